// The kernel of a combine: its roles run side by side in every block. Fold roles sum the rows that came to this rank;
// merge roles sum what comes back to it.
#include "backend/gpu/roles/fold.cuh"
#include "backend/gpu/roles/merge.cuh"
#include "backend/gpu/roles/returns.cuh"
#include "backend/gpu/roles/tell_folded.cuh"

namespace uccl_ep::gpu {
namespace {

// clang-format off
// Who does what, by warps of 32 lanes. `a ..> b`: b waits for a. `a --> b`: b is published when a is done.
//
// warps   role   time ---->
// 1       tell   ranges of rows --> block barrier | empty token blocks --> folded | boxes ..> count pieces --> folded
//                  | last block --> folded_all
// 7 (11)  fold   merged (of the last) ..> block barrier ..> fold rows --> boxes | weights | as merge
// 4 (8)   merge  block barrier ..> empty tokens | folded ..> relay rows --> chunks
//                  | folded, returns_there ..> merge rows | folded_all ..> weights; last block --> merged
//
// In brackets: without bulk copies. Where CombineForm::kFoldsFirst, the crew that merges folds first, and both merge
// together. In one domain block 0's tell warp writes headers (--> header_full), and a merge warp of it compares them.
// Where there are several (kNet), one more block does, which sees to the network:
//
// 1       poll     words of hosts ..> --> returns_there, returns_gone, header_full; until all blocks are through
// 1       push     headers --> header_full; packets --> commands; chunks complete ..> --> commands; weights
// 1       compare  header_full of all ..> compare calls
// 4 (8)   end      all blocks are through ..> --> merged, returns_consumed, ended
//
// Rows that need more memory than there is go in windows; barriers of the block come before each. The first row of the
// figure is that of window w. The second is that of window w - 1, and in the end also of the last.
// boxes are words of the block (Boxes), chunks counters of the GPU (relayed_counts); the others are flags (DeviceMap, NetState).
// clang-format on
template <bool kBulk, bool kNet, CombineForm kForm, typename Row, typename Wire>
struct Combine {
  static_assert(kBulk || kForm == CombineForm::kSums);
  static_assert(!kNet || kForm != CombineForm::kFoldsFirst);
  static constexpr bool kIsBulk = kBulk, kHasNet = kNet, kFoldsFirst = kForm == CombineForm::kFoldsFirst;
  using Folds = FoldRole<kBulk, kNet, kForm, Row, Wire>;
  using Merges = MergeRole<kBulk, kNet, kForm, Row, Wire>;
  using Tells = TellFoldedRole<Folds, kBulk, kNet, kForm>;
  using Roles = RoleTable<Tells, Folds, Merges>;
  static constexpr uint32_t kSumWarps = SumCrews<kBulk>::kAll;  // each has a pipeline of bulk copies
  static constexpr uint32_t kSharedBytes = kBulk ? kSumWarps * kSumWarpBytes : 0;
  static_assert(Roles::template first_warp<Merges>() == Roles::template first_warp<Folds>() + Folds::kWarps);
};

// Of shared memory, for tables of ranks and of what windows fold and merge.
__host__ __device__ inline uint32_t tables_bytes(const Group& g, const KernelCombineArgs& args) {
  return g.table_bytes + combine_table_bytes(g.map, args.num_windows);
}

// A function where there are several domains, because its registers would be taken from those that sum.
template <typename Table>
__device__ __noinline__ void begin_window(const CombineKernel k, uint32_t window,
                                          typename Table::Roles::Shared& shared) {
  Table::Tells::begin(k, window, shared, shared.merges);
}

// By all warps of a block that works: all windows.
template <typename Table>
__device__ __forceinline__ void work(const CombineKernel& kernel, typename Table::Roles::Shared& shared,
                                     PipelineTurn* turns, uint8_t* pipelines, uint64_t* barriers) {
  using Roles = typename Table::Roles;
  using Folds = typename Table::Folds;
  using Merges = typename Table::Merges;
  using Tells = typename Table::Tells;
  const bool folds = Roles::template is_in<Folds>(), tells = Roles::template is_in<Tells>();
  const CombineKernel teller = kernel.by(Roles::template crew<Tells>());
  const CombineKernel k = kernel.by(folds ? Roles::template crew<Folds>() : Roles::template crew<Merges>());
  const uint32_t sum_warp = threadIdx.x / kWarp - Roles::template first_warp<Folds>();
  SumPipeline pipeline{shared_address(pipelines) + sum_warp * kSumWarpBytes,
                       shared_address(barriers + sum_warp * kSumStages),
                       turns[tells ? 0 : threadIdx.x - Roles::template first_warp<Folds>() * kWarp]};
  // The window is read from shared memory again and again, because no registers are left to keep it. After an error
  // every part of it returns at once.
  const auto window = [&] { return read_shared(&shared.folds.window); };
  bool may_fold = true;
  if (!tells && !Table::kHasNet) {
    begin_sums<Table::kIsBulk>(pipeline, barriers + sum_warp * kSumStages);
    if (folds || Table::kFoldsFirst) may_fold = Folds::begin(k);
  }
  // All roles meet at one place of the code, as __syncthreads() demands.
#pragma unroll 1
  for (bool first = true;; first = false) {
    if (tells) {
      const uint32_t next = first ? 0 : window() + 1;
      if constexpr (Table::kHasNet)
        begin_window<Table>(teller, next, shared);
      else
        Tells::begin(teller, next, shared, shared.merges);
    }
    __syncthreads();
    if (tells) {
      Tells::run(teller, shared);
      if (is_last(k.args, window())) return;
    } else {
      if (Table::kHasNet && first) {
        begin_sums<Table::kIsBulk>(pipeline, barriers + sum_warp * kSumStages);
        if (folds) may_fold = Folds::begin(k);
      }
      // A warp that merges compares the calls: it waits for all ranks' entries no longer than for their pieces. One
      // that folds or tells would keep others waiting. With several domains the network's block compares.
      const auto compare = [&] {
        if (!has_net(kernel.g) && first && blockIdx.x == 0 && sum_warp == Table::kSumWarps - 1)
          all_alike(kernel.by(Roles::lone_warp()), kernel.args.signature);
      };
      if (!Table::kFoldsFirst) compare();
      if (may_fold && (folds || Folds::folding(k.g, shared.folds) > Folds::kWarps))
        Folds::run(k, shared, shared.merges[window() % kHalves], pipeline, folds ? 0 : Folds::kWarps);
      if (Table::kFoldsFirst) compare();
      Merges::return_sums(k, shared.merges[window() % kHalves], pipeline, folds);
      // The sums of the last window come after the next one has been folded and returned, because others wait for that.
      // One call for both roles and all windows, because its code is long.
#pragma unroll 1
      for (uint32_t back = min(window(), 1); back > 0 || is_last(k.args, window()); --back) {
        Merges::merge(k, shared.merges[(window() - back) % kHalves], pipeline, folds);
        if (back == 0) return;
      }
    }
    // What the window before the last merges is needed until all meet here.
    if (!device::barrier_and(0, Roles::kThreads, threadIdx.x != 0 || !stopped(kernel.g))) return;
  }
}

template <bool kBulk, bool kNet, CombineForm kForm, typename Row, typename Wire>
__global__ void __launch_bounds__(Combine<kBulk, kNet, kForm, Row, Wire>::Roles::kThreads, 1)
    combine(const __grid_constant__ Group g, const __grid_constant__ PlanView plan,
            const __grid_constant__ KernelCombineArgs args) {
  if constexpr (kBulk && !kArch.bulk_copies) return;  // never launched: see has_bulk_copies()
  using Table = Combine<kBulk, kNet, kForm, Row, Wire>;
  using Roles = typename Table::Roles;
  using Merges = typename Table::Merges;
  UCCL_EP_DYNAMIC_SHARED(dynamic);
  __shared__ KernelOp op;
  __shared__ typename Roles::Shared shared;
  __shared__ __align__(8) uint64_t barriers[Table::kSumWarps * kSumStages];  // of bulk copies
  __shared__ PipelineTurn turns[Table::kSumWarps * kWarp];
  if (!kNet) __builtin_assume(g.map.num_domains == 1);
  if (threadIdx.x < kWarp) shared.boxes.begin();
  enter(g, OpKind::kCombine, op, Roles::kThreads);
  const CombineKernel kernel{{g, plan, op, {}}, args};
  if (blockIdx.x == 0 && threadIdx.x == 0) trace_kernel(g, TraceKind::kKernelBegin, OpKind::kCombine, kernel.op.epoch);
  if constexpr (kNet) {
    if (blockIdx.x == workers(g)) {
      serve_network<kBulk, Merges>(kernel);
      return;
    }
  }
  work<Table>(kernel, shared, turns, dynamic + tables_bytes(g, args), barriers);
  __syncthreads();  // errors that other crews of the block found are seen from here on
  if constexpr (kNet) {
    if (thread_again() == 0) count_through(g);
    return;
  }
  if (!Roles::template is_in<Merges>()) return;
  const CombineKernel k = kernel.by(Roles::template crew<Merges>());
  if (!last_block(k, Phase::kMerged, gridDim.x)) return;
  Merges::finish(k, going(k));
  if (k.crew.thread == 0) trace_kernel(g, TraceKind::kKernelEnd, OpKind::kCombine, k.op.epoch);
}

template <bool kBulk, bool kNet, CombineForm kForm, typename Row, typename Wire>
void launch_one(const Group& group, const PlanView& plan, const KernelCombineArgs& args, uint32_t num_sms,
                StreamHandle stream) {
  using Table = Combine<kBulk, kNet, kForm, Row, Wire>;
  launch_kernel(combine<kBulk, kNet, kForm, Row, Wire>,
                {num_sms, Table::Roles::kThreads, tables_bytes(group, args) + Table::kSharedBytes, stream}, group, plan,
                args);
}
// Compact rows are copied, but not in large combines of two GPUs: of 4,096 tokens of 7168 the copying kernel took 258
// us there, the other one 241; on four GPUs 570 and 613. On two GPUs, where no link limits, all warps fold first if
// rows are few, or not compact (425 us, else 453). On more GPUs merging hides behind the link; there they do so only if
// no warp merges more than a token.
template <bool kBulk, typename Row, typename Wire>
void launch(const Group& group, const PlanView& plan, const KernelCombineArgs& args, uint32_t num_sms,
            StreamHandle stream) {
  using enum CombineForm;
  const uint32_t members = group.end - group.first;
  const bool copies = plan.compact_width > 0 && (has_net(group) || members > 2);
  const auto go = [&]<bool kNet>() {
    if constexpr (kBulk && !kNet) {
      const uint32_t few = (members > 2 ? 1 : kFewRows) * SumCrews<true>::kAll * num_sms;
      if (plan.num_tokens <= few || (plan.compact_width == 0 && members <= 2))
        return launch_one<true, false, kFoldsFirst, Row, Wire>(group, plan, args, num_sms, stream);
    }
    if constexpr (kBulk)
      if (copies) return launch_one<true, kNet, kCopies, Row, Wire>(group, plan, args, num_sms, stream);
    launch_one<kBulk, kNet, kSums, Row, Wire>(group, plan, args, num_sms, stream);
  };
  if (!has_net(group))
    go.template operator()<false>();
  else
    go.template operator()<true>();
}

}  // namespace

Status launch_combine(const Group& group, const PlanView& plan, const KernelCombineArgs& args, uint32_t num_sms,
                      StreamHandle stream) {
  if (args.dtype == Dtype::kFp32)
    launch<false, float, float>(group, plan, args, num_sms, stream);
  else if (args.wire == Dtype::kFp32)
    launch<false, uint16_t, float>(group, plan, args, num_sms, stream);
  else if (!group.bulk_copies ||
           group.shared_bytes <
               tables_bytes(group, args) + Combine<true, false, CombineForm::kSums, uint16_t, uint16_t>::kSharedBytes)
    launch<false, uint16_t, uint16_t>(group, plan, args, num_sms, stream);
  else
    launch<true, uint16_t, uint16_t>(group, plan, args, num_sms, stream);
  return launch_status();
}

Status load_combine(uint32_t shared_bytes) {
  using enum CombineForm;
  return load_all(shared_bytes, combine<false, false, kSums, float, float>,
                  combine<false, false, kSums, uint16_t, float>, combine<false, false, kSums, uint16_t, uint16_t>,
                  combine<true, false, kSums, uint16_t, uint16_t>, combine<true, false, kCopies, uint16_t, uint16_t>,
                  combine<true, false, kFoldsFirst, uint16_t, uint16_t>, combine<false, true, kSums, float, float>,
                  combine<false, true, kSums, uint16_t, float>, combine<false, true, kSums, uint16_t, uint16_t>,
                  combine<true, true, kSums, uint16_t, uint16_t>, combine<true, true, kCopies, uint16_t, uint16_t>);
}

}  // namespace uccl_ep::gpu
