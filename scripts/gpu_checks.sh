#!/usr/bin/env bash
# Runs everything that needs GPUs, on a machine that has them and a build with nvcc:
#
#   ./scripts/gpu_checks.sh [tests] [domains] [megatron] [sanitize] [soak] [bench] [links] [step]    none: all but step
#
# What each does, and its time on 4 x H200:
#   tests     one domain; 4 to 7 minutes
#   domains   several domains; about 9 minutes
#   megatron  tests/megatron; needs megatron-core; 2 minutes. With MEGATRON_LM, a checkout of Megatron-LM, also Megatron's
#             own dispatcher tests
#   sanitize  compute-sanitizer, on 1 or 2 GPUs; 2 minutes
#   soak      10,000 operations, 10,000 rounds beside NCCL, 1,000 replays of a graph, and all slow tests
#   bench     the sweep of bench/README.md, forward + backward, other widths and uneven routing; 7 minutes
#   links     several domains, with a link of 50 GB/s and without a limit; 4 minutes
#   step      a training step of Megatron with each dispatcher, on 4 GPUs of 140 GB; needs megatron-core; 50 s a cell
#
# Measurements go into $OUT (default: bench/results). RANKS is the number of ranks (default: the number of GPUs).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python="${PYTHON:-.venv/bin/python}"
known=(tests domains megatron sanitize soak bench links step)
[ $# -gt 0 ] || set -- "${known[@]:0:7}"
for what in "$@"; do
  [[ " ${known[*]} " == *" $what "* ]] || { printf '%s: none of %s\n' "$what" "${known[*]}" >&2 && exit 2; }
done
[[ "${RANKS:-1}" =~ ^[1-9][0-9]{0,3}$ ]] || { printf 'RANKS = %s: allowed is 1 .. 9999\n' "$RANKS" >&2 && exit 2; }
# All needs are checked now, before the first part runs.
. scripts/gpu_needs.sh
need_gpus "$python" "${RANKS:-1}"
for what in "$@"; do
  case "$what" in
    megatron | step) need_module "$python" megatron.core "megatron-core (scripts/setup_env.sh installs it)" ;;
    sanitize) need_program compute-sanitizer "CUDA's toolkit has it" ;;
  esac
done
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

for what in "$@"; do
  case "$what" in
    tests)
      check tests "$python" -m pytest -q tests/gpu --ignore-glob='*test_cuda_domain*'
      # Tests that the host backend must pass, too. They run as far as there is a GPU for each rank.
      check tests "$python" -m pytest -q --backend cuda tests/unit/test_dispatch_combine.py \
        tests/unit/test_property.py tests/unit/test_row_layouts.py tests/unit/test_rank_mismatch.py \
        tests/unit/test_deep_ep.py tests/unit/test_deep_ep_callers.py tests/unit/test_deep_ep_elastic.py \
        tests/unit/test_deep_ep_growth.py
      ;;
    domains) check domains "$python" -m pytest -q tests/gpu/test_cuda_domain*.py ;;
    # Training, stages and plug-in. They use GPUs if there are four.
    megatron)
      check megatron "$python" -m pytest -q tests/megatron
      [ -z "${MEGATRON_LM:-}" ] ||
        check megatron "$python" -m torch.distributed.run --standalone --nproc-per-node "$ranks" \
          scripts/megatron_own_tests.py "$MEGATRON_LM"
      ;;
    sanitize) check sanitize env PYTHON="$python" ./scripts/sanitize.sh ;;
    soak) check soak "$python" -m pytest -q -m slow tests/gpu ;;
    bench)
      check bench "$python" bench/dispatch_combine.py --preset ht --ranks "$ranks" --out "$out/gpus_${ranks}_one_domain"
      check bench "$python" bench/dispatch_combine.py --backward --ranks "$ranks" --tokens 128 512 4096 --hidden 7168 \
        --topk 8 --experts 256 --domains 1 --num-sms 24 64 --out "$out/gpus_${ranks}_backward"
      check bench "$python" bench/dispatch_combine.py --ranks "$ranks" --tokens 512 4096 --hidden 2048 4096 --topk 8 \
        --experts 256 --routing uniform zipf one_hot --domains 1 --num-sms 24 --out "$out/gpus_${ranks}_shapes"
      check bench "$python" bench/dispatch_combine.py --ranks "$ranks" --tokens 4096 --hidden 7168 --routing trace \
        --domains 1 --num-sms 24 --out "$out/gpus_${ranks}_router_trace"
      ;;
    links)
      # 512 MiB hold fewer than 4096 tokens in one window.
      for domains in $(printf "%s\n" 2 "$ranks" | sort -u); do
        check links env UCCL_EP_LOOP_LATENCY_US=5 UCCL_EP_BUDGET_BYTES=$((640 << 20)) "$python" bench/dispatch_combine.py \
          --ranks "$ranks" --domains "$domains" --link-gbytes-per-s 50 0 --tokens 128 1024 4096 --hidden 7168 --topk 8 \
          --experts 256 --num-sms 24 64 --systems uccl_ep uccl_ep_cached --out "$out/gpus_${ranks}_domains_$domains"
      done
      check links "$python" bench/proxy_load.py --ranks "$ranks" --tokens 2048 --hidden 7168 --out "$out/gpus_${ranks}_proxy_load"
      ;;
    step)
      check step "$python" -m bench.megatron_step --device cuda --num-ranks "$ranks" --recipe dsv3_proxy_4xh200 --layers 2 \
        --micro-batch-tokens 1024 4096 --hidden 2048 7168 --expert-ffn 2048 --dispatch-dtype fp8 --overlap off on --steps 6 \
        --out "$out/gpus_${ranks}_megatron_step"
      ;;
  esac
done
[ ${#failed[@]} -eq 0 ] || printf '[gpu] FAILED: %s\n' "${failed[*]}"
exit $((${#failed[@]} > 0))
