// Widens 8-bit floats in registers to bfloat16 or float32, and multiplies a step of a panel (fp8.inl) by dot products
// or multiply-adds.

// Returns the position of the code of input k and an output in a step of a panel, in bytes.
INLINE int64_t fp8_position(int64_t k, int64_t output) { return output / 4 * 16 + k / 2 * 8 + output % 4 * 2 + k % 2; }

// Returns two inputs of each output as 16-bit numbers with the code in the upper byte and 0 in the lower byte: the
// first two inputs of a step for `pair` 0, the last two for `pair` 1.
INLINE vu spread_codes(vu words, int pair) {
#if PENSTOCK_LANES == 16
  const __m512i zero = _mm512_setzero_si512(), codes = (__m512i)words;
  return (vu)(pair ? _mm512_unpackhi_epi8(zero, codes) : _mm512_unpacklo_epi8(zero, codes));
#elif PENSTOCK_LANES == 8
  const __m256i zero = _mm256_setzero_si256(), codes = (__m256i)words;
  return (vu)(pair ? _mm256_unpackhi_epi8(zero, codes) : _mm256_unpacklo_epi8(zero, codes));
#else
  const vi lane = lane_index();
  const vu codes = shuffled(words, (lane >> 1) + 2 * pair) >> (vu)((lane & 1) * 16);
  return (codes << 8 & 0xff00) | (codes << 16 & 0xff000000);
#endif
}

// Stands for the tables if codes are widened by arithmetic.
struct Fp8NoTables {
  INLINE_MEMBER void pin() {}
};

#if PENSTOCK_DOT
// Pairs of bfloat16 for the dot product instruction.
struct Fp8Pairs {
  typedef bf16 Input;
  typedef uint32_t Wide;
  typedef vu Wides;
  typedef vu Codes;
  static constexpr int PARTS = 2;
  static constexpr bool IN_PLACE = true;  // whether whole groups of inputs are read from x directly
  static constexpr bool UNIFORM = false;  // whether `widen` converts all numbers at the same speed
  typedef Fp8NoTables Tables;
  // Returns the codes of a step in the form that `widen` reads.
  INLINE_MEMBER static vu prepare_codes(vu words, const Tables&) { return words; }
  // Widens a pair of inputs to bfloat16, exactly. Without SUBNORMAL, all codes must have an exponent above 0. In this
  // case it is enough to shift the bits to their position and to replace the exponent bias 7 by 127.
  template <bool SUBNORMAL> INLINE_MEMBER static vu widen(vu words, int part) {
    const __m512i high = (__m512i)spread_codes(words, part), shifted = _mm512_srai_epi16(high, 4);
    const vu normal = (vu)_mm512_add_epi16((__m512i)((vu)shifted & 0x87f087f0), _mm512_set1_epi16(0x3c00));
    if (!SUBNORMAL) return normal;
    const __m512i subnormals = (__m512i)(__v32hi){0x0000, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60};
    const __m512i codes = _mm512_srli_epi16(high, 8);
    const __mmask32 is_small = _mm512_testn_epi16_mask(codes, _mm512_set1_epi16(0x78));
    const vu small = (vu)_mm512_maskz_permutexvar_epi16(is_small, codes, subnormals) | ((vu)high & 0x80008000);
    return (vu)_mm512_mask_mov_epi16((__m512i)normal, is_small, (__m512i)small);
  }
  template <int ROWS, int VECTORS, class Weights>
  INLINE_MEMBER static void add_step(vf (&totals)[ROWS][VECTORS], const bf16* x, int64_t x_stride, Weights weights) {
#pragma GCC unroll 2
    for (int part = 0; part < PARTS; part++) {
      vu numbers[VECTORS];
      for (int v = 0; v < VECTORS; v++) numbers[v] = weights(part, v);
      for (int r = 0; r < ROWS; r++) {
        uint32_t pair;
        __builtin_memcpy(&pair, x + r * x_stride + 2 * part, 4);
        const __m512bh a = (__m512bh)_mm512_set1_epi32((int)pair);
        for (int v = 0; v < VECTORS; v++) totals[r][v] = _mm512_dpbf16_ps(totals[r][v], a, (__m512bh)numbers[v]);
      }
    }
  }
};

// A table of 128 bytes in registers.
struct ByteTable {
  vu low, high;
  INLINE_MEMBER ByteTable(const uint8_t* bytes)
      : low(load((const uint32_t*)bytes)), high(load((const uint32_t*)bytes + W)) {}
  // Returns the byte at index & 127 for each byte. The instruction is written in assembly, because the file is compiled
  // without AVX-512 VBMI: its other code also runs on processors without this extension.
  INLINE_MEMBER vu at(vu index) const {
    __asm__("vpermi2b %2, %1, %0" : "+v"(index) : "v"(low), "v"(high));
    return index;
  }
  // Keeps the compiler from reading the table again in each step of a loop.
  INLINE_MEMBER void pin() { __asm__("" : "+v"(low), "+v"(high)); }
};

// The low and high bytes of the bfloat16 number of each code, without the sign bit.
struct Fp8Bytes {
  alignas(64) uint8_t low[128], high[128];
  constexpr Fp8Bytes() : low{}, high{} {
    for (int code = 0; code < 128; code++) {
      int exponent = code >> 3, mantissa = code & 7;
      if (!exponent) {
        if (!mantissa) continue;
        for (exponent = 1; !(mantissa & 8); exponent--) mantissa <<= 1;
      }
      const int bits = (exponent + 120) << 7 | (mantissa & 7) << 4;
      low[code] = (uint8_t)bits, high[code] = (uint8_t)(bits >> 8);
    }
  }
};
static constexpr Fp8Bytes FP8_BYTES;

// Like Fp8Pairs, but widens the codes by table look-ups.
struct Fp8TablePairs : Fp8Pairs {
  struct Codes {
    __m512i low, high;
  };
  static constexpr bool UNIFORM = true;
  struct Tables {
    ByteTable low{FP8_BYTES.low}, high{FP8_BYTES.high};
    INLINE_MEMBER void pin() { low.pin(), high.pin(); }
  };
  INLINE_MEMBER static Codes prepare_codes(vu words, const Tables& tables) {
    return {(__m512i)tables.low.at(words), (__m512i)(tables.high.at(words) | (words & 0x80808080))};
  }
  template <bool SUBNORMAL> INLINE_MEMBER static vu widen(Codes codes, int part) {
    return (vu)(part ? _mm512_unpackhi_epi8(codes.low, codes.high) : _mm512_unpacklo_epi8(codes.low, codes.high));
  }
};

// Returns whether codes are widened by table look-ups, which need AVX-512 VBMI. With TABLES_IF_FAST, look-ups are used
// unless a look-up takes more than twice as long as a multiply-add. On Zen 5 both take equally long.
static bool uses_fp8_tables() {
  if (penstock_fp8_tables != TABLES_IF_FAST) return penstock_fp8_tables == TABLES_ALWAYS;
  enum { UNKNOWN, FAST, SLOW };
  static int32_t shared_result = UNKNOWN;  // both methods give the same bits, so threads may use different results
  int32_t result = __atomic_load_n(&shared_result, __ATOMIC_RELAXED);
  if (result != UNKNOWN) return result == FAST;
  vf x = all(0.5f);
  __asm__("" : "+v"(x));
  const int64_t add_time = shortest_time([=](vf sum) __attribute__((always_inline)) { return fma(x, x, sum); });
  const ByteTable table(FP8_BYTES.low);
  const int64_t look_up_time = shortest_time([=](vf sum) __attribute__((always_inline)) {
    return as_float(table.at(as_bits(sum)));
  });
  result = look_up_time <= 2 * add_time ? FAST : SLOW;
  __atomic_store_n(&shared_result, result, __ATOMIC_RELAXED);
  return result == FAST;
}
#endif

// Codes that are widened to float32 and multiplied by multiply-adds.
struct Fp8Floats {
  typedef float Input;
  typedef float Wide;
  typedef vf Wides;
  typedef vu Codes;
  static constexpr int PARTS = 4;
  static constexpr bool IN_PLACE = false, UNIFORM = false;
  typedef Fp8NoTables Tables;
  INLINE_MEMBER static vu prepare_codes(vu words, const Tables&) { return words; }
  // Widens one input to float32, like the bfloat16 pairs above. Without SUBNORMAL, a code with the exponent 0 becomes
  // 2^-7 * (1 + m / 8) instead of 2^-6 * m / 8.
  template <bool SUBNORMAL> INLINE_MEMBER static vf widen(vu words, int part) {
    const vs high = (vs)spread_codes(words, part / 2);
    const vu pairs = (vu)((vs)((vu)(high >> 4) & 0x87f087f0) + (int16_t)0x3c00);
    const vf number = as_float(part % 2 ? pairs & 0xffff0000 : pairs << 16);
    if (!SUBNORMAL) return number;
    const vf magnitude = as_float(as_bits(number) & 0x7fffffff), small = magnitude * 2 - 0x1p-6f;
    return magnitude < 0x1p-6f ? as_float(as_bits(small) | (as_bits(number) & 0x80000000)) : number;
  }
  // Processes one vector at a time, so that few registers hold widened numbers. If the instruction set has bfloat16 dot
  // products, the two products of a pair are added in the order of the dot product instruction, see WidenedPairs.
  template <int ROWS, int VECTORS, class Weights>
  INLINE_MEMBER static void add_step(vf (&totals)[ROWS][VECTORS], const float* x, int64_t x_stride, Weights weights) {
#pragma GCC unroll 2
    for (int pair = 0; pair < PARTS; pair += 2) {
      const int first = pair + (PENSTOCK_DOT ? 1 : 0), second = pair + (PENSTOCK_DOT ? 0 : 1);
      vf a[ROWS], b[ROWS];
      for (int r = 0; r < ROWS; r++) a[r] = all(x[r * x_stride + first]), b[r] = all(x[r * x_stride + second]);
#pragma GCC unroll 8
      for (int v = 0; v < VECTORS; v++) {
        const vf first_weights = weights(first, v), second_weights = weights(second, v);
        for (int r = 0; r < ROWS; r++)
          totals[r][v] = fma(b[r], second_weights, fma(a[r], first_weights, totals[r][v]));
      }
    }
  }
};

#if PENSTOCK_DOT
typedef Fp8Pairs Fp8Steps;
#else
typedef Fp8Floats Fp8Steps;
#endif

// Returns whether any code in these words has the exponent 0, that is, is subnormal or 0.
template <int COUNT> INLINE bool has_zero_exponents(const vu (&words)[COUNT]) {
#if PENSTOCK_LANES == 16
  __mmask64 is_small = 0;  // the bytes with the exponent 0
  for (int i = 0; i < COUNT; i++) is_small |= _mm512_testn_epi8_mask((__m512i)words[i], _mm512_set1_epi8(0x78));
  return is_small != 0;
#elif PENSTOCK_LANES == 8
  __m256i least = _mm256_set1_epi8(-1);  // minimum of the doubled magnitudes
  for (int i = 0; i < COUNT; i++)
    least = _mm256_min_epu8(least, _mm256_add_epi8((__m256i)words[i], (__m256i)words[i]));
  return _mm256_movemask_epi8(_mm256_cmpeq_epi8(_mm256_min_epu8(least, _mm256_set1_epi8(15)), least)) != 0;
#else
  vu is_small = {};  // the highest bit of a byte is set if the byte has the exponent 0
  for (int i = 0; i < COUNT; i++) {
    const vu exponents = words[i] & 0x78787878;
    is_small |= (exponents - 0x01010101) & ~exponents;
  }
  return lanes_that_hold((vi)(is_small & 0x80808080) != 0) != 0;
#endif
}
