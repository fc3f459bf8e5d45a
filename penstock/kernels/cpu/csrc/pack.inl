// Packs weights from rows, the layout of checkpoints, into panels (kernels/panels.py). Quantizes floats if the encoding
// requires it. kernels/quantized.py defines the results bit by bit.

struct Pack {  // packs a weight [N, K] in rows into panels
  int64_t encoding;     // as in Linear
  int64_t source_type;  // 0 float32, 1 bfloat16, 2 float16, 3 quantized integers
  const void* source;
  int64_t source_stride;
  const uint16_t* source_scales;  // [N, ceil(K / GROUP)] float16: the scales of integers with groups; else null
  void* panels;
  float* scales;            // [N]: receives the scales if floats are packed as int8; else null
  const float* importance;  // [round_up(K, GROUP)]: importance of each input for int4 and int5; null: all equal
  int64_t N, K;
};

struct half {
  uint16_t bits;
};
INLINE vf load(const half* p) { return load_half((const uint16_t*)p); }
INLINE vf load(const half* p, int64_t n) {
  uint16_t lanes[W] = {};
  __builtin_memcpy(lanes, p, n * 2);
  return load_half(lanes);
}

// Rounds to float16, to nearest even. |x| must be at most 65504.
INLINE vu narrow_half(vf x) {
#if PENSTOCK_LANES == 16
  const vh halves = (vh)_mm512_maskz_cvtps_ph(0xffff, x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  return __builtin_convertvector(halves, vu);
#else
  vu bits = as_bits(x), magnitude = bits & 0x7fffffff;
  vu normal = ((magnitude + 0xfff + (magnitude >> 13 & 1)) >> 13) - (112 << 10);
  vu subnormal = as_bits(as_float(magnitude) + 0.5f) - 0x3f000000;  // resolution 2^-24, as float16 subnormals
  return (magnitude < 0x38800000 ? subnormal : normal) | (bits >> 16 & 0x8000);
#endif
}
INLINE vf widen_half(vu bits) { return widen_half(__builtin_convertvector(bits, vh)); }

// ---- units ----
// A unit has 4 bytes: a float, two bfloat16 or four bytes. read_units returns W units of a row. read_last_units returns
// the units of the last `inputs` inputs of a row, followed by padding.

template <class T> struct FloatUnits {
  static constexpr int64_t INPUTS = 1;
  template <class Lanes> INLINE vu read_units(const T* row, int64_t unit, Lanes lanes) {
    return as_bits(load(row + unit, lanes));
  }
  INLINE vu read_last_units(const T* row, int64_t unit, int64_t inputs) {
    return read_units(row, unit, PartialVector{inputs});
  }
};

template <class T> struct PairUnits {
  static constexpr int64_t INPUTS = 2;
  INLINE vu read_units(const T* row, int64_t unit, FullVector) {
    bf16 pairs[2 * W];
    store(pairs, load(row + 2 * unit));
    store(pairs + W, load(row + 2 * unit + W));
    return load((const uint32_t*)pairs);
  }
  INLINE vu read_last_units(const T* row, int64_t unit, int64_t inputs) {
    bf16 pairs[2 * W] = {};
    for (int64_t i = 0; i < inputs; i++) put(pairs + i, load(row + 2 * unit + i, 1)[0]);
    return load((const uint32_t*)pairs);
  }
};
template <> INLINE_MEMBER vu PairUnits<bf16>::read_units(const bf16* row, int64_t unit, FullVector) {
  return load((const uint32_t*)(row + 2 * unit));
}

struct ByteUnits {
  static constexpr int64_t INPUTS = 4;
  INLINE vu read_units(const int8_t* row, int64_t unit, FullVector) {
    return load((const uint32_t*)(row + 4 * unit)) ^ 0x80808080;
  }
  INLINE vu read_last_units(const int8_t* row, int64_t unit, int64_t inputs) {
    int8_t bytes[4 * W] = {};
    __builtin_memcpy(bytes, row + 4 * unit, inputs);
    return read_units(bytes, 0, FullVector{});
  }
};

// Transposes `num_outputs` rows to columns of a panel [units, PANEL].
template <class U, class T>
static void transpose_rows(const T* rows, int64_t row_stride, int64_t num_outputs, int64_t K, uint32_t* panel) {
  for (int64_t first_output = 0; first_output < PANEL; first_output += W) {
    const int64_t num_rows = min<int64_t>(max<int64_t>(num_outputs - first_output, 0), W);
    for (int64_t unit = 0; unit * U::INPUTS < K; unit += W) {
      const int64_t inputs = K - unit * U::INPUTS;
      vu square[W];
      for (int64_t i = 0; i < W; i++) {
        const T* row = rows + (first_output + i) * row_stride;
        if (i >= num_rows) square[i] = U::INPUTS == 4 ? 0x80808080 - vu{} : vu{};
        else if (inputs >= W * U::INPUTS) square[i] = U::read_units(row, unit, FullVector{});
        else square[i] = U::read_last_units(row, unit, inputs);
      }
      transpose(square);
      const int64_t units = min<int64_t>(ceil_div(inputs, U::INPUTS), W);
      for (int64_t i = 0; i < units; i++) store(panel + (unit + i) * PANEL + first_output, square[i]);
    }
  }
}

// ---- quantization to int4 and int5, for the groups of W outputs at a time ----

constexpr float LARGEST_HALF = 65504;
constexpr int NUM_DIVISORS = 7;           // number of candidates of the scale search, as in kernels/quantized.py
constexpr float MIN_WEIGHT = 1e-30f;  // a group whose largest magnitude is smaller becomes 0

INLINE vf vmin(vf a, vf b) {
#if PENSTOCK_LANES == 16
  return _mm512_min_ps(a, b);
#elif PENSTOCK_LANES == 8
  return _mm256_min_ps(a, b);
#else
  return a < b ? a : b;
#endif
}
INLINE vf clamped(vf x, float low, float high) { return vmin(vmax(x, all(low)), all(high)); }
INLINE vf invert_scale(vf scale) { return scale == 0.0f ? vf{} : 1.0f / scale; }
template <int BITS> INLINE vf nearest_integer(vf x) {
  return rounded(clamped(x, -(1 << (BITS - 1)), (1 << (BITS - 1)) - 1));
}

constexpr float EQUAL_IMPORTANCE[GROUP] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1,
                                1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};

// Quantizes w [GROUP, W], a group of W outputs, to `integers` [GROUP, W] of BITS bits with float16 `scales` [W].
// `importance` [GROUP] weights the squared errors.
template <int BITS>
static void search_scales(const float* w, const float* importance, int32_t* integers, uint16_t* scales) {
  vf largest_weight = {}, largest_magnitude = {};
  for (int k = 0; k < GROUP; k++) {
    vf weight = load(w + k * W), magnitude = as_float(as_bits(weight) & 0x7fffffff);
    largest_weight = magnitude > largest_magnitude ? weight : largest_weight;
    largest_magnitude = magnitude > largest_magnitude ? magnitude : largest_magnitude;
  }
  vf best_fit = all(-1), scale = all(__builtin_nanf(""));  // the scale stays NaN if no candidate is valid
  for (int i = 0; i < NUM_DIVISORS; i++) {
    const vf divisor = all(-(7 + i / 3.0) * (1 << (BITS - 4)));
    const vf inverse = largest_magnitude < MIN_WEIGHT ? vf{} : divisor / largest_weight;
    vf product_sum = {}, square_sum = {};
#pragma GCC unroll 32
    for (int k = 0; k < GROUP; k++) {
      const vf x = load(w + k * W) * inverse, nearest = nearest_integer<BITS>(x);
      product_sum += x * importance[k] * nearest;
      square_sum += nearest * nearest * importance[k];
    }
    const vf scaled_product = product_sum / divisor;
    const vf fit = square_sum == 0.0f ? vf{} : scaled_product * scaled_product / square_sum;
    const vf candidate = square_sum == 0.0f ? vf{} : product_sum / square_sum * (largest_weight / divisor);
    scale = fit > best_fit ? candidate : scale;
    best_fit = fit > best_fit ? fit : best_fit;
  }
  const vi is_valid = best_fit >= 0.0f;
  vu bits = is_valid ? narrow_half(clamped(scale, -LARGEST_HALF, LARGEST_HALF)) : 0x7e00 - vu{};
  bits = bits == 0x8000 ? vu{} : bits;  // replaces -0 by 0
  const vf inverse = invert_scale(widen_half(bits));
  for (int k = 0; k < GROUP; k++) {
    vi nearest = rounded_to_integers(nearest_integer<BITS>(load(w + k * W) * inverse));
    store((uint32_t*)integers + k * W, (vu)(is_valid ? nearest : vi{}));
  }
  vh halves = __builtin_convertvector(bits, vh);
  __builtin_memcpy(scales, &halves, sizeof halves);
}

// Writes integers [GROUP, W] to W columns of a unit of Groups<BITS> (quantized.inl).
template <int BITS> INLINE void store_group(const int32_t* integers, char* unit, int64_t column) {
  vu fifth_bits = {};
  for (int step = 0; step < 4; step++) {
    vu bytes = {};
    for (int half = 0; half < 2; half++)
      for (int j = 0; j < 4; j++) {
        const vu integer = load((const uint32_t*)integers + (8 * step + 4 * half + j) * W) + (1 << (BITS - 1));
        bytes |= (integer & 15) << (8 * j + 4 * half);
        fifth_bits |= integer >> 4 << (8 * j + 2 * step + half);
      }
    store((uint32_t*)unit + step * PANEL + column, bytes);
  }
  if (BITS > 4) store((uint32_t*)(unit + Groups<BITS>::FIFTH_BITS_OFFSET) + column, fifth_bits);
}

template <int BITS, class T>
static void pack_groups(Groups<BITS>, const T* rows, int64_t row_stride, const float* importance, int64_t num_outputs,
                        int64_t K, char* panel) {
  float w[GROUP * W];
  int32_t integers[GROUP * W];
  for (int64_t column = 0; column < PANEL; column += W) {
    const int64_t num_rows = min<int64_t>(max<int64_t>(num_outputs - column, 0), W);
    for (int64_t k = 0; k < K; k += GROUP) {
      for (int64_t part = 0; part < GROUP; part += W) {
        const int64_t num_inputs = K - k - part;
        vu square[W];
        for (int64_t i = 0; i < W; i++) {
          const T* row = rows + (column + i) * row_stride + k + part;
          square[i] = i >= num_rows || num_inputs <= 0
                          ? vu{}
                          : as_bits(num_inputs >= W ? load(row) : load(row, num_inputs));
        }
        transpose(square);
        for (int64_t i = 0; i < W; i++) store((uint32_t*)w + (part + i) * W, square[i]);
      }
      char* unit = panel + k / GROUP * Groups<BITS>::UNIT_BYTES;
      uint16_t* scales = (uint16_t*)(unit + Groups<BITS>::SCALES_OFFSET) + column;
      search_scales<BITS>(w, importance ? importance + k : EQUAL_IMPORTANCE, integers, scales);
      store_group<BITS>(integers, unit, column);
    }
  }
}

template <int BITS>
static void copy_groups(Groups<BITS>, const int8_t* rows, int64_t row_stride, const uint16_t* scales,
                        int64_t num_outputs, int64_t K, char* panel) {
  const int64_t groups = ceil_div(K, GROUP);
  int32_t integers[GROUP * W];
  for (int64_t group = 0; group < groups; group++) {
    char* unit = panel + group * Groups<BITS>::UNIT_BYTES;
    uint16_t* half_scales = (uint16_t*)(unit + Groups<BITS>::SCALES_OFFSET);
    for (int64_t first = 0; first < PANEL; first += W) {
      for (int64_t i = 0; i < W; i++) {
        const int64_t column = first + i;
        const bool is_inside = column < num_outputs;
        half_scales[column] = is_inside ? scales[column * groups + group] : 0;
        for (int64_t k = 0; k < GROUP; k++)
          integers[k * W + i] = is_inside && group * GROUP + k < K ? rows[column * row_stride + group * GROUP + k] : 0;
      }
      store_group<BITS>(integers, unit, first);
    }
  }
}

// ---- the kernel ----

// Calls run with a Groups<BITS> object for the encodings int4 and int5.
template <class F> INLINE void with_groups(int64_t encoding, F run) {
  if (encoding == 3) run(Groups<4>{});
  if (encoding == 4) run(Groups<5>{});
}

template <class T> static void pack_panel(const Pack& a, int64_t panel) {
  const int64_t first_output = panel * PANEL, num_outputs = min(PANEL, a.N - first_output);
  const T* rows = (const T*)a.source + first_output * a.source_stride;
  char* panels = (char*)a.panels;
  if (a.encoding == 0) {
    transpose_rows<FloatUnits<T>>(rows, a.source_stride, num_outputs, a.K, (uint32_t*)panels + panel * a.K * PANEL);
  } else if (a.encoding == 1) {
    transpose_rows<PairUnits<T>>(rows, a.source_stride, num_outputs, a.K,
                                 (uint32_t*)panels + panel * ceil_div(a.K, 2) * PANEL);
  } else if (a.encoding == 2) {
    int8_t* integers = (int8_t*)penstock_scratch(PRIVATE, PANEL * a.K);
    for (int64_t i = 0; i < num_outputs; i++)
      quantize(rows + i * a.source_stride, a.K, integers + i * a.K, a.scales + first_output + i);
    transpose_rows<ByteUnits>(integers, a.K, num_outputs, a.K, (uint32_t*)panels + panel * ceil_div(a.K, 4) * PANEL);
  } else {
    with_groups(a.encoding, [&](auto form) {
      char* groups_memory = panels + panel * ceil_div(a.K, GROUP) * form.UNIT_BYTES;
      pack_groups(form, rows, a.source_stride, a.importance, num_outputs, a.K, groups_memory);
    });
  }
}

template <> void pack_panel<int8_t>(const Pack& a, int64_t panel) {
  const int64_t first_output = panel * PANEL, num_outputs = min(PANEL, a.N - first_output);
  const int8_t* rows = (const int8_t*)a.source + first_output * a.source_stride;
  if (a.encoding == 2) {
    transpose_rows<ByteUnits>(rows, a.source_stride, num_outputs, a.K,
                              (uint32_t*)a.panels + panel * ceil_div(a.K, 4) * PANEL);
  } else {
    const int64_t groups = ceil_div(a.K, GROUP);
    with_groups(a.encoding, [&](auto form) {
      char* groups_memory = (char*)a.panels + panel * groups * form.UNIT_BYTES;
      copy_groups(form, rows, a.source_stride, a.source_scales + first_output * groups, num_outputs, a.K,
                  groups_memory);
    });
  }
}

static int64_t work(const Pack& a) { return a.N * a.K * (a.encoding >= 3 ? 100 : ELEMENT_WORK); }

static void run(const Pack& a, const Team& team) {
  over_pieces(team, ceil_div(a.N, PANEL), [&](int64_t panel) {
    if (a.source_type == 0) pack_panel<float>(a, panel);
    if (a.source_type == 1) pack_panel<bf16>(a, panel);
    if (a.source_type == 2) pack_panel<half>(a, panel);
    if (a.source_type == 3) pack_panel<int8_t>(a, panel);
  });
}
KERNEL(pack, Pack)
