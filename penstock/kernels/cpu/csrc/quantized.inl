// Linear layers with weights of 8, 5 or 4 bits (kernels/quantized.py). int8 weights have a scale for each output. int5
// and int4 weights have a float16 scale for each group of GROUP inputs of an output. Rows of x are quantized to 8 bits
// first, with a scale for each row or group. Integer sums are exact in any order. Float sums are added in the order of
// the groups. The bits of a row therefore do not depend on other rows.
//
// Weights are the unsigned operand of the byte products, stored as w + 128, w + 16 or w + 8. To compensate, sums start
// at -128, -16 or -8 times the sum of x. With int8 weights, a row of x may have a few integers beyond -127..127. Extra
// bytes, which are multiplied separately, hold their excess.

constexpr int64_t GROUP = 32;  // inputs
constexpr int64_t MAX_DIRECT_BYTES = 4 << 20;  // results of int8 layers below this size are stored from registers
constexpr int64_t MAX_QUANTIZED_BYTES = 8 << 20;  // bytes of x that are quantized at once, unless 256 rows are larger

// ---- quantization of rows to 8 bits ----

// The excess of a row's integers beyond -127..127, stored as extra bytes of units of four inputs. The product also
// multiplies the weights of a unit by the extra bytes of the unit.
constexpr int64_t MAX_EXTRAS = 15, INPUTS_PER_EXTRA = 32;
constexpr float RANGES[] = {1.5, 2, 3, 4, 6, 8, 12, 16};  // candidates for the largest integer of a row, divided by 127
struct Extras {
  struct Bytes {
    int32_t unit;
    int8_t bytes[4];
  };
  int64_t count;
  Bytes units[MAX_EXTRAS];
};

// Rows quantized to integers [rows, stride]. `scales` and `starts` [rows, groups] are the scale and the start value of
// the sums of each group of a row. With int8 weights, all inputs are one group, and rows have extras.
struct QuantizedRows {
  int8_t* integers;
  Extras* extras;
  float* scales;
  int32_t* starts;
  int64_t stride, groups;

  // Returns the stride of rows of K inputs: K rounded up to a multiple of 256, because units of block encodings read up
  // to 256 inputs, plus a cache line. With a power of two as stride, all rows would map to the same cache sets.
  static int64_t row_stride(int64_t K) { return round_up(K, 256) + 64; }
  static int64_t num_bytes(int64_t rows, int64_t K, int64_t groups) {
    return rows * (row_stride(K) + (int64_t)sizeof(Extras) + round_up(groups, 16) * 8);
  }
  QuantizedRows(char* memory, int64_t rows, int64_t K, int64_t groups)
      : integers((int8_t*)memory), extras((Extras*)(memory + rows * row_stride(K))), scales((float*)(extras + rows)),
        starts((int32_t*)(scales + rows * round_up(groups, 16))), stride(row_stride(K)), groups(round_up(groups, 16)) {}
  INLINE_MEMBER QuantizedRows skip_rows(int64_t rows) const {
    QuantizedRows part = *this;
    part.integers += rows * stride, part.extras += rows, part.scales += rows * groups, part.starts += rows * groups;
    return part;
  }
};

INLINE vu umax(vu a, vu b) {
#if PENSTOCK_LANES == 16
  return (vu)_mm512_max_epu32((__m512i)a, (__m512i)b);
#else
  return a > b ? a : b;
#endif
}
template <class V> INLINE V swapped_lanes(V x, int distance) { return shuffled(x, lane_index() ^ distance); }
INLINE uint32_t largest(vu x) {
#pragma GCC unroll 4
  for (int distance = W / 2; distance; distance /= 2) x = umax(x, swapped_lanes(x, distance));
  return x[0];
}
INLINE int32_t sum(vi x) {
#pragma GCC unroll 4
  for (int distance = W / 2; distance; distance /= 2) x += swapped_lanes(x, distance);
  return x[0];
}

// Divides n numbers into vectors, and returns the largest magnitude of each lane of these vectors as the bits of a
// float. The bits have the same order as the magnitudes.
template <class T> INLINE vu largest_of_lanes(const T* x, int64_t n) {
  vu lane_maxima = {};
  for_vectors(n, EACH_VECTOR { lane_maxima = umax(lane_maxima, as_bits(load(x + i, lanes)) & 0x7fffffff); });
  return lane_maxima;
}

// Returns the largest of the magnitudes in a vector of bits, or infinity if any is infinite or NaN.
INLINE float largest_magnitude(vu magnitudes) {
  // The bits of infinity exceed those of all numbers, and the bits of a NaN exceed those of infinity.
  const uint32_t bits = largest(magnitudes);
  float max_magnitude;
  __builtin_memcpy(&max_magnitude, &bits, 4);
  return bits >= 0x7f800000 ? __builtin_inff() : max_magnitude;
}

// If the largest magnitude of n numbers is below 1e-30 or not finite, sets the integers to 0, sets the scale to 0
// (below 1e-30) or NaN, and returns true. Otherwise returns false.
INLINE bool store_if_degenerate(float max_magnitude, int64_t n, int8_t* integers, float* scale) {
  if (max_magnitude >= 1e-30f && max_magnitude < __builtin_inff()) return false;
  *scale = max_magnitude < 1e-30f ? 0 : __builtin_nanf("");
  __builtin_memset(integers, 0, n);
  return true;
}

// Stores n numbers multiplied by `inverse` as integers, and returns the sum of the integers.
template <class T> INLINE int32_t store_integers(const T* x, int64_t n, float inverse, int8_t* integers) {
  vi total = {};
  for_vectors(n, EACH_VECTOR {
    vf scaled = load(x + i, lanes) * inverse;
    total += rounded_to_integers(scaled);
    store(integers + i, scaled, lanes);
  });
  return sum(total);
}

// Quantizes n numbers to integers in -127..127. Stores their scale and returns their sum.
template <class T> INLINE int32_t quantize(const T* x, int64_t n, int8_t* integers, float* scale) {
  const float max_magnitude = largest_magnitude(largest_of_lanes(x, n));
  if (store_if_degenerate(max_magnitude, n, integers, scale)) return 0;
  *scale = max_magnitude / 127;
  return store_integers(x, n, 127 / max_magnitude, integers);
}

// Returns a bit mask of the lanes in which a >= b. Both must be below 2^31.
INLINE uint32_t lanes_at_least(vu a, vu b) {
#if PENSTOCK_LANES == 16
  return _mm512_cmpge_epu32_mask((__m512i)a, (__m512i)b);
#else
  return lanes_that_hold((vi)a >= (vi)b);
#endif
}

// Returns the number of extras that n numbers multiplied by `inverse` need. The magnitudes of the products are at most
// 127 * `range`. An integer of at least 127 k + 1 needs at least k extras. A count above `max_extras` may be too small,
// because counting stops there.
template <class T> INLINE int64_t count_extras(const T* x, int64_t n, float inverse, float range, int64_t max_extras) {
  int64_t count = 0;
  for (int32_t k = 1; k <= range && count <= max_extras; k++) {
    // `least` is the smallest magnitude that is rounded to at least 127 k + 1. Rounding half to even, 127 k + 0.5
    // becomes 127 k + 1 only if k is odd.
    const float bound = (float)(127 * k) + 0.5f;
    uint32_t bits;
    __builtin_memcpy(&bits, &bound, 4);
    const vu least = bits + (k % 2 ? 0 : 1) - vu{};
    for_vectors(n, EACH_VECTOR {
      const vu magnitude = as_bits(load(x + i, lanes) * inverse) & 0x7fffffff;
      count += __builtin_popcount(lanes_at_least(magnitude, least));
    });
  }
  return count;
}

// Returns the integer to which the largest magnitude is scaled: 127 times the last of RANGES before the first
// that needs more than `max_extras` extras, or 127 if the first of RANGES needs more.
template <class T> static float choose_target(const T* x, int64_t n, float max_magnitude, int64_t max_extras) {
  float target = 127;
  for (float range : RANGES) {
    if (count_extras(x, n, 127 * range / max_magnitude, range, max_extras) > max_extras) break;
    target = 127 * range;
  }
  return target;
}

// Stores an integer beyond -127..127 as a byte at its position i, and extras that add up to the excess.
INLINE void split_integer(int64_t i, int32_t integer, int8_t* integers, Extras* extras) {
  auto clamp_to_byte = [](int32_t number) { return (int8_t)max(min(number, 127), -127); };
  integers[i] = clamp_to_byte(integer);
  for (int32_t excess = integer - integers[i]; excess;) {
    Extras::Bytes& extra = extras->units[extras->count++];
    extra = {(int32_t)(i / 4), {}};
    excess -= extra.bytes[i % 4] = clamp_to_byte(excess);
  }
}

#if PENSTOCK_LANES == 16
// The largest numbers of a row and their positions.
struct LargestNumbers {
  static constexpr int64_t CAPACITY = 256;
  float numbers[CAPACITY];
  int32_t positions[CAPACITY];
  int64_t count;

  // Collects the numbers whose magnitude is at least `least`, the bits of a float. Returns false if there are more than
  // CAPACITY - W such numbers, of which some may then be missing.
  template <class T> INLINE_MEMBER bool collect(const T* x, int64_t n, uint32_t least) {
    const __m512i bound = _mm512_set1_epi32((int)least);
    int64_t num_large = 0;  // a local variable instead of `count`, so that it stays in a register
    for_vectors(n, EACH_VECTOR {
      const vf number = load(x + i, lanes);
      const __mmask16 large = _mm512_cmpge_epu32_mask((__m512i)(as_bits(number) & 0x7fffffff), bound);
      const int64_t position = min(num_large, CAPACITY - W);
      store(numbers + position, (vf)_mm512_maskz_compress_ps(large, number));
      const __m512i number_positions = (__m512i)(lane_index() + (int32_t)i);
      store((uint32_t*)positions + position, (vu)_mm512_maskz_compress_epi32(large, number_positions));
      num_large += __builtin_popcount(large);
    });
    count = num_large;
    return num_large <= CAPACITY - W;
  }
};
#endif

#if PENSTOCK_LANES == 16
// Returns the magnitudes of up to 32 bfloat16 numbers as 16-bit integers, which have the same order.
INLINE __m512i magnitudes(const bf16* x, int64_t count) {
  const __mmask32 valid_lanes = count >= 2 * W ? ~0u : (1u << count) - 1;
  return _mm512_and_si512(_mm512_maskz_loadu_epi16(valid_lanes, x), _mm512_set1_epi16(0x7fff));
}
INLINE vu largest_of_lanes(const bf16* x, int64_t n) {
  __m512i lane_maxima = _mm512_setzero_si512();
  for (int64_t i = 0; i < n; i += 2 * W) lane_maxima = _mm512_max_epu16(lane_maxima, magnitudes(x + i, n - i));
  const vu low = (vu)_mm512_cvtepu16_epi32(_mm512_castsi512_si256(lane_maxima));
  return umax(low, (vu)_mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(lane_maxima, 1))) << 16;
}
#endif

// Like `quantize`, but scales the largest magnitude to the result of `choose_target`. A few outliers then reduce the
// precision of the other numbers less than with `quantize`.
template <class T>
static int32_t quantize_with_extras(const T* x, int64_t n, int8_t* integers, float* scale, Extras* extras) {
  const vu lane_maxima = largest_of_lanes(x, n);
  const float max_magnitude = largest_magnitude(lane_maxima);
  extras->count = 0;
  if (store_if_degenerate(max_magnitude, n, integers, scale)) return 0;
  const int64_t max_extras = min(MAX_EXTRAS, n / INPUTS_PER_EXTRA);
#if PENSTOCK_LANES == 16
  // Each number beyond 127 needs an extra, so only the MAX_EXTRAS + 1 largest numbers of the row matter. `lane_maxima`
  // has the largest magnitude of each lane, so at least W numbers are not below the minimum of `lane_maxima`.
  // Collecting these numbers is enough, because MAX_EXTRAS is below W.
  static_assert(MAX_EXTRAS < W);
  LargestNumbers large;
  if (large.collect(x, n, ~largest(~lane_maxima))) {
    const float target = choose_target(large.numbers, large.count, max_magnitude, max_extras);
    const float inverse = target / max_magnitude;
    *scale = max_magnitude / target;
    const int32_t total = store_integers(x, n, inverse, integers);
    if (target == 127) return total;
    for (int64_t i = 0; i < large.count; i += W) {
      const vi integer = rounded_to_integers(load(large.numbers + i) * inverse);
      int32_t lane_integers[W];
      store((uint32_t*)lane_integers, (vu)integer);
      const uint32_t valid_lanes = large.count - i >= W ? ~0u : (1u << (large.count - i)) - 1;
      uint32_t excess = lanes_that_hold((integer > 127) | (integer < -127)) & valid_lanes;  // mask of the lanes
      for (; excess; excess &= excess - 1) {
        const int lane = __builtin_ctz(excess);
        split_integer(large.positions[i + lane], lane_integers[lane], integers, extras);
      }
    }
    return total;
  }
#endif
  const float target = choose_target(x, n, max_magnitude, max_extras), inverse = target / max_magnitude;
  *scale = max_magnitude / target;
  const int32_t total = store_integers(x, n, inverse, integers);
  if (target == 127) return total;
  for_vectors(n, EACH_VECTOR {
    const vi integer = rounded_to_integers(load(x + i, lanes) * inverse);
    for (uint32_t excess = lanes_that_hold((integer > 127) | (integer < -127)); excess; excess &= excess - 1)
      split_integer(i + __builtin_ctz(excess), integer[__builtin_ctz(excess)], integers, extras);
  });
  return total;
}

// Returns whether the products of an encoding need quantized inputs. Other encodings multiply floats.
INLINE bool is_quantized(int64_t encoding) { return encoding >= 2 && encoding != 7; }
// Returns the factor by which the sum of a group's integers is multiplied to get the start value of its products, for
// encodings with groups.
INLINE int32_t start_factor(int64_t encoding) {
  switch (encoding) {
    case 3: return -8;
    case 4: return -16;
    case 10: return -32;
    case 13: case 14: return -12;
    case 15: case 16: return -32768;
  }
  return -1;
}
// Returns the number of inputs of x that share a scale, for encodings with groups.
INLINE int64_t scaled_inputs(int64_t encoding) { return encoding == 10 || encoding == 14 ? 16 : GROUP; }
// Returns the number of inputs of a unit of a panel, for encodings with groups.
INLINE int64_t unit_inputs(int64_t encoding) {
  return encoding == 15 || encoding == 16 ? 64 : encoding >= 8 && encoding <= 10 ? 256 : GROUP;
}
INLINE int64_t groups_of(int64_t encoding, int64_t K) {
  return encoding == 2 ? 1 : round_up(K, unit_inputs(encoding)) / scaled_inputs(encoding);
}

// Quantizes a row of x as `encoding` needs it. `order` is the permutation of the inputs in the panels, or null.
template <class T>
static void quantize_row(const T* x, int64_t K, int64_t encoding, const QuantizedRows& result, const int32_t* order) {
  T gathered[GROUP];
  auto read_inputs = [&](int64_t begin, int64_t count) __attribute__((always_inline)) {
    if (!order) return x + begin;
    for (int64_t i = 0; i < count; i++) gathered[i] = x[order[begin + i]];
    return (const T*)gathered;
  };
  if (encoding == 2) {
    *result.starts = -128 * quantize_with_extras(x, K, result.integers, result.scales, result.extras);
  } else {
    const int32_t factor = start_factor(encoding);
    const int64_t scale_inputs = scaled_inputs(encoding), groups = groups_of(encoding, K);
    int64_t group = 0;
    if (scale_inputs == GROUP)
      for (; (group + 1) * GROUP <= K; group++)
        result.starts[group] = factor * quantize(read_inputs(group * GROUP, GROUP), GROUP,
                                                 result.integers + group * GROUP, result.scales + group);
    for (; group * scale_inputs < K; group++) {
      const int64_t count = min(scale_inputs, K - group * scale_inputs);
      result.starts[group] = factor * quantize(read_inputs(group * scale_inputs, count), count,
                                               result.integers + group * scale_inputs, result.scales + group);
    }
    for (; group < groups; group++) result.starts[group] = 0, result.scales[group] = 0;
  }
  __builtin_memset(result.integers + K, 0, result.stride - K);
}

// ---- products of bytes ----
// add_bytes adds four products of an unsigned byte of w and a signed byte of x to each lane of a sum.

// The maximum number of rows of a tile and the number of vectors of outputs that a tile computes at once, for int8
// weights and for groups. With AVX-512, tiles of few rows of groups compute more vectors (`vectors`).
constexpr int BYTE_ROWS = W == 16 ? 6 : 2, BYTE_VECTORS = 4, GROUP_ROWS = W == 16 ? 6 : 2, GROUP_VECTORS = 2;

#if PENSTOCK_LANES == 16
INLINE vi add_bytes(vi sum, vu w, vu x) { return (vi)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)w, (__m512i)x); }
#elif PENSTOCK_LANES == 8 || defined(__SSE2__)
#if PENSTOCK_LANES == 8
INLINE vi add_pairs(vu a, vs b) { return (vi)_mm256_madd_epi16((__m256i)a, (__m256i)b); }
#else
INLINE vi add_pairs(vu a, vs b) { return (vi)_mm_madd_epi16((__m128i)a, (__m128i)b); }
#endif
// Multiplies even and odd bytes separately in 16 bits, because a sum of two products could overflow 16 bits.
INLINE vi add_bytes(vi sum, vu w, vu x) {
  return sum + (add_pairs(w & 0x00ff00ff, (vs)x << 8 >> 8) + add_pairs(w >> 8 & 0x00ff00ff, (vs)x >> 8));
}
#else
INLINE vi add_bytes(vi sum, vu w, vu x) {
  for (int shift = 0; shift < 32; shift += 8) sum += (vi)(w >> shift & 0xff) * ((vi)(x << (24 - shift)) >> 24);
  return sum;
}
#endif

// The sum of products of a group with weights of 4 to 6 bits. `halfway` is called after half of the products.
template <int BITS> struct GroupSum {
#if PENSTOCK_LANES == 8
  // A 16-bit sum can hold 16 products of up to 15 * 127, 8 products of up to 31 * 127, or 4 products of up to 63 * 127.
  // With 6 bits, a group has 16 inputs, so half of a group adds 4 products to each sum.
  static constexpr bool HALVES = BITS > 4;
  vi pair_sums, half_sum;
  INLINE_MEMBER void start(int32_t) { pair_sums = half_sum = vi{}; }
  INLINE_MEMBER void add(vu w, vu x) {
    pair_sums = (vi)_mm256_add_epi16((__m256i)pair_sums, _mm256_maddubs_epi16((__m256i)w, (__m256i)x));
  }
  INLINE_MEMBER void halfway() {
    if (HALVES) half_sum = add_pair_sums(), pair_sums = vi{};
  }
  INLINE_MEMBER vi total(int32_t start) const {
    return (HALVES ? half_sum + add_pair_sums() : add_pair_sums()) + start;
  }
  INLINE_MEMBER vi add_pair_sums() const { return (vi)_mm256_madd_epi16((__m256i)pair_sums, _mm256_set1_epi16(1)); }
#else
  vi sum;
  INLINE_MEMBER void start(int32_t start) { sum = start - vi{}; }
  INLINE_MEMBER void add(vu w, vu x) { sum = add_bytes(sum, w, x); }
  INLINE_MEMBER void halfway() {}
  INLINE_MEMBER vi total(int32_t) const { return sum; }
#endif
};

// The sum of products of a group with 8-bit weights. The 32-bit sum cannot overflow.
template <> struct GroupSum<8> {
  vi sum;
  INLINE_MEMBER void start(int32_t start) { sum = start - vi{}; }
  INLINE_MEMBER void add(vu w, vu x) { sum = add_bytes(sum, w, x); }
  INLINE_MEMBER void halfway() {}
  INLINE_MEMBER vi total(int32_t) const { return sum; }
};

INLINE vu four_bytes(const int8_t* x) {
  uint32_t unit;
  __builtin_memcpy(&unit, x, 4);
  return unit - vu{};
}

INLINE vf widen_half(vh half) {
#if PENSTOCK_LANES == 16
  return _mm512_maskz_cvtph_ps(0xffff, (__m256i)half);
#else
  vu bits = __builtin_convertvector(half, vu), magnitude = (bits & 0x7fff) << 13;
  vu wide = as_bits(as_float(magnitude) * 0x1p112f);
  return as_float((magnitude < 0x7c00u << 13 ? wide : magnitude | 0x7f800000) | (bits & 0x8000) << 16);
#endif
}
INLINE vf load_half(const uint16_t* p) {
  vh half;
  __builtin_memcpy(&half, p, sizeof half);
  return widen_half(half);
}

// ---- products of rows with a block of a panel ----

// A block is a range of the inputs of a panel. It stays in the core's cache while all rows are multiplied with it.
struct ByteBlock {
  QuantizedRows x;     // the rows from the first input of the block on
  const char* w;       // the weights of the block
  int64_t units;       // number of units in the block; a unit is 4 inputs with int8 weights, else one or more groups
  const char* ahead;   // data to prefetch; null: none
  uint32_t* sums;      // [rows, PANEL]: sums of the previous blocks; integers with int8 weights, else floats
  bool is_first, is_last;  // whether this is the first or the last block of the panel
  const char* panel;   // the panel of the block
  const Linear* layer; // not null: the last block stores the results of this layer directly, instead of `sums`
  int64_t row, column; // of the first result

  // Skips the first rows. Tiles advance one ByteBlock object in place, because copying an object right after it was
  // written would wait for its stores.
  INLINE_MEMBER void advance(int64_t rows) {
    x = x.skip_rows(rows);
    sums += rows * PANEL;
    row += rows;
  }
};

// The number of cache lines that a pass prefetches for each part of a unit: a half, a fourth or a sixth of all lines.
// With more passes, each pass prefetches fewer lines.
constexpr int half_of(int64_t lines) { return (int)(lines + 1) / 2; }
constexpr int fourth_of(int64_t lines) { return (int)(lines + 3) / 4; }
constexpr int sixth_of(int64_t lines) { return (int)(lines + 5) / 6; }

// Types such as Bytes, Groups<4> and Blocks<Q4K> (S in templates) describe the units of the panels of an encoding, and
// multiply them. INPUTS is the number of inputs of a unit. PASSES is the number of parts of a unit, each of LINES cache
// lines. X_SCALES is the number of scales of x in a part; 0 if x has one scale per row. BLOCK_UNITS is the number of
// units of a block. FETCH_2_PASSES, FETCH_4_PASSES and FETCH_MORE are the numbers of lines that a pass prefetches per
// part with up to 2, up to 4 and more passes. Offsets are in bytes.

// int8 weights.
struct Bytes {
  static constexpr int64_t INPUTS = 4, UNIT_BYTES = 4 * PANEL, LINES = UNIT_BYTES / 64, ROWS_AT_ONCE = BYTE_ROWS;
  static constexpr int64_t BLOCK_UNITS = 256, X_SCALES = 0, PASSES = 1;
  static constexpr int FETCH_2_PASSES = half_of(LINES), FETCH_4_PASSES = fourth_of(LINES), FETCH_MORE = sixth_of(LINES);
  static constexpr int vectors(int64_t) { return BYTE_VECTORS; }  // vectors of a panel that are processed at once

  template <int ROWS, int FETCHED> INLINE void multiply(const ByteBlock& block) {
    constexpr int VECTORS = vectors(ROWS);
    constexpr int64_t ADVANCE = prefetch_advance<FETCHED>(LINES);
    for (int64_t column = 0; column < PANEL; column += VECTORS * W) {
      uint32_t* stored_sums = block.sums + column;
      vi sums[ROWS][VECTORS];
      for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < VECTORS; v++)
          sums[r][v] = block.is_first ? block.x.starts[r * block.x.groups] - vi{}
                                      : (vi)load(stored_sums + r * PANEL + v * W);
      const int8_t* x = block.x.integers;
      const int64_t x_stride = block.x.stride;
      const char *w = block.w + column * 4, *ahead = block.ahead + column / (VECTORS * W) * ADVANCE * block.units;
      for (int64_t i = 0; i < block.units; i++, x += 4, w += UNIT_BYTES, ahead += ADVANCE) {
        fetch<FETCHED>(ahead, LINES, 0, 1);
        vu weights[VECTORS];
        for (int v = 0; v < VECTORS; v++) weights[v] = load((const uint32_t*)w + v * W);
        for (int r = 0; r < ROWS; r++) {
          const vu bytes = four_bytes(x + r * x_stride);
          for (int v = 0; v < VECTORS; v++) sums[r][v] = add_bytes(sums[r][v], weights[v], bytes);
        }
      }
      if (block.is_last) add_extras(block, column, sums);
      if (block.is_last && block.layer) {
        WITH_TYPE(block.layer->type, T, store_results<T>(block, column, sums));
        continue;
      }
      for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < VECTORS; v++) store(stored_sums + r * PANEL + v * W, (vu)sums[r][v]);
    }
  }

  template <int ROWS, int VECTORS>
  INLINE void add_extras(const ByteBlock& block, int64_t column, vi (&sums)[ROWS][VECTORS]) {
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++) {
      const Extras& extras = block.x.extras[r];
      for (int64_t i = 0; i < extras.count; i++) {
        const uint32_t* w = (const uint32_t*)(block.panel + extras.units[i].unit * UNIT_BYTES) + column;
        const vu bytes = four_bytes(extras.units[i].bytes);
        for (int v = 0; v < VECTORS; v++) sums[r][v] = add_bytes(sums[r][v], load(w + v * W), bytes);
      }
    }
  }

  // Stores the results of VECTORS * W outputs of a complete panel from the sums in registers.
  template <class T, int ROWS, int VECTORS>
  INLINE void store_results(const ByteBlock& block, int64_t column, const vi (&sums)[ROWS][VECTORS]) {
    const Linear& a = *block.layer;
    const int64_t first = block.column + column, stride = a.y_stride, groups = block.x.groups;
    const float *scales_x = block.x.scales, *scales_w = a.scales + first;
    const T* biases = (const T*)a.bias;
    T* y = (T*)a.y + block.row * stride + first;
    for (int v = 0; v < VECTORS; v++, y += W) {
      const vf scale_w = load(scales_w + v * W), bias = biases ? load(biases + first + v * W) : vf{};
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; r++) {
        const vf result = Bytes::result((vu)sums[r][v], all(scales_x[r * groups]), scale_w);
        store(y + r * stride, biases ? result + bias : result);
      }
    }
    if (a.activation && column + VECTORS * W == PANEL) activate<T>(a, block.row, ROWS, block.column);
  }

  INLINE vf result(vu sums, vf scale_x, vf scale_w) {
    return __builtin_convertvector((vi)sums, vf) * (scale_x * scale_w);
  }
};

// int4 and int5 weights. A unit has the low four bits of a group's integers, the fifth bits (int5 only), and the
// scales, for all outputs of the panel.
template <int BITS> struct Groups {
  static constexpr int64_t FIFTH_BITS_OFFSET = PANEL * GROUP / 2, SCALES_OFFSET = PANEL * GROUP * BITS / 8;
  static constexpr int64_t INPUTS = GROUP, UNIT_BYTES = SCALES_OFFSET + PANEL * 2, LINES = UNIT_BYTES / 64;
  static constexpr int64_t ROWS_AT_ONCE = GROUP_ROWS, BLOCK_UNITS = 48, X_SCALES = 1, PASSES = 1;
  static constexpr int FETCH_2_PASSES = half_of(LINES), FETCH_4_PASSES = fourth_of(LINES), FETCH_MORE = sixth_of(LINES);
  // Returns the number of vectors processed at once: the whole panel (4) if 32 registers can hold the sums of these
  // rows and the unpacked weights.
  static constexpr int vectors(int64_t rows) { return W == 16 && rows <= (BITS > 4 ? 1 : 3) ? 4 : GROUP_VECTORS; }

  // Moves bit number `bit` of each byte to the position of the fifth bit, and clears all other bits.
  INLINE vu fifth_bits(vu bits, int bit) {
    return (bit < 4 ? bits << (4 - bit) : bits >> (bit - 4)) & 0x10101010;
  }

  template <int ROWS, int FETCHED> INLINE void multiply(const ByteBlock& block) {
    constexpr int VECTORS = vectors(ROWS);
    constexpr int64_t ADVANCE = prefetch_advance<FETCHED>(LINES);
    for (int64_t column = 0; column < PANEL; column += VECTORS * W) {
      float* stored_sums = (float*)block.sums + column;
      vf sums[ROWS][VECTORS];
      for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < VECTORS; v++) sums[r][v] = block.is_first ? vf{} : load(stored_sums + r * PANEL + v * W);
      const int8_t* x = block.x.integers;
      const int64_t x_stride = block.x.stride, groups = block.x.groups;
      const char *w = block.w + column * 4, *ahead = block.ahead + column / (VECTORS * W) * ADVANCE * block.units;
      for (int64_t g = 0; g < block.units; g++, x += GROUP, w += UNIT_BYTES, ahead += ADVANCE) {
        GroupSum<BITS> totals[ROWS][VECTORS];
        for (int r = 0; r < ROWS; r++)
          for (int v = 0; v < VECTORS; v++) totals[r][v].start(block.x.starts[r * groups + g]);
#pragma GCC unroll 4
        for (int step = 0; step < 4; step++) {
          fetch<FETCHED>(ahead, LINES, step, 4);
          vu low[VECTORS], high[VECTORS];
          for (int v = 0; v < VECTORS; v++) {
            vu code_pairs = load((const uint32_t*)(w + step * 4 * PANEL) + v * W);
            low[v] = code_pairs & 0x0f0f0f0f;
            high[v] = code_pairs >> 4 & 0x0f0f0f0f;
            if (BITS > 4) {
              const vu bits = load((const uint32_t*)(w + FIFTH_BITS_OFFSET) + v * W);
              low[v] |= fifth_bits(bits, 2 * step);
              high[v] |= fifth_bits(bits, 2 * step + 1);
            }
          }
          for (int r = 0; r < ROWS; r++) {
            const vu low_inputs = four_bytes(x + r * x_stride + 8 * step);
            const vu high_inputs = four_bytes(x + r * x_stride + 8 * step + 4);
            for (int v = 0; v < VECTORS; v++) {
              totals[r][v].add(low[v], low_inputs);
              totals[r][v].add(high[v], high_inputs);
              if (step == 1) totals[r][v].halfway();
            }
          }
        }
        const uint16_t* halves = (const uint16_t*)(w - column * 4 + SCALES_OFFSET) + column;
        vf scales[VECTORS];
        for (int v = 0; v < VECTORS; v++) scales[v] = load_half(halves + v * W);
        for (int r = 0; r < ROWS; r++)
          for (int v = 0; v < VECTORS; v++) {
            vi total = totals[r][v].total(block.x.starts[r * groups + g]);
            vf scaled = __builtin_convertvector(total, vf) * block.x.scales[r * groups + g];
            sums[r][v] = fma(scaled, scales[v], sums[r][v]);
          }
      }
      for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < VECTORS; v++) store(stored_sums + r * PANEL + v * W, sums[r][v]);
    }
  }

  INLINE vf result(vu sums, vf, vf) { return as_float(sums); }
};

#include "codes.inl"
#include "blocks.inl"

template <class S, int ROWS, int FETCHED> static void multiply_rows(const ByteBlock& block) {
  S::template multiply<ROWS, FETCHED>(block);
}

template <class S, int FETCHED> static void multiply_rows(const ByteBlock& block, int64_t rows) {
  switch (rows) {
    case 1: multiply_rows<S, 1, FETCHED>(block); break;
    case 2: multiply_rows<S, 2, FETCHED>(block); break;
#if PENSTOCK_LANES == 16
    case 3: multiply_rows<S, 3, FETCHED>(block); break;
    case 4: multiply_rows<S, 4, FETCHED>(block); break;
    case 5: multiply_rows<S, 5, FETCHED>(block); break;
    case 6: multiply_rows<S, 6, FETCHED>(block); break;
#endif
  }
}

// Multiplies all rows with a block in tiles with about equal numbers of rows. Each pass prefetches a few lines of the
// data at `ahead` per unit. Prefetching all lines at once would fill the miss buffers.
template <class S> static void multiply_all_rows(const ByteBlock& block, int64_t rows) {
  constexpr int ALL = S::LINES, HALF = S::FETCH_2_PASSES, FOURTH = S::FETCH_4_PASSES, SIXTH = S::FETCH_MORE;
  const int64_t tiles = ceil_div(rows, S::ROWS_AT_ONCE), passes = tiles * (PANEL / W / S::vectors(rows / tiles));
  const int64_t lines_per_pass = passes <= 2 ? HALF : passes <= 4 ? FOURTH : SIXTH;
  int64_t line = block.ahead ? 0 : ALL;
  ByteBlock tile_block = block;
  for (int64_t tile = 0, tile_rows; tile < tiles; tile++, tile_block.advance(tile_rows)) {
    tile_rows = rows * (tile + 1) / tiles - rows * tile / tiles;
    if (line >= ALL) {
      multiply_rows<S, 0>(tile_block, tile_rows);
      continue;
    }
    tile_block.ahead = block.ahead + line * 64 * block.units * S::PASSES;
    line += lines_per_pass * (PANEL / W / S::vectors(tile_rows));
    if (lines_per_pass == HALF) multiply_rows<S, HALF>(tile_block, tile_rows);
    else if (lines_per_pass == FOURTH) multiply_rows<S, FOURTH>(tile_block, tile_rows);
    else multiply_rows<S, SIXTH>(tile_block, tile_rows);
  }
}

// Computes the outputs of a panel for the rows first_row:first_row + rows. `x` has these rows, quantized. `next` is the
// panel that this thread probably gets next, or -1.
template <class S>
static void multiply_panel(const Linear& a, const QuantizedRows& x, int64_t first_row, int64_t rows, int64_t panel,
                           int64_t next, uint32_t* sums) {
  const int64_t units = ceil_div(a.K, S::INPUTS), column = panel * PANEL;
  const char* w = (const char*)a.panels + panel * units * S::UNIT_BYTES;
  // If a single pass reads the panel, nothing needs to stay in the cache.
  const bool is_single_pass = W == 16 && rows <= S::ROWS_AT_ONCE && S::vectors(rows) * W == PANEL;
  const int64_t blocks = is_single_pass ? 1 : ceil_div(units, S::BLOCK_UNITS);
  // With int8 weights, the results of a complete panel are stored from registers, unless all results of the layer
  // exceed the caches. It is then faster to store the results of many rows together.
  const int64_t result_bytes = a.rows * a.N * (a.type ? 2 : 4);
  const bool stores_directly = !S::X_SCALES && column + PANEL <= a.N && result_bytes < MAX_DIRECT_BYTES;
  for (int64_t block_index = 0; block_index < blocks; block_index++) {
    const int64_t first_unit = units * block_index / blocks, end_unit = units * (block_index + 1) / blocks;
    ByteBlock block = {x, w + first_unit * S::UNIT_BYTES, end_unit - first_unit, nullptr, sums, block_index == 0,
                       block_index == blocks - 1, w, stores_directly ? &a : nullptr, first_row, column};
    block.x.integers += first_unit * S::INPUTS;
    if (S::X_SCALES)
      block.x.scales += first_unit * S::PASSES * S::X_SCALES, block.x.starts += first_unit * S::PASSES * S::X_SCALES;
    if (is_single_pass) block.ahead = w + STREAM_AHEAD;
    else if (block_index < blocks - 1) block.ahead = w + end_unit * S::UNIT_BYTES;
    else if (next >= 0) block.ahead = (const char*)a.panels + next * units * S::UNIT_BYTES;
    if (is_single_pass) multiply_rows<S, STREAM>(block, rows);
    else multiply_all_rows<S>(block, rows);
  }
  if (stores_directly) return;
  for (int64_t r = 0; r < rows; r++) {
    const vf scale_x = all(x.scales[r * x.groups]);
    for_vectors(min(PANEL, a.N - column), EACH_VECTOR {
      vf scale_w = a.scales ? load(a.scales + column + i, lanes) : vf{};
      vf y = S::result(load(sums + r * PANEL + i), scale_x, scale_w);
      WITH_TYPE(a.type, T, {
        if (a.bias) y += load((const T*)a.bias + column + i, lanes);
        store((T*)a.y + (first_row + r) * a.y_stride + column + i, y, lanes);
      });
    });
  }
  if (a.activation) WITH_TYPE(a.type, T, activate<T>(a, first_row, rows, column));
}

template <class S> static void multiply_quantized(const Linear& a, const Team& team) {
  const int64_t groups = groups_of(a.encoding, a.K);
  const int64_t row_bytes = QuantizedRows::num_bytes(1, a.K, groups);
  const int64_t max_rows = min(a.rows, max<int64_t>(MAX_QUANTIZED_BYTES / row_bytes, 256));
  const int64_t chunk_rows = min<int64_t>(max_rows, 240);
  // Each thread quantizes all rows itself if this is faster than a barrier.
  const bool each_quantizes = team.size == 1 || a.rows <= 3;
  const int64_t quantized_bytes = round_up(QuantizedRows::num_bytes(max_rows, a.K, groups), 64);
  char* own_memory = (char*)penstock_scratch(PRIVATE, chunk_rows * PANEL * 4 + (each_quantizes ? quantized_bytes : 0));
  char* memory = own_memory + chunk_rows * PANEL * 4;
  if (!each_quantizes) memory = (char*)team.share(team.rank == 0 ? penstock_scratch(SHARED, quantized_bytes) : nullptr);
  const QuantizedRows x(memory, max_rows, a.K, groups);
  for (int64_t first_row = 0; first_row < a.rows; first_row += max_rows) {
    const int64_t rows = min(max_rows, a.rows - first_row), chunks = chunks_of(rows, a.N, chunk_rows, team);
    if (first_row) team.barrier();  // other threads may still read the previous rows
    auto quantize_rows = [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; row++)
        WITH_TYPE(a.type, T, {
          quantize_row((const T*)a.x + (first_row + row) * a.x_stride, a.K, a.encoding, x.skip_rows(row), a.order);
        });
    };
    if (each_quantizes) {
      quantize_rows(0, rows);
    } else {
      over_rows(team, rows, quantize_rows);
      team.barrier();
    }
    const Pieces pieces(a, team, rows, chunks, chunks);
    over_pieces(team, pieces.num_pieces(), [&](int64_t piece) {
      pieces.for_each_panel(team, piece, [&](int64_t panel, int64_t next, int64_t begin, int64_t end) {
        multiply_panel<S>(a, x.skip_rows(begin), first_row + begin, end - begin, panel, next, (uint32_t*)own_memory);
      });
    });
  }
}

// Calls run with an object of the type that describes the units of an encoding. Does nothing for floats and fp8.
template <class F> INLINE void with_units(int64_t encoding, F run) {
  if (encoding == 2) run(Bytes{});
  if (encoding == 3) run(Groups<4>{});
  if (encoding == 4) run(Groups<5>{});
  if (encoding == 5) run(CodeGroups<4>{});
  if (encoding == 6) run(CodeGroups<8>{});
  with_blocks(encoding, run);
}

static void run_quantized(const Linear& a, const Team& team) {
  with_units(a.encoding, [&](auto form) { multiply_quantized<decltype(form)>(a, team); });
}
