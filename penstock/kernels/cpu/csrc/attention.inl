// Causal attention over the paged cache: one pass, blocks read in place, an online softmax in float32.
//
// The work is cut into items. An item is a tile of queries of one sequence with the same kv head (some rows, the
// heads of the group) and all keys that they see. Keys are processed in tiles of TILE. Every CHUNK of keys has a
// separate softmax, and the chunks are merged from left to right. Tiles and chunks start at multiples of their size,
// counted from position 0, so that the bits of a query's result do not depend on its batch, its prompt chunk, or the
// number of threads. If there are too few items for the threads, the chunks of an item are separate tasks, merged
// afterwards.
//
// An item with many queries packs each tile of keys and values once for all queries. An item with few queries loads
// them into registers directly. Both variants do the same additions in the same order and give the same bits.

constexpr int64_t TILE = 64;
constexpr int64_t CHUNK = 512;
// The range of the number of queries of an item, if a sequence is long and all its queries see the same keys. Each item
// packs its keys and values, so larger items pack less in total.
constexpr int64_t MANY_QUERIES = 128, MAX_QUERIES = 512;
constexpr int64_t ITEMS_PER_THREAD = 8;  // an item may have more than MANY_QUERIES if each thread gets this many items
// Maximum number of queries of an item for short sequences, and if queries see different keys. Such an item computes
// the scores of all its queries with all its keys, including masked ones. It is also the maximum number of heads of an
// item.
constexpr int64_t MAX_MASKED_QUERIES = 64;
constexpr int64_t FEW_QUERIES = 8;  // keys and values are packed for items with more queries than this

struct Attention {
  int64_t type, cache_type;  // cache_type 2: int8
  const void *q, *cache;  // [T, H, D] with strides; [2, N, K, S, D]
  const float* scales;    // [2, N, K, S] of an int8 cache, else null
  void* out;              // [T, H, D]
  const int32_t *tables, *row_offsets, *lengths;
  const float* sinks;  // [H] or null
  const float* bias;   // [H, ...] or null: bias[h * bias_head + key - query] is added to a scaled score
  int64_t B, H, N, K, S, D, q_row, q_head, table_stride;
  int64_t window;     // number of keys up to and including the query; 0: all
  int64_t is_chunked;  // whether windows start at multiples of the window size (chunked attention)
  int64_t ahead;      // number of keys after the query that it sees; 0: causal attention
  int64_t bias_head;
  double scale, cap;  // cap 0: no cap
};

// Returns the position of the first key that the query at `position` sees.
INLINE int64_t first_key(const Attention& a, int64_t position) {
  if (!a.window) return 0;
  return a.is_chunked ? position / a.window * a.window : max<int64_t>(0, position - a.window + 1);
}

// Numbers the items of a call. The numbering depends only on the arguments of the call and the number of threads.
struct Items {
  int64_t group, heads, head_tiles, rows;  // heads: per item; rows: maximum per item
  int64_t* first;                          // [B + 1] number of the first item of each sequence
  int64_t count, max_chunks;
};

struct Item {
  int64_t b, kv_head, first_head, heads, row, rows;  // row: index in the ragged batch
  int64_t position;                                  // of the first row
  int64_t begin, end;                                // keys that at least one row sees
  const Item* next;                                  // the item that the thread probably gets next, or null
};

static Items items_of(const Attention& a, int64_t threads, int64_t* first) {
  Items items = {};
  items.group = a.H / a.K;
  items.heads = min(items.group, MAX_MASKED_QUERIES);
  items.head_tiles = ceil_div(items.group, items.heads);
  int64_t longest = 0;
  for (int64_t b = 0; b < a.B; b++) longest = max<int64_t>(longest, a.row_offsets[b + 1] - a.row_offsets[b]);
  int64_t queries = MAX_MASKED_QUERIES;
  if (a.ahead && !a.window && longest * items.heads >= 4 * MANY_QUERIES) {
    queries = MANY_QUERIES;
    const int64_t total = a.row_offsets[a.B] * a.H;
    while (queries < MAX_QUERIES && total >= 2 * queries * ITEMS_PER_THREAD * threads) queries *= 2;
  }
  items.rows = max<int64_t>(1, min(queries / items.heads, longest));
  items.first = first;
  for (int64_t b = 0; b < a.B; b++) {
    int64_t rows = a.row_offsets[b + 1] - a.row_offsets[b];
    int64_t seen = a.window ? min<int64_t>(a.lengths[b], a.window + rows + a.ahead) : a.lengths[b];
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
  int64_t within = items.first[b + 1] - 1 - number;  // the last rows come first, because they see the most keys
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
  item.begin = first_key(a, item.position);
  item.end = min<int64_t>(a.lengths[b], item.position + item.rows + a.ahead);
  item.next = nullptr;
  return item;
}

#include "attention_tile.inl"

// Computes the partial softmax of one chunk of keys into `sums`.
template <class P, class TC>
static void attend_chunk(const Attention& a, const Item& item, Packed<P>& packed, Partial& sums, int64_t chunk) {
  const int64_t Dp = padded_width(a.D), M = padded_count(item.rows * item.heads);
  for (int64_t m = 0; m < M; m++) sums.top[m] = -__builtin_inff();
  for (int64_t i = 0; i < M * Dp; i += W) store(sums.out + i, vf{});
  for (int64_t m = 0; m < M; m++) store(sums.total + m * W, vf{});
  int64_t begin = max(item.begin, chunk * CHUNK), end = min(item.end, (chunk + 1) * CHUNK);
  for (int64_t tile = begin / TILE * TILE; tile < end; tile += TILE) attend_tile<P, TC>(a, item, packed, sums, tile);
}

static void merge(Partial& sums, const Partial& next, int64_t M, int64_t Dp) {
  const float masked = -__builtin_inff();
  for (int64_t m = 0; m < M; m++) {
    if (next.top[m] == masked) continue;
    float top = max(sums.top[m], next.top[m]);
    // If all keys of the earlier chunks are masked, their share is 0.
    vf old_share = sums.top[m] == masked ? vf{} : exp(all(sums.top[m] - top));
    vf new_share = exp(all(next.top[m] - top));
    auto add = [&](float* to, const float* from) { store(to, load(to) * old_share + load(from) * new_share); };
    sums.top[m] = top;
    add(sums.total + m * W, next.total + m * W);
    for (int64_t i = 0; i < Dp; i += W) add(sums.out + m * Dp + i, next.out + m * Dp + i);
  }
}

// Calls body(m, row, head) for each query of an item: `row` of the item, `head` of the model.
template <class Body> INLINE void over_queries(const Attention& a, const Item& item, Body body) {
  const int64_t first = item.kv_head * (a.H / a.K) + item.first_head;
  int64_t m = 0;
  for (int64_t row = 0; row < item.rows; row++)
    for (int64_t head = first; head < first + item.heads; head++) body(m++, row, head);
}

template <class P, class TQ> static void finish(const Attention& a, const Item& item, const Partial& sums) {
  const int64_t Dp = padded_width(a.D), M = item.rows * item.heads;
  float totals[MAX_QUERIES + 4];
  for (int64_t m = 0; m < M; m += 4) {
    vf lanes[4];
    for (int64_t i = 0; i < 4; i++) lanes[i] = m + i < M ? load(sums.total + (m + i) * W) : vf{};
    const vf total = sum_each(lanes);
    for (int64_t i = 0; i < 4; i++) totals[m + i] = total[i];
  }
  over_queries(a, item, [&](int64_t m, int64_t row, int64_t head) __attribute__((always_inline)) {
    float share = 1, total = totals[m];
    if (a.sinks) {
      float top = max(sums.top[m], a.sinks[head]);
      share = exp(all(sums.top[m] - top))[0];
      total = total * share + exp(all(a.sinks[head] - top))[0];
    }
    TQ* out = (TQ*)a.out + ((item.row + row) * a.H + head) * a.D;
    const float *from = sums.out + m * Dp, factor = share / total;
    for (int64_t d = 0; d < a.D; d += 2 * W) {
      vf ordered[2];
      load_in_order<P>(from + d, ordered);
      for (int64_t v = 0; v < 2; v++) {
        const int64_t count = a.D - d - v * W;
        if (count >= W) store(out + d + v * W, ordered[v] * factor);
        else if (count > 0) store(out + d + v * W, ordered[v] * factor, count);
      }
    }
  });
}

template <class P, class TQ> static void pack_queries(const Attention& a, const Item& item, Packed<P>& packed) {
  const int64_t M = item.rows * item.heads, units = padded_units<P>(a.D);
  over_queries(a, item, [&](int64_t m, int64_t row, int64_t head) __attribute__((always_inline)) {
    const TQ* q = (const TQ*)a.q + (item.row + row) * a.q_row + head * a.q_head;
    packed.q_scales[m] = pack_query(q, packed.q + m * units, a.D, P{});
  });
  for (int64_t m = M; m < padded_count(M); m++) {
    __builtin_memset((void*)(packed.q + m * units), 0, units * 4);
    __builtin_memset((void*)(packed.weights + m * (TILE / P::TERMS)), 0, TILE / P::TERMS * 4);
    packed.factors[m] = 0;
  }
}

template <class P, class TQ, class TC> static void attend(const Attention& a, const Team& team) {
  const int64_t D = a.D, Dp = padded_width(D);
  const int64_t header = round_up(sizeof(Items) + (a.B + 1) * 8, 64);  // items, then the first of each sequence
  char* memory = nullptr;
  int64_t chunks = 1;
  auto number = [&] { *(Items*)memory = items_of(a, team.size, (int64_t*)(memory + sizeof(Items))); };
  if (team.rank == 0) {
    memory = (char*)penstock_scratch(SHARED, header);
    number();
  }
  memory = team.share(memory);
  Items items = *(const Items*)memory;
  const int64_t M = padded_count(items.rows * items.heads), partial = Partial::floats(M, Dp);
  const bool split = team.size > 1 && items.count < 4 * team.size && items.max_chunks > 2;
  if (split) {
    chunks = items.max_chunks;
    team.barrier();  // all threads have read the items
    if (team.rank == 0) {  // a larger request may return other memory: compute the numbering again
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
    Item item = item_of(a, items, task / chunks), later;
    int64_t first = item.begin / CHUNK, last = (item.end - 1) / CHUNK;
    if (split) {
      int64_t chunk = first + task % chunks;
      if (chunk > last) return;
      pack_queries<P, TQ>(a, item, packed);
      Partial task_sums(partials + task * partial, M, Dp);
      attend_chunk<P, TC>(a, item, packed, task_sums, chunk);
      return;
    }
    if (task == team.rank) NextTile<TC>(a, item).prefetch_all();
    if (task + team.size < items.count) {
      later = item_of(a, items, task + team.size);
      item.next = &later;
    }
    pack_queries<P, TQ>(a, item, packed);
    attend_chunk<P, TC>(a, item, packed, sums, first);
    for (int64_t chunk = first + 1; chunk <= last; chunk++) {
      attend_chunk<P, TC>(a, item, packed, next, chunk);
      merge(sums, next, item.rows * item.heads, Dp);
    }
    finish<P, TQ>(a, item, sums);
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
    finish<P, TQ>(a, item, whole);
  });
}

static int64_t work(const Attention& a) {
  int64_t total = 0;
  for (int64_t b = 0; b < a.B; b++) {
    int64_t rows = a.row_offsets[b + 1] - a.row_offsets[b];
    total += rows * (a.window ? min<int64_t>(a.lengths[b], a.window + rows + a.ahead) : a.lengths[b]) * a.H * a.D;
  }
  return 2 * total;  // products with the keys and with the values
}
#if PENSTOCK_DOT
// Returns whether an item has more than FEW_QUERIES queries.
static bool has_many_queries(const Attention& a) {
  const int64_t threshold = (FEW_QUERIES + 1) * a.K;  // a sequence has rows * H / K queries for each kv head
  for (int64_t b = 0; b < a.B; b++)
    if ((a.row_offsets[b + 1] - a.row_offsets[b]) * a.H >= threshold) return true;
  return false;
}
#endif
static void run(const Attention& a, const Team& team) {
#if PENSTOCK_DOT
  if (a.type == 1 && a.cache_type == 1) {
    if (has_many_queries(a) && dot_is_slow()) return attend<WidenedPairs, bf16, bf16>(a, team);
    return attend<Pairs, bf16, bf16>(a, team);
  }
  if (a.type == 1 && a.cache_type == 2) return attend<Shorts, bf16, int8_t>(a, team);
#endif
  if (a.cache_type == 2) WITH_TYPE(a.type, T, attend<Floats, T, int8_t>(a, team));
  else WITH_TYPE(a.type, T, WITH_TYPE(a.cache_type, TC, attend<Floats, T, TC>(a, team)));
}
KERNEL(attention, Attention)
