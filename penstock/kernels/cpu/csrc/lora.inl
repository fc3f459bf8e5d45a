// y [T, N] += (x A^T) B of each row's adapter, for the rows that have one: A [adapters, R, n], B [adapters, R, N].
//
// Rows are taken a few at a time, those of one adapter together, so that its matrices are read once for them.
// Each product is summed in the order of n, then of R, in floats, and added to y once: a row's bits depend on
// nothing beside it.

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

// At most X_ROWS rows of one adapter.
template <class T>
static void add_lora_rows(const Lora& a, const int64_t* rows, int64_t count, int64_t adapter, int64_t rank) {
  const T *down = (const T*)a.a + adapter * a.R * a.n, *up = (const T*)a.b + adapter * a.R * a.N;
  float* x = (float*)penstock_scratch(OWN, X_ROWS * (a.n + a.R) * sizeof(float));
  float* h = x + X_ROWS * a.n;
  T* y[X_ROWS];
  for (int64_t t = 0; t < count; t++) {
    const T* from = (const T*)a.x + rows[t] * a.x_stride;
    float* to = x + t * a.n;
    for_vectors(a.n, EACH_VECTOR { store(to + i, load(from + i, lanes), lanes); });
    y[t] = (T*)a.y + rows[t] * a.y_stride;
  }
  int64_t r = 0;
  for (; r + WEIGHT_ROWS <= rank; r += WEIGHT_ROWS)
    dot_all<Widened<T>, float, WEIGHT_ROWS>(x, a.n, down + r * a.n, nullptr, h + r, a.R, count, a.n);
  for (; r < rank; r++) dot_all<Widened<T>, float, 1>(x, a.n, down + r * a.n, nullptr, h + r, a.R, count, a.n);
  switch (count) {
    case 1: add_up<T, 1>(h, a.R, up, rank, a.N, y); break;
    case 2: add_up<T, 2>(h, a.R, up, rank, a.N, y); break;
    case 3: add_up<T, 3>(h, a.R, up, rank, a.N, y); break;
    case 4: add_up<T, 4>(h, a.R, up, rank, a.N, y); break;
    case 5: add_up<T, 5>(h, a.R, up, rank, a.N, y); break;
    case 6: add_up<T, 6>(h, a.R, up, rank, a.N, y); break;
  }
}

template <class T> static void lora(const Lora& a, const Team& team) {
  const int64_t rows = a.count ? a.segments[3 * a.count - 1] : 0;
  const int64_t tiles = ceil_div(rows, X_ROWS) + a.count;  // at least as many as there are
  over_pieces(team, tiles, [=](int64_t tile) {
    int64_t left = tile;
    for (int64_t s = 0; s < a.count; s++) {
      const int64_t *segment = a.segments + 3 * s, height = segment[2] - segment[1];
      const int64_t own = ceil_div(height, X_ROWS);
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
