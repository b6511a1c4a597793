// Whether a type of ours is, to a caller in machine code, the type that a vendor's header declares.
//
// Both are taken apart together: functions, pointers, const and arrays must agree exactly. Where the header has an
// enumeration, ours may be an integer or an enumeration of the same size, whatever its sign. A struct of ours stands
// for one of theirs if kStandsFor says so, and then a check of its layout belongs beside that.
#pragma once

#include <type_traits>

namespace abi {

template <typename Ours, typename Theirs>
inline constexpr bool kStandsFor = false;

template <typename Ours, typename Theirs>
constexpr bool same_value() {
  if constexpr (std::is_same_v<Ours, Theirs>) {
    return true;
  } else if constexpr (std::is_enum_v<Theirs>) {
    return (std::is_enum_v<Ours> || (std::is_integral_v<Ours> && !std::is_same_v<Ours, bool>)) &&
           sizeof(Ours) == sizeof(Theirs);
  } else {
    return kStandsFor<Ours, Theirs>;
  }
}

template <typename Ours, typename Theirs>
struct Same {
  static constexpr bool value = [] {
    using O = std::remove_cv_t<Ours>;
    using T = std::remove_cv_t<Theirs>;
    if constexpr (std::is_const_v<Ours> != std::is_const_v<Theirs> ||
                  std::is_volatile_v<Ours> != std::is_volatile_v<Theirs>) {
      return false;
    } else if constexpr (std::is_pointer_v<O> && std::is_pointer_v<T>) {
      return Same<std::remove_pointer_t<O>, std::remove_pointer_t<T>>::value;
    } else if constexpr (std::is_array_v<O> && std::is_array_v<T>) {
      return std::extent_v<O> == std::extent_v<T> && Same<std::remove_extent_t<O>, std::remove_extent_t<T>>::value;
    } else {
      return same_value<O, T>();
    }
  }();
};

template <typename OurResult, typename... OurParameters, typename TheirResult, typename... TheirParameters>
struct Same<OurResult(OurParameters...), TheirResult(TheirParameters...)> {
  static constexpr bool value = [] {
    if constexpr (sizeof...(OurParameters) != sizeof...(TheirParameters)) {
      return false;
    } else {
      return Same<OurResult, TheirResult>::value && (Same<OurParameters, TheirParameters>::value && ...);
    }
  }();
};

template <typename Ours, typename Theirs>
inline constexpr bool kSame = Same<Ours, Theirs>::value;

// A constant of ours has the value that theirs has.
template <typename Ours, typename Theirs>
constexpr bool equal(Ours ours, Theirs theirs) {
  return static_cast<long long>(ours) == static_cast<long long>(theirs);
}

// A member of a struct of ours lies where theirs does, and has its type.
#define ABI_SAME_MEMBER(Ours, ours, Theirs, theirs)                                                                   \
  static_assert(                                                                                                      \
      offsetof(Ours, ours) == offsetof(Theirs, theirs) && abi::kSame<decltype(Ours::ours), decltype(Theirs::theirs)>, \
      #Theirs "::" #theirs)

}  // namespace abi
