// Attention within sequences of up to MAX_SHORT tokens. Every query sees all tokens of its sequence. Keys and values
// are read in place, without a cache. The operations and their order are the same as in attention.inl, so both kernels
// give the same bits.

constexpr int64_t MAX_SHORT = 16;  // a multiple of W
constexpr int SHORT_VECTORS = MAX_SHORT / W;  // vectors that hold the scores of a query
constexpr int64_t SHORT_ROWS = 8;  // queries that are processed at once

struct ShortAttention {
  int64_t type;  // of q, k, v and out
  const void *q, *k, *v;  // [T, H, D], [T, K, D], [T, K, D] with strides
  void* out;  // [T, H, D]
  const int32_t* row_offsets;  // [B + 1]
  const float* bias;  // as in Attention
  int64_t B, H, K, D, q_row_stride, q_head_stride, k_row_stride, k_head_stride, v_row_stride, v_head_stride;
  int64_t bias_head_stride;
  double scale;
};

// Consecutive queries of a head, the keys and values of their sequence, and the memory of the results.
template <class P, class T> struct ShortQueries {
  const typename P::Unit *q, *keys;  // q [rows, padded units]; keys [units, MAX_SHORT]
  typename P::Unit* weights;         // [SHORT_ROWS, MAX_SHORT / TERMS]
  const T* values;
  const float* bias;  // of the first query, or null
  T* out;
  int64_t num_keys, v_row_stride, out_row_stride;  // number of keys; row strides of values and results
};

template <class P, class T, int ROWS>
static void attend_short_rows(const ShortAttention& a, const ShortQueries<P, T>& queries) {
  constexpr int64_t WEIGHTS = MAX_SHORT / P::TERMS;
  const int64_t units = a.D / P::TERMS, stride = padded_units<P>(a.D);
  typename P::Sums sums[ROWS][SHORT_VECTORS] = {};
  for (int64_t u = 0; u < units; u++) {
    typename P::Units keys[SHORT_VECTORS];
    for (int c = 0; c < SHORT_VECTORS; c++) keys[c] = load(queries.keys + u * MAX_SHORT + c * W);
    for (int m = 0; m < ROWS; m++)
      for (int c = 0; c < SHORT_VECTORS; c++)
        sums[m][c] = P::add_product(sums[m][c], queries.q[m * stride + u], keys[c]);
  }
  vf totals[SHORT_ROWS] = {};
#pragma GCC unroll 8
  for (int m = 0; m < ROWS; m++) {
    const vf masked = all(-__builtin_inff());
    vf scores[SHORT_VECTORS], exponentials[SHORT_VECTORS], max_score = masked;
    for (int c = 0; c < SHORT_VECTORS; c++) {
      scores[c] = sums[m][c] * (float)a.scale;
      if (queries.bias) scores[c] += load(queries.bias - m + c * W);
      scores[c] = lane_index() + c * W < (int32_t)queries.num_keys ? scores[c] : masked;
      max_score = vmax(max_score, scores[c]);
    }
    max_score = largest_everywhere(max_score);
    for (int c = 0; c < SHORT_VECTORS; c++) exponentials[c] = exp_below<P::SPAN == 2 ? 3 : 5>(scores[c] - max_score);
    float unused;
    store_weights(queries.weights + m * WEIGHTS, exponentials, exponentials, totals[m], unused, P{});
  }
  float factors[SHORT_ROWS];
  for (int m = 0; m < ROWS; m += 4) {
    vf lanes[4] = {totals[m], totals[m + 1], totals[m + 2], totals[m + 3]};
    const vf total = sum_each(lanes);
    for (int i = 0; i < 4; i++) factors[m + i] = 1 / total[i];
  }
  for (int64_t d = 0; d < a.D; d += 2 * W) {
    typename P::Sums results[ROWS][2] = {};
    for (int64_t j = 0; j < queries.num_keys; j += P::TERMS) {
      typename P::Units values[2];
      load_values(values, queries.values + j * queries.v_row_stride, queries.v_row_stride, a.D, d, true,
                  j + 1 < queries.num_keys, P{});
      for (int m = 0; m < ROWS; m++)
        for (int v = 0; v < 2; v++)
          results[m][v] = P::add_product(results[m][v], queries.weights[m * WEIGHTS + j / P::TERMS], values[v]);
    }
    for (int m = 0; m < ROWS; m++) {
      vf restored[2];
      restore_order<P>(results[m][0], results[m][1], restored);
      for (int v = 0; v < 2; v++) {
        T* to = queries.out + m * queries.out_row_stride + d + v * W;
        const int64_t count = a.D - d - v * W;
        if (count >= W) store(to, restored[v] * factors[m]);
        else if (count > 0) store(to, restored[v] * factors[m], count);
      }
    }
  }
}

template <class P, class T>
static void attend_short_rows(const ShortAttention& a, const ShortQueries<P, T>& queries, int64_t rows) {
  switch (rows) {
    case 1: return attend_short_rows<P, T, 1>(a, queries);
    case 2: return attend_short_rows<P, T, 2>(a, queries);
    case 3: return attend_short_rows<P, T, 3>(a, queries);
    case 4: return attend_short_rows<P, T, 4>(a, queries);
    case 5: return attend_short_rows<P, T, 5>(a, queries);
    case 6: return attend_short_rows<P, T, 6>(a, queries);
    case 7: return attend_short_rows<P, T, 7>(a, queries);
    case 8: return attend_short_rows<P, T, 8>(a, queries);
  }
}

// Transposes the keys of a sequence for one head. Columns after the last key repeat the last key; their scores are
// masked.
template <class P, class T>
INLINE void pack_short_keys(const T* rows, int64_t row_stride, int64_t num_keys, typename P::Unit* columns, int64_t D) {
  for (int64_t first = 0; first < MAX_SHORT; first += W)
    for_vectors(D / P::TERMS, [&](int64_t u, auto lanes) __attribute__((always_inline)) {
      vu square[W];
#pragma GCC unroll 16
      for (int i = 0; i < W; i++)
        square[i] = load_units(rows + min(first + i, num_keys - 1) * row_stride, u, lanes, P{});
      transpose(square);
      for (int i = 0; i < lane_count(lanes); i++) store((uint32_t*)columns + (u + i) * MAX_SHORT + first, square[i]);
    });
}

template <class P, class T> static void attend_short(const ShortAttention& a, const Team& team) {
  typedef typename P::Unit Unit;
  const int64_t units = padded_units<P>(a.D), heads_per_kv_head = a.H / a.K;
  const int64_t num_units = units * (MAX_SHORT + SHORT_ROWS) + SHORT_ROWS * MAX_SHORT;
  Unit* memory = (Unit*)penstock_scratch(PRIVATE, num_units * sizeof(Unit));
  Unit *keys = memory, *weights = keys + units * MAX_SHORT, *q = weights + SHORT_ROWS * MAX_SHORT;
  // If there are at least 4 sequences per thread, a piece of work is a sequence. Otherwise it is a kv head of a
  // sequence.
  const int64_t sequence_pieces = a.B >= 4 * team.size ? 1 : a.K;
  over_pieces(team, a.B * sequence_pieces, [&](int64_t piece) {
    const int64_t b = piece / sequence_pieces, first_head = a.K / sequence_pieces * (piece % sequence_pieces);
    const int64_t begin = a.row_offsets[b], num_keys = a.row_offsets[b + 1] - begin;
    if (!num_keys) return;
    for (int64_t kv_head = first_head; kv_head < first_head + a.K / sequence_pieces; kv_head++) {
      pack_short_keys<P>((const T*)a.k + begin * a.k_row_stride + kv_head * a.k_head_stride, a.k_row_stride, num_keys,
                         keys, a.D);
      for (int64_t head = kv_head * heads_per_kv_head; head < (kv_head + 1) * heads_per_kv_head; head++) {
        const int64_t chunks = ceil_div(num_keys, SHORT_ROWS);
        for (int64_t chunk = 0; chunk < chunks; chunk++) {
          const int64_t first_row = num_keys * chunk / chunks, rows = num_keys * (chunk + 1) / chunks - first_row;
          for (int64_t m = 0; m < rows; m++)
            pack_query((const T*)a.q + (begin + first_row + m) * a.q_row_stride + head * a.q_head_stride, q + m * units,
                       a.D, P{});
          attend_short_rows<P, T>(
              a,
              {q, keys, weights, (const T*)a.v + begin * a.v_row_stride + kv_head * a.v_head_stride,
               a.bias ? a.bias + head * a.bias_head_stride - first_row : nullptr,
               (T*)a.out + ((begin + first_row) * a.H + head) * a.D, num_keys, a.v_row_stride, a.H * a.D},
              rows);
        }
      }
    }
  });
}

static int64_t work(const ShortAttention& a) {
  return a.B ? 2 * a.row_offsets[a.B] * ceil_div(a.row_offsets[a.B], a.B) * a.H * a.D : 0;
}
static void run(const ShortAttention& a, const Team& team) {
#if PENSTOCK_DOT
  if (a.type == 1) return attend_short<Pairs, bf16>(a, team);
#endif
  WITH_TYPE(a.type, T, attend_short<Floats, T>(a, team));
}
KERNEL(short_attention, ShortAttention)
