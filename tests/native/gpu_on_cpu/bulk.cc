// Bulk copies: they are over some time after they were asked for, in any order.
#include <algorithm>
#include <cstring>

#include "block.h"

namespace gpu_on_cpu {
namespace {

// A barrier of bulk loads as it lies in shared memory: what is missing of its phase.
struct TransactionBarrier {
  uint32_t bytes;
  uint16_t arrivals, phase;
};
static_assert(sizeof(TransactionBarrier) == 8);

void complete(TransactionBarrier& barrier) {
  if (barrier.arrivals != 0 || barrier.bytes != 0) return;
  barrier.phase ^= 1;
  barrier.arrivals = 1;
}

}  // namespace

// One that is under way, or all. False: there is none.
bool Block::move_bulk(bool all) {
  bool any = false;
  const auto chosen = [&](size_t count) { return all ? 0 : random_of_thread.next() % count; };
  while (!loads_.empty() && (all || !any)) {
    const auto it = loads_.begin() + static_cast<ptrdiff_t>(chosen(loads_.size()));
    const BulkLoad load = *it;
    loads_.erase(it);
    std::memcpy(load.to, load.from, load.num_bytes);
    auto& barrier = *reinterpret_cast<TransactionBarrier*>(load.barrier);
    barrier.bytes -= load.num_bytes;
    complete(barrier);
    any = true;
  }
  bool stored = false;
  while (!stores_.empty() && (all || !stored)) {
    const auto it = stores_.begin() + static_cast<ptrdiff_t>(chosen(stores_.size()));
    BulkStore& store = **it;
    if (!store.is_read) store.bytes.assign(reinterpret_cast<const char*>(store.from), store.num_bytes);
    const bool was_read = store.is_read;
    store.is_read = stored = any = true;
    if (!was_read && !all) break;
    std::memcpy(store.to, store.bytes.data(), store.num_bytes);
    store.is_complete = true;
    stores_.erase(it);
  }
  return any;
}

void Block::commit() {
  running_->groups.push_back(std::move(running_->open_group));
  running_->open_group.clear();
}

void Block::wait_stores(uint32_t groups, bool only_read, const void* at) {
  const auto done = [&](const Group& group) {
    return std::all_of(group.begin(), group.end(),
                       [&](const auto& store) { return only_read ? store->is_read : store->is_complete; });
  };
  Lane& lane = *running_;
  const auto over = [&] {
    const size_t old = lane.groups.size() > groups ? lane.groups.size() - groups : 0;
    return std::all_of(lane.groups.begin(), lane.groups.begin() + static_cast<ptrdiff_t>(old), done);
  };
  while (!over()) look(at);
  while (!lane.groups.empty() && std::all_of(lane.groups.front().begin(), lane.groups.front().end(),
                                             [](const auto& store) { return store->is_complete; }))
    lane.groups.pop_front();
}

uint32_t shared_address(const void* p) { return static_cast<uint32_t>(static_cast<const uint8_t*>(p) - dynamic_bytes); }
void* shared_pointer(uint32_t address) { return dynamic_bytes + static_cast<int32_t>(address); }

void init_barrier(uint32_t barrier, uint32_t arrivals) {
  *static_cast<TransactionBarrier*>(shared_pointer(barrier)) = {0, static_cast<uint16_t>(arrivals), 0};
}
void load_bulk(uint32_t to, const void* from, uint32_t num_bytes, uint32_t barrier) {
  if ((reinterpret_cast<uintptr_t>(from) | to | num_bytes) % 16 != 0)
    current_block().fail("a bulk load that is not aligned");
  auto& its = *static_cast<TransactionBarrier*>(shared_pointer(barrier));
  its.bytes += num_bytes;
  if (its.arrivals == 0) current_block().fail("more arrivals at a barrier of bulk loads than it waits for");
  --its.arrivals;
  current_block().begin({static_cast<uint8_t*>(shared_pointer(to)), static_cast<const uint8_t*>(from), num_bytes,
                         static_cast<uint64_t*>(shared_pointer(barrier))});
  act();
}
void wait_barrier(uint32_t barrier, uint32_t parity) {
  const auto& its = *static_cast<const TransactionBarrier*>(shared_pointer(barrier));
  while (its.phase == (parity & 1)) current_block().look(__builtin_return_address(0));
}
void store_bulk(void* to, uint32_t from, uint32_t num_bytes) {
  if ((reinterpret_cast<uintptr_t>(to) | from | num_bytes) % 16 != 0)
    current_block().fail("a bulk store that is not aligned");
  current_block().store({static_cast<uint8_t*>(to), static_cast<const uint8_t*>(shared_pointer(from)), num_bytes, {}});
  act();
}
void commit_stores() { current_block().commit(); }
void wait_stores(uint32_t groups, bool only_read) {
  current_block().wait_stores(groups, only_read, __builtin_return_address(0));
}

}  // namespace gpu_on_cpu
