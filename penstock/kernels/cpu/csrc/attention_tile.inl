// Attention of the queries of an item over one tile of keys: scores, their softmax, and the weighted sum of the values.
//
// `tile` is the position of the first key of a tile. In the functions that process a tile, `begin` and `end` are the
// bounds of the keys that the item needs, relative to `tile`. M is a number of queries, D the head size, and Dp the
// padded head size.

// Returns the padded number of columns of a row of D values, a multiple of two vectors.
INLINE int64_t padded_width(int64_t D) { return round_up(D, 2 * W); }
// Returns the padded number of units of a query of D numbers, a multiple of one vector.
template <class P> INLINE int64_t padded_units(int64_t D) { return round_up(ceil_div(D, P::TERMS), W); }
// Returns the padded number of queries: 3 becomes 4, and 5 to FEW_QUERIES become 8. Other numbers are unchanged.
INLINE int64_t padded_count(int64_t M) { return M > FEW_QUERIES || M < 3 ? M : M > 4 ? 8 : 4; }

// The keys (cache_half 0) or values (cache_half 1) of the sequence and kv head of an item, indexed by position. The
// rows of W consecutive positions from a multiple of W on are contiguous, because they are in one block.
template <class TC> struct CachedRows {
  const TC* first_row;
  const float* scales;
  const int32_t* table;
  int64_t block_shift, block_mask, block_stride, D;
  CachedRows(const Attention& a, const Item& item, int64_t cache_half)
      : first_row((const TC*)a.cache + (cache_half * a.N * a.K + item.kv_head) * a.S * a.D),
        scales(a.scales + (cache_half * a.N * a.K + item.kv_head) * a.S),
        table(a.block_tables + item.b * a.table_stride),
        block_shift(__builtin_ctzll(a.S)), block_mask(a.S - 1), block_stride(a.K * a.S), D(a.D) {}
  // Returns the index of the row of a position, counted from `first_row` in rows of D numbers.
  INLINE_MEMBER int64_t row_index(int64_t key) const {
    return table[key >> block_shift] * block_stride + (key & block_mask);
  }
  INLINE_MEMBER const TC* operator[](int64_t key) const { return first_row + row_index(key) * D; }
  // Prefetches W rows from position `key` on, unless `key` is at or after `end`.
  INLINE_MEMBER void prefetch(int64_t key, int64_t end) const {
    if (key >= end) return;
    const char* address = (const char*)(*this)[key];
    // Prefetches into L2, which supports more outstanding misses than L1. If no cache has the keys, this is twice as
    // fast as a prefetch into L1.
    for (int64_t i = 0; i < W * D * (int64_t)sizeof(TC); i += 64) __builtin_prefetch(address + i, 0, 2);
  }
};

// The tile of keys that a thread processes after the current tile, in the same item or in the thread's next item. The
// thread prefetches it while it processes the current tile.
template <class TC> struct NextTile {
  CachedRows<TC> keys;
  int64_t tile, end;  // end: the end of the keys of the item; 0: nothing to prefetch
  NextTile(const Attention& a, const Item& item)
      : keys(a, item, 0), tile(item.begin_key / TILE * TILE), end(item.end_key) {}
  static NextTile after(const Attention& a, const Item& item, int64_t tile) {
    const bool is_last = tile + TILE >= item.end_key;
    NextTile next_tile(a, is_last && item.next ? *item.next : item);
    if (!is_last) next_tile.tile = tile + TILE;
    else if (!item.next) next_tile.end = 0;  // nothing to prefetch
    return next_tile;
  }
  INLINE_MEMBER void prefetch(int64_t i) const { keys.prefetch(tile + i, end); }
  INLINE_MEMBER void prefetch_all(int64_t begin = 0) const {
    for (int64_t i = begin; i < TILE; i += W) prefetch(i);
  }
};

// The partial softmax over some keys of M queries.
struct PartialSoftmax {
  float* out;        // [M, Dp]: sum of exp(score - max_score) * value, in the order that `load_restored` reads
  float* sum_exp;    // [M, W]: sum of exp(score - max_score); each lane sums different keys
  float* max_score;  // [M]: the score that the softmax subtracts; later scores may exceed it by `max_excess`
  static int64_t num_floats(int64_t M, int64_t Dp) { return round_up(M * (Dp + W + 1), 16); }
  PartialSoftmax(float* memory, int64_t M, int64_t Dp)
      : out(memory), sum_exp(memory + M * Dp), max_score(memory + M * (Dp + W)) {}
  // Returns the partial softmax without the first `queries` queries, in the same memory.
  INLINE_MEMBER PartialSoftmax skip_queries(int64_t queries, int64_t Dp) const {
    PartialSoftmax remaining = *this;
    remaining.out += queries * Dp, remaining.sum_exp += queries * W, remaining.max_score += queries;
    return remaining;
  }
};

// The operands of a thread in the layout of the products.
template <class P> struct PackedOperands {
  typedef typename P::Unit Unit;
  Unit* q;          // [M, padded units]
  Unit* keys;       // [units, TILE]
  Unit* values;     // [TILE / TERMS, Dp]
  float* scores;    // [M, TILE]; integer scores are not converted to floats
  Unit* weights;    // [M, TILE / TERMS]
  float* q_scales;  // [M]: factor of an integer score
  float* factors;   // [M]: factor of an integer sum of values
  float *key_scales, *value_scales;  // [TILE]
  static int64_t num_floats(int64_t M, int64_t D, int64_t Dp) {
    return round_up(M * (padded_units<P>(D) + 2 * TILE + 2) + TILE * (D + Dp + 2), 16);
  }
  PackedOperands(float* memory, int64_t M, int64_t D, int64_t Dp) {
    scores = memory, memory += M * TILE;
    keys = (Unit*)memory, memory += TILE * D;
    values = (Unit*)memory, memory += TILE * Dp;
    weights = (Unit*)memory, memory += M * TILE;
    key_scales = memory, memory += TILE;
    value_scales = memory, memory += TILE;
    q = (Unit*)memory, memory += M * padded_units<P>(D);
    q_scales = memory, memory += M;
    factors = memory;
  }
  // Returns the operands without the first `queries` queries. Only the pointers q, q_scales and factors advance: scores
  // and weights of the remaining queries overwrite those of the first.
  INLINE_MEMBER PackedOperands skip_queries(int64_t queries, int64_t D) const {
    PackedOperands remaining = *this;
    remaining.q += queries * padded_units<P>(D), remaining.q_scales += queries, remaining.factors += queries;
    return remaining;
  }
};

// ---- queries ----
// pack_query stores the units of a query, padded with zeros, and returns their scale (1 for floats).

template <class T> INLINE float pack_query(const T* q, float* units, int64_t D, Floats) {
  store(units + padded_units<Floats>(D) - W, vf{});
  for_vectors(D, EACH_VECTOR { store(units + i, load(q + i, lanes), lanes); });
  return 1;
}
#if PENSTOCK_DOT
INLINE vf with_swapped_pairs(vf x) { return _mm512_permute_ps(x, 0xb1); }
template <class T> INLINE float pack_query(const T* q, float* units, int64_t D, WidenedPairs) {
  store(units + padded_units<WidenedPairs>(D) - W, vf{});
  for_vectors(D, EACH_VECTOR { store(units + i, with_swapped_pairs(load(q + i, lanes)), lanes); });
  return 1;
}
INLINE float pack_query(const bf16* q, uint32_t* units, int64_t D, Pairs) {
  store(units + padded_units<Pairs>(D) - W, vu{});
  for_vectors(D / 2, EACH_VECTOR { store(units + i, load((const uint32_t*)q + i, lanes), lanes); });
  return 1;
}

INLINE void store_shorts(uint32_t* units, int64_t i, vf x) {
  _mm256_storeu_si256((__m256i*)((int16_t*)units + i), _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(x)));
}

// Quantizes a query to 15-bit integers. The error is below the rounding error of bfloat16 for the largest number, and a
// sum of up to 1024 products with bytes fits in 32 bits. The scale of a query with a NaN or an infinity is NaN.
INLINE float pack_query(const bf16* q, uint32_t* units, int64_t D, Shorts) {
  constexpr float LIMIT = 16383;
  vf maxima = {}, zero_or_nan = {};
  for_vectors(D, EACH_VECTOR {
    vf x = load(q + i, lanes);
    maxima = vmax(maxima, as_float(as_bits(x) & 0x7fffffff));
    zero_or_nan += x * 0;
  });
  const float max_magnitude = largest(maxima), inverse = max_magnitude > 0 ? LIMIT / max_magnitude : 0;
  store(units + padded_units<Shorts>(D) - W, vu{});
  for (int64_t i = 0; i < D; i += W) store_shorts(units, i, load(q + i, min<int64_t>(W, D - i)) * inverse);
  return max_magnitude / LIMIT + sum(zero_or_nan);
}
#endif

// ---- keys: transposed in squares of W keys and W units ----

// Loads units of a row from unit u on. Lanes outside `lanes` are 0.
template <class TC, class Lanes> INLINE vu load_units(const TC* row, int64_t u, Lanes lanes, Floats) {
  return (vu)load(row + u, lanes);
}
#if PENSTOCK_DOT
template <class Lanes> INLINE vu load_units(const bf16* row, int64_t u, Lanes lanes, Pairs) {
  return load((const uint32_t*)row + u, lanes);
}
INLINE vu load_units(const int8_t* row, int64_t u, FullVector, Shorts) {
  return (vu)_mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)(row + 2 * u)));
}
INLINE vu load_units(const int8_t* row, int64_t u, PartialVector partial, Shorts) {
  return (vu)_mm512_cvtepi8_epi16(_mm256_maskz_loadu_epi8((1u << 2 * partial.num_lanes) - 1, row + 2 * u));
}
#endif

// Stores unit u + i of W keys to square[i].
template <class P, class TC, class Lanes>
INLINE void transpose_keys(vu (&square)[W], const TC* rows, int64_t D, int64_t u, Lanes lanes) {
#pragma GCC unroll 16
  for (int i = 0; i < W; i++) square[i] = load_units(rows + i * D, u, lanes, P{});
  transpose(square);
}

// Stores W keys [W, D] as W columns of the packed keys [D / TERMS, TILE].
template <class P, class TC> INLINE void pack_keys(const TC* rows, typename P::Unit* columns, int64_t D) {
  for_vectors(D / P::TERMS, [&](int64_t u, auto lanes) __attribute__((always_inline)) {
    vu square[W];
    transpose_keys<P>(square, rows, D, u, lanes);
    for (int i = 0; i < lane_count(lanes); i++) store((uint32_t*)columns + ((u + i) ^ P::SWAP) * TILE, square[i]);
  });
}

// Computes the scores of W keys with ROWS queries from unpacked rows.
template <class P, int ROWS, class TC>
INLINE void score_keys(const TC* rows, const typename P::Unit* q, float* scores, int64_t D) {
  typename P::Sums sums[ROWS] = {};
  const int64_t stride = padded_units<P>(D);
  for_vectors(D / P::TERMS, [&](int64_t u, auto lanes) __attribute__((always_inline)) {
    vu square[W];
    transpose_keys<P>(square, rows, D, u, lanes);
#pragma GCC unroll 16
    for (int i = 0; i < W; i++)
      for (int m = 0; m < ROWS; m++)
        sums[m] = P::add_product(sums[m], q[m * stride + u + i], (typename P::Units)square[i]);
  });
  for (int m = 0; m < ROWS; m++) store((uint32_t*)scores + m * TILE, (vu)sums[m]);
}

// ---- values ----

// Loads the values of TERMS consecutive keys from column `d` on, as two vectors of units. `row` points to the values of
// the first key, row + stride to those of the second. `sees_first` and `sees_second` are whether the keys are
// visible. Values of invisible keys become 0, because their memory may hold stale NaNs, and 0 * NaN is NaN.
template <class TC>
INLINE void load_values(vf (&units)[2], const TC* row, int64_t, int64_t D, int64_t d, bool sees_first, bool, Floats) {
  for (int v = 0; v < 2; v++) {
    int64_t n = max<int64_t>(0, min<int64_t>(W, D - d - v * W));
    units[v] = !sees_first ? vf{} : n == W ? load(row + d + v * W) : n ? load(row + d + v * W, n) : vf{};
  }
}
#if PENSTOCK_DOT
INLINE void interleave(vu (&units)[2], __m512i first, __m512i second) {
  units[0] = (vu)_mm512_unpacklo_epi16(first, second);
  units[1] = (vu)_mm512_unpackhi_epi16(first, second);
}
INLINE void load_values(vu (&units)[2], const bf16* row, int64_t stride, int64_t D, int64_t d, bool sees_first,
                        bool sees_second, Pairs) {
  __mmask32 valid_columns = D - d >= 2 * W ? ~0u : (1u << (D - d)) - 1;
  interleave(units, _mm512_maskz_loadu_epi16(sees_first ? valid_columns : 0, row + d),
             _mm512_maskz_loadu_epi16(sees_second ? valid_columns : 0, row + stride + d));
}
INLINE void load_values(vu (&units)[2], const int8_t* row, int64_t stride, int64_t D, int64_t d, bool sees_first,
                        bool sees_second, Shorts) {
  __mmask32 valid_columns = D - d >= 2 * W ? ~0u : (1u << (D - d)) - 1;
  interleave(units, _mm512_cvtepi8_epi16(_mm256_maskz_loadu_epi8(sees_first ? valid_columns : 0, row + d)),
             _mm512_cvtepi8_epi16(_mm256_maskz_loadu_epi8(sees_second ? valid_columns : 0, row + stride + d)));
}
#endif

// Stores the 2 W sums `low` and `high` to `restored` in the order of the columns of the values. If TERMS is 2, `low`
// and `high` are in the order of `interleave`, which works within 128-bit lanes.
template <class P> INLINE void restore_order(vf low, vf high, vf (&restored)[2]) {
  restored[0] = low, restored[1] = high;
  if (P::TERMS == 1) return;
  vi from_low, from_high;
  for (int i = 0; i < W; i++) {
    from_low[i] = i / 8 * 4 + i % 4 + i / 4 % 2 * W;
    from_high[i] = from_low[i] + W / 2;
  }
  restored[0] = shuffled(low, high, from_low);
  restored[1] = shuffled(low, high, from_high);
}
template <class P> INLINE void load_restored(const float* sums, vf (&restored)[2]) {
  restore_order<P>(load(sums), load(sums + W), restored);
}

// Packs the values begin:end of a tile. `rows` points to the value i of the tile.
template <class P, class TC>
INLINE void pack_values(typename P::Unit* packed, int64_t D, int64_t begin, int64_t end, int64_t i, const TC* rows) {
  const int64_t Dp = padded_width(D);
  for (int64_t j = begin / P::SPAN * P::SPAN; j < round_up(end, P::SPAN); j += P::TERMS)
    for (int64_t d = 0; d < D; d += 2 * W) {
      typename P::Units units[2];
      load_values(units, rows + (j - i) * D, D, D, d, j >= begin && j < end, j + 1 < end, P{});
      auto* to = packed + (j / P::TERMS ^ P::SWAP) * Dp + d;
      store(to, units[0]);
      store(to + W, units[1]);
    }
}

// Adds the weighted sum of the values begin:end of a tile to `out` for ROWS queries, in 2 W * COLUMN_GROUPS columns
// from `d` on. Reads the values from the cache without packing them. The pass over the first columns also prefetches
// the next tile of keys, W keys at a time. Prefetching all keys at once would delay the values.
template <class P, int ROWS, int COLUMN_GROUPS, class TC>
INLINE void add_values(const CachedRows<TC>& values, const NextTile<TC>& next_tile, int64_t tile, int64_t begin,
                       int64_t end, int64_t d, const PackedOperands<P>& packed, float* out, int64_t D) {
  const int64_t Dp = padded_width(D);
  typename P::Sums sums[ROWS][2 * COLUMN_GROUPS];
  for (int m = 0; m < ROWS; m++)
    for (int v = 0; v < 2 * COLUMN_GROUPS; v++) begin_sum(sums[m][v], out + m * Dp + d + v * W, true);
  for (int64_t i = begin / W * W; i < end; i += W) {
    if (d == 0) next_tile.prefetch(i);
    const TC* rows = values[tile + i];
    const int64_t first = max(begin, i), last = min<int64_t>(end, i + W);
    for (int64_t j = first / P::TERMS * P::TERMS; j < last; j += P::TERMS)
      for (int c = 0; c < COLUMN_GROUPS; c++) {
        typename P::Units units[2];
        load_values(units, rows + (j - i) * D, D, D, d + c * 2 * W, j >= first, j + 1 < last, P{});
        for (int m = 0; m < ROWS; m++)
          for (int v = 0; v < 2; v++)
            sums[m][2 * c + v] = P::add_product(
                sums[m][2 * c + v], packed.weights[(m * TILE + j) / P::TERMS], units[v]);
      }
  }
  for (int m = 0; m < ROWS; m++)
    for (int v = 0; v < 2 * COLUMN_GROUPS; v++)
      end_sum(sums[m][v], out + m * Dp + d + v * W, true, P::INTEGER ? packed.factors[m] : 0);
}

// ---- the softmax ----

// Loads scores as floats. Scores from integer products are stored as integers.
INLINE vf as_score(const float* sums, Floats) { return load(sums); }

// Stores the weights of W * COUNT keys in the type of the products, and adds the exponentials to the total.
template <int COUNT>
INLINE void store_weights(float* weights, const vf (&exponentials)[COUNT], const vf (&weighted)[COUNT], vf& total,
                          float&, Floats) {
  for (int i = 0; i < COUNT; i++) {
    store(weights + i * W, weighted[i]);
    total += exponentials[i];
  }
}
#if PENSTOCK_DOT
INLINE vf as_score(const float* sums, Pairs) { return load(sums); }
INLINE vf as_score(const float* sums, Shorts) { return _mm512_cvtepi32_ps(_mm512_loadu_si512(sums)); }
// The next two functions add the rounded weights, which the products use, instead of the exponentials to the total.
template <int COUNT>
INLINE void store_weights(uint32_t* weights, const vf (&)[COUNT], const vf (&weighted)[COUNT], vf& total, float&,
                          Pairs) {
  for (int i = 0; i < COUNT; i++) {
    vh rounded = narrow(weighted[i]);
    __builtin_memcpy((bf16*)weights + i * W, &rounded, sizeof rounded);
    total += widen(rounded);
  }
}
template <int COUNT>
INLINE void store_weights(float* weights, const vf (&)[COUNT], const vf (&weighted)[COUNT], vf& total, float&,
                          WidenedPairs) {
  for (int i = 0; i < COUNT; i++) {
    const vf rounded = widen(narrow(weighted[i]));
    store(weights + i * W, with_swapped_pairs(rounded));
    total += rounded;
  }
}
INLINE void store_weights(uint32_t* weights, const vf (&exponentials)[TILE / W], const vf (&weighted)[TILE / W],
                          vf& total, float& factor, Shorts) {
  constexpr float LIMIT = 32767;  // a sum of TILE products of 16-bit integers and bytes fits in 32 bits
  vf maxima = vmax(vmax(weighted[0], weighted[1]), vmax(weighted[2], weighted[3]));
  const float max_weight = largest(maxima), inverse = max_weight > 0 ? LIMIT / max_weight : 0;
  factor = max_weight / LIMIT;
  for (int i = 0; i < TILE / W; i++) {
    store_shorts(weights, i * W, weighted[i] * inverse);
    // Adding weight * 0 makes the total NaN if the scale of a value is NaN. The integer weights cannot represent NaN.
    total = fma(weighted[i], vf{}, total + exponentials[i]);
  }
}
#endif

// Returns by how much scores may exceed the score that a softmax subtracts, before the sums are rescaled. If queries
// see later keys, new maxima are frequent and a branch for each one is hard to predict. A small excess is then allowed.
INLINE float max_excess(const Attention& a) { return a.keys_ahead ? 8 : 0; }

// Updates the partial softmax of query m with the keys begin:end of a tile. HAS_SCALES is whether keys and values have
// scales. COUNT is the number of vectors of the tile that hold keys. SEES_ALL is whether the query sees all keys of
// these vectors, without a soft cap and a bias.
template <class P, bool HAS_SCALES, int COUNT, bool SEES_ALL>
INLINE void update_softmax(const Attention& a, PackedOperands<P>& packed, PartialSoftmax& sums, int64_t m, int64_t Dp,
                           int64_t begin, int64_t end, const float* bias) {
  constexpr int TERMS = P::INTEGER ? 4 : P::SPAN == 2 ? 3 : 5;  // terms of the polynomial for e^x
  const vf masked = all(-__builtin_inff());
  const float scale = (float)a.scale * (P::INTEGER ? packed.q_scales[m] : 1), soft_cap = (float)a.soft_cap;
  const bool all_visible = SEES_ALL || (begin == 0 && end == COUNT * W);
  vf scores[COUNT], maxima = all(sums.max_score[m]);
  for (int i = 0; i < COUNT; i++) {
    vf score = as_score(packed.scores + m * TILE + i * W, P{}) * scale;
    if (HAS_SCALES) score *= load(packed.key_scales + i * W);
    if (!SEES_ALL && soft_cap != 0) score = soft_cap * tanh(score / soft_cap);
    scores[i] = score;
  }
  if (!SEES_ALL && bias)
    for (int i = 0; i < COUNT; i++) scores[i] += load(bias + i * W);
  if (!all_visible)
    for (int i = 0; i < COUNT; i++) {
      vi j = lane_index() + i * W;
      scores[i] = j >= (int32_t)begin ? scores[i] : masked;
      scores[i] = j < (int32_t)end ? scores[i] : masked;
    }
  for (int i = 0; i < COUNT; i++) maxima = vmax(maxima, scores[i]);
  vf total = load(sums.sum_exp + m * W), new_max = all(sums.max_score[m]);
  const float old_max = sums.max_score[m];
  if (exceeds(maxima, old_max + max_excess(a))) {  // true for a NaN, too
    new_max = largest_everywhere(maxima);
    if (old_max != masked[0]) {
      vf shrink_factor = exp_below<5>(all(old_max) - new_max);
      total *= shrink_factor;
      float* out = sums.out + m * Dp;
      for (int64_t i = 0; i < Dp; i += W) store(out + i, load(out + i) * shrink_factor);
    }
    sums.max_score[m] = new_max[0];
  }
  vf exponentials[COUNT], weighted[COUNT];
  for (int i = 0; i < COUNT; i++) {
    weighted[i] = exponentials[i] = exp_below<TERMS>(scores[i] - new_max);
    if (HAS_SCALES) {
      weighted[i] *= load(packed.value_scales + i * W);
      if (!all_visible) weighted[i] = scores[i] == masked ? vf{} : weighted[i];  // a stale scale may be NaN
    }
  }
  store_weights(packed.weights + m * (TILE / P::TERMS), exponentials, weighted, total, packed.factors[m], P{});
  store(sums.sum_exp + m * W, total);
}

// A range of rows of an item. The operands and sums that a function receives with it start at the queries of these
// rows.
struct RowRange {
  int64_t begin, end;
};

template <class P, bool HAS_SCALES, int COUNT>
static void update_tile_softmax(const Attention& a, const Item& item, PackedOperands<P>& packed, PartialSoftmax& sums,
                                int64_t tile, RowRange rows) {
  const int64_t Dp = padded_width(a.D);
  // If the first row sees the last of these keys, and the last row sees the first, all rows see all of these keys.
  const bool all_visible = item.end_key - tile >= COUNT * W &&
                           item.position + rows.begin + a.keys_ahead - tile >= COUNT * W - 1 &&
                           first_key(a, item.position + rows.end - 1) <= tile;
  if (all_visible && a.soft_cap == 0 && !a.bias) {
    const int64_t num_queries = (rows.end - rows.begin) * item.heads;
    for (int64_t m = 0; m < num_queries; m++)
      update_softmax<P, HAS_SCALES, COUNT, true>(a, packed, sums, m, Dp, 0, COUNT * W, nullptr);
    return;
  }
  for (int64_t row = rows.begin, m = 0; row < rows.end; row++) {
    int64_t position = item.position + row - tile;
    int64_t first_key_in_tile = max<int64_t>(first_key(a, item.position + row) - tile, 0);
    int64_t last_key_in_tile = min(min<int64_t>(position + a.keys_ahead, item.end_key - tile - 1), TILE - 1);
    for (int64_t head = 0; head < item.heads; head++, m++) {
      if (first_key_in_tile <= last_key_in_tile) {
        const int64_t query_head = item.kv_head * (a.H / a.K) + item.first_head + head;
        const float* bias = a.bias ? a.bias + query_head * a.bias_head_stride - position : nullptr;
        update_softmax<P, HAS_SCALES, COUNT, false>(a, packed, sums, m, Dp, first_key_in_tile, last_key_in_tile + 1,
                                                    bias);
      } else {  // the query sees no key of this tile
        __builtin_memset((void*)(packed.weights + m * (TILE / P::TERMS)), 0, TILE / P::TERMS * 4);
        packed.factors[m] = 0;
      }
    }
  }
}

template <class P, class TC>
INLINE void update_tile_softmax(const Attention& a, const Item& item, PackedOperands<P>& packed, PartialSoftmax& sums,
                                int64_t tile, RowRange rows) {
  constexpr bool HAS_SCALES = sizeof(TC) == 1;
  constexpr int ALL = TILE / W;
  const int64_t vectors = ceil_div(item.end_key - tile, W);
  if (HAS_SCALES || ALL != 4 || vectors > 3) update_tile_softmax<P, HAS_SCALES, ALL>(a, item, packed, sums, tile, rows);
  else if (vectors == 1) update_tile_softmax<P, HAS_SCALES, HAS_SCALES ? ALL : 1>(a, item, packed, sums, tile, rows);
  else if (vectors == 2) update_tile_softmax<P, HAS_SCALES, HAS_SCALES ? ALL : 2>(a, item, packed, sums, tile, rows);
  else update_tile_softmax<P, HAS_SCALES, HAS_SCALES ? ALL : 3>(a, item, packed, sums, tile, rows);
}

// ---- attention over a tile ----

constexpr int64_t CACHED_QUERIES = 32;  // queries whose scores, weights and sums fit in the first-level cache

template <class P, int ROWS, class TC>
static void attend_tile_unpacked(const Attention& a, const Item& item, PackedOperands<P>& packed, PartialSoftmax& sums,
                                 int64_t tile, const CachedRows<TC>& keys, const CachedRows<TC>& values, int64_t begin,
                                 int64_t end) {
  constexpr int COLUMN_GROUPS = ROWS < 8 && W == 16 ? 2 : 1;
  for (int64_t i = begin / W * W; i < end; i += W) {
    values.prefetch(tile + i, item.end_key);
    score_keys<P, ROWS>(keys[tile + i], packed.q, packed.scores + i, a.D);
  }
  update_tile_softmax<P, TC>(a, item, packed, sums, tile, {0, item.rows});
  const auto next_tile = NextTile<TC>::after(a, item, tile);
  int64_t d = 0;
  for (; d + 2 * W * COLUMN_GROUPS <= padded_width(a.D); d += 2 * W * COLUMN_GROUPS)
    add_values<P, ROWS, COLUMN_GROUPS>(values, next_tile, tile, begin, end, d, packed, sums.out, a.D);
  for (; d < a.D; d += 2 * W) add_values<P, ROWS, 1>(values, next_tile, tile, begin, end, d, packed, sums.out, a.D);
  next_tile.prefetch_all(round_up(end, W));
}

template <class P, class TC>
static void attend_tile_packed(const Attention& a, const Item& item, PackedOperands<P>& packed, PartialSoftmax& sums,
                               int64_t tile, const CachedRows<TC>& keys, const CachedRows<TC>& values, int64_t begin,
                               int64_t end) {
  const int64_t D = a.D, Dp = padded_width(D);
  for (int64_t i = begin / W * W; i < end; i += W) {
    values.prefetch(tile + i, item.end_key);
    pack_keys<P>(keys[tile + i], packed.keys + i, D);
  }
  const auto next_tile = NextTile<TC>::after(a, item, tile);
  for (int64_t i = begin / W * W; i < end; i += W) {
    next_tile.prefetch(i);
    pack_values<P>(packed.values, D, max(begin, i), min<int64_t>(end, i + W), i, values[tile + i]);
  }
  const int64_t begin_key = begin / W * W, num_keys = round_up(end, W) - begin_key;
  constexpr int64_t UNITS = P::SPAN / P::TERMS;
  const int64_t first_unit = begin / P::SPAN * UNITS, end_unit = ceil_div(end, P::SPAN) * UNITS;
  // Processes a few rows at a time, so that their scores, weights and sums stay in the first-level cache.
  const int64_t cached_rows = max<int64_t>(1, CACHED_QUERIES / item.heads);
  const int64_t rows_at_once = cached_rows < 4 ? cached_rows : cached_rows / 4 * 4;
  for (int64_t row = 0; row < item.rows; row += rows_at_once) {
    const RowRange rows = {row, min(row + rows_at_once, item.rows)};
    const int64_t M = (rows.end - rows.begin) * item.heads;
    PackedOperands<P> part = packed.skip_queries(row * item.heads, D);
    PartialSoftmax part_sums = sums.skip_queries(row * item.heads, Dp);
    // This product overwrites the scores instead of adding to them, so it does not apply factors: scores of integer
    // products stay integers, see as_score.
    const float* unused_factors = part.factors;
    {
      [[maybe_unused]] const typename P::Mode mode{};
      product<P>(part.q, padded_units<P>(D), part.keys + begin_key, TILE, part.scores + begin_key, TILE, M, num_keys,
                 D / P::TERMS, false, unused_factors);
    }
    update_tile_softmax<P, TC>(a, item, part, part_sums, tile, rows);
    [[maybe_unused]] const typename P::Mode mode{};
    product<P>(part.weights + first_unit, TILE / P::TERMS, part.values + first_unit * Dp, Dp, part_sums.out, Dp, M, Dp,
               end_unit - first_unit, true, part.factors);
  }
}

template <class P, class TC>
static void attend_tile(const Attention& a, const Item& item, PackedOperands<P>& packed, PartialSoftmax& sums,
                        int64_t tile) {
  const int64_t begin = max<int64_t>(item.begin_key - tile, 0), end = min(item.end_key - tile, TILE);
  const CachedRows<TC> keys(a, item, 0), values(a, item, 1);
  if (sizeof(TC) == 1)
    for (int64_t i = begin / W * W; i < end; i += W) {
      store(packed.key_scales + i, load(keys.scales + keys.row_index(tile + i)));
      store(packed.value_scales + i, load(values.scales + values.row_index(tile + i)));
    }
  const int64_t M = padded_count(item.rows * item.heads);
  if constexpr (P::SWAP) return attend_tile_packed<P>(a, item, packed, sums, tile, keys, values, begin, end);
  else if (M == 1) attend_tile_unpacked<P, 1>(a, item, packed, sums, tile, keys, values, begin, end);
  else if (M == 2) attend_tile_unpacked<P, 2>(a, item, packed, sums, tile, keys, values, begin, end);
  else if (M == 4) attend_tile_unpacked<P, 4>(a, item, packed, sums, tile, keys, values, begin, end);
  else if (M == 8) attend_tile_unpacked<P, 8>(a, item, packed, sums, tile, keys, values, begin, end);
  else attend_tile_packed<P>(a, item, packed, sums, tile, keys, values, begin, end);
}
