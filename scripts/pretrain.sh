#!/usr/bin/env bash
# Sets everything up (see setup_env.sh), then pretrains a small mixture-of-experts GPT on this machine, on its GPUs if there is
# one for each rank:
#
#   ./scripts/pretrain.sh [arguments of the launcher]      e.g. --token-dispatcher alltoall, --compare alltoall, --help
#
# A later --recipe overrides tiny_host. Runs in the clone's folder, to which relative paths refer.
. "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"

cd "$ROOT"
printf '[pretrain] python -m recipes.launch --recipe tiny_host %s\n' "$*"
exec "$VENV/bin/python" -m recipes.launch --recipe tiny_host "$@"
