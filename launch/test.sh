#!/usr/bin/env bash
# Lint and tests, in the environment of quickstart.sh. Arguments go to pytest.
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
ruff check .
ruff format --check .
python tools/demo_target.py "$DFLASH_CACHE/smollm2-135m-instruct"
exec python -m pytest "$@"
