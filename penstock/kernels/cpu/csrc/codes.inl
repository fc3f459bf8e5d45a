// Integer codes of checkpoints: unsigned integers of 4 or 8 bits (kernels/encodings/_codes.py). The inputs of an output
// are divided into groups of GROUP inputs. A group has a zero point and a float16 scale, and each output has a float32
// scale. A weight is (code - zero) * scale of the group * scale of the output.
//
// Rows of x are quantized as for int4. The zero point is applied in float32: sum(code * x) - zero * sum(x). This is
// exact, because the integers are below 2^24. Each output is one chain of additions in the order of the groups.

template <int BITS> struct CodeGroups {
  static constexpr int64_t SCALES_OFFSET = PANEL * GROUP * BITS / 8, ZEROS_OFFSET = SCALES_OFFSET + PANEL * 2;
  static constexpr int64_t INPUTS = GROUP, UNIT_BYTES = ZEROS_OFFSET + PANEL, LINES = UNIT_BYTES / 64;
  static constexpr int64_t ROWS_AT_ONCE = GROUP_ROWS, BLOCK_UNITS = BITS == 4 ? 44 : 24, X_SCALES = 1, PASSES = 1;
  static constexpr int FETCH_2_PASSES = half_of(LINES), FETCH_4_PASSES = fourth_of(LINES), FETCH_MORE = sixth_of(LINES);
  static constexpr int vectors(int64_t rows) { return W == 16 && rows <= 2 ? 4 : GROUP_VECTORS; }

  template <int ROWS, int FETCHED> INLINE void multiply(const ByteBlock& block) {
    constexpr int VECTORS = vectors(ROWS), STEPS = BITS == 4 ? 4 : 8;
    constexpr int64_t ADVANCE = prefetch_advance<FETCHED>(LINES);
    for (int64_t column = 0; column < PANEL; column += VECTORS * W) {
      float* stored_sums = (float*)block.sums + column;
      vf sums[ROWS][VECTORS];
      for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < VECTORS; v++) sums[r][v] = block.is_first ? vf{} : load(stored_sums + r * PANEL + v * W);
      const int8_t* x = block.x.integers;
      const int64_t x_stride = block.x.stride, groups = block.x.groups;
      const char *w = block.w, *ahead = block.ahead + column / (VECTORS * W) * ADVANCE * block.units;
      for (int64_t g = 0; g < block.units; g++, x += GROUP, w += UNIT_BYTES, ahead += ADVANCE) {
        GroupSum<BITS> totals[ROWS][VECTORS];
        for (int r = 0; r < ROWS; r++)
          for (int v = 0; v < VECTORS; v++) totals[r][v].start(0);
#pragma GCC unroll 8
        for (int step = 0; step < STEPS; step++) {
          fetch<FETCHED>(ahead, LINES, step, STEPS);
          vu low[VECTORS], high[VECTORS];
          for (int v = 0; v < VECTORS; v++) {
            low[v] = load((const uint32_t*)(w + step * 4 * PANEL + column * 4) + v * W);
            if (BITS == 4) high[v] = low[v] >> 4 & 0x0f0f0f0f, low[v] &= 0x0f0f0f0f;
          }
          for (int r = 0; r < ROWS; r++) {
            const int8_t* inputs = x + r * x_stride + step * (GROUP / STEPS);
            const vu low_inputs = four_bytes(inputs), high_inputs = BITS == 4 ? four_bytes(inputs + 4) : vu{};
            for (int v = 0; v < VECTORS; v++) {
              totals[r][v].add(low[v], low_inputs);
              if (BITS == 4) totals[r][v].add(high[v], high_inputs);
            }
          }
        }
        vf scales[VECTORS], zeros[VECTORS];
        for (int v = 0; v < VECTORS; v++) {
          scales[v] = load_half((const uint16_t*)(w + SCALES_OFFSET) + column + v * W);
          zeros[v] = load((const uint8_t*)(w + ZEROS_OFFSET) + column + v * W);
        }
        for (int r = 0; r < ROWS; r++) {
          const vf negated_sum = all((float)block.x.starts[r * groups + g]);
          for (int v = 0; v < VECTORS; v++) {
            const vf total = __builtin_convertvector(totals[r][v].total(0), vf);
            const vf scaled = (total + zeros[v] * negated_sum) * block.x.scales[r * groups + g];
            sums[r][v] = fma(scaled, scales[v], sums[r][v]);
          }
        }
      }
      for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < VECTORS; v++) store(stored_sums + r * PANEL + v * W, sums[r][v]);
    }
  }

  INLINE vf result(vu sums, vf, vf scale_w) { return as_float(sums) * scale_w; }
};

// ---- packing ----

struct PackCodes {  // packs codes [N, K] in rows, with their scales, zero points or minima, into panels
  int64_t encoding;  // as in Linear: codes with zero points, 8-bit floats, or blocks
  const uint8_t* codes;
  int64_t row_stride;
  const void* scales;    // [N, groups]: float32 for 8-bit floats, the type of the block kind for blocks, else float16
  const uint8_t* zeros;  // [N, groups]: zero points, or the minima of blocks; null: none
  const uint16_t *factors, *min_factors;  // [N, ceil(K / 256)] float16 of blocks; null: none
  void* panels;
  int64_t N, K;
};

template <int BITS> static void pack_codes(const PackCodes& a, int64_t panel) {
  typedef CodeGroups<BITS> Form;
  const int64_t groups = ceil_div(a.K, GROUP), first_output = panel * PANEL;
  const int64_t num_outputs = min(PANEL, a.N - first_output);
  char* unit = (char*)a.panels + panel * groups * Form::UNIT_BYTES;
  __builtin_memset(unit, 0, groups * Form::UNIT_BYTES);
  for (int64_t g = 0; g < groups; g++, unit += Form::UNIT_BYTES) {
    const int64_t inputs = min(GROUP, a.K - g * GROUP);
    for (int64_t column = 0; column < num_outputs; column++) {
      const uint8_t* codes = a.codes + (first_output + column) * a.row_stride + g * GROUP;
      const int64_t group = (first_output + column) * groups + g;
      uint8_t* to = (uint8_t*)unit + column * 4;
      for (int64_t k = 0; k < inputs; k++) {
        if (BITS == 4) to[k / 8 * 4 * PANEL + k % 4] |= codes[k] << (k % 8 / 4 * 4);
        else to[k / 4 * 4 * PANEL + k % 4] = codes[k];
      }
      ((uint16_t*)(unit + Form::SCALES_OFFSET))[column] = ((const uint16_t*)a.scales)[group];
      ((uint8_t*)unit + Form::ZEROS_OFFSET)[column] = a.zeros[group];
    }
  }
}
