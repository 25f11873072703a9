// A rank's address, as one line of text.
#pragma once

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <string>
#include <string_view>
#include <system_error>

#include "transport/failure.h"

namespace uccl_ep::loop {

struct Address {
  int rank = -1;
  uint64_t generation = 0;  // of the engine
  int pid = 0;
  uint64_t pid_namespace = 0;
  std::string boot_id;  // of the host
  std::string region_name;
  uint64_t region_bytes = 0;
  std::string inbox_name;
  uint32_t inbox_slots = 0;  // per sender
};

inline std::string encode_address(const Address& a) {
  std::string text = "loop3";
  const auto add = [&](const std::string& field) { (text += ' ') += field; };
  add(std::to_string(a.rank));
  add(std::to_string(a.generation));
  add(std::to_string(a.pid));
  add(std::to_string(a.pid_namespace));
  add(a.boot_id);
  add(a.region_name);
  add(std::to_string(a.region_bytes));
  add(a.inbox_name);
  add(std::to_string(a.inbox_slots));
  return text;
}

// Throws CommunicationFailure(kTransport) for anything that encode_address cannot have written. Without streams, which
// took most of the time of a large group's creation.
inline Address decode_address(const std::string& text) {
  Address a;
  std::string_view left = text;
  const auto word = [&] {
    const std::string_view found = left.substr(0, left.find(' '));
    left.remove_prefix(std::min(left.size(), found.size() + 1));
    return found;
  };
  const auto number = [&](auto& to) {
    const std::string_view digits = word();
    return std::from_chars(digits.data(), digits.data() + digits.size(), to).ec == std::errc();
  };
  const bool plain = std::ranges::none_of(text, [](unsigned char letter) { return letter < ' '; });
  bool good =
      plain && word() == "loop3" && number(a.rank) && number(a.generation) && number(a.pid) && number(a.pid_namespace);
  a.boot_id = word();
  a.region_name = word();
  good = good && number(a.region_bytes);
  a.inbox_name = word();
  good = good && number(a.inbox_slots);
  // What is empty, or not all of its number, or too much, does not encode back to itself.
  if (!good || a.rank < 0 || a.region_bytes == 0 || a.inbox_slots == 0 || a.boot_id.empty() || a.region_name.empty() ||
      a.inbox_name.empty() || encode_address(a) != text)
    fail_address("loop", text);
  return a;
}

}  // namespace uccl_ep::loop
