"""A long integer in 32-bit limbs as CUDA C++ text: the accumulator of a thread's exact sum.

A finite x is m * 2^(field - bias) with an integer m. ``add_limbs`` adds m * 2^field to signed 64-bit limbs of weight
2^(32 i). ``total_of`` carries and makes the binary64 value to be rounded: the leading 53 bits, to odd or to nearest
even. Between two carries a limb takes 2^30 additions of less than 2^33. Only integers are added, so the order of the
elements cannot change the result; ``SIZES`` leaves room above the largest number for 2^35 of them.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

# The number of limbs, bits of the trailing significand, mask of the exponent field and bias of bit 0, by carrier.
SIZES: Final = MappingProxyType({"f32": (12, 23, 255, 150), "f64": (69, 52, 2047, 1075)})

LIMBS: Final = """\
__device__ __forceinline__ void add_limbs(i64* limbs, const u32 place, const u64 m, const i64 sign) {
  const u64 low = (m & 0xffffffffull) << (place % 32), high = (m >> 32) << (place % 32);
  const i64 parts[3] = {(i64)(low & 0xffffffffull), (i64)((low >> 32) + (high & 0xffffffffull)), (i64)(high >> 32)};
  for (int i = 0; i < 3; ++i) limbs[place / 32 + i] += (parts[i] ^ sign) - sign;
}
__device__ __forceinline__ void carry_limbs(i64* limbs, const int count) {
  i64 carried = 0;
  for (int i = 0; i < count; ++i) {
    carried += limbs[i];
    limbs[i] = i + 1 < count ? carried & 0xffffffffll : carried;
    carried >>= 32;
  }
}
__device__ __forceinline__ double special_of(const u32 flags) {
  const u64 infinity = 0x7ffull << 52;
  const u64 code = flags == 1 ? infinity : flags == 2 ? infinity | 1ull << 63 : 0x7ff8ull << 48;
  return __longlong_as_double((long long)code);
}
__device__ __forceinline__ u64 encoded(const u64 significand, const int exponent, const bool to_odd) {
  const bool low = exponent < -1022;
  const int places = 11 + (low ? -1022 - exponent : 0);
  u64 kept = significand >> places;
  const u64 lost = significand & ((1ull << places) - 1), half = 1ull << (places - 1);
  if (to_odd) kept |= lost != 0;
  else kept += lost > half || (lost == half && (kept & 1));
  if (exponent > 1023) return (0x7ffull << 52) - (to_odd ? 1 : 0);
  return kept + ((u64)(low ? 0 : exponent + 1022) << 52);
}
__device__ __forceinline__ double total_of(i64* limbs, const int count, const int bias, const bool to_odd) {
  carry_limbs(limbs, count);
  const bool negative = limbs[count - 1] < 0;
  if (negative) {
    for (int i = 0; i < count; ++i) limbs[i] = -limbs[i];
    carry_limbs(limbs, count);
  }
  int leading = count - 1;
  while (leading >= 0 && limbs[leading] == 0) --leading;
  if (leading < 0) return 0.0;
  int top = 31;
  while (!(limbs[leading] >> top & 1)) --top;
  u64 parts[3];
  for (int i = 0; i < 3; ++i) parts[i] = leading >= i ? (u64)limbs[leading - i] : 0;
  const int empty = 31 - top;
  u64 significand = (parts[0] << 32 | parts[1]) << empty;
  u64 rest = parts[2];
  if (empty) significand |= parts[2] >> (32 - empty), rest = parts[2] << empty & 0xffffffffull;
  for (int i = leading - 3; i >= 0; --i) rest |= (u64)limbs[i];
  const u64 code = encoded(significand | (rest != 0), 32 * leading + top - bias, to_odd);
  return __longlong_as_double((long long)(code | (u64)negative << 63));
}
"""
