#!/usr/bin/env bash
# Sets everything up (once) and answers a prompt with the bundled model. Arguments go to `ddllm_vk generate`.
set -euo pipefail
source "$(dirname -- "${BASH_SOURCE[0]}")/.ci/venv.sh"
prepare_venv run
prepare_gpu run
if [ $# -eq 0 ]; then
    set -- "What is the capital of France?"
    say "generate \"$1\""
fi
exec "$venv/bin/python" -m ddllm_vk generate "$@"
