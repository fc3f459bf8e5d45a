// Weights as 8-bit floats (E4M3), with a float32 scale for each group of FP8_GROUP inputs of an output
// (kernels/encodings/fp8.py). Activations are bfloat16. The products of a group are added in float32. The sum is scaled
// and added to the output's total, in the order of the groups. The bits of a row therefore do not depend on other rows.
//
// A weight has the codes of all panels, then for each panel a table of scales and two strides (kernels/codes.py). The
// codes are contiguous: with tables between them, a core reads memory 6 % more slowly. A group has 32 steps of 4 inputs
// each. A step has 16 bytes for each set of four outputs: the first two inputs of these outputs, then the last two. In
// this order, `unpack` instructions, which work within 16 bytes, can convert the bytes to 16-bit numbers.

// Inputs of a group; bytes of a step; bytes of the codes of a group, for all outputs of a panel.
constexpr int64_t FP8_GROUP = 128, FP8_STEP_BYTES = 4 * PANEL, FP8_GROUP_BYTES = FP8_GROUP * PANEL;
constexpr int64_t FP8_BLOCK_GROUPS = 4;  // groups per block if two tiles read a block: it stays in the core's cache

// The scales of a panel. In most checkpoints, all groups of each output or all outputs of each group share a scale.
// The table then stores each scale once, and the kernel reads 3 % fewer bytes.
struct Fp8Scales {
  const float* table;
  int32_t group_stride, output_stride;  // of `table`; output_stride is 0 or 1

  static constexpr int64_t num_bytes(int64_t groups) { return groups * PANEL * (int64_t)sizeof(float) + LINE; }
  // Returns the table of a panel of a weight [N, K].
  INLINE_MEMBER static char* table_address(const void* panels, int64_t N, int64_t K, int64_t panel) {
    const int64_t groups = ceil_div(K, FP8_GROUP);
    return (char*)panels + ceil_div(N, PANEL) * groups * FP8_GROUP_BYTES + panel * num_bytes(groups);
  }
  // Prefetches the strides and the first scales of a table.
  INLINE_MEMBER static void prefetch(const char* table, int64_t groups) {
    for (int64_t line = 0; line < PANEL * (int64_t)sizeof(float); line += LINE) __builtin_prefetch(table + line, 0, 3);
    __builtin_prefetch(table + num_bytes(groups) - LINE, 0, 3);
  }
  Fp8Scales(const char* begin, int64_t groups) : table((const float*)begin) {
    const int32_t* strides = (const int32_t*)(table + groups * PANEL);
    group_stride = strides[0], output_stride = strides[1];
  }
  // Returns the scales of W outputs from `output` on.
  INLINE_MEMBER vf read(int64_t group, int64_t output) const {
    const float* scales = table + group * group_stride;
    return output_stride ? load(scales + output) : all(*scales);
  }
};

// Returns the bytes of the codes of a panel.
INLINE int64_t fp8_panel_bytes(int64_t K) { return ceil_div(K, FP8_GROUP) * FP8_GROUP_BYTES; }

#include "fp8_numbers.inl"

// The arguments of a product of a few rows with consecutive groups of a panel.
template <class P> struct Fp8Tile {
  const typename P::Input* x;    // [rows, groups * FP8_GROUP]; an incomplete last group is padded with zeros
  int64_t x_stride;
  const char* codes;             // the codes of the groups
  const typename P::Wide* wide;  // the widened codes of a single group [step, part, PANEL]
  int64_t steps;                 // number of steps of each group
  int64_t group, groups;         // index of the first group; number of groups
  const Fp8Scales& scales;
  float* sums;                   // [rows, PANEL]
};

// Multiplies a tile. WIDE: the weights are read from `wide` instead of `codes`.
template <class P, int ROWS, bool WIDE> static void multiply_fp8_tile(const Fp8Tile<P>& tile) {
  constexpr int VECTORS = vectors_per_pass(ROWS);
  typename P::Tables tables;
  if (ROWS <= 2) tables.pin();  // with more rows, the sums take the registers
  for (int64_t column = 0; column < PANEL; column += VECTORS * W) {
    const char* codes = tile.codes + column * 4;
    for (int64_t group = tile.group; group < tile.group + tile.groups; group++) {
      const typename P::Wide* wide = tile.wide + column;
      const typename P::Input* x = tile.x + (group - tile.group) * FP8_GROUP;
      vf totals[ROWS][VECTORS] = {};
      for (int64_t step = 0; step < tile.steps; step++, codes += FP8_STEP_BYTES, wide += P::PARTS * PANEL, x += 4) {
        // Prefetches every line into the first-level cache. This reads memory 8 to 15 % faster than prefetching two
        // lines per step, or than prefetching into the second-level cache.
        if (!WIDE && column == 0)
          for (int64_t line = 0; line < FP8_STEP_BYTES; line += LINE)
            __builtin_prefetch(codes + STREAM_AHEAD + line, 0, 0);
        vu words[VECTORS];
        for (int v = 0; v < VECTORS; v++) words[v] = WIDE ? vu{} : load((const uint32_t*)codes + v * W);
        auto add = [&](auto weights) __attribute__((always_inline)) {
          P::template add_step<ROWS, VECTORS>(totals, x, tile.x_stride, weights);
        };
        if (WIDE) {
          add([&](int part, int v) __attribute__((always_inline)) -> typename P::Wides {
            return load(wide + part * PANEL + v * W);
          });
          continue;
        }
        typename P::Codes numbers[VECTORS];
        for (int v = 0; v < VECTORS; v++) numbers[v] = P::prepare_codes(words[v], tables);
        // Subnormal numbers are rare, because weights are scaled to the largest 8-bit float. The code for numbers that
        // are not subnormal is faster.
#define FP8_WEIGHTS [&](int part, int v) __attribute__((always_inline)) -> typename P::Wides
        if (P::UNIFORM || __builtin_expect(has_zero_exponents(words), 0))
          add(FP8_WEIGHTS { return P::template widen<true>(numbers[v], part); });
        else add(FP8_WEIGHTS { return P::template widen<false>(numbers[v], part); });
      }
      for (int v = 0; v < VECTORS; v++) {
        const vf scales = tile.scales.read(group, column + v * W);
        for (int r = 0; r < ROWS; r++) {
          float* sums = tile.sums + r * PANEL + column + v * W;
          store(sums, fma(totals[r][v], scales, group ? load(sums) : vf{}));
        }
      }
    }
  }
}

template <class P, bool WIDE> static void multiply_fp8_tile(const Fp8Tile<P>& tile, int64_t rows) {
  switch (rows) {
    case 1: multiply_fp8_tile<P, 1, WIDE>(tile); break;
    case 2: multiply_fp8_tile<P, 2, WIDE>(tile); break;
    case 3: multiply_fp8_tile<P, 3, WIDE>(tile); break;
    case 4: multiply_fp8_tile<P, 4, WIDE>(tile); break;
#if PENSTOCK_LANES > 4
    case 5: multiply_fp8_tile<P, 5, WIDE>(tile); break;
    case 6: multiply_fp8_tile<P, 6, WIDE>(tile); break;
#endif
  }
}

// Sets the inputs of a tile. Complete groups are read in place. An incomplete group is copied and padded.
template <class P>
INLINE void set_fp8_inputs(Fp8Tile<P>& tile, const bf16* x, int64_t x_stride, int64_t rows, int64_t inputs,
                           bf16* copy) {
  tile.x = x, tile.x_stride = x_stride;
  if (inputs == FP8_GROUP) return;
  tile.x = copy, tile.x_stride = FP8_GROUP;
  for (int64_t r = 0; r < rows; r++, x += x_stride, copy += FP8_GROUP) {
    __builtin_memcpy(copy, x, inputs * 2);
    __builtin_memset(copy + inputs, 0, (FP8_GROUP - inputs) * 2);
  }
}
// Sets the inputs of a tile to a copy, widened to float32 and padded with zeros.
template <class P>
INLINE void set_fp8_inputs(Fp8Tile<P>& tile, const bf16* x, int64_t x_stride, int64_t rows, int64_t inputs,
                           float* copy) {
  tile.x = copy, tile.x_stride = FP8_GROUP;
  for (int64_t r = 0; r < rows; r++, x += x_stride, copy += FP8_GROUP) {
    __builtin_memset(copy + inputs / W * W, 0, (FP8_GROUP - inputs / W * W) * 4);
    for_vectors(inputs, EACH_VECTOR { store(copy + i, load(x + i, lanes), lanes); });
  }
}

// Computes the outputs of a panel for the rows first_row:first_row + rows. `next`: the panel that this thread probably
// gets next, or -1.
template <class P>
static void multiply_fp8_panel(const Linear& a, int64_t first_row, int64_t rows, int64_t panel, int64_t next,
                               float* sums) {
  const char* panel_codes = (const char*)a.panels + panel * fp8_panel_bytes(a.K);
  const int64_t column = panel * PANEL;
  const int64_t groups = ceil_div(a.K, FP8_GROUP), tiles = ceil_div(rows, TILE_ROWS);
  const bool is_wide = tiles > 2;  // if more than two tiles read the weights, widening them once is faster
  const int64_t block_groups = is_wide ? 1 : tiles > 1 ? FP8_BLOCK_GROUPS : groups;
  const Fp8Scales scales(Fp8Scales::table_address(a.panels, a.N, a.K, panel), groups);
  if (next >= 0) Fp8Scales::prefetch(Fp8Scales::table_address(a.panels, a.N, a.K, next), groups);
  alignas(64) typename P::Wide wide[FP8_GROUP / 4 * P::PARTS * PANEL];
  alignas(64) typename P::Input x[TILE_ROWS * FP8_GROUP];
  for (int64_t first_group = 0; first_group < groups; first_group += block_groups) {
    const int64_t end_group = min(first_group + block_groups, groups);
    if (is_wide) {
      const typename P::Tables tables;
      const char* codes = panel_codes + first_group * FP8_GROUP_BYTES;
      for (int64_t step = 0; step < FP8_GROUP / 4; step++) {
        __builtin_prefetch(codes + FP8_GROUP_BYTES + step * FP8_STEP_BYTES, 0, 2);
        for (int64_t i = 0; i < PANEL; i += W) {
          const vu words[] = {load((const uint32_t*)(codes + step * FP8_STEP_BYTES) + i)};
          const bool subnormal = P::UNIFORM || has_zero_exponents(words);
          const typename P::Codes numbers = P::prepare_codes(words[0], tables);
          for (int part = 0; part < P::PARTS; part++)
            store(wide + (step * P::PARTS + part) * PANEL + i,
                  subnormal ? P::template widen<true>(numbers, part) : P::template widen<false>(numbers, part));
        }
      }
    }
    for (int64_t tile_index = 0; tile_index < tiles; tile_index++) {
      const int64_t row = rows * tile_index / tiles, tile_rows = rows * (tile_index + 1) / tiles - row;
      for (int64_t group = first_group, run_groups; group < end_group; group += run_groups) {
        const int64_t inputs = min(FP8_GROUP, a.K - group * FP8_GROUP);
        run_groups = P::IN_PLACE && !is_wide && inputs == FP8_GROUP ? min(end_group, a.K / FP8_GROUP) - group : 1;
        Fp8Tile<P> tile = {x,     FP8_GROUP,  panel_codes + group * FP8_GROUP_BYTES, wide, ceil_div(inputs, 4),
                           group, run_groups, scales, sums + row * PANEL};
        const bf16* rows_of_group = (const bf16*)a.x + (first_row + row) * a.x_stride + group * FP8_GROUP;
        set_fp8_inputs(tile, rows_of_group, a.x_stride, tile_rows, inputs, x);
        if (is_wide) multiply_fp8_tile<P, true>(tile, tile_rows);
        else multiply_fp8_tile<P, false>(tile, tile_rows);
      }
    }
  }
  for (int64_t r = 0; r < rows; r++) {
    for_vectors(min(PANEL, a.N - column), EACH_VECTOR {
      vf y = load(sums + r * PANEL + i, lanes);
      if (a.bias) y += load((const bf16*)a.bias + column + i, lanes);
      store((bf16*)a.y + (first_row + r) * a.y_stride + column + i, y, lanes);
    });
  }
}

template <class P> static void multiply_fp8(const Linear& a, const Team& team) {
  const int64_t chunks = chunks_of(a.rows, a.N, MAX_CHUNK_ROWS, team);
  const int64_t chunk_bytes = ceil_div(a.rows, chunks) * a.K * (int64_t)sizeof(bf16);
  const int64_t chunks_at_once = min(max<int64_t>(CACHED_BYTES / max<int64_t>(chunk_bytes, 1), 1), chunks);
  float* sums = (float*)penstock_scratch(PRIVATE, min(a.rows, MAX_CHUNK_ROWS) * PANEL * sizeof(float));
  const Pieces pieces(a, team, a.rows, chunks, chunks_at_once);
  over_pieces(team, pieces.num_pieces(), [&](int64_t piece) {
    pieces.for_each_panel(team, piece, [&](int64_t panel, int64_t next, int64_t begin, int64_t end) {
      multiply_fp8_panel<P>(a, begin, end - begin, panel, next, sums);
    });
  });
}

static void multiply_fp8(const Linear& a, const Team& team) {
#if PENSTOCK_DOT
  const FlushedDenormals mode;  // set for any number of rows, so that the bits do not depend on this number
  // With one or two rows, the memory bandwidth limits the speed.
  if (a.rows > 2 && dot_is_slow()) return multiply_fp8<Fp8Floats>(a, team);
  if (uses_fp8_tables()) return multiply_fp8<Fp8TablePairs>(a, team);
#endif
  multiply_fp8<Fp8Steps>(a, team);
}

// ---- packing ----

static void pack_fp8(const PackCodes& a, int64_t panel) {
  const int64_t groups = ceil_div(a.K, FP8_GROUP), first_output = panel * PANEL;
  const int64_t num_outputs = min(PANEL, a.N - first_output);
  char* panel_codes = (char*)a.panels + panel * fp8_panel_bytes(a.K);
  uint32_t* table = (uint32_t*)Fp8Scales::table_address(a.panels, a.N, a.K, panel);  // the bits of the scales
  __builtin_memset(panel_codes, 0, fp8_panel_bytes(a.K));
  __builtin_memset((void*)table, 0, Fp8Scales::num_bytes(groups));
  bool groups_share_scale = true;   // whether all groups of each output have the same scale
  bool outputs_share_scale = true;  // whether all outputs of each group have the same scale
  for (int64_t g = 0; g < groups; g++) {
    const int64_t inputs = min(FP8_GROUP, a.K - g * FP8_GROUP);
    uint32_t* scales = table + g * PANEL;
    for (int64_t column = 0; column < num_outputs; column++) {
      const uint8_t* codes = a.codes + (first_output + column) * a.row_stride + g * FP8_GROUP;
      bool has_nan = false;
      for (int64_t k = 0; k < inputs; k++) {
        panel_codes[g * FP8_GROUP_BYTES + k / 4 * FP8_STEP_BYTES + fp8_position(k % 4, column)] = (char)codes[k];
        has_nan |= (codes[k] & 0x7f) == 0x7f;
      }
      const float scale = has_nan ? __builtin_nanf("") : ((const float*)a.scales)[(first_output + column) * groups + g];
      __builtin_memcpy(scales + column, &scale, 4);
      groups_share_scale &= scales[column] == table[column];
      outputs_share_scale &= scales[column] == scales[0];
    }
  }
  int32_t* strides = (int32_t*)(table + groups * PANEL);
  strides[0] = groups_share_scale ? 0 : outputs_share_scale ? 1 : PANEL;
  strides[1] = groups_share_scale || !outputs_share_scale;
  if (strides[0] == PANEL) return;
  if (!groups_share_scale)
    for (int64_t g = 0; g < groups; g++) table[g] = table[g * PANEL];
  const int64_t num_scales = groups_share_scale ? PANEL : groups;
  __builtin_memset(table + num_scales, 0, (groups * PANEL - num_scales) * 4);
}

static int64_t work(const PackCodes& a) { return a.N * a.K * ELEMENT_WORK; }
static void run(const PackCodes& a, const Team& team) {
  over_pieces(team, ceil_div(a.N, PANEL), [&](int64_t panel) {
    if (a.encoding == 5) pack_codes<4>(a, panel);
    if (a.encoding == 6) pack_codes<8>(a, panel);
    if (a.encoding == 7) pack_fp8(a, panel);
    with_blocks(a.encoding, [&](auto form) { pack_blocks(form, a, panel); });
  });
}
KERNEL(pack_codes, PackCodes)
