// Stores new keys and values in the paged KV cache.

// Stores k and v [n, K, D] in the slots [n] of cache [2, N, K, S, D]: n rows, K heads, D numbers per head, N blocks of
// S positions. A slot is block * S + offset. The first half of the cache has the keys, the second the values. Numbers
// are converted to the type of the cache. An int8 cache has a scale per row and head.
struct StoreKV {
  int64_t type, cache_type;  // cache_type 0: float, 1: bf16, 2: int8
  const void *k, *v;
  void* cache;
  float* scales;  // [2, N, K, S] of an int8 cache, else null
  const int64_t* slots;
  int64_t n, N, K, S, D, k_row_stride, k_head_stride, v_row_stride, v_head_stride;
};

template <class T, class TC> INLINE void store_head(const T* x, TC* row, float*, int64_t D) {
  for_vectors(D, EACH_VECTOR { store(row + i, load(x + i, lanes), lanes); });
}
// Quantizes x to -127..127 and stores the scale. The scale is NaN if any number is not finite.
template <class T> INLINE void store_head(const T* x, int8_t* row, float* scale, int64_t D) {
  vf maxima = {}, zero_or_nan = {};
  for_vectors(D, EACH_VECTOR {
    vf y = load(x + i, lanes);
    maxima = vmax(maxima, as_float(as_bits(y) & 0x7fffffff));
    zero_or_nan += y * 0;
  });
  *scale = max(largest(maxima), 1e-12f) / 127 + sum(zero_or_nan);
  const vf divisor = all(*scale);
  for_vectors(D, EACH_VECTOR { store(row + i, load(x + i, lanes) / divisor, lanes); });
}

template <class T, class TC> static void store_kv(const StoreKV& a, const Team& team) {
  over_rows(team, a.n, [=](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; t++)
      for (int64_t h = 0; h < a.K; h++) {
        int64_t row = (a.slots[t] / a.S * a.K + h) * a.S + a.slots[t] % a.S, rows_per_half = a.N * a.K * a.S;
        TC* cache = (TC*)a.cache;
        store_head((const T*)a.k + t * a.k_row_stride + h * a.k_head_stride, cache + row * a.D, a.scales + row, a.D);
        row += rows_per_half;
        store_head((const T*)a.v + t * a.v_row_stride + h * a.v_head_stride, cache + row * a.D, a.scales + row, a.D);
      }
  });
}

static int64_t work(const StoreKV& a) { return ELEMENT_WORK * a.n * 2 * a.K * a.D; }
static void run(const StoreKV& a, const Team& team) {
  WITH_TYPE(a.type, T, {
    if (a.cache_type == 0) store_kv<T, float>(a, team);
    if (a.cache_type == 1) store_kv<T, bf16>(a, team);
    if (a.cache_type == 2) store_kv<T, int8_t>(a, team);
  });
}
KERNEL(store_kv, StoreKV)
