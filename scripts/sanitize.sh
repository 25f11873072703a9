#!/usr/bin/env bash
# Runs the kernels of a small case under compute-sanitizer, with one rank. If there are two GPUs, it also runs two ranks, in
# one domain and in two. Needs a build with nvcc. No tool may find anything.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python="${PYTHON:-.venv/bin/python}"
. scripts/gpu_needs.sh
need_gpus "$python" 1
need_program compute-sanitizer "CUDA's toolkit has it"
starts=("$python")
if [ "$("$python" -c 'import torch; print(torch.cuda.device_count())')" -gt 1 ]; then
  starts+=("$python -m torch.distributed.run --nproc_per_node=2 --master_port=${MASTER_PORT:-29511}")
fi
for tool in ${TOOLS:-memcheck racecheck synccheck}; do
  for start in "${starts[@]}"; do
    printf '[sanitize] %s: %s\n' "$tool" "$start"
    # torch's own kernels are not checked.
    # shellcheck disable=SC2086  # the words of the command
    compute-sanitizer --tool "$tool" --target-processes all --kernel-name kns=uccl_ep --error-exitcode 1 $start tests/gpu/small_case.py
  done
done
