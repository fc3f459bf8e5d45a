// y [T, N] = x [T, n] w [N, n]^T + bias, on weights as they lie in the checkpoint. Few rows are multiplied as the
// weights are read, once and in order: memory's speed is the limit. Many rows are taken in blocks that stay in a
// core's cache. Each output is summed in an order that depends on n alone: a row's bits depend on no other row.

// What is multiplied: float by float or bfloat16 (widened), or bfloat16 by bfloat16 where there are dot products.
template <class TW> struct Widened {
  typedef float X;
  typedef TW Weight;
  static constexpr int STEP = W;
  template <class L> INLINE vf read_x(const float* x, L lanes) { return load(x, lanes); }
  template <class L> INLINE vf read_weight(const TW* w, L lanes) { return load(w, lanes); }
  INLINE vf add_products(vf sum, vf x, vf w) { return fma(x, w, sum); }
};

#if PENSTOCK_DOT
struct Dotted {
  typedef bf16 X;
  typedef bf16 Weight;
  static constexpr int STEP = 2 * W;
  INLINE __m512bh read_x(const bf16* p, Whole) { return (__m512bh)_mm512_loadu_si512(p); }
  INLINE __m512bh read_x(const bf16* p, Some some) {
    return (__m512bh)_mm512_maskz_loadu_epi16((1u << some.n) - 1, p);
  }
  template <class L> INLINE __m512bh read_weight(const bf16* p, L lanes) { return read_x(p, lanes); }
  INLINE vf add_products(vf sum, __m512bh x, __m512bh w) { return _mm512_dpbf16_ps(sum, x, w); }
};
#endif

constexpr int WEIGHT_ROWS = W == 16 ? 4 : 2;  // with X_ROWS sums each, what the registers hold
constexpr int X_ROWS = W == 16 ? 6 : 4;
constexpr int64_t BLOCK_BYTES = 1 << 18;  // of the rows of x that are multiplied with all weights at a time

template <class P, int ROWS, int XS, class L>
INLINE void add_step(vf (&sums)[ROWS][XS], const typename P::X* x, int64_t x_stride, const typename P::Weight* w,
                     int64_t n, L lanes) {
  decltype(P::read_weight(w, lanes)) weights[ROWS];
  for (int r = 0; r < ROWS; r++) {
    weights[r] = P::read_weight(w + r * n, lanes);
    __builtin_prefetch(w + (r + ROWS) * n, 0, 2);  // the next rows, to L2: half as fast again as without
  }
  for (int t = 0; t < XS; t++) {
    auto units = P::read_x(x + t * x_stride, lanes);
    for (int r = 0; r < ROWS; r++) sums[r][t] = P::add_products(sums[r][t], units, weights[r]);
  }
}

// ROWS outputs of XS rows of x.
template <class P, class T, int ROWS, int XS>
INLINE void dot_rows(const typename P::X* x, int64_t x_stride, const typename P::Weight* w, const T* bias, T* y,
                     int64_t y_stride, int64_t n) {
  vf sums[ROWS][XS] = {};
  int64_t i = 0;
  for (; i + P::STEP <= n; i += P::STEP) add_step<P>(sums, x + i, x_stride, w + i, n, Whole{});
  if (i < n) add_step<P>(sums, x + i, x_stride, w + i, n, Some{n - i});
  const Some outputs = {ROWS};
  for (int t = 0; t < XS; t++) {
    vf own[ROWS];
    for (int r = 0; r < ROWS; r++) own[r] = sums[r][t];
    vf output = sum_each(own);
    store(y + t * y_stride, bias ? output + load(bias, outputs) : output, outputs);
  }
}

template <class P, class T, int ROWS>
INLINE void dot_all(const typename P::X* x, int64_t x_stride, const typename P::Weight* w, const T* bias, T* y,
                    int64_t y_stride, int64_t rows, int64_t n) {
  const int64_t tiles = ceil_div(rows, X_ROWS);  // of about equal height: 8 rows are 4 + 4, not 6 + 2
  for (int64_t tile = 0; tile < tiles; tile++) {
    int64_t begin = rows * tile / tiles, count = rows * (tile + 1) / tiles - begin;
    const typename P::X* from = x + begin * x_stride;
    T* to = y + begin * y_stride;
    switch (count) {
      case 1: dot_rows<P, T, ROWS, 1>(from, x_stride, w, bias, to, y_stride, n); break;
      case 2: dot_rows<P, T, ROWS, 2>(from, x_stride, w, bias, to, y_stride, n); break;
      case 3: dot_rows<P, T, ROWS, 3>(from, x_stride, w, bias, to, y_stride, n); break;
      case 4: dot_rows<P, T, ROWS, 4>(from, x_stride, w, bias, to, y_stride, n); break;
      case 5: dot_rows<P, T, ROWS, 5>(from, x_stride, w, bias, to, y_stride, n); break;
      case 6: dot_rows<P, T, ROWS, 6>(from, x_stride, w, bias, to, y_stride, n); break;
    }
  }
}

struct Linear {  // x [rows, n], rows strided; w [N, n]; bias [N] of x's type, or null; y [rows, N]
  int64_t type, weight_type;
  const void* x;
  int64_t x_stride;
  const void *w, *bias;
  void* y;
  int64_t rows, N, n;
};

template <class P, class T>
static void multiply(const Linear& a, const typename P::X* x, int64_t x_stride, const Team& team) {
  const auto* w = (const typename P::Weight*)a.w;
  const T* bias = (const T*)a.bias;
  T* y = (T*)a.y;
  // Pieces are handed out as threads ask for them: one that has to wait for its core takes fewer.
  const int64_t piece = max<int64_t>(16, round_up(ceil_div(a.N, 8 * team.size), WEIGHT_ROWS));
  over_pieces(team, ceil_div(a.N, piece), [=](int64_t number) {
    int64_t r = number * piece, end = min(a.N, r + piece);
    for (; r + WEIGHT_ROWS <= end; r += WEIGHT_ROWS)
      dot_all<P, T, WEIGHT_ROWS>(x, x_stride, w + r * a.n, bias ? bias + r : bias, y + r, a.N, a.rows, a.n);
    for (; r < end; r++)
      dot_all<P, T, 1>(x, x_stride, w + r * a.n, bias ? bias + r : bias, y + r, a.N, a.rows, a.n);
  });
}

template <class TW> static void multiply(const Linear& a, const float* x, const Team& team) {
  multiply<Widened<TW>, float>(a, x, a.x_stride, team);
}

template <class TW> static void multiply(const Linear& a, const bf16* x, const Team& team) {
  float* wide = team.share(team.rank == 0 ? (float*)penstock_scratch(SHARED, a.rows * a.n * 4) : nullptr);
  over_rows(team, a.rows, [=](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; t++)
      for_vectors(a.n, EACH_VECTOR { store(wide + t * a.n + i, load(x + t * a.x_stride + i, lanes), lanes); });
  });
  team.barrier();
  multiply<Widened<TW>, bf16>(a, wide, a.n, team);
}

#if PENSTOCK_DOT
template <> void multiply<bf16>(const Linear& a, const bf16* x, const Team& team) {
  multiply<Dotted, bf16>(a, x, a.x_stride, team);
}
#endif

// About equally many rows a block, of a size that stays in a core's cache; but weights are read anew for each.
template <class T, class TW> static void linear(const Linear& a, const Team& team) {
  const int64_t most = max<int64_t>(BLOCK_BYTES / (a.n * sizeof(T)), 64), blocks = ceil_div(a.rows, most);
  for (int64_t block = 0; block < blocks; block++) {
    int64_t begin = a.rows * block / blocks, end = a.rows * (block + 1) / blocks;
    Linear part = a;
    part.y = (T*)a.y + begin * a.N;
    part.rows = end - begin;
    if (block) team.barrier();
    multiply<TW>(part, (const T*)a.x + begin * a.x_stride, team);
  }
}

static int64_t work(const Linear& a) { return a.rows * a.N * a.n; }
static void run(const Linear& a, const Team& team) {
  WITH_TYPE(a.type, T, WITH_TYPE(a.weight_type, TW, linear<T, TW>(a, team)));
}
KERNEL(linear, Linear)
