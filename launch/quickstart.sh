#!/usr/bin/env bash
# From nothing to a drafter for a real LLM, its accept length measured by real speculative decoding.
# Run it again at any time: it does only what is still to do. Arguments are overrides of the training command.
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
target="$DFLASH_CACHE/smollm2-135m-instruct"
run_dir="${RUN_DIR:-runs/quickstart}"

python tools/demo_target.py "$target"
torchrun --standalone --nproc_per_node 2 -m dflash.train experiment=quickstart run_dir="$run_dir" resume=auto "$@"

newest="$(dirname "$(ls "$run_dir"/checkpoints/step-*/meta.json | sort | tail -n 1)")"
served="$run_dir/served-$(basename "$newest")"
result="$run_dir/evaluation-$(basename "$newest").json"
if [ ! -f "$result" ]; then
    python tools/heldout_prompts.py "$run_dir/heldout_prompts.jsonl" --limit 10
    python -m dflash.evaluate drafter="$newest" target="$target" prompts="$run_dir/heldout_prompts.jsonl" \
        max_new_tokens=64 output="$result"
fi
[ -d "$served" ] || python -m dflash.export checkpoint="$newest" output="$served"

python - "$result" <<'PY'
import json, sys

result = json.load(open(sys.argv[1], encoding="utf-8"))
prompts, speed = result["prompts"], result["tokens_per_second"]
print(f"accept length on {len(prompts)} held-out prompts: {result['tau_mean_of_prompts']:.2f} tokens per verification")
print(f"lossless: {sum(p['lossless'] for p in prompts)} of {len(prompts)} prompts equal plain greedy decoding")
print(f"tokens/s: {speed['speculative']:.1f} with the drafter, {speed['greedy']:.1f} without")
PY
echo "drafter for serving: $served"
echo "details:             $result"
echo "charts:              .venv/bin/tensorboard --logdir $run_dir/tensorboard   then open http://localhost:6006"
