// The first page of every rank's region: the rank's identity, signs of life, and its error.
// Mapped by all ranks of the domain.
#pragma once

#include <unistd.h>

#include <cstdint>

#include "common/clock.h"
#include "common/error.h"
#include "common/patience.h"
#include "common/units.h"
#include "sync/flag.h"

namespace uccl_ep {

constexpr size_t kRefusalBytes = 192;  // of the text that says why a call was refused

struct ControlBlock {
  // Written once by the owner before the handle is given out.
  uint64_t magic = 0;
  uint64_t generation = 0;
  int32_t rank = -1;
  int32_t pid = 0;
  uint64_t pid_namespace = 0;  // of `pid`; 0: the readers' own

  // now_usec() of the owner's proxy, every <= kHeartbeatUsec. Readers: domain peers, to tell a frozen from a waiting
  // rank.
  alignas(kLineBytes) Flag heartbeat;
  // now_usec() of the last movement of the owner's current operation. Writer: its worker; readers: domain peers and
  // the owner's proxy, which tells the other domains. A progress deadline runs only while no rank moves.
  alignas(kLineBytes) Flag progress;
  // now_usec() when it was last seen that bytes of chunks had moved between domains, also inside a chunk. Writer: the
  // owner's proxy; readers as of `progress`, which it stands beside.
  alignas(kLineBytes) Flag carried;
  // The sleeper is the owner's worker thread. Rung by whoever published a flag that the worker may wait for.
  alignas(kLineBytes) Bell worker_bell;
  // The sleeper is the owner's proxy thread. Rung by the worker (commands), by readers of landing memory (credits) and
  // by transports that deliver without a NIC.
  alignas(kLineBytes) Bell proxy_bell;
  // 1 once the owner entered close(). Readers: domain peers; a rank that said so may disappear.
  alignas(kLineBytes) Flag closing;
  // Number of calls that the owner has refused; call n leaves why in refusals[n % 2] before. Writer: the owner;
  // readers: the owner's proxy, which tells the other domains the number, and domain peers whose patience is over. A
  // text is for messages only: it may be overwritten while it is read.
  alignas(kLineBytes) Flag num_refused;
  char refusals[2][kRefusalBytes] = {};
  // The first error that reached this rank. Writers: the owner or any domain peer, the first wins the claim;
  // reader: the owner. Never reset: after an error the engine is created anew.
  alignas(kLineBytes) Claim error_claim;
  ErrorRecord error;
  // 1: what the owner then posts is its own alone, because others go on without it. Writer: the owner; reader: its
  // proxy; never reset.
  Flag keeps_error;
};
static_assert(sizeof(ControlBlock) <= kPageBytes);

// What a rank knows of a rank of another domain whose rows it lands: that one tells nobody else of the domain. Behind
// the control block, ranks ascending. Writer: the proxy of the rank that knows it; readers: its domain; never reset.
struct RemoteSigns {
  Flag heard;        // now_usec() of the last message
  Flag moved;        // now_usec() of the last heartbeat that said that its operation moved
  Flag num_refused;  // calls that it has refused, as its heartbeats say
  Flag ended;        // 1: its bye arrived. 2: it is dead
};
constexpr uint64_t kSaidBye = 1, kDead = 2;
inline RemoteSigns* remote_signs(ControlBlock* control) {
  return reinterpret_cast<RemoteSigns*>(reinterpret_cast<uint8_t*>(control) + kPageBytes);
}

constexpr uint64_t kControlMagic = 0x7563636c65703031;  // "uccl" "ep01"
constexpr uint64_t kHeartbeatUsec = 100000;
// A rank whose heartbeat is older than this is blamed before one that is merely waited for.
constexpr uint64_t kStaleHeartbeatUsec = 1000000;

// Copies `record` into `control` unless an earlier error is there; wakes both threads of the owner.
inline bool post_error(ControlBlock& control, const ErrorRecord& record) {
  const bool first = control.error_claim.take();
  if (first) {
    control.error = record;
    control.error_claim.publish();
  }
  control.worker_bell.ring();
  control.proxy_bell.ring();
  return first;
}

// The error whose claim on `control` is taken. Its writer publishes it within microseconds, unless it died in between.
inline ErrorRecord posted_error(const ControlBlock& control) {
  constexpr uint64_t kPatienceUsec = 100000;
  Patience patience(kPatienceUsec);
  while (!control.error_claim.published() && !patience.over()) usleep(100);
  if (control.error_claim.published()) return control.error;
  ErrorRecord record;
  record.kind = ErrorKind::kPeerFailed;
  record.rank = control.rank;
  record.set_message("a rank of the domain found an error and ended before it could say which");
  return record;
}

}  // namespace uccl_ep
