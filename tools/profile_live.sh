#!/usr/bin/env bash
# Profiles every rank of a run that is running on this machine: `tools/profile_live.sh RUN_DIR [SECONDS]`, see --help.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
active="${VIRTUAL_ENV:-${CONDA_PREFIX:-}}"
for candidate in ${active:+"$active/bin/python"} "$root/.venv/bin/python" python3 python; do
    if command -v "$candidate" >/dev/null && "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
        # In place of this shell, so that Ctrl-C reaches what started py-spy.
        exec "$candidate" "$root/tools/pyspy_live.py" "$@"
    fi
done
echo "error: no Python 3.11 or newer here: activate the environment in which the training runs" >&2
exit 1
