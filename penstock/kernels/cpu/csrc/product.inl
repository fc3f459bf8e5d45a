// Small matrix products of packed operands, the inner loops of attention: C [M, N] = A [M, n] B [n, N], or C += A B.
// lda, ldb and ldc are the strides of the rows of A, B and C.
//
// A unit is the part of an operand that one multiplication reads: a float, or a pair of numbers that a dot product
// instruction multiplies and adds into one sum. Each C[m][j] is one chain of additions in the order of n, for all sizes
// and register tiles. The bits of a query's result therefore do not depend on other queries.

struct Floats {
  typedef float Unit;
  static constexpr int TERMS = 1;  // numbers in a unit
  static constexpr int SPAN = 1;   // number of consecutive products that are always computed together
  static constexpr int SWAP = 0;   // 1: the two units of a span are in reverse order
  static constexpr bool INTEGER = false;
  typedef vf Units;
  typedef vf Sums;
  struct Mode {};  // an object that sets the floating-point mode of the processor while it exists; empty for floats
  INLINE_MEMBER static Sums add_product(Sums sum, float a, Units b) { return fma(all(a), b, sum); }
};

#if PENSTOCK_DOT
struct Pairs {  // pairs of bfloat16 for the dot product instruction
  typedef uint32_t Unit;
  static constexpr int TERMS = 2, SPAN = 2, SWAP = 0;
  static constexpr bool INTEGER = false;
  typedef vu Units;
  typedef vf Sums;
  struct Mode {};
  INLINE_MEMBER static Sums add_product(Sums sum, uint32_t a, Units b) {
    return _mm512_dpbf16_ps(sum, (__m512bh)_mm512_set1_epi32((int)a), (__m512bh)b);
  }
};

struct Shorts {  // pairs of 16-bit integers; one factor is a widened byte, so that 32-bit sums are exact
  typedef uint32_t Unit;
  static constexpr int TERMS = 2, SPAN = 2, SWAP = 0;
  static constexpr bool INTEGER = true;
  typedef vu Units;
  typedef vi Sums;
  struct Mode {};
  INLINE_MEMBER static Sums add_product(Sums sum, uint32_t a, Units b) {
    return (vi)_mm512_dpwssd_epi32((__m512i)sum, _mm512_set1_epi32((int)a), (__m512i)b);
  }
};
#endif

#if PENSTOCK_DOT
// While an object of this type exists, all instructions of its thread read and write denormal numbers as 0. The dot
// product instruction always does so.
struct FlushedDenormals {
  const unsigned saved_mode = _mm_getcsr();
  INLINE_MEMBER FlushedDenormals() { set(saved_mode | 0x8040); }  // the bits FTZ and DAZ
  INLINE_MEMBER ~FlushedDenormals() { set(saved_mode); }
  INLINE_MEMBER static void set(unsigned mode) {
    __asm__ volatile("" ::: "memory");
    _mm_setcsr(mode);
    __asm__ volatile("" ::: "memory");
  }
};

// Pairs of bfloat16 that are widened to floats and multiplied by multiply-adds. The results have the same bits as those
// of the dot product instruction. This instruction first adds the product of the second numbers of a pair, then the
// product of the first numbers, with one rounding each.
struct WidenedPairs : Floats {
  static constexpr int SPAN = 2, SWAP = 1;
  typedef FlushedDenormals Mode;
};

// Returns the shortest time of 16 measurements, in ns. A measurement runs 12 independent chains of 512 steps.
template <class Step> static int64_t shortest_time(Step step) {
  int64_t shortest = INT64_MAX;
  for (int attempt = 0; attempt < 16; attempt++) {
    vf sums[12] = {};
#pragma GCC unroll 12
    for (int j = 0; j < 12; j++) __asm__ volatile("" : "+v"(sums[j]));  // keeps the compiler from merging the chains
    const int64_t begin = nanoseconds();
    for (int i = 0; i < 512; i++)
#pragma GCC unroll 12
      for (int j = 0; j < 12; j++) sums[j] = step(sums[j]);
#pragma GCC unroll 12
    for (int j = 0; j < 12; j++) __asm__ volatile("" ::"v"(sums[j]));
    shortest = min(shortest, nanoseconds() - begin);
  }
  return shortest;
}

// Returns whether a dot product takes more than 1.4 times as long as two multiply-adds, as on Emerald Rapids (twice as
// long). The first measured result holds for the whole process.
static bool dot_is_slow() {
  enum { UNKNOWN, FAST, SLOW };
  static int32_t shared_result = UNKNOWN;
  int32_t result = __atomic_load_n(&shared_result, __ATOMIC_RELAXED);
  if (result != UNKNOWN) return result == SLOW;
  vf x = all(0.5f);
  __asm__("" : "+v"(x));
  const int64_t dot_time = shortest_time([=](vf sum) __attribute__((always_inline)) {
    return (vf)_mm512_dpbf16_ps(sum, (__m512bh)x, (__m512bh)x);
  });
  const int64_t widened_time =
      shortest_time([=](vf sum) __attribute__((always_inline)) { return fma(x, x, fma(x, x, sum)); });
  const int32_t measured = 5 * dot_time > 7 * widened_time ? SLOW : FAST;
  if (__atomic_compare_exchange_n(&shared_result, &result, measured, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
    result = measured;
  return result == SLOW;
}
#endif

// begin_sum sets `sum` to its start value for W elements of C at `c`, and end_sum stores the sum there. With `adds` the
// sum is added to the elements. Integer sums are stored as integers, or multiplied by `factor` when they are added to
// floats.
INLINE void begin_sum(vf& sum, const float* c, bool adds) { sum = adds ? load(c) : vf{}; }
INLINE void begin_sum(vi& sum, const float*, bool) { sum = vi{}; }
INLINE void end_sum(vf sum, float* c, bool, float) { store(c, sum); }
INLINE void end_sum(vi sum, float* c, bool adds, float factor) {
  vf added = fma(__builtin_convertvector(sum, vf), all(factor), load(c));
  store(c, adds ? added : (vf)sum);
}

// P is one of the types Floats, Pairs, Shorts and WidenedPairs.
template <class P, int ROWS, int VECTORS>
INLINE void product_tile(const typename P::Unit* a, int64_t lda, const typename P::Unit* b, int64_t ldb, float* c,
                         int64_t ldc, int64_t n, bool adds, const float* factors) {
  typename P::Sums sums[ROWS][VECTORS];
  for (int m = 0; m < ROWS; m++)
    for (int v = 0; v < VECTORS; v++) begin_sum(sums[m][v], c + m * ldc + v * W, adds);
  for (int64_t i = 0; i < n; i++) {
    typename P::Units units[VECTORS];
    for (int v = 0; v < VECTORS; v++) units[v] = load(b + i * ldb + v * W);
    for (int m = 0; m < ROWS; m++)
      for (int v = 0; v < VECTORS; v++) sums[m][v] = P::add_product(sums[m][v], a[m * lda + i], units[v]);
  }
  for (int m = 0; m < ROWS; m++)
    for (int v = 0; v < VECTORS; v++)
      end_sum(sums[m][v], c + m * ldc + v * W, adds, P::INTEGER ? factors[m] : 0);
}

template <class P, int VECTORS>
INLINE void product_columns(const typename P::Unit* a, int64_t lda, const typename P::Unit* b, int64_t ldb, float* c,
                            int64_t ldc, int64_t M, int64_t n, bool adds, const float* factors) {
  int64_t m = 0;
  if (W == 16 && VECTORS < 4)  // eight rows have enough independent sums to hide the latency of the products
    for (; m + 8 <= M; m += 8)
      product_tile<P, W == 16 && VECTORS < 4 ? 8 : 4, VECTORS>(a + m * lda, lda, b, ldb, c + m * ldc, ldc, n, adds,
                                                               factors + m);
  for (; m + 4 <= M; m += 4)
    product_tile<P, 4, VECTORS>(a + m * lda, lda, b, ldb, c + m * ldc, ldc, n, adds, factors + m);
  for (; m + 2 <= M; m += 2)
    product_tile<P, 2, VECTORS>(a + m * lda, lda, b, ldb, c + m * ldc, ldc, n, adds, factors + m);
  for (; m < M; m++)
    product_tile<P, 1, VECTORS>(a + m * lda, lda, b, ldb, c + m * ldc, ldc, n, adds, factors + m);
}

// Computes C [M, N], or adds to it with `adds`. N is a multiple of W. `factors` [M] are the factors of integer sums.
// Four vectors of sums for each of four rows need 16 registers. Only AVX-512, which has 32 registers, uses such tiles.
template <class P>
static void product(const typename P::Unit* a, int64_t lda, const typename P::Unit* b, int64_t ldb, float* c,
                    int64_t ldc, int64_t M, int64_t N, int64_t n, bool adds, const float* factors) {
  int64_t j = 0;
  if (W == 16)
    for (; j + 4 * W <= N; j += 4 * W) product_columns<P, 4>(a, lda, b + j, ldb, c + j, ldc, M, n, adds, factors);
  for (; j + 2 * W <= N; j += 2 * W) product_columns<P, 2>(a, lda, b + j, ldb, c + j, ldc, M, n, adds, factors);
  for (; j < N; j += W) product_columns<P, 1>(a, lda, b + j, ldb, c + j, ldc, M, n, adds, factors);
}

// ---- transposition of W rows of W units: lane j of row i becomes lane i of row j ----

// Divides the matrix into squares of width 2 H (H = 1, 2, 4 ...). In each of them, exchanges the two off-diagonal
// squares of width H.
template <int H> INLINE void exchange(vu* rows) {
  vi low, high;
  for (int j = 0; j < W; j++) {
    low[j] = j & H ? W + j - H : j;
    high[j] = j & H ? W + j : j + H;
  }
#pragma GCC unroll 16
  for (int i = 0; i < W; i++) {
    if (i & H) continue;
    vu a = rows[i], b = rows[i + H];
    rows[i] = shuffled(a, b, low);
    rows[i + H] = shuffled(a, b, high);
  }
}

#if PENSTOCK_LANES == 16
// Transposes the 4 x 4 squares within 128-bit lanes, then the 4 x 4 matrix of these squares. These shuffles need no
// index vectors.
INLINE void transpose(vu* rows) {
  __m512i pairs[W], quads[W];
#pragma GCC unroll 8
  for (int i = 0; i < W; i += 2) {
    pairs[i] = _mm512_unpacklo_epi32((__m512i)rows[i], (__m512i)rows[i + 1]);
    pairs[i + 1] = _mm512_unpackhi_epi32((__m512i)rows[i], (__m512i)rows[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < W; i += 4) {  // quads[i + c]: lanes c, c + 4, c + 8, c + 12 of rows i to i + 3
    quads[i] = _mm512_unpacklo_epi64(pairs[i], pairs[i + 2]);
    quads[i + 1] = _mm512_unpackhi_epi64(pairs[i], pairs[i + 2]);
    quads[i + 2] = _mm512_unpacklo_epi64(pairs[i + 1], pairs[i + 3]);
    quads[i + 3] = _mm512_unpackhi_epi64(pairs[i + 1], pairs[i + 3]);
  }
#pragma GCC unroll 4
  for (int c = 0; c < 4; c++) {
    __m512i even = _mm512_shuffle_i32x4(quads[c], quads[c + 4], 0x88);
    __m512i odd = _mm512_shuffle_i32x4(quads[c], quads[c + 4], 0xdd);
    __m512i even_below = _mm512_shuffle_i32x4(quads[c + 8], quads[c + 12], 0x88);
    __m512i odd_below = _mm512_shuffle_i32x4(quads[c + 8], quads[c + 12], 0xdd);
    rows[c] = (vu)_mm512_shuffle_i32x4(even, even_below, 0x88);
    rows[c + 4] = (vu)_mm512_shuffle_i32x4(odd, odd_below, 0x88);
    rows[c + 8] = (vu)_mm512_shuffle_i32x4(even, even_below, 0xdd);
    rows[c + 12] = (vu)_mm512_shuffle_i32x4(odd, odd_below, 0xdd);
  }
}
#else
INLINE void transpose(vu* rows) {
  exchange<1>(rows);
  exchange<2>(rows);
  if (W > 4) exchange<4 % W>(rows);
}
#endif
