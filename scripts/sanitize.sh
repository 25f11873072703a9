#!/usr/bin/env bash
# The kernels under compute-sanitizer, on a small case. Needs a GPU and a build with nvcc. Every tool has to find nothing.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python="${PYTHON:-.venv/bin/python}"
for tool in ${TOOLS:-memcheck racecheck synccheck}; do
  printf '[sanitize] %s\n' "$tool"
  # torch's own kernels are not ours to check.
  compute-sanitizer --tool "$tool" --kernel-name kns=uccl_ep --error-exitcode 1 "$python" tests/gpu/small_case.py
done
