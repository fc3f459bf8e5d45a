// Causal attention over the paged cache: one pass, blocks read in place, an online softmax in float32.
//
// The work is cut into items: a tile of queries of one sequence that share a kv head (some rows, the heads of
// the group), against all keys that they see. Keys are taken in tiles of TILE, and every CHUNK of keys has a
// softmax of its own; the chunks are merged from left to right. Tiles and chunks lie on multiples from position
// 0, so that a query's bits do not depend on its batch, its chunk of the prompt, or the number of threads.
// Where there are fewer items than the threads want, an item's chunks are separate tasks, merged afterwards.

constexpr int64_t TILE = 64;
constexpr int64_t CHUNK = 512;
constexpr int64_t QUERIES = 64;  // of an item, at most

struct Attention {
  int64_t type, cache_type;
  const void *q, *cache;  // [T, H, D] with strides; [2, N, K, S, D]
  void* out;              // [T, H, D]
  const int32_t *tables, *row_offsets, *lengths;
  const float* sinks;  // [H] or null
  int64_t B, H, N, K, S, D, q_row, q_head, table_stride;
  int64_t window;     // 0: all keys
  double scale, cap;  // cap 0: none
};

// How the items are numbered. Derived from the call alone.
struct Items {
  int64_t group, heads, head_tiles, rows;  // heads: of an item; rows: of an item, at most
  int64_t* first;                          // [B + 1] number of each sequence's first item
  int64_t count, max_chunks;
};

struct Item {
  int64_t b, kv_head, first_head, heads, row, rows;  // row: of the ragged batch
  int64_t position;                                  // of the first row
  int64_t begin, end;                                // keys that any of the rows sees
};

static Items items_of(const Attention& a, int64_t* first) {
  Items items = {};
  items.group = a.H / a.K;
  items.heads = min(items.group, QUERIES);
  items.head_tiles = ceil_div(items.group, items.heads);
  int64_t longest = 0;
  for (int64_t b = 0; b < a.B; b++) longest = max<int64_t>(longest, a.row_offsets[b + 1] - a.row_offsets[b]);
  items.rows = max<int64_t>(1, min(QUERIES / items.heads, longest));
  items.first = first;
  for (int64_t b = 0; b < a.B; b++) {
    int64_t rows = a.row_offsets[b + 1] - a.row_offsets[b];
    int64_t seen = a.window ? min<int64_t>(a.lengths[b], a.window + rows) : a.lengths[b];
    first[b] = items.count;
    items.count += ceil_div(rows, items.rows) * a.K * items.head_tiles;
    items.max_chunks = max(items.max_chunks, seen / CHUNK + 2);
  }
  first[a.B] = items.count;
  return items;
}

static Item item_of(const Attention& a, const Items& items, int64_t number) {
  int64_t b = 0, above = a.B;  // the last b with first[b] <= number
  while (above - b > 1) {
    int64_t middle = (b + above) / 2;
    (items.first[middle] <= number ? b : above) = middle;
  }
  int64_t within = items.first[b + 1] - 1 - number;  // backwards: the latest rows see the most keys
  Item item;
  item.b = b;
  item.first_head = within % items.head_tiles * items.heads;
  item.heads = min(items.heads, items.group - item.first_head);
  within /= items.head_tiles;
  item.kv_head = within % a.K;
  int64_t row = within / a.K * items.rows, rows = a.row_offsets[b + 1] - a.row_offsets[b];
  item.rows = min(items.rows, rows - row);
  item.row = a.row_offsets[b] + row;
  item.position = a.lengths[b] - rows + row;
  item.begin = a.window ? max<int64_t>(0, item.position - a.window + 1) : 0;
  item.end = item.position + item.rows;
  return item;
}

// The keys (side 0) or values (side 1) of an item's sequence and kv head, by position. W of them from a multiple
// of W on lie together in one block.
template <class TC> struct Rows {
  const TC* base;
  const int32_t* table;
  int64_t shift, mask, block_stride, D;
  Rows(const Attention& a, const Item& item, int64_t side)
      : base((const TC*)a.cache + (side * a.N * a.K + item.kv_head) * a.S * a.D),
        table(a.tables + item.b * a.table_stride), shift(__builtin_ctzll(a.S)), mask(a.S - 1),
        block_stride(a.K * a.S * a.D), D(a.D) {}
  INLINE_MEMBER const TC* operator[](int64_t key) const {
    return base + table[key >> shift] * block_stride + (key & mask) * D;
  }
  INLINE_MEMBER void prefetch(int64_t key, int64_t end) const {
    if (key >= end) return;
    const char* from = (const char*)(*this)[key];
    // To L2, which waits for more lines at once than L1: twice as fast as to L1 on keys from memory.
    for (int64_t i = 0; i < W * D * (int64_t)sizeof(TC); i += 64) __builtin_prefetch(from + i, 0, 2);
  }
};

// An unfinished softmax of each query m over some keys.
struct Partial {
  float* out;    // [M, Dp]: sum of exp(score - top) * value; Dp is D, filled up to whole vectors
  float* top;    // [M] largest score so far
  float* total;  // [M] sum of exp(score - top)
  static int64_t floats(int64_t M, int64_t Dp) { return M * Dp + 2 * M; }
  Partial(float* memory, int64_t M, int64_t Dp)
      : out(memory), top(memory + M * Dp), total(memory + M * Dp + M) {}
};

// A thread's packed operands.
template <class P> struct Packed {
  typedef typename P::Unit Unit;
  Unit* q;        // [M, D / TERMS]
  Unit* keys;     // [D / TERMS, TILE]
  Unit* values;   // [TILE / TERMS, Dp]
  float* scores;  // [M, TILE]
  Unit* weights;  // [M, TILE / TERMS]
  static int64_t floats(int64_t M, int64_t D, int64_t Dp) { return M * (D + 2 * TILE) + TILE * (D + Dp); }
  Packed(float* memory, int64_t M, int64_t D, int64_t Dp) {
    scores = memory, memory += M * TILE;
    keys = (Unit*)memory, memory += TILE * D;
    values = (Unit*)memory, memory += TILE * Dp;
    weights = (Unit*)memory, memory += M * TILE;
    q = (Unit*)memory;
  }
};

INLINE void pack_query(const float* q, float* units, int64_t D) { __builtin_memcpy(units, q, D * 4); }
INLINE void pack_query(const bf16* q, uint32_t* units, int64_t D) { __builtin_memcpy(units, q, D * 2); }
INLINE void pack_query(const bf16* q, float* units, int64_t D) {
  for_vectors(D, EACH_VECTOR { store(units + i, load(q + i, lanes), lanes); });
}

// W keys [W, D] into columns of keys [D / TERMS, TILE].
template <class TC, class Unit> INLINE void pack_keys(const TC* rows, Unit* columns, int64_t D) {
  for (int64_t u = 0; u < D; u += W) {
    vu square[W];
    if (u + W <= D) {
      for (int i = 0; i < W; i++) square[i] = (vu)load(rows + i * D + u);
    } else {
      for (int i = 0; i < W; i++) square[i] = (vu)load(rows + i * D + u, D - u);
    }
    transpose(square);
    int64_t units = min<int64_t>(W, D - u);
    for (int i = 0; i < units; i++) store((uint32_t*)columns + (u + i) * TILE, square[i]);
  }
}
#if PENSTOCK_DOT
INLINE void pack_keys(const bf16* rows, uint32_t* columns, int64_t D) {
  pack_keys((const uint32_t*)rows, columns, D / 2);
}
#endif

// Values begin:end of a tile, of the W from `i` on that lie at `rows`. What lies outside may be stale, a NaN
// even, and a weight of 0 would not silence it.
template <class TC>
INLINE void pack_values(float* packed, int64_t D, int64_t Dp, int64_t begin, int64_t end, int64_t i, const TC* rows) {
  for (int64_t j = begin; j < end; j++) {
    const TC* value = rows + (j - i) * D;
    float* to = packed + j * Dp;
    for_vectors(D, EACH_VECTOR { store(to + i, load(value + i, lanes)); });
  }
}
#if PENSTOCK_DOT
// Where the pairs (first[d], second[d]) come from, for the lower and the upper half of 2 W values d.
struct PairOrder {
  uint16_t lower[2 * W], upper[2 * W];
  constexpr PairOrder() : lower(), upper() {
    for (int d = 0; d < W; d++) {
      lower[2 * d] = d, lower[2 * d + 1] = d + 2 * W;
      upper[2 * d] = d + W, upper[2 * d + 1] = d + 3 * W;
    }
  }
};
constexpr PairOrder PAIR_ORDER;

INLINE void pack_values(uint32_t* packed, int64_t D, int64_t Dp, int64_t begin, int64_t end, int64_t i,
                        const bf16* rows) {
  const __m512i lower = _mm512_loadu_si512(PAIR_ORDER.lower), upper = _mm512_loadu_si512(PAIR_ORDER.upper);
  for (int64_t j = begin & ~1; j < end; j += 2) {
    const bf16 *first = rows + (j - i) * D, *second = first + D;
    uint32_t* to = packed + j / 2 * Dp;
    for (int64_t d = 0; d < D; d += 2 * W) {
      __mmask32 inside = D - d >= 2 * W ? ~0u : (1u << (D - d)) - 1;
      __m512i a = _mm512_maskz_loadu_epi16(j >= begin ? inside : 0, first + d);
      __m512i b = _mm512_maskz_loadu_epi16(j + 1 < end ? inside : 0, second + d);
      _mm512_storeu_si512(to + d, _mm512_permutex2var_epi16(a, lower, b));
      if (d + W < Dp) _mm512_storeu_si512(to + d + W, _mm512_permutex2var_epi16(a, upper, b));
    }
  }
}
#endif

INLINE vf stored_weight(float* weights, int64_t i, vf weight) {
  store(weights + i, weight);
  return weight;
}
// Rounded, and summed as rounded: then the weights of a query add up to its total exactly as they are used.
INLINE vf stored_weight(uint32_t* weights, int64_t i, vf weight) {
  bf16* rounded = (bf16*)weights + i;
  store(rounded, weight);
  return load(rounded);
}

// One query's softmax over a tile of which it sees the keys begin:end.
template <class P>
INLINE void soften(const Attention& a, float* scores, typename P::Unit* weights, Partial& sums, int64_t m, int64_t Dp,
                   int64_t begin, int64_t end) {
  const vf nothing = all(-__builtin_inff());
  const float scale = (float)a.scale, cap = (float)a.cap;
  vf tops = nothing;
  for (int64_t i = 0; i < TILE; i += W) {
    vf score = load(scores + i) * scale;
    if (cap != 0) score = cap * tanh(score / cap);
    if (begin > i || end < i + W) {
      vi j = lane_index() + (int32_t)i;
      score = j >= (int32_t)begin ? score : nothing;
      score = j < (int32_t)end ? score : nothing;
    }
    store(scores + i, score);
    tops = vmax(tops, score);
  }
  float top = max(sums.top[m], largest(tops));
  if (sums.top[m] != top) {
    float shrink = exp(all(sums.top[m] - top))[0];
    sums.top[m] = top;
    sums.total[m] *= shrink;
    float* out = sums.out + m * Dp;
    for (int64_t i = 0; i < Dp; i += W) store(out + i, load(out + i) * shrink);
  }
  vf total = {};
  for (int64_t i = 0; i < TILE; i += W) total += stored_weight(weights, i, exp(load(scores + i) - top));
  sums.total[m] += sum(total);
}

template <class P, class TC>
static void attend_tile(const Attention& a, const Item& item, Packed<P>& packed, Partial& sums, int64_t tile) {
  const int64_t D = a.D, Dp = round_up(D, W), M = item.rows * item.heads, units = D / P::TERMS;
  int64_t begin = max<int64_t>(item.begin - tile, 0), end = min(item.end - tile, TILE);
  const Rows<TC> keys(a, item, 0), values(a, item, 1);
  for (int64_t i = begin / W * W; i < end; i += W) {
    values.prefetch(tile + i, item.end);
    pack_keys(keys[tile + i], packed.keys + i, D);
  }
  product<P>(packed.q, units, packed.keys, TILE, packed.scores, TILE, M, TILE, units, false);
  for (int64_t m = 0; m < M; m++) {
    int64_t position = item.position + m / item.heads - tile;
    int64_t first = a.window ? max<int64_t>(position - a.window + 1, 0) : 0, last = min(position, TILE - 1);
    auto* weights = packed.weights + m * (TILE / P::TERMS);
    if (first > last) __builtin_memset((void*)weights, 0, TILE / P::TERMS * 4);  // sees nothing of this tile
    else soften<P>(a, packed.scores + m * TILE, weights, sums, m, Dp, first, last + 1);
  }
  for (int64_t i = begin / W * W; i < end; i += W) {
    keys.prefetch(tile + TILE + i, item.end);
    pack_values(packed.values, D, Dp, max(begin, i), min<int64_t>(end, i + W), i, values[tile + i]);
  }
  int64_t first = begin / P::TERMS, last = ceil_div(end, P::TERMS);
  product<P>(packed.weights + first, TILE / P::TERMS, packed.values + first * Dp, Dp, sums.out, Dp, M, Dp,
             last - first, true);
}

// The softmax of chunk `chunk` alone, into `sums`.
template <class P, class TC>
static void attend_chunk(const Attention& a, const Item& item, Packed<P>& packed, Partial& sums, int64_t chunk) {
  const int64_t Dp = round_up(a.D, W), M = item.rows * item.heads;
  for (int64_t m = 0; m < M; m++) sums.top[m] = -__builtin_inff(), sums.total[m] = 0;
  for (int64_t i = 0; i < M * Dp; i += W) store(sums.out + i, vf{});
  int64_t begin = max(item.begin, chunk * CHUNK), end = min(item.end, (chunk + 1) * CHUNK);
  for (int64_t tile = begin / TILE * TILE; tile < end; tile += TILE) attend_tile<P, TC>(a, item, packed, sums, tile);
}

static void merge(Partial& sums, const Partial& next, int64_t M, int64_t Dp) {
  const float nothing = -__builtin_inff();
  for (int64_t m = 0; m < M; m++) {
    if (next.top[m] == nothing) continue;
    float top = max(sums.top[m], next.top[m]);
    // A query's first chunk is taken as it is.
    float old_share = sums.top[m] == nothing ? 0 : exp(all(sums.top[m] - top))[0];
    float new_share = exp(all(next.top[m] - top))[0];
    sums.top[m] = top;
    sums.total[m] = sums.total[m] * old_share + next.total[m] * new_share;
    float *out = sums.out + m * Dp, *add = next.out + m * Dp;
    for (int64_t i = 0; i < Dp; i += W) store(out + i, load(out + i) * old_share + load(add + i) * new_share);
  }
}

template <class TQ> static void finish(const Attention& a, const Item& item, const Partial& sums) {
  const int64_t Dp = round_up(a.D, W), M = item.rows * item.heads, group = a.H / a.K;
  for (int64_t m = 0; m < M; m++) {
    int64_t head = item.kv_head * group + item.first_head + m % item.heads;
    float share = 1, total = sums.total[m];
    if (a.sinks) {
      float top = max(sums.top[m], a.sinks[head]);
      share = exp(all(sums.top[m] - top))[0];
      total = total * share + exp(all(a.sinks[head] - top))[0];
    }
    TQ* out = (TQ*)a.out + ((item.row + m / item.heads) * a.H + head) * a.D;
    const float* from = sums.out + m * Dp;
    for_vectors(a.D, EACH_VECTOR { store(out + i, load(from + i) * share / total, lanes); });
  }
}

template <class P, class TQ>
static void pack_queries(const Attention& a, const Item& item, typename P::Unit* packed) {
  const int64_t group = a.H / a.K;
  for (int64_t m = 0; m < item.rows * item.heads; m++) {
    int64_t head = item.kv_head * group + item.first_head + m % item.heads;
    pack_query((const TQ*)a.q + (item.row + m / item.heads) * a.q_row + head * a.q_head,
               packed + m * (a.D / P::TERMS), a.D);
  }
}

template <class P, class TQ, class TC> static void attend(const Attention& a, const Team& team) {
  const int64_t D = a.D, Dp = round_up(D, W);
  const int64_t header = round_up(sizeof(Items) + (a.B + 1) * 8, 64);  // the items, then where each sequence's begin
  char* memory = nullptr;
  int64_t chunks = 1;
  auto number = [&] { *(Items*)memory = items_of(a, (int64_t*)(memory + sizeof(Items))); };
  if (team.rank == 0) {
    memory = (char*)penstock_scratch(SHARED, header);
    number();
  }
  memory = team.share(memory);
  Items items = *(const Items*)memory;
  const int64_t M = items.rows * items.heads, partial = Partial::floats(M, Dp);
  const bool split = team.size > 1 && items.count < 4 * team.size && items.max_chunks > 2;
  if (split) {
    chunks = items.max_chunks;
    team.barrier();  // all have read them
    if (team.rank == 0) {  // the memory may move: number the items again
      memory = (char*)penstock_scratch(SHARED, header + items.count * chunks * partial * 4);
      number();
    }
    memory = team.share(memory);
    items = *(const Items*)memory;
  }
  float* partials = (float*)(memory + header);
  float* own_memory = (float*)penstock_scratch(OWN, (Packed<P>::floats(M, D, Dp) + 2 * partial) * 4);
  Partial sums(own_memory, M, Dp), next(own_memory + partial, M, Dp);
  Packed<P> packed(own_memory + 2 * partial, M, D, Dp);
  over_pieces(team, items.count * chunks, [&](int64_t task) {
    Item item = item_of(a, items, task / chunks);
    int64_t first = item.begin / CHUNK, last = (item.end - 1) / CHUNK;
    if (split) {
      int64_t chunk = first + task % chunks;
      if (chunk > last) return;
      pack_queries<P, TQ>(a, item, packed.q);
      Partial own(partials + task * partial, M, Dp);
      attend_chunk<P, TC>(a, item, packed, own, chunk);
      return;
    }
    pack_queries<P, TQ>(a, item, packed.q);
    attend_chunk<P, TC>(a, item, packed, sums, first);
    for (int64_t chunk = first + 1; chunk <= last; chunk++) {
      attend_chunk<P, TC>(a, item, packed, next, chunk);
      merge(sums, next, item.rows * item.heads, Dp);
    }
    finish<TQ>(a, item, sums);
  });
  if (!split) return;
  team.barrier();
  over_pieces(team, items.count, [&](int64_t number) {
    Item item = item_of(a, items, number);
    int64_t count = (item.end - 1) / CHUNK - item.begin / CHUNK + 1;
    Partial whole(partials + number * chunks * partial, M, Dp);
    for (int64_t i = 1; i < count; i++) {
      Partial other(partials + (number * chunks + i) * partial, M, Dp);
      merge(whole, other, item.rows * item.heads, Dp);
    }
    finish<TQ>(a, item, whole);
  });
}

static int64_t work(const Attention& a) {
  int64_t total = 0;
  for (int64_t b = 0; b < a.B; b++) {
    int64_t rows = a.row_offsets[b + 1] - a.row_offsets[b];
    total += rows * (a.window ? min<int64_t>(a.lengths[b], a.window + rows) : a.lengths[b]) * a.H * a.D;
  }
  return total;
}
static void run(const Attention& a, const Team& team) {
#if PENSTOCK_DOT
  if (a.type == 1 && a.cache_type == 1) return attend<Pairs, bf16, bf16>(a, team);
#endif
  WITH_TYPE(a.type, T, WITH_TYPE(a.cache_type, TC, attend<Floats, T, TC>(a, team)));
}
KERNEL(attention, Attention)
