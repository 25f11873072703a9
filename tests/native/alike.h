// Whether two declarations of one thing, ours and a library's own, mean the same to a compiled program.
#pragma once

#include <cstddef>
#include <type_traits>
#include <utility>

namespace alike {

// As it is passed or stored: pointers to anything are alike, numbers and enums by their size.
template <typename Theirs, typename Ours>
constexpr bool alike() {
  if constexpr (std::is_void_v<Theirs> || std::is_void_v<Ours>)
    return std::is_void_v<Theirs> && std::is_void_v<Ours>;
  else
    return sizeof(Theirs) == sizeof(Ours) && std::is_pointer_v<Theirs> == std::is_pointer_v<Ours> &&
           std::is_floating_point_v<Theirs> == std::is_floating_point_v<Ours>;
}

// Of pointers to functions: what is passed, one by one, and what comes back.
template <typename Theirs, typename Ours>
struct Same {
  static constexpr bool value = alike<Theirs, Ours>() && !std::is_function_v<std::remove_pointer_t<Theirs>> &&
                                !std::is_function_v<std::remove_pointer_t<Ours>>;
};
template <typename R, typename... A, typename S, typename... B>
struct Same<R (*)(A...), S (*)(B...)> {
  static constexpr bool value = [] {
    if constexpr (sizeof...(A) != sizeof...(B))
      return false;
    else
      return alike<R, S>() && (... && Same<A, B>::value);
  }();
};

}  // namespace alike

#define FIELD(structure, field)                                                                                      \
  static_assert(offsetof(::structure, field) == offsetof(ours::structure, field), #structure "." #field ": offset"); \
  static_assert(alike::Same<std::remove_cv_t<decltype(std::declval<::structure>().field)>,                           \
                            std::remove_cv_t<decltype(std::declval<ours::structure>().field)>>::value,               \
                #structure "." #field ": type")
// Of a field that headers older than our declaration lack.
#define YOUNG_FIELD(structure, field)                                                           \
  static_assert(                                                                                \
      []<typename Theirs>(Theirs*) {                                                            \
        if constexpr (requires(Theirs theirs) { theirs.field; })                                \
          return offsetof(Theirs, field) == offsetof(ours::structure, field) &&                 \
                 alike::Same<decltype(Theirs::field), decltype(ours::structure::field)>::value; \
        else                                                                                    \
          return true;                                                                          \
      }(static_cast<::structure*>(nullptr)),                                                    \
      #structure "." #field ": offset or type")
// Of a structure that grows at its beginning: as far from its last field.
#define FIELD_BEFORE(structure, field, last)                                                        \
  static_assert(offsetof(::structure, last) - offsetof(::structure, field) ==                       \
                    offsetof(ours::structure, last) - offsetof(ours::structure, field),             \
                #structure "." #field ": offset");                                                  \
  static_assert(alike::Same<decltype(::structure::field), decltype(ours::structure::field)>::value, \
                #structure "." #field ": type")
#define SIZE(structure, relation) \
  static_assert(sizeof(::structure) relation sizeof(ours::structure), #structure ": size")
#define VALUE(name, theirs) \
  static_assert(static_cast<unsigned long>(ours::name) == static_cast<unsigned long>(theirs), #name ": value")
#define FUNCTION(name) static_assert(alike::Same<decltype(&::name), decltype(&ours::name)>::value, #name ": parameters")
#define FUNCTION_TYPE(name) static_assert(alike::Same<decltype(&::name), ours::name*>::value, #name ": parameters")
