#!/usr/bin/env bash
# Sets everything up (see setup_env.sh), then pretrains a small mixture-of-experts GPT on this machine, on its GPUs if there is
# one for each rank:
#
#   ./scripts/pretrain.sh [arguments of the launcher]      e.g. --token-dispatcher alltoall, --compare alltoall, --help
#
# A later --recipe overrides tiny_host. Runs in the clone's folder, to which relative paths refer.

# Checked before the set-up, which may take minutes. The launcher itself says what else it needs.
case " $* " in
  *" --device cuda "* | *" --device=cuda "*)
    . "$(dirname "${BASH_SOURCE[0]}")/needs.sh"
    has_gpu || { printf '[pretrain] --device cuda: this machine has no NVIDIA GPU, or no driver for it\n' >&2 && exit 1; }
    ;;
esac
TOOLS_TOO=0
. "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"

cd "$ROOT"
printf '[pretrain] python -m recipes.launch --recipe tiny_host %s\n' "$*"
exec "$VENV/bin/python" -m recipes.launch --recipe tiny_host "$@"
