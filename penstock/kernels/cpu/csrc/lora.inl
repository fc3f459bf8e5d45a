// Adds (x A^T) B of each row's adapter to y. Rows without an adapter do not change. One call computes all slices of a
// fused layer that have adapters. Each slice has its own A [adapters, R, n] and B [adapters, R, N], for n inputs and
// the N outputs of the slice.
//
// Rows are sorted by adapter and divided into tiles of a few rows. A tile reads the matrices of its adapter once. The
// products are summed in float32, first over n, then over R, in a fixed order. The result is added to y once. The
// bits of a row therefore do not depend on other rows.

constexpr int ADAPTED_ROWS = W == 16 ? 6 : 4;  // maximum number of rows per tile
constexpr int RANKS = W == 16 ? 4 : 2;         // rows of A that a tile multiplies at once; limited by the registers
constexpr int FETCHING_ROWS = 4;               // tiles of up to this many rows prefetch, because they are memory-bound
constexpr int64_t TILES_PER_THREAD = 4;        // from this many tiles per thread on, one thread computes a whole tile
constexpr int64_t MIN_OUTPUTS = 64;            // minimum outputs of a thread, so that threads do not share cache lines

// A slice of the outputs that has adapters.
struct LoraSlice {
  const void *a, *b;
  const int64_t* ranks;  // [adapters]: the rank of each adapter, at most R; null: all adapters have rank R
  int64_t R, first_output, N;

  INLINE_MEMBER int64_t adapter_rank(int64_t adapter) const { return ranks ? ranks[adapter] : R; }
};

struct Lora {
  int64_t type;  // element type of x, y, A and B
  const void* x;
  int64_t x_stride;
  void* y;
  int64_t y_stride;
  const int64_t* row_adapters;  // [num_rows]: index of each row's adapter; -1: none
  const LoraSlice* slices;
  int64_t num_rows, num_slices, num_adapters, n;
};

// The rows of an adapter: entries begin:end of AdaptedRows::order.
struct Segment {
  int64_t adapter, begin, end;
  INLINE_MEMBER int64_t tiles() const { return ceil_div(end - begin, ADAPTED_ROWS); }
  // Returns the rows of a tile. Tiles have about equal numbers of rows.
  INLINE_MEMBER Segment tile(int64_t tile_index) const {
    const int64_t num_rows = end - begin, count = tiles();
    return {adapter, begin + num_rows * tile_index / count, begin + num_rows * (tile_index + 1) / count};
  }
};

// The rows with an adapter, sorted by adapter. Each thread computes the same order.
struct AdaptedRows {
  int64_t* order;
  Segment* segments;
  int64_t num_segments, num_tiles;

  static int64_t bytes(const Lora& a) { return a.num_rows * 8 + a.num_adapters * (int64_t)sizeof(Segment); }
  AdaptedRows(const Lora& a, char* memory) : order((int64_t*)memory), segments((Segment*)(order + a.num_rows)) {
    for (int64_t s = 0; s < a.num_adapters; s++) segments[s] = {s, 0, 0};
    for (int64_t t = 0; t < a.num_rows; t++)
      if (a.row_adapters[t] >= 0) segments[a.row_adapters[t]].end++;
    int64_t begin = 0;
    for (int64_t s = 0; s < a.num_adapters; s++) {
      const int64_t num_rows = segments[s].end;
      segments[s].begin = segments[s].end = begin;
      begin += num_rows;
    }
    for (int64_t t = 0; t < a.num_rows; t++)
      if (a.row_adapters[t] >= 0) order[segments[a.row_adapters[t]].end++] = t;
    num_segments = num_tiles = 0;
    for (int64_t s = 0; s < a.num_adapters; s++) {
      if (segments[s].begin == segments[s].end) continue;
      segments[num_segments] = segments[s];
      num_tiles += segments[num_segments++].tiles();
    }
  }
};

// Computes h [ROWS, RANKS] = x [ROWS, n] A^T for RANKS rows of A. The sums of the lanes are added at the end.
template <class T, int RANKS, int ROWS>
INLINE void dot_rows(const T* const* x, const T* down, float* h, int64_t h_stride, int64_t n) {
  vf sums[ROWS][RANKS] = {};
  for_vectors(n, EACH_VECTOR {
    vf weights[RANKS];
    for (int r = 0; r < RANKS; r++) {
      weights[r] = load(down + r * n + i, lanes);
      if (ROWS <= FETCHING_ROWS && i % (LINE / (int64_t)sizeof(T)) == 0) __builtin_prefetch(down + (RANKS + r) * n + i);
    }
    for (int t = 0; t < ROWS; t++) {
      vf inputs = load(x[t] + i, lanes);
      for (int r = 0; r < RANKS; r++) sums[t][r] = fma(inputs, weights[r], sums[t][r]);
    }
  });
  for (int t = 0; t < ROWS; t++) store(h + t * h_stride, sum_each(sums[t]), PartialVector{RANKS});
}

// Adds h [ROWS, rank] B [rank, N] to y [ROWS, N], for VECTORS vectors of outputs from i on.
template <class T, int ROWS, int VECTORS, class Lanes>
INLINE void add_outputs(const float* h, int64_t h_stride, const T* b, int64_t rank, int64_t N, T* const* y, int64_t i,
                        Lanes lanes) {
  vf sums[ROWS][VECTORS] = {};
  for (int64_t r = 0; r < rank; r++) {
    for (int v = 0; v < VECTORS; v++) {
      const T* b_part = b + r * N + i + v * W;
      vf weights = load(b_part, lanes);
      if (ROWS <= FETCHING_ROWS && v * W * (int64_t)sizeof(T) % LINE == 0) __builtin_prefetch(b_part + VECTORS * W);
      for (int t = 0; t < ROWS; t++) sums[t][v] = fma(all(h[t * h_stride + r]), weights, sums[t][v]);
    }
  }
  for (int t = 0; t < ROWS; t++)
    for (int v = 0; v < VECTORS; v++) {
      T* to = y[t] + i + v * W;
      store(to, load(to, lanes) + sums[t][v], lanes);
    }
}

// Computes one tile, ROWS rows of one adapter, for a slice. h [ROWS, h_stride] has the intermediate values x A^T.
template <class T, int ROWS> struct Tile {
  const T* x[ROWS];
  T* y[ROWS];
  const T *down, *up;
  float* h;
  int64_t h_stride, rank, n, N;

  INLINE_MEMBER Tile(const Lora& a, const LoraSlice& slice, const int64_t* order, const Segment& tile, float* h,
                     int64_t h_stride)
      : down((const T*)slice.a + tile.adapter * slice.R * a.n),
        up((const T*)slice.b + tile.adapter * slice.R * slice.N),
        h(h), h_stride(h_stride), rank(slice.adapter_rank(tile.adapter)), n(a.n), N(slice.N) {
    for (int t = 0; t < ROWS; t++) {
      const int64_t row = order[tile.begin + t];
      x[t] = (const T*)a.x + row * a.x_stride;
      y[t] = (T*)a.y + row * a.y_stride + slice.first_output;
    }
  }
  INLINE_MEMBER void multiply_down(int64_t r, int64_t end) const {
    for (; r + RANKS <= end; r += RANKS) dot_rows<T, RANKS, ROWS>(x, down + r * n, h + r, h_stride, n);
    for (; r < end; r++) dot_rows<T, 1, ROWS>(x, down + r * n, h + r, h_stride, n);
  }
  INLINE_MEMBER void multiply_up(int64_t i, int64_t end) const {
    constexpr int VECTORS = ROWS == 1 ? 8 : ROWS == 2 ? 4 : ROWS <= 4 ? 2 : 1;
    for (; i + VECTORS * W <= end; i += VECTORS * W)
      add_outputs<T, ROWS, VECTORS>(h, h_stride, up, rank, N, y, i, FullVector{});
    for (; i + W <= end; i += W) add_outputs<T, ROWS, 1>(h, h_stride, up, rank, N, y, i, FullVector{});
    if (i < end) add_outputs<T, ROWS, 1>(h, h_stride, up, rank, N, y, i, PartialVector{end - i});
  }
};

// The rows of A and the columns of B that a thread multiplies.
struct ThreadRange {
  int64_t first_rank, last_rank, first_output, last_output;
};

template <class T, int ROWS>
static void multiply_lora(const Lora& a, const LoraSlice& slice, const int64_t* order, const Segment& rows, float* h,
                          int64_t h_stride, const ThreadRange& range) {
  const Tile<T, ROWS> tile(a, slice, order, rows, h, h_stride);
  tile.multiply_down(range.first_rank, min(range.last_rank, tile.rank));
  if (tile.rank) tile.multiply_up(range.first_output, range.last_output);
}

template <class T>
static void multiply_lora(const Lora& a, const LoraSlice& slice, const int64_t* order, const Segment& rows, float* h,
                          int64_t h_stride, const ThreadRange& range) {
  switch (rows.end - rows.begin) {
    case 1: multiply_lora<T, 1>(a, slice, order, rows, h, h_stride, range); break;
    case 2: multiply_lora<T, 2>(a, slice, order, rows, h, h_stride, range); break;
    case 3: multiply_lora<T, 3>(a, slice, order, rows, h, h_stride, range); break;
    case 4: multiply_lora<T, 4>(a, slice, order, rows, h, h_stride, range); break;
#if PENSTOCK_LANES == 16
    case 5: multiply_lora<T, 5>(a, slice, order, rows, h, h_stride, range); break;
    case 6: multiply_lora<T, 6>(a, slice, order, rows, h, h_stride, range); break;
#endif
  }
}

// Computes the layer with one thread per tile. Used for many rows, and for a single thread.
template <class T> static void multiply_tiles(const Lora& a, const Team& team, const AdaptedRows& adapted, float* h) {
  over_pieces(team, adapted.num_tiles, [&](int64_t tile_index) {
    const Segment* segment = adapted.segments;
    for (; tile_index >= segment->tiles(); segment++) tile_index -= segment->tiles();
    const Segment rows = segment->tile(tile_index);
    for (int64_t p = 0; p < a.num_slices; p++) {
      const LoraSlice& slice = a.slices[p];
      multiply_lora<T>(a, slice, adapted.order, rows, h, slice.R, {0, slice.R, 0, slice.N});
    }
  });
}

// Computes the layer with all threads on each adapter: each thread first multiplies some rows of A, then some columns
// of B. Used for few rows.
template <class T> static void multiply_split(const Lora& a, const Team& team, const AdaptedRows& adapted) {
  int64_t total_rank = 0;
  for (int64_t p = 0; p < a.num_slices; p++) total_rank += a.slices[p].R;
  const int64_t num_rows = adapted.segments[adapted.num_segments - 1].end;
  float* h = team.share(
      team.rank ? nullptr : (float*)penstock_scratch(SHARED, num_rows * total_rank * (int64_t)sizeof(float)));
  // Multiplies by A, or by B if is_up.
  auto multiply_matrices = [&](bool is_up) __attribute__((always_inline)) {
    over_pieces(team, adapted.num_segments * a.num_slices * team.size, [&](int64_t piece) {
      const int64_t thread = piece % team.size, p = piece / team.size % a.num_slices;
      const Segment& segment = adapted.segments[piece / team.size / a.num_slices];
      const LoraSlice& slice = a.slices[p];
      const int64_t num_columns = is_up ? slice.N : slice.adapter_rank(segment.adapter);
      const int64_t thread_share = round_up(ceil_div(num_columns, team.size), is_up ? MIN_OUTPUTS : RANKS);
      const int64_t begin = min(thread * thread_share, num_columns), end = min(begin + thread_share, num_columns);
      if (begin == end) return;
      float* slice_h = h + segment.begin * total_rank;
      for (int64_t earlier = 0; earlier < p; earlier++) slice_h += a.slices[earlier].R;
      for (int64_t i = 0; i < segment.tiles(); i++) {
        const Segment rows = segment.tile(i);
        const ThreadRange range = is_up ? ThreadRange{0, 0, begin, end} : ThreadRange{begin, end, 0, 0};
        multiply_lora<T>(a, slice, adapted.order, rows, slice_h + (rows.begin - segment.begin) * total_rank, total_rank,
                         range);
      }
    });
  };
  multiply_matrices(false);
  team.barrier();
  multiply_matrices(true);
}

template <class T> static void lora(const Lora& a, const Team& team) {
  int64_t max_rank = 0;
  for (int64_t p = 0; p < a.num_slices; p++) max_rank = max(max_rank, a.slices[p].R);
  const int64_t bytes = round_up(AdaptedRows::bytes(a), LINE);
  char* memory = (char*)penstock_scratch(PRIVATE, bytes + ADAPTED_ROWS * max_rank * sizeof(float));
  const AdaptedRows adapted(a, memory);
  if (team.size == 1 || adapted.num_tiles >= TILES_PER_THREAD * team.size)
    multiply_tiles<T>(a, team, adapted, (float*)(memory + bytes));
  else if (adapted.num_segments) multiply_split<T>(a, team, adapted);
}

// Returns an upper bound of the work, which counts the largest rank for every row. The adapters of the rows are not
// known yet, because an earlier operation of the step may set them.
static int64_t work(const Lora& a) {
  int64_t work_per_row = 0;
  for (int64_t p = 0; p < a.num_slices; p++) {
    const LoraSlice& slice = a.slices[p];
    int64_t max_rank = slice.ranks ? 0 : slice.R;
    for (int64_t s = 0; slice.ranks && s < a.num_adapters; s++) max_rank = max(max_rank, slice.ranks[s]);
    work_per_row += max_rank * (a.n + slice.N);
  }
  return a.num_rows * work_per_row;
}
static void run(const Lora& a, const Team& team) { WITH_TYPE(a.type, T, lora<T>(a, team)); }
KERNEL(lora, Lora)
