// Exceptions of transports.
#pragma once

#include <string>

#include "common/error.h"

namespace uccl_ep {

// Throws CommunicationFailure(kTransport) of `rank`, about `peer` (-1: no peer).
[[noreturn]] inline void fail_transport(const char* transport, int rank, int peer, const std::string& text) {
  ErrorRecord record;
  record.kind = ErrorKind::kTransport;
  record.step = Step::kShip;
  record.rank = rank;
  record.peer = peer;
  record.set_message(std::string(transport) + ": " + text);
  throw CommunicationFailure(record);
}

// Throws CommunicationFailure(kTransport) for an address that this transport's encode_address cannot have written.
[[noreturn]] inline void fail_address(const char* transport, const std::string& text) {
  fail_transport(transport, -1, -1, "no address of this transport: '" + text.substr(0, 80) + "'");
}

}  // namespace uccl_ep
