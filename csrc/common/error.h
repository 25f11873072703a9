// The error that travels between ranks, and the exceptions that the bindings map one to one to Python.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <exception>
#include <stdexcept>
#include <string>
#include <string_view>

namespace uccl_ep {

enum class ErrorKind : uint32_t {
  kNone = 0,
  kArrivalTimeout,
  kProgressTimeout,
  kPeerDied,
  kTransport,
  kRankMismatch,
  kPlanMismatch,
  kPeerFailed,
};

// The steps of an operation. Traces, counters and errors use these names; so do the files.
enum class Step : uint32_t { kNone = 0, kExchange, kPlan, kStage, kShip, kPlace, kFold, kMerge, kClose };

constexpr uint32_t kNumSteps = 9;

inline const char* step_name(Step step) {
  static const char* const names[] = {"none", "exchange", "plan", "stage", "ship", "place", "fold", "merge", "close"};
  return names[static_cast<uint32_t>(step)];
}

// Makes text of other processes valid UTF-8, which Python requires.
template <size_t kBytes>
void make_printable(char (&text)[kBytes]) {
  text[kBytes - 1] = 0;
  for (char* c = text; *c != 0; ++c)
    if (*c < ' ' || *c > '~') *c = '?';
}
// Copies as much of `begin` and `text` as fits. Needs no memory.
template <size_t kBytes>
void copy_text(char (&to)[kBytes], std::string_view begin, std::string_view text) {
  size_t size = begin.copy(to, kBytes - 1);
  size += text.copy(to + size, kBytes - 1 - size);
  to[size] = 0;
  if (begin.size() + text.size() >= kBytes) std::memcpy(to + kBytes - 4, "...", 4);
  make_printable(to);
}
template <size_t kBytes>
void copy_text(char (&to)[kBytes], std::string_view text) {
  copy_text(to, text, {});
}

// Trivially copyable: it is copied into the control block of domain peers and written to the other ranks by the
// transport.
struct ErrorRecord {
  ErrorKind kind = ErrorKind::kNone;
  Step step = Step::kNone;
  int32_t rank = -1;  // the rank that found it
  int32_t peer = -1;  // the rank that it blames, -1 = none
  uint64_t epoch = 0;
  int64_t chunk = -1;
  uint64_t expected = 0;
  uint64_t seen = 0;
  char message[464] = {};  // two calls, and why one of them was refused

  void set_message(std::string_view text) { copy_text(message, text); }
  // "rank 3", `says`, `text`. Needs no memory, which may be what is missing.
  void set_message_of(int of, const char* says, std::string_view text) {
    char begin[64];
    std::snprintf(begin, sizeof(begin), "rank %d%s", of, says);
    copy_text(message, begin, text);
  }
};
static_assert(sizeof(ErrorRecord) == 512, "its size is part of the layout");

// Of a rank that cannot go on because of an exception, `what`. Needs no memory.
inline ErrorRecord failure_of(int rank, const char* what) {
  ErrorRecord record;
  record.kind = ErrorKind::kPeerFailed;
  record.rank = record.peer = rank;
  record.set_message_of(rank, " failed: ", what);
  return record;
}

// An operation failed on this or another rank: the buffer can no longer be used.
class CommunicationFailure : public std::runtime_error {
 public:
  explicit CommunicationFailure(const ErrorRecord& record) : std::runtime_error(record.message), record_(record) {}
  const ErrorRecord& record() const { return record_; }

 private:
  ErrorRecord record_;
};

// An argument is invalid: nothing was launched, the buffer stays usable.
enum class UsageKind : uint32_t { kConfig, kBudget, kInput, kDtype, kShape, kRouting, kClosed, kTopology };

class UsageFailure : public std::runtime_error {
 public:
  UsageFailure(UsageKind kind, const std::string& text) : std::runtime_error(text), kind_(kind) {}
  UsageKind kind() const { return kind_; }

 private:
  UsageKind kind_;
};

// As Python names them.
inline const char* error_name(ErrorKind kind) {
  switch (kind) {
    case ErrorKind::kArrivalTimeout:
      return "ArrivalTimeout";
    case ErrorKind::kProgressTimeout:
      return "ProgressTimeout";
    case ErrorKind::kPeerDied:
      return "PeerDied";
    case ErrorKind::kTransport:
      return "TransportError";
    case ErrorKind::kRankMismatch:
      return "RankMismatchError";
    case ErrorKind::kPlanMismatch:
      return "PlanMismatchError";
    default:
      return "PeerFailed";
  }
}
inline const char* error_name(UsageKind kind) {
  switch (kind) {
    case UsageKind::kConfig:
      return "ConfigError";
    case UsageKind::kBudget:
      return "MemoryBudgetError";
    case UsageKind::kDtype:
      return "DtypeError";
    case UsageKind::kShape:
      return "ShapeError";
    case UsageKind::kRouting:
      return "RoutingError";
    case UsageKind::kClosed:
      return "ClosedError";
    case UsageKind::kTopology:
      return "TopologyError";
    default:
      return "InputError";
  }
}
inline const char* error_name(const std::exception& error) {
  if (const auto* failure = dynamic_cast<const CommunicationFailure*>(&error))
    return error_name(failure->record().kind);
  if (const auto* failure = dynamic_cast<const UsageFailure*>(&error)) return error_name(failure->kind());
  return "Exception";
}

}  // namespace uccl_ep
