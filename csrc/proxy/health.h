// Life and errors of ranks: heartbeats, process watching, error and bye messages.
#pragma once

#include <cstdint>
#include <vector>

#include "common/patience.h"
#include "common/process.h"
#include "layout/words.h"
#include "proxy/post.h"
#include "proxy/proxy.h"

namespace uccl_ep {

class Health {
 public:
  explicit Health(const ProxyContext& context);

  // Posts pending messages to ranks of other domains: byes, this rank's error.
  bool send_due();
  // Every kHeartbeatUsec: sends heartbeats and checks processes. `moved_bytes`: of chunks, so far.
  void housekeeping(uint64_t now_usec, uint64_t moved_bytes);
  uint64_t next_housekeeping_usec() const { return next_housekeeping_usec_; }
  // Whether the transport refused a pending message.
  bool refused() const { return refused_; }

  // A message of `peer` arrived.
  void heard(int peer, uint64_t now_usec) { heard_[static_cast<size_t>(peer)].publish(now_usec); }
  // The immediate of an error, a heartbeat, or a bye.
  void arrive(const Imm& imm, int peer, uint64_t now_usec);
  // A post has completed: the peer has it, or cannot be reached.
  void flushed(const Cookie& cookie);
  // This rank found an error: send it to all ranks directly.
  void spread(const ErrorRecord& record);

  // ---- any thread
  void announce_close();
  bool closed(int rank) const { return closed_[static_cast<size_t>(rank)].read() != 0 || domain_closing(rank); }
  bool all_closed() const;
  bool error_delivered() const;
  uint64_t last_heard_usec(int rank) const;
  uint64_t silent_usec(int rank) const {
    const uint64_t heard = heard_patient_[static_cast<size_t>(rank)].read();  // read first: it may grow meanwhile
    return patient_.read() - heard;
  }
  uint64_t last_moved_usec(int rank) const;
  uint32_t num_refused(int rank) const;
  void add_stats(ProxyStats& stats) const { stats.heartbeats_sent = heartbeats_.value(); }

 private:
  enum class Debt : uint32_t { kNone, kDue, kPosted, kPaid };
  // A rank of another domain.
  struct Remote {
    int rank;
    bool heartbeat_in_flight = false;
    uint64_t told_progress = 0;  // our `progress` at the last heartbeat to it
    bool dead = false;
    Debt bye = Debt::kNone;
    Debt error = Debt::kNone;
  };
  struct Watched {
    int rank;
    bool suspected = false;  // looked dead once
    ProcessWatch process;    // domain peers; the transport knows the others
  };

  bool domain_closing(int rank) const {
    const ControlBlock* control = context_.domain_controls[static_cast<size_t>(rank)];
    return control != nullptr && control->closing.read() != 0;
  }
  void owe_what_changed();
  bool pay(Remote& remote, PostKind kind, Debt& debt);
  void settle(Debt& debt);
  void publish_settled();
  void send_heartbeats();
  void listen();
  void watch_processes();
  void found_dead(const Watched& watched);
  void start_shipping(const ErrorRecord& record);
  Remote& remote_of(int rank) { return remotes_[static_cast<size_t>(remote_idx_[static_cast<size_t>(rank)])]; }

  const ProxyContext& context_;
  const uint64_t created_usec_;
  std::vector<Remote> remotes_;
  std::vector<int> remote_idx_;   // [rank] in remotes_, -1: own domain
  std::vector<Watched> watched_;
  uint64_t next_housekeeping_usec_ = 0;
  uint64_t period_ = 0;
  bool refused_ = false;
  uint64_t num_due_ = 0;          // pending messages that were not posted yet
  bool byes_owed_ = false;        // byes were requested, and are due in remotes_
  bool error_owed_ = false;       // likewise, of our error
  Counter heartbeats_;
  PatienceClock patience_;
  uint64_t moved_bytes_ = 0;
  std::vector<uint64_t> heard_before_;  // [rank] last_heard_usec() at the last housekeeping

  // Writer: the proxy; readers: any thread of this process; never reset.
  std::vector<Flag> heard_;       // [rank] now_usec() of the last message
  std::vector<Flag> heard_patient_;  // [rank] patience_ when the last sign of life was noticed
  Flag patient_;  // patience_ at the last housekeeping; published after heard_patient_
  std::vector<Flag> moved_;  // [rank] now_usec() of the last heartbeat that said that the rank's operation moved
  std::vector<Flag> calls_refused_;  // [rank] modulo kHeartbeatRefusals, as its heartbeats say
  std::vector<Flag> closed_;  // [rank] 1: its bye arrived, or it is dead
  Flag shipping_error_;  // 1: an error that we found is on its way to the other domains
  Flag error_settled_;  // 1: it has reached all live ranks
  Flag byes_settled_;  // likewise, the byes
  Flag bye_requested_;  // writer: the closing thread; reader: the proxy
};

}  // namespace uccl_ep
