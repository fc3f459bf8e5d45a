// Quantized blocks of checkpoints: codes of 4, 5 or 6 bits with a scale per block of SIZE inputs (nf4 and fp4: per unit
// of 64 inputs), and in some encodings a minimum per group of GROUP inputs (kernels/encodings/_blocks.py). A weight is
// scale * (code - offset) - minimum. Some encodings also multiply by a float32 scale per output. In encodings with
// units of 256 inputs (GGUF's K types), scales and minima are small integers, multiplied by a float16 factor. These
// products are exact in float32. The code of a 4-bit float (E2M1) is an index into a table of the integers
// 12 + 2 * number.
//
// Rows of x are quantized as for int4, with a scale for each block of SIZE inputs. The minimum is applied in float32:
// scale * sum((code - offset) * x) - minimum * sum(x). An output is one chain of additions in the order of the blocks.
//
// The codes of nf4 and fp4 are indices into a table of 16-bit numbers. The table is stored as one table of the low
// bytes and one of the high bytes. With AVX-512, the low and the high bytes are multiplied with x separately, and the
// products are added. Otherwise the bytes are joined to 16-bit numbers first.
//
// A unit of a panel has GROUPS groups of GROUP inputs, then the factors, or the scales of nf4 and fp4. A group has the
// low four bits of the codes as in int4, then the higher bits (one word per output for 5 bits, two for 6 bits), the
// scales and the minima of all outputs.

struct ByteScale {  // an integer 0..255
  static constexpr int64_t BYTES = 1;
  INLINE vf read(const char* p) { return load((const uint8_t*)p); }
};
struct SignedScale {  // an integer -128..127
  static constexpr int64_t BYTES = 1;
  INLINE vf read(const char* p) { return load((const int8_t*)p); }
};
struct HalfScale {  // a float16
  static constexpr int64_t BYTES = 2;
  INLINE vf read(const char* p) { return load_half((const uint16_t*)p); }
};
struct PowerScale {  // E8M0: 2^(b - 127), and NaN for 255
  static constexpr int64_t BYTES = 1;
  INLINE vf read(const char* p) {
    const vi bits = widen_bytes((const uint8_t*)p) << 23, normal = bits > 0x7f000000 ? 0x7fc00000 - vi{} : bits;
    return as_float((vu)(normal < 0x00400000 ? 0x00400000 - vi{} : normal));
  }
};
// E4M3. The bits of the number, shifted to their position in a float32, represent the number times 2^-120. This also
// holds for subnormal numbers, so the multiplication by 2^120 is exact.
struct Fp8Scale {
  static constexpr int64_t BYTES = 1;
  INLINE vf read(const char* p) {
    const vi bits = widen_bytes((const uint8_t*)p), magnitude = bits & 0x7f;
    const vi number = magnitude == 0x7f ? 0x7fc00000 - vi{} : magnitude << 20;
    return as_float((vu)(number | (bits & 0x80) << 24)) * 0x1p120f;
  }
};

struct UnitScale {  // a float32 for all inputs of a unit, stored after the groups of the unit
  static constexpr int64_t BYTES = 0;
  INLINE vf read(const char*) { return vf{}; }
};

// The entries of the table of E2M1 codes: 12 + 2 * number.
constexpr uint8_t E2M1_CODES[] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
// Returns the entries of a table of 16 bytes for the bytes of `indices` (0 to 15).
INLINE vu look_up_bytes(const uint8_t* entries, vu indices) {
#if PENSTOCK_LANES == 16
  const __m512i table = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)entries));
  return (vu)_mm512_shuffle_epi8(table, (__m512i)indices);
#elif PENSTOCK_LANES == 8
  const __m256i table = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)entries));
  return (vu)_mm256_shuffle_epi8(table, (__m256i)indices);
#else
  typedef uint8_t Bytes __attribute__((vector_size(16)));
  Bytes table;
  __builtin_memcpy(&table, entries, 16);
#ifdef __clang__
  Bytes result, index_bytes = (Bytes)indices;
  for (int i = 0; i < 16; i++) result[i] = table[index_bytes[i]];
  return (vu)result;
#else
  return (vu)__builtin_shuffle(table, (Bytes)indices);
#endif
#endif
}

// A table of sixteen 16-bit numbers, split into bytes. The AVX-512 dot product needs unsigned bytes. For AVX-512, 2^15
// is therefore added to the numbers, and the sums start at -2^15 times the sum of x.
struct NumberTable {
  float value_of_one;  // the number that the integer 1 represents
  uint8_t low[16], high[16];
  constexpr NumberTable(int32_t integer_of_one, const int16_t (&numbers)[16])
      : value_of_one(1.0f / (float)integer_of_one), low{}, high{} {
    for (int i = 0; i < 16; i++) {
      low[i] = (uint8_t)(numbers[i] & 255);
      high[i] = (uint8_t)((numbers[i] >> 8 & 255) ^ (W == 16 ? 128 : 0));
    }
  }
};
constexpr NumberTable NUMBER_TABLES[] = {
    {32767,
     {-32767, -22812, -17205, -12940, -9320, -6054, -2983, 0, 2608, 5273, 8064, 11072, 14441, 18435, 23689, 32767}},
    {32640, {0, 170, 21760, 32640, 10880, 16320, 5440, 8160, 0, -170, -21760, -32640, -10880, -16320, -5440, -8160}},
};

// The table entries for the codes of four inputs per lane, in two vectors. With AVX-512 these are the low and the high
// bytes, else the 16-bit numbers of two inputs each.
struct Numbers {
  vu first, second;
};
INLINE Numbers look_up_numbers(const NumberTable& table, vu indices) {
  const vu low = look_up_bytes(table.low, indices), high = look_up_bytes(table.high, indices);
#if PENSTOCK_LANES == 16
  return {low, high};
#else  // first: inputs 0 and 2; second: inputs 1 and 3
  return {(low & 0x00ff00ff) | (high & 0x00ff00ff) << 8, (low >> 8 & 0x00ff00ff) | (high & 0xff00ff00)};
#endif
}

template <> struct GroupSum<16> {
#if PENSTOCK_LANES == 16
  vi low, high;
  INLINE_MEMBER void start(int32_t start) { low = start - vi{}, high = vi{}; }
  INLINE_MEMBER void add(Numbers w, vu x) { low = add_bytes(low, w.first, x), high = add_bytes(high, w.second, x); }
  INLINE_MEMBER vi total(int32_t) const { return low + (high << 8); }
#else
  vi sum;
  INLINE_MEMBER void start(int32_t) { sum = vi{}; }
#if PENSTOCK_LANES == 8 || defined(__SSE2__)
  INLINE_MEMBER void add(Numbers w, vu x) {
    sum += add_pairs(w.first, (vs)x << 8 >> 8) + add_pairs(w.second, (vs)x >> 8);
  }
#else
  INLINE_MEMBER void add(Numbers w, vu x) {
    sum += ((vi)(w.first << 16) >> 16) * ((vi)(x << 24) >> 24) + ((vi)w.first >> 16) * ((vi)(x << 8) >> 24);
    sum += ((vi)(w.second << 16) >> 16) * ((vi)(x << 16) >> 24) + ((vi)w.second >> 16) * ((vi)x >> 24);
  }
#endif
  INLINE_MEMBER vi total(int32_t) const { return sum; }
#endif
  INLINE_MEMBER void halfway() {}
};

struct BlockKind {
  int bits;
  int64_t scale_inputs, unit_groups;  // number of inputs per scale; number of groups of GROUP inputs per unit
  int64_t min_bytes;                  // bytes of a minimum: 0 for none, 1 for an integer, 2 for a float16
  bool is_e2m1;
  bool has_row_scales;   // whether each output has a float32 scale
  int table = -1;  // index into NUMBER_TABLES; -1: codes are not indices
  int offset = 0;  // subtracted from codes in kinds with minima
};

template <class Kind> struct Blocks {
  static constexpr BlockKind KIND = Kind::KIND;
  typedef typename Kind::Scale Scale;
  static constexpr bool HAS_UNIT_SCALES = KIND.scale_inputs > GROUP, HAS_TABLE = KIND.table >= 0;
  static constexpr int64_t SIZE = min(KIND.scale_inputs, GROUP), GROUPS = KIND.unit_groups, X_SCALES = GROUP / SIZE;
  static constexpr int64_t HIGH_BITS_OFFSET = PANEL * GROUP / 2, SCALES_OFFSET = PANEL * GROUP * KIND.bits / 8;
  static constexpr int64_t MINIMA_OFFSET = SCALES_OFFSET + PANEL * X_SCALES * Scale::BYTES;
  static constexpr int64_t GROUP_BYTES = MINIMA_OFFSET + PANEL * KIND.min_bytes;
  static constexpr int64_t FACTORS_OFFSET = GROUPS * GROUP_BYTES, MIN_FACTORS_OFFSET = FACTORS_OFFSET + PANEL * 2;
  static constexpr int64_t FACTOR_BYTES = KIND.min_bytes || HAS_UNIT_SCALES ? PANEL * 4 : PANEL * 2;
  static constexpr int64_t UNIT_BYTES = FACTORS_OFFSET + (GROUPS == 1 ? 0 : FACTOR_BYTES);
  static constexpr int64_t INPUTS = GROUPS * GROUP, LINES = GROUP_BYTES / 64, PASSES = GROUPS;
  static constexpr int64_t ROWS_AT_ONCE = HAS_TABLE && W == 16 ? 4 : GROUP_ROWS, BLOCK_UNITS = 40 / GROUPS;
  static constexpr int FETCH_2_PASSES = (LINES + 3) / 4, FETCH_4_PASSES = FETCH_2_PASSES, FETCH_MORE = FETCH_2_PASSES;
  static constexpr float VALUE_OF_ONE = HAS_TABLE      ? NUMBER_TABLES[max(KIND.table, 0)].value_of_one
                                        : KIND.is_e2m1 ? 0.5f
                                                       : 1;
  static constexpr int vectors(int64_t rows) { return W == 16 && rows <= (HAS_TABLE ? 1 : 2) ? 4 : GROUP_VECTORS; }

  // Returns the operand of the products for one half of a step of 8 inputs. `low` has the low four bits of the codes.
  INLINE auto make_operand(vu low, const char* w, int step, int half, int v) {
    if constexpr (HAS_TABLE) return look_up_numbers(NUMBER_TABLES[KIND.table], low);
    else return add_high_bits(low, w, step, half, v);
  }
  INLINE vu add_high_bits(vu low, const char* w, int step, int half, int v) {
    if (KIND.bits == 5)
      return low | Groups<5>::fifth_bits(load((const uint32_t*)(w + HIGH_BITS_OFFSET) + v * W), 2 * step + half);
    if (KIND.bits == 6) {
      const vu bits = load((const uint32_t*)(w + HIGH_BITS_OFFSET + step / 2 * 4 * PANEL) + v * W);
      const int position = 2 * (step % 2 * 2 + half);
      return low | ((position < 4 ? bits << (4 - position) : bits >> (position - 4)) & 0x30303030);
    }
    return KIND.is_e2m1 ? look_up_bytes(E2M1_CODES, low) : low;
  }

  template <int ROWS, int FETCHED> INLINE void multiply(const ByteBlock& block) {
    constexpr int VECTORS = vectors(ROWS), STEPS = SIZE / 8;
    constexpr int64_t ADVANCE = prefetch_advance<FETCHED>(LINES);
    for (int64_t column = 0; column < PANEL; column += VECTORS * W) {
      float* stored_sums = (float*)block.sums + column;
      vf sums[ROWS][VECTORS];
      for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < VECTORS; v++) sums[r][v] = block.is_first ? vf{} : load(stored_sums + r * PANEL + v * W);
      const int8_t* x = block.x.integers;
      const int64_t x_stride = block.x.stride, groups = block.x.groups;
      const float* x_scales = block.x.scales;
      const int32_t* starts = block.x.starts;
      const char *unit = block.w, *ahead = block.ahead + column / (VECTORS * W) * ADVANCE * block.units * PASSES;
      for (int64_t u = 0; u < block.units; u++, unit += UNIT_BYTES) {
        vf factors[VECTORS], min_factors[VECTORS];
        // Prefetches the factors of the next unit. STREAM would prefetch them too late: they are stored after the
        // groups, but the first group needs them.
        for (int64_t line = FACTORS_OFFSET; line < UNIT_BYTES; line += LINE)
          __builtin_prefetch(unit + UNIT_BYTES + line, 0, 2);
        if (GROUPS > 1)
          for (int v = 0; v < VECTORS; v++) {
            factors[v] = HAS_UNIT_SCALES ? load((const float*)(unit + FACTORS_OFFSET) + column + v * W)
                                         : load_half((const uint16_t*)(unit + FACTORS_OFFSET) + column + v * W);
            if (KIND.min_bytes)
              min_factors[v] = load_half((const uint16_t*)(unit + MIN_FACTORS_OFFSET) + column + v * W);
          }
        const char* w = unit;
        for (int64_t g = 0; g < GROUPS; g++, w += GROUP_BYTES, ahead += ADVANCE) {
#pragma GCC unroll 2
          for (int scale_index = 0; scale_index < X_SCALES; scale_index++, x += SIZE, x_scales++, starts++) {
            GroupSum<HAS_TABLE ? 16 : KIND.is_e2m1 ? 5 : KIND.bits> totals[ROWS][VECTORS];
            for (int r = 0; r < ROWS; r++)
              for (int v = 0; v < VECTORS; v++)
                totals[r][v].start(KIND.min_bytes ? KIND.offset * starts[r * groups] : starts[r * groups]);
#pragma GCC unroll 4
            for (int part = 0; part < STEPS; part++) {
              const int step = scale_index * STEPS + part;
              if (FETCHED == STREAM && GROUPS > 1 && KIND.bits > 4) {  // hardware prefetchers would not load all lines
#pragma GCC unroll 8
                for (int64_t line = step; line < LINES; line += 4) __builtin_prefetch(ahead + line * LINE, 0, 2);
              } else fetch<FETCHED>(ahead, LINES, step, 4);
              decltype(make_operand(vu{}, nullptr, 0, 0, 0)) low[VECTORS], high[VECTORS];
              for (int v = 0; v < VECTORS; v++) {
                const vu code_pairs = load((const uint32_t*)(w + column * 4 + step * 4 * PANEL) + v * W);
                low[v] = make_operand(code_pairs & 0x0f0f0f0f, w + column * 4, step, 0, v);
                high[v] = make_operand(code_pairs >> 4 & 0x0f0f0f0f, w + column * 4, step, 1, v);
              }
              for (int r = 0; r < ROWS; r++) {
                const int8_t* inputs = x + r * x_stride + 8 * part;
                const vu low_inputs = four_bytes(inputs), high_inputs = four_bytes(inputs + 4);
                for (int v = 0; v < VECTORS; v++) {
                  totals[r][v].add(low[v], low_inputs);
                  totals[r][v].add(high[v], high_inputs);
                  if (part == STEPS / 2 - 1) totals[r][v].halfway();
                }
              }
            }
            vf scales[VECTORS], minima[VECTORS];
            for (int v = 0; v < VECTORS; v++) {
              const int64_t output = column + v * W;
              scales[v] = Scale::read(w + SCALES_OFFSET + (scale_index * PANEL + output) * Scale::BYTES);
              if (KIND.min_bytes == 1) minima[v] = load((const uint8_t*)(w + MINIMA_OFFSET) + output);
              if (KIND.min_bytes == 2) minima[v] = load_half((const uint16_t*)(w + MINIMA_OFFSET) + output);
              if (HAS_UNIT_SCALES) scales[v] = factors[v];
              else if (GROUPS > 1) scales[v] *= factors[v];
              if (GROUPS > 1 && KIND.min_bytes) minima[v] *= min_factors[v];
            }
            for (int r = 0; r < ROWS; r++) {
              const int32_t start = starts[r * groups];
              const float scale_x = x_scales[r * groups] * VALUE_OF_ONE;
              const vf negated_sum = all((float)start * scale_x);
              for (int v = 0; v < VECTORS; v++) {
                const vi total = totals[r][v].total(KIND.min_bytes ? KIND.offset * start : start);
                sums[r][v] = fma(__builtin_convertvector(total, vf) * scale_x, scales[v], sums[r][v]);
                if (KIND.min_bytes) sums[r][v] = fma(negated_sum, minima[v], sums[r][v]);
              }
            }
          }
        }
      }
      for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < VECTORS; v++) store(stored_sums + r * PANEL + v * W, sums[r][v]);
    }
  }

  INLINE vf result(vu sums, vf, vf scale_w) { return KIND.has_row_scales ? as_float(sums) * scale_w : as_float(sums); }
};

#define BLOCK_KIND(name, SCALE, ...)                   \
  struct name {                                        \
    static constexpr BlockKind KIND = {__VA_ARGS__};   \
    typedef SCALE Scale;                               \
  }
BLOCK_KIND(Q4K, ByteScale, 4, 32, 8, 1, false, false);
BLOCK_KIND(Q5K, ByteScale, 5, 32, 8, 1, false, false);
BLOCK_KIND(Q6K, SignedScale, 6, 16, 8, 0, false, false);
BLOCK_KIND(Q41, HalfScale, 4, 32, 1, 2, false, false);
BLOCK_KIND(Q51, HalfScale, 5, 32, 1, 2, false, false);
BLOCK_KIND(MXFP4, PowerScale, 4, 32, 1, 0, true, false);
BLOCK_KIND(NVFP4, Fp8Scale, 4, 16, 1, 0, true, true);
BLOCK_KIND(NF4, UnitScale, 4, 64, 2, 0, false, false, 0);
BLOCK_KIND(FP4, UnitScale, 4, 64, 2, 0, false, false, 1);
BLOCK_KIND(Q4Z, HalfScale, 4, 32, 1, 2, false, true, -1, 8);

// Calls run with a Blocks object for the number of a block encoding. Does nothing for other numbers.
template <class F> INLINE void with_blocks(int64_t encoding, F run) {
  switch (encoding) {
    case 8: run(Blocks<Q4K>{}); break;
    case 9: run(Blocks<Q5K>{}); break;
    case 10: run(Blocks<Q6K>{}); break;
    case 11: run(Blocks<Q41>{}); break;
    case 12: run(Blocks<Q51>{}); break;
    case 13: run(Blocks<MXFP4>{}); break;
    case 14: run(Blocks<NVFP4>{}); break;
    case 15: run(Blocks<NF4>{}); break;
    case 16: run(Blocks<FP4>{}); break;
    case 17: run(Blocks<Q4Z>{}); break;
  }
}

// ---- packing ----

template <class Form> static void pack_blocks(Form, const PackCodes& a, int64_t panel) {
  constexpr int64_t SCALE_BYTES = Form::Scale::BYTES, MIN_BYTES = Form::KIND.min_bytes;
  const int64_t units = ceil_div(a.K, Form::INPUTS), first_output = panel * PANEL;
  const int64_t num_outputs = min(PANEL, a.N - first_output), scales_per_row = ceil_div(a.K, Form::SIZE);
  const int64_t minima_per_row = ceil_div(a.K, GROUP), factors_per_row = ceil_div(a.K, 256);
  char* unit = (char*)a.panels + panel * units * Form::UNIT_BYTES;
  __builtin_memset(unit, 0, units * Form::UNIT_BYTES);
  for (int64_t u = 0; u < units; u++, unit += Form::UNIT_BYTES) {
    for (int64_t column = 0; column < num_outputs; column++) {
      const int64_t row = first_output + column;
      for (int64_t g = 0; g < Form::GROUPS; g++) {
        const int64_t group = u * Form::GROUPS + g, inputs = min(GROUP, a.K - group * GROUP);
        if (inputs <= 0) break;
        const uint8_t* codes = a.codes + row * a.row_stride + group * GROUP;
        char* group_memory = unit + g * Form::GROUP_BYTES;
        uint8_t* to = (uint8_t*)group_memory + column * 4;
        for (int64_t k = 0; k < inputs; k++) {
          const int64_t step = k / 8, half = k % 8 / 4, byte = k % 4;
          to[step * 4 * PANEL + byte] |= (codes[k] & 15) << (4 * half);
          if (Form::KIND.bits == 5) to[Form::HIGH_BITS_OFFSET + byte] |= codes[k] >> 4 << (2 * step + half);
          if (Form::KIND.bits == 6)
            to[Form::HIGH_BITS_OFFSET + step / 2 * 4 * PANEL + byte] |= codes[k] >> 4 << (2 * (step % 2 * 2 + half));
        }
        const int64_t num_scales = SCALE_BYTES ? min(Form::X_SCALES, scales_per_row - group * Form::X_SCALES) : 0;
        for (int64_t scale_index = 0; scale_index < num_scales; scale_index++)
          __builtin_memcpy(
              group_memory + Form::SCALES_OFFSET + (scale_index * PANEL + column) * SCALE_BYTES,
              (const char*)a.scales + (row * scales_per_row + group * Form::X_SCALES + scale_index) * SCALE_BYTES,
              SCALE_BYTES);
        if (MIN_BYTES)
          __builtin_memcpy(group_memory + Form::MINIMA_OFFSET + column * MIN_BYTES,
                           (const char*)a.zeros + (row * minima_per_row + group) * MIN_BYTES, MIN_BYTES);
      }
      if (Form::HAS_UNIT_SCALES)
        ((float*)(unit + Form::FACTORS_OFFSET))[column] = ((const float*)a.scales)[row * units + u];
      else if (Form::GROUPS > 1)
        ((uint16_t*)(unit + Form::FACTORS_OFFSET))[column] = a.factors[row * factors_per_row + u];
      if (Form::GROUPS > 1 && MIN_BYTES)
        ((uint16_t*)(unit + Form::MIN_FACTORS_OFFSET))[column] = a.min_factors[row * factors_per_row + u];
    }
  }
}
