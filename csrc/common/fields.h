// Lists the members of a structure by name, once and beside the structure, for bindings and errors.
#pragma once

#include <cstddef>
#include <cstdint>
#include <tuple>
#include <type_traits>
#include <utility>

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

// Specialised beside each structure with listed members.
template <typename Struct>
inline constexpr std::tuple<> kFields{};

// Number of members of an aggregate without nested ones.
struct AnyMember {
  template <typename Member>
  constexpr operator Member() const;
};
template <typename Struct, typename... Members>
constexpr size_t num_members() {
  if constexpr (requires { Struct{Members{}..., AnyMember{}}; })
    return num_members<Struct, Members..., AnyMember>();
  else
    return sizeof...(Members);
}
template <typename Struct>
constexpr bool all_listed() {
  return num_members<Struct>() == std::tuple_size_v<std::remove_cvref_t<decltype(kFields<Struct>)>>;
}

template <auto kMember, typename Struct>
constexpr uint32_t equal_in(const Struct& a, const Struct& b) {
  return a.*kMember == b.*kMember;
}
// Whether all listed members are equal. Comparisons are independent, so a kernel loads all members of a peer at once.
template <typename Struct>
constexpr bool all_equal(const Struct& a, const Struct& b) {
  return [&]<size_t... kAt>(std::index_sequence<kAt...>) {
    return (1u & ... & equal_in<std::get<kAt>(kFields<Struct>).member>(a, b)) != 0;
  }(std::make_index_sequence<std::tuple_size_v<std::remove_cvref_t<decltype(kFields<Struct>)>>>{});
}

}  // namespace uccl_ep

// A member with its name.
#define UCCL_EP_FIELD(type, name) ::uccl_ep::field(#name, &type::name)
