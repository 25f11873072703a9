// Another rank's call meets ours (contract 9).
#pragma once

#include <cstdint>
#include <string>

#include "backend/plan.h"
#include "common/clock.h"

namespace uccl_ep::host {

class Meeting {
 public:
  // `refusal`: why this rank refused a call, the last of those before ours. `patience_usec`: why_usec().
  Meeting(uint64_t number, const Called& ours, const std::string& refusal, uint64_t patience_usec)
      : number_(number), ours_(ours), refusal_(refusal), patience_usec_(patience_usec) {}

  [[noreturn]] void refuse(ErrorKind kind, int src, const std::string& text) const {
    ErrorRecord record;
    record.kind = kind;
    record.step = Step::kExchange;
    record.rank = ours_.rank;
    record.peer = src;
    record.epoch = number_;
    record.set_message(text);
    throw CommunicationFailure(record);
  }
  // It is not our call. Returns while the other rank, which has refused calls before it, will soon say why; else throws
  // CommunicationFailure.
  void meet_other_call(const Called& other) {
    const uint64_t now = now_usec();
    if (other.num_refused > ours_.num_refused) {
      if (met_usec_ == 0) met_usec_ = now;
      if (now - met_usec_ < patience_usec_) return;
    }
    refuse(ErrorKind::kRankMismatch, other.rank,
           describe_mismatch(number_, ours_, other, other.num_refused < ours_.num_refused ? refusal_ : ""));
  }

 private:
  const uint64_t number_;
  const Called ours_;
  const std::string refusal_;
  const uint64_t patience_usec_;
  uint64_t met_usec_ = 0;
};

}  // namespace uccl_ep::host
