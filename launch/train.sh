#!/usr/bin/env bash
# Starts a training run that survives the death of a rank: torchrun, its environment, one run folder, logs per rank.
set -euo pipefail

usage() {
    cat <<'HELP'
usage: ./launch/train.sh [options] [--] key=value ...

Trains on this machine, or on several that all call it, and after the death of a rank starts all ranks again from the
newest checkpoint. key=value arguments go to python -m dflash.train; `resume=auto` is passed for you.

  --nproc N            ranks on each machine            (NPROC; default: the GPUs here, 2 where there are none)
  --max-restarts N     how often to start again         (MAX_RESTARTS; default 3)
  --run-dir DIR        the run's folder, same as run_dir=DIR: a new one, or an earlier one to go on with
                                                        (RUN_DIR; default runs/<date>_<time>)
  --profile-interval S seconds between summary lines    (DFLASH_PROFILE_INTERVAL; default 60)
  --help

Several machines, every one with the same arguments but for --node-rank:

  --nnodes N           number of machines               (NNODES; default 1)
  --node-rank R        number of this one, 0 to N-1     (NODE_RANK)
  --endpoint HOST:PORT address of machine 0 and a port that is free there, where all meet (ENDPOINT; default port 29400)
  --job-id ID          keeps jobs apart that meet at one endpoint (JOB_ID; default: from the run folder's name)
  --join-timeout S     how long to wait for the other machines, also for one that comes back after a failure
                                                        (JOIN_TIMEOUT; default 600)

DIR must then be named, and be one folder that all machines share.

Output: the console shows every rank's lines with its number in front. The same, complete, rank by rank and attempt by
attempt: <run folder>/logs/node-<R>/<start or job>_<random>/attempt_<n>/<local rank>/{stdout,stderr}.log

Stop: SIGTERM or SIGINT (Ctrl-C), once, to this command. The last finished step is saved; ranks that need longer than
TORCH_ELASTIC_SHUTDOWN_TIMEOUT (default 30) seconds are killed. The same command with the same DIR goes on.

Exit code:
  0  trained to the end (or to train.stop_at_step)
  1  a rank failed and no restart was left, a machine did not come back in time, or the command was stopped by a signal:
     torchrun itself ends with 1 whatever the ranks end with
  2  an option or a key=value is wrong, the endpoint is taken or not reached; nothing was started
A rank ends with 0, with 1 after an error of its own or of another rank, with 143, 130 or 129 after SIGTERM, SIGINT or
SIGHUP and a checkpoint. torchrun prints these (as exitcode; -9 is a SIGKILL). A rank that is stopped alone ends all
ranks, each with its checkpoint, which counts as a failure: they are started again.
HELP
}

fail() {
    echo "error: $*" >&2
    exit 2
}

nproc="${NPROC:-auto}"
nnodes="${NNODES:-1}"
node_rank="${NODE_RANK:-}"
endpoint="${ENDPOINT:-}"
job_id="${JOB_ID:-}"
join_timeout="${JOIN_TIMEOUT:-600}"
max_restarts="${MAX_RESTARTS:-3}"
run_dir="${RUN_DIR:-}"
profile_interval="${DFLASH_PROFILE_INTERVAL:-60}"
overrides=()

while [ $# -gt 0 ]; do
    case "$1" in
        --help | -h) usage && exit 0 ;;
        --)
            shift
            overrides+=("$@")
            break
            ;;
        --*=*)
            set -- "${1%%=*}" "${1#*=}" "${@:2}"
            continue
            ;;
        --nproc | --nnodes | --node-rank | --endpoint | --job-id | --join-timeout | --max-restarts | --run-dir | \
            --profile-interval)
            [ $# -ge 2 ] || fail "$1: needs a value; see --help"
            name="${1#--}"
            printf -v "${name//-/_}" '%s' "$2"
            shift
            ;;
        -*) fail "$1: no such option; see --help" ;;
        *=*) overrides+=("$1") ;;
        *) fail "$1: expected an option or key=value; see --help" ;;
    esac
    shift
done

whole() { # name, value, least
    [[ "$2" =~ ^[0-9]{1,9}$ ]] && [ "$((10#$2))" -ge "$3" ] || fail "$1: $2 must be a whole number, $3 or more"
}
[ "$nproc" = auto ] || whole --nproc "$nproc" 1
whole --nnodes "$nnodes" 1
whole --max-restarts "$max_restarts" 0
whole --join-timeout "$join_timeout" 1
[[ "$profile_interval" =~ ^[0-9]*\.?[0-9]+$ ]] ||
    fail "--profile-interval: $profile_interval must be a number of seconds"

arguments=()
for override in "${overrides[@]}"; do
    case "$override" in
        run_dir=*)
            run_dir="${override#run_dir=}"
            run_dir="${run_dir#[\'\"]}"
            run_dir="${run_dir%[\'\"]}"
            ;;
        resume=auto) ;;
        resume=*)
            # A restart would begin there again instead of going on.
            fail "$override: train.sh goes on with the newest checkpoint of its run folder (resume=auto); start from" \
                "another one with torchrun -m dflash.train"
            ;;
        *) arguments+=("$override") ;;
    esac
done

if [ "$nnodes" -gt 1 ]; then
    [ -n "$endpoint" ] || fail "--endpoint: must be given with --nnodes $nnodes: HOST:PORT of machine 0"
    [ -n "$node_rank" ] || fail "--node-rank: must be given with --nnodes $nnodes: 0 to $((nnodes - 1))"
    whole --node-rank "$node_rank" 0
    [ "$node_rank" -lt "$nnodes" ] || fail "--node-rank: $node_rank must be below --nnodes $nnodes"
    # Each machine would stamp another one.
    [ -n "$run_dir" ] || fail "--run-dir: must be given with --nnodes $nnodes: one folder that all machines share"
else
    node_rank=0
fi
started="$(date +%Y-%m-%d_%H-%M-%S)"
# One name for all ranks and all attempts, so that a restart finds what the attempt before has saved.
run_dir="${run_dir:-runs/$started}"
quoted="${run_dir//\\/\\\\}"
arguments+=("run_dir='${quoted//\'/\\\'}'" resume=auto)

# The environment that is active, then the repository's own. It is not made here as quickstart.sh does: several machines
# that share this folder would do so at once, and a cluster has environments of its own.
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
active="${VIRTUAL_ENV:-${CONDA_PREFIX:-}}"
python=
for candidate in ${active:+"$active/bin/python"} "$root/.venv/bin/python" python3 python; do
    if command -v "$candidate" >/dev/null && PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" "$candidate" -c '
import sys
from importlib.util import find_spec
sys.exit(not all(map(find_spec, ("dflash", "torch", "hydra", "transformers"))))'; then
        python="$candidate"
        break
    fi
done
[ -n "$python" ] || fail "no Python here has dflash and what it needs: activate an environment made with pip install" \
    "'$root', or let ./launch/test.sh make .venv"

# This repository's dflash, from whatever folder the command is called, before another distribution of that name.
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
# Read by conf/profiling.
export DFLASH_PROFILE_INTERVAL="$profile_interval"

found="$("$python" "$root/launch/preflight.py" --nproc "$nproc" --nnodes "$nnodes" --node-rank "$node_rank" \
    ${endpoint:+--endpoint "$endpoint"} --join-timeout "$join_timeout" -- "${arguments[@]}")" || exit $?
read -r nproc threads local_addr endpoint <<<"$found"
[ "$((nproc * nnodes))" -gt 1 ] || arguments=(pipeline=colocated "${arguments[@]}")

# Every attempt gets a store of its own, held by rank 0. The agent's outlives a restart, addresses of the dead included.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
# On an NCCL error or timeout end the process without aborting its communicators first, which can block on a peer that
# is gone. It is PyTorch's default, but torchrun sets 1 (abort, then end) where nothing is set.
export TORCH_NCCL_ASYNC_ERROR_HANDLING=3
# Micro-batches differ in length, and fixed segments that fit one do not fit the next: they are freed and allocated anew,
# which stops the GPU each time. Expandable ones grow. PYTORCH_ALLOC_CONF=expandable_segments:False turns it off; the
# older PYTORCH_CUDA_ALLOC_CONF, where it is set, outranks both.
export PYTORCH_ALLOC_CONF="${PYTORCH_ALLOC_CONF-expandable_segments:True}"
# The cores of this machine shared among its ranks. torchrun sets 1 where nothing is set, and warns.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$threads}"
# In front of every console line: the rank's number in the whole job instead of [default<local rank>].
export TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE="${TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE:-[\${rank\}] }"

launcher=(
    --nproc-per-node "$nproc" --nnodes "$nnodes" --max-restarts "$max_restarts" --local-addr "$local_addr"
    # Both streams of every rank into files, and from there to the console: which ranks lead is not known here, and a
    # rank that does not has nothing to say but an error.
    --log-dir "$run_dir/logs/node-$node_rank" --tee 3
)
if [ "$nnodes" -gt 1 ]; then
    name="$(basename "$run_dir")"
    # Machine 0 holds the meeting point, and no other one takes itself for it because an address looks like its own.
    launcher+=(
        --rdzv-backend c10d --rdzv-endpoint "$endpoint" --rdzv-id "${job_id:-${name//[^A-Za-z0-9._-]/_}}"
        --rdzv-conf "is_host=$((node_rank == 0)),join_timeout=$join_timeout"
    )
else
    # What --standalone means, on a free port, but with a name for the folder of logs that sorts by time.
    launcher+=(--rdzv-backend c10d --rdzv-endpoint localhost:0 --rdzv-id "$started")
fi
[ "$node_rank" != 0 ] || echo "run folder: $run_dir"
# In place of this shell, so that signals reach torchrun, which passes them on to the ranks. -u: it shows the ranks'
# lines when they come also where the console is a file.
exec "$python" -u -m torch.distributed.run "${launcher[@]}" -m dflash.train "${arguments[@]}"
