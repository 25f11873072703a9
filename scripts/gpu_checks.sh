#!/usr/bin/env bash
# Everything that needs GPUs, on a machine that has them and a build with nvcc:
#
#   ./scripts/gpu_checks.sh [tests] [sanitize] [soak] [bench] [step]      without arguments: all but step
#
# tests: 10 minutes at most; soak: 10,000 operations, 10,000 rounds beside NCCL, 1,000 replays of a graph; bench: the sweep
# of bench/README.md, and forward + backward, into $OUT (bench/results); step: a training step of Megatron with each
# dispatcher, needs megatron-core. RANKS: as many as there are GPUs.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python="${PYTHON:-.venv/bin/python}"
ranks="${RANKS:-$("$python" -c 'import torch; print(torch.cuda.device_count())')}"
out="${OUT:-bench/results}"
failed=()
check() {
  local name="$1" started=$SECONDS
  shift
  printf '[gpu] %s: %s\n' "$name" "$*"
  "$@" || failed+=("$name")
  printf '[gpu] %s took %d s\n' "$name" $((SECONDS - started))
}

[ $# -gt 0 ] || set -- tests sanitize soak bench
for what in "$@"; do
  case "$what" in
    tests)
      check tests "$python" -m pytest -q tests/gpu
      # What the host backend has to do, too, as far as there is a GPU for each rank.
      check tests "$python" -m pytest -q --backend cuda tests/unit/test_dispatch_combine.py \
        tests/unit/test_property.py tests/unit/test_row_layouts.py tests/unit/test_rank_mismatch.py
      # Megatron's training, stages and plug-in: on GPUs where there are four.
      check megatron "$python" -m pytest -q tests/megatron
      ;;
    sanitize) check sanitize env PYTHON="$python" ./scripts/sanitize.sh ;;
    soak) check soak "$python" -m pytest -q -m slow tests/gpu ;;
    bench)
      check bench "$python" bench/dispatch_combine.py --preset ht --ranks "$ranks" --out "$out/gpus_${ranks}_one_domain"
      check bench "$python" bench/dispatch_combine.py --backward --ranks "$ranks" --tokens 128 512 4096 --hidden 7168 \
        --topk 8 --experts 256 --domains 1 --num-sms 24 64 --out "$out/gpus_${ranks}_backward"
      ;;
    step)
      check step "$python" -m bench.megatron_step --device cuda --num-ranks "$ranks" --micro-batch-tokens 1024 4096 \
        --hidden 2048 7168 --expert-ffn 2048 --dispatch-dtype bf16 fp8 --overlap off on --budget-mib 512 \
        --out "$out/gpus_${ranks}_megatron_step"
      ;;
    *)
      printf '%s: none of tests, sanitize, soak, bench, step\n' "$what" >&2
      exit 2
      ;;
  esac
done
[ ${#failed[@]} -eq 0 ] || printf '[gpu] FAILED: %s\n' "${failed[*]}"
exit $((${#failed[@]} > 0))
