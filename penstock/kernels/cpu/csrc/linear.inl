// Linear layers: y [rows, N] = x [rows, K] w^T + bias, for any number of rows. An activation can follow. The weights
// are packed in panels of 64 outputs (kernels/panels.py).
//
// A panel is divided into blocks of consecutive inputs. A tile multiplies a few rows of x by a block, with the sums in
// registers. All tiles multiply a block while it is in the core's cache, and the first tiles prefetch the next block.
// Each output is one chain of additions in a fixed order of the inputs, for all tiles and blocks. The bits of a row
// therefore do not depend on other rows.

// x and y have strided rows. `bias` [N] has the type of x, or is null. `scales` [N] are the scales of whole outputs;
// null if the encoding has none. `order` [K] is the permutation of the inputs in the panels, for encodings that
// quantize rows of x in groups; null for the original order.
struct Linear {
  // Encodings: 0 float32, 1 bfloat16 (x has the same type), 2 int8, 3 int4, 4 int5 (quantized.inl), 5 uint4, 6 uint8
  // (codes.inl), 7 8-bit floats (fp8.inl, then x is bfloat16), 8 q4_k, 9 q5_k, 10 q6_k, 11 q4_1, 12 q5_1, 13 mxfp4,
  // 14 nvfp4, 15 nf4, 16 fp4, 17 q4_z (blocks.inl).
  int64_t encoding, type;
  const void* x;
  int64_t x_stride;
  const void* panels;
  const float* scales;
  const int32_t* order;
  const void* bias;
  void* y;
  int64_t y_stride, rows, N, K;
  int64_t activation;  // of the results: 0 for none, else 1 + the number of an activation (elementwise.inl)
};

constexpr int64_t PANEL = 64;                 // outputs per panel
constexpr int TILE_ROWS = W == 4 ? 4 : 6;     // maximum number of rows of x in a tile
constexpr int64_t STEP_BYTES = 4 * PANEL;     // bytes of a panel per step: one float or two bfloat16 per output
constexpr int64_t BLOCK_STEPS = 512;          // steps per block: the current and the prefetched block fit in the cache
constexpr int64_t STRIP_STEPS = W == 16 ? 256 : 64;  // number of steps for which x is widened at once
constexpr int64_t CACHED_BYTES = 8 << 20;     // bytes of x that stay in the last-level cache while all weights are read
constexpr int64_t MAX_CHUNK_ROWS = 252;       // rows of a chunk, whose sums stay in the last-level cache, too
constexpr int64_t MIN_CHUNK_ROWS = 24;        // smaller chunks read the weights too often
constexpr int64_t LINE = 64;                  // bytes
constexpr int64_t FEW_ROWS = 8;               // up to this many rows, a thread gets a long run of panels, see Pieces
constexpr int64_t MAX_FETCHED_BYTES = 256 << 10;  // maximum bytes of the next layer that a waiting thread prefetches

// The template argument FETCHED selects the cache lines that a pass over a panel prefetches at each step:
// - FETCHED >= 0: this number of consecutive lines of the data at `ahead`.
// - STREAM: two lines of the step that is STREAM_AHEAD bytes ahead of the pass. The hardware prefetchers, which stop at
//   the end of a page, load the lines in between. On fast memory this gives 10 % more bandwidth than no prefetching.
//   Prefetching every line of a step into the second-level cache, or the first lines of the next page, was slower than
//   no prefetching.
constexpr int STREAM = -1;
constexpr int64_t STREAM_AHEAD = 4096;  // bytes
// Prefetches every `parts`-th of the selected lines of a step, from line `part` on.
template <int FETCHED> INLINE void fetch(const char* ahead, int64_t lines, int64_t part, int64_t parts) {
  const int64_t num_lines = FETCHED == STREAM ? 2 : FETCHED, line_distance = FETCHED == STREAM ? lines / 2 : 1;
#pragma GCC unroll 8
  for (int64_t line = part; line < num_lines; line += parts)
    __builtin_prefetch(ahead + line * line_distance * LINE, 0, 2);
}
// Returns the number of bytes by which a step advances the prefetch address.
template <int FETCHED> constexpr int64_t prefetch_advance(int64_t lines) {
  return (FETCHED == STREAM ? lines : FETCHED) * LINE;
}

// Returns the number of vectors of a panel that a tile with `rows` rows processes at once. The registers must hold the
// sums and the factors. With 32 registers a tile processes the whole panel at once.
constexpr int vectors_per_pass(int rows) { return W == 16 ? 4 : rows == 1 ? 8 : rows <= 3 ? 4 : 2; }

// The next types (S in templates) compute the product of a step of a panel. `add` multiplies `terms` numbers of each
// row of x, of type X, by the weights of VECTORS * W outputs, and adds the products to `sums`.
struct FloatSteps {
  typedef float T, X;
  static constexpr int TERMS = 1;
  template <int terms, int ROWS, int VECTORS>
  INLINE void add(vf (&sums)[ROWS][VECTORS], const float* x, int64_t x_stride, const float* w) {
    vf weights[VECTORS];
    for (int v = 0; v < VECTORS; v++) weights[v] = load(w + v * W);
    for (int r = 0; r < ROWS; r++) {
      vf a = all(x[r * x_stride]);
      for (int v = 0; v < VECTORS; v++) sums[r][v] = fma(a, weights[v], sums[r][v]);
    }
  }
};

#if PENSTOCK_DOT
struct PairSteps {
  typedef bf16 T, X;
  static constexpr int TERMS = 2;
  template <int terms, int ROWS, int VECTORS>
  INLINE void add(vf (&sums)[ROWS][VECTORS], const bf16* x, int64_t x_stride, const bf16* w) {
    vu weights[VECTORS];
    for (int v = 0; v < VECTORS; v++) weights[v] = load((const uint32_t*)(w + 2 * v * W));
    for (int r = 0; r < ROWS; r++) {
      uint32_t pair = 0;  // if K is odd, the last pair has one number and its second half stays 0
      __builtin_memcpy(&pair, x + r * x_stride, 2 * terms);
      __m512bh a = (__m512bh)_mm512_set1_epi32((int)pair);
      for (int v = 0; v < VECTORS; v++) sums[r][v] = _mm512_dpbf16_ps(sums[r][v], a, (__m512bh)weights[v]);
    }
  }
};
#endif

// Pairs of bfloat16 that are widened to floats and multiplied by multiply-adds. If the instruction set has bfloat16 dot
// products, the order of the additions is that of the dot product instruction, see WidenedPairs.
struct WidenedPairSteps {
  typedef bf16 T;
  typedef float X;  // rows of x are widened once for all outputs of a panel
  static constexpr int TERMS = 2;
  template <int terms, int ROWS, int VECTORS>
  INLINE void add(vf (&sums)[ROWS][VECTORS], const float* x, int64_t x_stride, const bf16* w) {
    const vu high = 0xffff0000u - vu{};
#pragma GCC unroll 2
    for (int i = 0; i < terms; i++) {  // one term at a time, to save registers
      const int term = PENSTOCK_DOT ? terms - 1 - i : i;
      vf weights[VECTORS];
      for (int v = 0; v < VECTORS; v++) {
        vu pairs = load((const uint32_t*)(w + 2 * v * W));
        weights[v] = as_float(term ? pairs & high : pairs << 16);
      }
      for (int r = 0; r < ROWS; r++) {
        vf a = all(x[r * x_stride + term]);
        for (int v = 0; v < VECTORS; v++) sums[r][v] = fma(a, weights[v], sums[r][v]);
      }
    }
  }
};
#if !PENSTOCK_DOT
typedef WidenedPairSteps PairSteps;
#endif

// The rows of x of a tile in the type that S reads: x itself, or a copy of up to STRIP_STEPS steps, widened to X.
template <class S, class X, int ROWS> struct StripRows {
  X widened[ROWS * STRIP_STEPS * S::TERMS];
  static constexpr bool IN_PLACE = false;  // whether `read` returns x itself
  INLINE_MEMBER const X* read(const typename S::T* x, int64_t x_stride, int64_t terms) {
    for (int r = 0; r < ROWS; r++) {
      X* row = widened + r * stride(x_stride);
      for_vectors(terms, EACH_VECTOR { store(row + i, load(x + r * x_stride + i, lanes), lanes); });
    }
    return widened;
  }
  INLINE_MEMBER int64_t stride(int64_t) const { return STRIP_STEPS * S::TERMS; }
};
template <class S, int ROWS> struct StripRows<S, typename S::T, ROWS> {
  static constexpr bool IN_PLACE = true;
  INLINE_MEMBER const typename S::T* read(const typename S::T* x, int64_t, int64_t) const { return x; }
  INLINE_MEMBER int64_t stride(int64_t x_stride) const { return x_stride; }
};

// A block of a panel and the rows to multiply with it.
template <class S> struct Block {
  typedef typename S::T T;
  const T *x, *w;
  int64_t x_stride, terms;  // terms: number of inputs in the block
  const char* ahead;        // data to prefetch; null: none
  float* sums;              // [rows, PANEL]: sums of the previous blocks, and the result for the next block
  bool is_first, is_last;   // whether it is the first or last block of the panel
  const T* bias;
  T* y;
  int64_t y_stride, outputs;  // outputs: number of outputs of the layer from the panel's first one on

  // Skips the first rows. Tiles advance one Block object in place, because copying an object right after it was written
  // would wait for its stores.
  INLINE_MEMBER void advance(int64_t rows) {
    x += rows * x_stride;
    sums += rows * PANEL;
    y += rows * y_stride;
  }
};

// Applies the activation of the layer to the results of the rows first_row:first_row + rows, in the panel whose first
// output is `column`. The results are already rounded to T.
template <class T>
static __attribute__((noinline)) void activate(const Linear& a, int64_t first_row, int64_t rows, int64_t column) {
  T* y = (T*)a.y + first_row * a.y_stride + column;
  with_activation<T>(a.activation - 1, [&](auto function) __attribute__((always_inline)) {
    for (int64_t row = 0; row < rows; row++, y += a.y_stride)
      for_vectors(min(PANEL, a.N - column), EACH_VECTOR { store(y + i, function(load(y + i, lanes)), lanes); });
  });
}

// Adds the bias to the sums of a tile for VECTORS * W outputs from `column` on, and stores them to y.
template <class S, int ROWS, int VECTORS>
INLINE void finish_tile(const Block<S>& block, const vf (&sums)[ROWS][VECTORS], int64_t column) {
  for (int v = 0; v < VECTORS; v++) {
    const int64_t begin = column + v * W, count = block.outputs - begin;
    auto finish = [&](auto lanes) __attribute__((always_inline)) {
      vf bias = block.bias ? load(block.bias + begin, lanes) : vf{};
      for (int r = 0; r < ROWS; r++)
        store(block.y + r * block.y_stride + begin, block.bias ? sums[r][v] + bias : sums[r][v], lanes);
    };
    if (count >= W) finish(FullVector{});
    else if (count > 0) finish(PartialVector{count});
  }
}

// Multiplies ROWS rows with the block in passes for VECTORS * W outputs each. Each pass prefetches a different part of
// `ahead`.
template <class S, int ROWS, int FETCHED> static void multiply_tile(const Block<S>& block) {
  constexpr int VECTORS = vectors_per_pass(ROWS);
  constexpr int64_t LINES = STEP_BYTES / LINE;
  StripRows<S, typename S::X, ROWS> strip;
  const int64_t x_stride = strip.stride(block.x_stride);
  const int64_t strip_terms = strip.IN_PLACE ? block.terms : STRIP_STEPS * S::TERMS;
  for (int64_t first_term = 0; first_term == 0 || first_term < block.terms; first_term += strip_terms) {
    const int64_t terms = min(strip_terms, block.terms - first_term), steps = terms / S::TERMS;
    const bool is_first = block.is_first && first_term == 0;
    const bool is_last = block.is_last && first_term + terms == block.terms;
    const auto* rows = strip.read(block.x + first_term, block.x_stride, terms);
    for (int64_t column = 0; column < PANEL; column += VECTORS * W) {
      const auto* x = rows;
      const auto* w = block.w + first_term * PANEL + column * S::TERMS;
      const int64_t pass = column / (VECTORS * W) * (block.terms / S::TERMS);
      const int64_t advance = prefetch_advance<FETCHED>(LINES);
      const char* ahead = block.ahead + (pass + first_term / S::TERMS) * advance;
      float* stored = block.sums + column;
      vf sums[ROWS][VECTORS];
      for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < VECTORS; v++) sums[r][v] = is_first ? vf{} : load(stored + r * PANEL + v * W);
      for (int64_t i = 0; i < steps; i++, x += S::TERMS, w += PANEL * S::TERMS, ahead += advance) {
        fetch<FETCHED>(ahead, LINES, 0, 1);
        S::template add<S::TERMS>(sums, x, x_stride, w);
      }
      if (S::TERMS > 1 && terms % S::TERMS) S::template add<1>(sums, x, x_stride, w);
      if (is_last) {
        finish_tile(block, sums, column);
        continue;
      }
      for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < VECTORS; v++) store(stored + r * PANEL + v * W, sums[r][v]);
    }
  }
}

template <class S, int FETCHED> static void multiply_tile(const Block<S>& block, int64_t rows) {
  switch (rows) {
    case 1: multiply_tile<S, 1, FETCHED>(block); break;
    case 2: multiply_tile<S, 2, FETCHED>(block); break;
    case 3: multiply_tile<S, 3, FETCHED>(block); break;
    case 4: multiply_tile<S, 4, FETCHED>(block); break;
#if PENSTOCK_LANES > 4
    case 5: multiply_tile<S, 5, FETCHED>(block); break;
    case 6: multiply_tile<S, 6, FETCHED>(block); break;
#endif
  }
}

// Multiplies all rows with a block. The tiles have about equal numbers of rows, because two tiles of 4 rows are faster
// than tiles of 6 and 2 rows. The first tiles prefetch the data at `ahead`, one or two lines in each step.
template <class S> static void multiply_block(const Block<S>& block, int64_t rows) {
  constexpr int64_t LINES = STEP_BYTES / LINE;
  const int64_t tiles = ceil_div(rows, TILE_ROWS), steps = block.terms / S::TERMS;
  auto passes_per_tile = [](int64_t tile_rows) { return PANEL / W / vectors_per_pass(tile_rows); };
  const int64_t passes = tiles * passes_per_tile(rows / tiles);
  int64_t num_fetched_lines = block.ahead ? 0 : LINES;
  Block<S> tile_block = block;
  for (int64_t tile = 0, tile_rows; tile < tiles; tile++, tile_block.advance(tile_rows)) {
    tile_rows = rows * (tile + 1) / tiles - rows * tile / tiles;
    if (num_fetched_lines >= LINES) {
      multiply_tile<S, 0>(tile_block, tile_rows);
      continue;
    }
    tile_block.ahead = block.ahead + num_fetched_lines * LINE * steps;
    if (passes < LINES) {
      multiply_tile<S, 2>(tile_block, tile_rows);
      num_fetched_lines += 2 * passes_per_tile(tile_rows);
    } else {
      multiply_tile<S, 1>(tile_block, tile_rows);
      num_fetched_lines += passes_per_tile(tile_rows);
    }
  }
}

// Computes the outputs of a panel for the rows first_row:first_row + rows. `next` is the panel that this thread
// probably gets next, or null. `column` is the first output of the panel.
template <class S>
static void multiply_panel(const Linear& a, int64_t first_row, int64_t rows, const char* panel, const char* next,
                           int64_t column, float* sums) {
  typedef typename S::T T;
  const int64_t steps = ceil_div(a.K, S::TERMS);
  const bool is_single_pass = rows <= TILE_ROWS && vectors_per_pass(rows) * W == PANEL;
  const int64_t blocks = is_single_pass ? 1 : max<int64_t>(1, ceil_div(steps, BLOCK_STEPS));
  for (int64_t block_index = 0; block_index < blocks; block_index++) {
    const int64_t first_step = steps * block_index / blocks, end_step = steps * (block_index + 1) / blocks;
    Block<S> block;
    block.x = (const T*)a.x + first_row * a.x_stride + first_step * S::TERMS;
    block.w = (const T*)(panel + first_step * STEP_BYTES);
    block.x_stride = a.x_stride;
    block.terms = min(end_step * S::TERMS, a.K) - first_step * S::TERMS;
    block.is_first = block_index == 0;
    block.is_last = block_index == blocks - 1;
    block.ahead = is_single_pass ? panel + STREAM_AHEAD : block.is_last ? next : panel + end_step * STEP_BYTES;
    block.sums = sums;
    block.bias = a.bias ? (const T*)a.bias + column : nullptr;
    block.y = (T*)a.y + first_row * a.y_stride + column;
    block.y_stride = a.y_stride;
    block.outputs = a.N - column;
    if (is_single_pass) multiply_tile<S, STREAM>(block, rows);
    else multiply_block(block, rows);
  }
  if (a.activation) activate<T>(a, first_row, rows, column);
}

// The pieces of work of a layer. A piece is a run of consecutive panels with all rows, or one panel with one chunk of
// rows. After its first piece, a thread gets pieces dynamically, so a thread whose core is busy gets fewer.
// - At most FEW_ROWS rows: each thread first gets an equal run of consecutive panels, because long runs read memory
//   fastest. The remaining panels are assigned one by one.
// - More rows: panels are assigned one by one. With longer runs, threads would wait for the thread with the last run.
// - Several chunks of rows: all panels are multiplied with `chunks_at_once` chunks, which stay in the last-level
//   cache, before the next chunks.
struct Pieces {
  int64_t rows, num_panels, num_chunks, chunks_at_once;
  int64_t run_panels, num_runs;  // panels per run; number of runs (0: panels are assigned one by one)

  Pieces(const Linear& a, const Team& team, int64_t rows, int64_t num_chunks, int64_t chunks_at_once)
      : rows(rows), num_panels(ceil_div(a.N, PANEL)), num_chunks(num_chunks), chunks_at_once(chunks_at_once),
        run_panels(a.rows <= FEW_ROWS ? num_panels * 7 / 8 / team.size : 0), num_runs(run_panels > 1 ? team.size : 0) {}
  INLINE_MEMBER int64_t num_pieces() const { return num_runs + (num_panels - num_runs * run_panels) * num_chunks; }

  // Calls body(panel, next, begin, end) for each panel of a piece, with a range of rows. `next` is the panel that the
  // thread probably gets next, or -1.
  template <class Body> INLINE_MEMBER void for_each_panel(const Team& team, int64_t piece, Body body) const {
    const bool is_run = piece < num_runs;
    const int64_t round = is_run ? 0 : (piece - num_runs) / (num_panels * chunks_at_once);
    const int64_t first_chunk = round * chunks_at_once, round_piece = piece - num_runs - first_chunk * num_panels;
    const int64_t round_chunks = min(chunks_at_once, num_chunks - first_chunk);
    const int64_t first = first_panel(piece, round_piece / round_chunks), num_run_panels = is_run ? run_panels : 1;
    const int64_t chunk = is_run ? 0 : first_chunk + round_piece % round_chunks;
    for (int64_t panel = first; panel < first + num_run_panels; panel++) {
      int64_t next = panel + 1 < first + num_run_panels ? panel + 1 : panel + 1 + num_run_panels * (team.size - 1);
      body(panel, next < num_panels ? next : -1, rows * chunk / num_chunks, rows * (chunk + 1) / num_chunks);
    }
  }
  // Returns the first panel of a piece. `single` is the index of the panel among the panels that are not in runs.
  INLINE_MEMBER int64_t first_panel(int64_t piece, int64_t single) const {
    return piece < num_runs ? piece * run_panels : num_runs * run_panels + single;
  }
};

// Returns the number of chunks, of at most `max_rows` rows each, into which `rows` are divided. While a thread would
// get more than 17 / 16 of the mean number of pieces, for example 5 of 9 for two threads, chunks of at least
// 2 MIN_CHUNK_ROWS rows are halved.
INLINE int64_t chunks_of(int64_t rows, int64_t N, int64_t max_rows, const Team& team) {
  const int64_t panels = ceil_div(N, PANEL);
  int64_t chunks = max<int64_t>(1, ceil_div(rows, max_rows));
  for (; rows >= 2 * chunks * MIN_CHUNK_ROWS; chunks *= 2) {
    const int64_t pieces = panels * chunks, rounded_pieces = ceil_div(pieces, (int64_t)team.size) * team.size;
    if (16 * rounded_pieces <= 17 * pieces) break;
  }
  return chunks;
}

template <class S> static void multiply(const Linear& a, const Team& team) {
  const int64_t chunks = chunks_of(a.rows, a.N, MAX_CHUNK_ROWS, team);
  const int64_t panel_stride = ceil_div(a.K, S::TERMS) * STEP_BYTES;
  const int64_t chunk_bytes = ceil_div(a.rows, chunks) * a.K * (int64_t)sizeof(typename S::T);
  const int64_t chunks_at_once = min(max<int64_t>(CACHED_BYTES / max<int64_t>(chunk_bytes, 1), 1), chunks);
  const char* w = (const char*)a.panels;
  float* sums = (float*)penstock_scratch(PRIVATE, min(a.rows, MAX_CHUNK_ROWS) * PANEL * sizeof(float));
  const Pieces pieces(a, team, a.rows, chunks, chunks_at_once);
  over_pieces(team, pieces.num_pieces(), [&](int64_t piece) {
    pieces.for_each_panel(team, piece, [&](int64_t panel, int64_t next, int64_t begin, int64_t end) {
      multiply_panel<S>(a, begin, end - begin, w + panel * panel_stride, next < 0 ? nullptr : w + next * panel_stride,
                        panel * PANEL, sums);
    });
  });
}

static void multiply_pairs(const Linear& a, const Team& team) {
#if PENSTOCK_DOT
  if (a.rows > 2 && dot_is_slow()) {  // with one or two rows, the memory bandwidth limits the speed
    const FlushedDenormals mode;
    return multiply<WidenedPairSteps>(a, team);
  }
#endif
  multiply<PairSteps>(a, team);
}

// Returns the memory, at most MAX_FETCHED_BYTES, of the panels that `over_pieces` assigns to this thread first; an
// empty range if there are none. A panel has `panel_stride` bytes. The result is exact only for a single chunk of rows.
INLINE PrefetchRange first_panels(const Linear& a, const Team& team, int64_t panel_stride) {
  const Pieces pieces(a, team, a.rows, 1, 1);
  const int64_t panel = pieces.first_panel(team.rank, team.rank - pieces.num_runs);
  const int64_t num_first_panels = max<int64_t>(pieces.run_panels, 1);
  const char* begin = (const char*)a.panels + panel * panel_stride;
  return panel < pieces.num_panels
             ? PrefetchRange{begin, begin + min(panel_stride * num_first_panels, MAX_FETCHED_BYTES)}
             : PrefetchRange{};
}

#include "quantized.inl"
#include "fp8.inl"

static int64_t work(const Linear& a) { return a.rows * a.N * a.K; }
// Returns the number of bytes of a panel.
INLINE int64_t panel_bytes(int64_t encoding, int64_t K) {
  int64_t bytes = encoding == 0   ? K * STEP_BYTES
                  : encoding == 1 ? ceil_div(K, 2) * STEP_BYTES
                                  : fp8_panel_bytes(K);
  with_units(encoding, [&](auto form) { bytes = ceil_div(K, form.INPUTS) * form.UNIT_BYTES; });
  return bytes;
}
INLINE PrefetchRange first_read(const Linear& a, const Team& team) {
  return work(a) < MIN_PARALLEL_WORK_IN_PLAN ? PrefetchRange{} : first_panels(a, team, panel_bytes(a.encoding, a.K));
}
static void run(const Linear& a, const Team& team) {
  if (!a.rows) return;
  if (a.encoding == 0) multiply<FloatSteps>(a, team);
  if (a.encoding == 1) multiply_pairs(a, team);
  if (is_quantized(a.encoding)) run_quantized(a, team);
  if (a.encoding == 7) {
    multiply_fp8(a, team);
    if (!a.activation) return;
    team.barrier();
    over_rows(team, a.rows, [&](int64_t begin, int64_t end) {
      for (int64_t column = 0; column < a.N; column += PANEL) activate<bf16>(a, begin, end - begin, column);
    });
  }
}
KERNEL(linear, Linear)
