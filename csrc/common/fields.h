// What of a structure another language sees, listed once, beside the structure.
#pragma once

#include <tuple>

namespace uccl_ep {

template <typename Struct, typename Member>
struct Field {
  const char* name;
  Member Struct::* member;
};

template <typename Struct, typename Member>
constexpr Field<Struct, Member> field(const char* name, Member Struct::* member) {
  return {name, member};
}

// Specialised beside each structure that has some.
template <typename Struct>
inline constexpr std::tuple<> kFields{};

}  // namespace uccl_ep

// A name and a member that cannot differ.
#define UCCL_EP_FIELD(type, name) ::uccl_ep::field(#name, &type::name)
