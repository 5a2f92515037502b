#!/usr/bin/env bash
# The long tests: each program in tests/soak in turn, and what became of it. On two cores in under 30 minutes.
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
export OMP_NUM_THREADS=1
summary=""
failed=0
for program in tests/soak/*.py; do
    echo "== $program"
    since=$SECONDS
    verdict=passed
    python "$program" || { verdict=FAILED; failed=1; }
    summary+="$(printf '%-32s %-6s %5d s' "$program" "$verdict" $((SECONDS - since)))"$'\n'
done
printf '\n%s' "$summary"
exit "$failed"
