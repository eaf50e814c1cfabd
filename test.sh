#!/usr/bin/env bash
# Sets everything up (once) and runs every check: lint, format, types, tests. Arguments go to pytest.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/.ci/venv.sh"
prepare_venv dev
prepare_gpu dev
cd "$root"

failed=()
check() {
    say "$*"
    "$venv/bin/python" -m "$@" </dev/null || failed+=("$1")
}
check ruff check .
check ruff format --check .
check pyright --pythonpath "$venv/bin/python"
check pytest "$@"

if [ ${#failed[@]} -gt 0 ]; then
    give_up "failed: $(IFS=,; printf '%s' "${failed[*]}")"
fi
say "all checks passed"
