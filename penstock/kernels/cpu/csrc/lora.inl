// y [T, N] += (x A^T) B of each row's adapter, for the rows that have one: A [adapters, R, n], B [adapters, R, N].
//
// Rows are taken a few at a time, those of one adapter together, so that its matrices are read once for them.
// Each product is summed in the order of n, then of R, in floats, and added to y once: a row's bits depend on
// nothing beside it.

constexpr int ADAPTED_ROWS = W == 16 ? 6 : 4;  // taken together
constexpr int RANKS = W == 16 ? 4 : 2;         // of A: with ADAPTED_ROWS sums each, what the registers hold

struct Lora {
  int64_t type;  // of all of them
  const void* x;
  int64_t x_stride;
  const void *a, *b;
  void* y;
  int64_t y_stride;
  const int64_t* order;     // rows, those of one adapter together
  const int64_t* segments;  // [count, 3]: an adapter, and the range of `order` that is its rows'
  const int64_t* ranks;     // [adapters]: how many of the R it uses; null for all
  int64_t count, R, N, n;
};

// h [XS, R] = x [XS, n] of some RANKS rows of A: each sum over lanes first, then across them.
template <class T, int RANKS, int XS>
INLINE void dot_rows(const float* x, const T* down, float* h, int64_t R, int64_t n) {
  vf sums[XS][RANKS] = {};
  for_vectors(n, EACH_VECTOR {
    vf weights[RANKS];
    for (int r = 0; r < RANKS; r++) weights[r] = load(down + r * n + i, lanes);
    for (int t = 0; t < XS; t++) {
      vf units = load(x + t * n + i, lanes);
      for (int r = 0; r < RANKS; r++) sums[t][r] = fma(units, weights[r], sums[t][r]);
    }
  });
  for (int t = 0; t < XS; t++) store(h + t * R, sum_each(sums[t]), Some{RANKS});
}

// y [XS rows] += h [XS, R] b [rank, N]
template <class T, int XS>
INLINE void add_up(const float* h, int64_t R, const T* b, int64_t rank, int64_t N, T* const* y) {
  for_vectors(N, EACH_VECTOR {
    vf sums[XS] = {};
    for (int64_t r = 0; r < rank; r++) {
      vf weights = load(b + r * N + i, lanes);
      for (int t = 0; t < XS; t++) sums[t] = fma(all(h[t * R + r]), weights, sums[t]);
    }
    for (int t = 0; t < XS; t++) store(y[t] + i, load(y[t] + i, lanes) + sums[t], lanes);
  });
}

// XS rows of one adapter.
template <class T, int XS>
static void add_lora_rows(const Lora& a, const int64_t* rows, int64_t adapter, int64_t rank) {
  const T *down = (const T*)a.a + adapter * a.R * a.n, *up = (const T*)a.b + adapter * a.R * a.N;
  float* x = (float*)penstock_scratch(OWN, XS * (a.n + a.R) * sizeof(float));
  float* h = x + XS * a.n;
  T* y[XS];
  for (int t = 0; t < XS; t++) {
    const T* from = (const T*)a.x + rows[t] * a.x_stride;
    float* to = x + t * a.n;
    for_vectors(a.n, EACH_VECTOR { store(to + i, load(from + i, lanes), lanes); });
    y[t] = (T*)a.y + rows[t] * a.y_stride;
  }
  int64_t r = 0;
  for (; r + RANKS <= rank; r += RANKS) dot_rows<T, RANKS, XS>(x, down + r * a.n, h + r, a.R, a.n);
  for (; r < rank; r++) dot_rows<T, 1, XS>(x, down + r * a.n, h + r, a.R, a.n);
  add_up<T, XS>(h, a.R, up, rank, a.N, y);
}

template <class T>
static void add_lora_rows(const Lora& a, const int64_t* rows, int64_t count, int64_t adapter, int64_t rank) {
  switch (count) {
    case 1: add_lora_rows<T, 1>(a, rows, adapter, rank); break;
    case 2: add_lora_rows<T, 2>(a, rows, adapter, rank); break;
    case 3: add_lora_rows<T, 3>(a, rows, adapter, rank); break;
    case 4: add_lora_rows<T, 4>(a, rows, adapter, rank); break;
#if PENSTOCK_LANES == 16
    case 5: add_lora_rows<T, 5>(a, rows, adapter, rank); break;
    case 6: add_lora_rows<T, 6>(a, rows, adapter, rank); break;
#endif
  }
}

template <class T> static void lora(const Lora& a, const Team& team) {
  const int64_t rows = a.count ? a.segments[3 * a.count - 1] : 0;
  const int64_t tiles = ceil_div(rows, ADAPTED_ROWS) + a.count;  // at least as many as there are
  over_pieces(team, tiles, [=](int64_t tile) {
    int64_t left = tile;
    for (int64_t s = 0; s < a.count; s++) {
      const int64_t *segment = a.segments + 3 * s, height = segment[2] - segment[1];
      const int64_t own = ceil_div(height, ADAPTED_ROWS);
      if (left < own) {
        int64_t begin = segment[1] + height * left / own, end = segment[1] + height * (left + 1) / own;
        int64_t rank = a.ranks ? a.ranks[segment[0]] : a.R;
        if (rank) add_lora_rows<T>(a, a.order + begin, end - begin, segment[0], rank);
        break;
      }
      left -= own;
    }
  });
}

static int64_t work(const Lora& a) {
  return (a.count ? a.segments[3 * a.count - 1] : 0) * a.R * (a.N + a.n);
}
static void run(const Lora& a, const Team& team) { WITH_TYPE(a.type, T, lora<T>(a, team)); }
KERNEL(lora, Lora)
