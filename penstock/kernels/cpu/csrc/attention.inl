// Attention over the paged KV cache in one pass, with an online softmax in float32. Attention is causal unless
// `keys_ahead` is set. Cache blocks are read in place.
//
// The work is divided into items. An item has queries of one sequence and kv head, and all keys that these queries see.
// The queries are those of consecutive rows and of query heads that share the kv head. Keys are processed in tiles of
// TILE keys. Each chunk of CHUNK keys has a partial softmax, and the partial softmaxes are merged in order of position.
// Tiles and chunks start at multiples of their size, counted from position 0. The bits of a query's result therefore do
// not depend on its batch, the chunks of its prefill, or the number of threads. If there are several threads and fewer
// than 4 items per thread, and an item may have more than 2 chunks, each chunk of an item is a separate task.
//
// An item with more than FEW_QUERIES queries packs each tile of keys and values once for all its queries. Other items
// load keys and values into registers without packing, except in products of type WidenedPairs. Both variants do the
// same additions in the same order and give the same bits.

constexpr int64_t TILE = 64;    // keys
constexpr int64_t CHUNK = 512;  // keys
// Smallest and largest limit on the queries of an item if queries see later keys, there is no window, and the longest
// sequence is long. In encoders, all queries of a sequence then see the same keys. Each item packs its keys and values,
// so fewer and larger items pack less in total.
constexpr int64_t MANY_QUERIES = 128, MAX_QUERIES = 512;
constexpr int64_t ITEMS_PER_THREAD = 8;  // the limit is doubled while each thread still gets this many items
// Maximum number of queries of an item in all other cases: short sequences, causal attention, and windows. An item
// computes the scores of all its queries with all its keys, including masked keys, so larger items would compute more
// masked scores. The constant is also the maximum number of heads of an item.
constexpr int64_t MAX_MASKED_QUERIES = 64;
constexpr int64_t FEW_QUERIES = 8;  // keys and values are packed for items with more queries than this

struct Attention {
  int64_t type, cache_type;  // 0: float32, 1: bfloat16; cache_type 2: int8
  const void *q, *cache;  // [T, H, D] with strides; [2, N, K, S, D]
  const float* scales;    // [2, N, K, S] of an int8 cache, else null
  void* out;              // [T, H, D]
  const int32_t *block_tables, *row_offsets, *lengths;
  const float* sinks;        // [H] or null
  const float* bias;         // [H, ...] or null: bias[h * bias_head_stride + key - query] is added to a scaled score
  int64_t B, H, N, K, S, D;  // sequences, query heads, cache blocks, kv heads, tokens per block, head size
  int64_t q_row_stride, q_head_stride, table_stride;
  int64_t window;      // window size: maximum number of keys that a query sees up to its own position; 0: no limit
  int64_t is_chunked;  // whether windows start at multiples of the window size (chunked attention)
  int64_t keys_ahead; // number of keys after its position that a query sees; 0: causal attention
  int64_t bias_head_stride;
  double scale, soft_cap;  // soft_cap: limit of the scores; 0: none
};

// Returns the position of the first key that the query at `position` sees.
INLINE int64_t first_key(const Attention& a, int64_t position) {
  if (!a.window) return 0;
  return a.is_chunked ? position / a.window * a.window : max<int64_t>(0, position - a.window + 1);
}

// The numbering of the items of a call. It depends only on the arguments of the call and the number of threads.
struct Items {
  int64_t heads_per_kv_head;      // query heads per kv head
  int64_t max_heads, head_tiles;  // maximum number of query heads per item; number of items per kv head and row tile
  int64_t max_rows;               // maximum number of rows per item
  int64_t* first_items;           // [B + 1]: number of the first item of each sequence
  int64_t num_items, max_chunks;  // number of items; upper bound for the number of chunks of an item
};

struct Item {
  int64_t b, kv_head;          // index of the sequence; kv head
  int64_t first_head, heads;   // first query head, relative to those of the kv head; their number
  int64_t first_row, rows;     // index of the first row in the ragged batch; number of rows
  int64_t position;            // of the first row
  int64_t begin_key, end_key;  // keys that at least one row sees
  const Item* next;            // the item that the thread probably gets next, or null
};

// Divides a call into numbered items. `first_items` becomes the array Items::first_items.
static Items number_items(const Attention& a, int64_t threads, int64_t* first_items) {
  Items items = {};
  items.heads_per_kv_head = a.H / a.K;
  items.max_heads = min(items.heads_per_kv_head, MAX_MASKED_QUERIES);
  items.head_tiles = ceil_div(items.heads_per_kv_head, items.max_heads);
  int64_t max_sequence_rows = 0;
  for (int64_t b = 0; b < a.B; b++)
    max_sequence_rows = max<int64_t>(max_sequence_rows, a.row_offsets[b + 1] - a.row_offsets[b]);
  int64_t max_queries = MAX_MASKED_QUERIES;
  if (a.keys_ahead && !a.window && max_sequence_rows * items.max_heads >= 4 * MANY_QUERIES) {
    max_queries = MANY_QUERIES;
    const int64_t total_queries = a.row_offsets[a.B] * a.H;
    while (max_queries < MAX_QUERIES && total_queries >= 2 * max_queries * ITEMS_PER_THREAD * threads) max_queries *= 2;
  }
  items.max_rows = max<int64_t>(1, min(max_queries / items.max_heads, max_sequence_rows));
  items.first_items = first_items;
  for (int64_t b = 0; b < a.B; b++) {
    int64_t rows = a.row_offsets[b + 1] - a.row_offsets[b];
    int64_t num_keys = a.window ? min<int64_t>(a.lengths[b], a.window + rows + a.keys_ahead) : a.lengths[b];
    first_items[b] = items.num_items;
    items.num_items += ceil_div(rows, items.max_rows) * a.K * items.head_tiles;
    items.max_chunks = max(items.max_chunks, num_keys / CHUNK + 2);
  }
  first_items[a.B] = items.num_items;
  return items;
}

static Item find_item(const Attention& a, const Items& items, int64_t item_index) {
  int64_t b = 0, end = a.B;  // binary search for the last b with first_items[b] <= item_index
  while (end - b > 1) {
    int64_t middle = (b + end) / 2;
    (items.first_items[middle] <= item_index ? b : end) = middle;
  }
  // Of the items of a sequence, those with the last rows start first, because they see the most keys.
  int64_t index_in_sequence = items.first_items[b + 1] - 1 - item_index;
  Item item;
  item.b = b;
  item.first_head = index_in_sequence % items.head_tiles * items.max_heads;
  item.heads = min(items.max_heads, items.heads_per_kv_head - item.first_head);
  index_in_sequence /= items.head_tiles;
  item.kv_head = index_in_sequence % a.K;
  int64_t row = index_in_sequence / a.K * items.max_rows, rows = a.row_offsets[b + 1] - a.row_offsets[b];
  item.rows = min(items.max_rows, rows - row);
  item.first_row = a.row_offsets[b] + row;
  item.position = a.lengths[b] - rows + row;
  item.begin_key = first_key(a, item.position);
  item.end_key = min<int64_t>(a.lengths[b], item.position + item.rows + a.keys_ahead);
  item.next = nullptr;
  return item;
}

#include "attention_tile.inl"

// Computes the partial softmax of one chunk of keys into `sums`.
template <class P, class TC>
static void attend_chunk(const Attention& a, const Item& item, PackedOperands<P>& packed, PartialSoftmax& sums,
                         int64_t chunk) {
  const int64_t Dp = padded_width(a.D), M = padded_count(item.rows * item.heads);
  for (int64_t m = 0; m < M; m++) sums.max_score[m] = -__builtin_inff();
  for (int64_t i = 0; i < M * Dp; i += W) store(sums.out + i, vf{});
  for (int64_t m = 0; m < M; m++) store(sums.sum_exp + m * W, vf{});
  int64_t begin = max(item.begin_key, chunk * CHUNK), end = min(item.end_key, (chunk + 1) * CHUNK);
  for (int64_t tile = begin / TILE * TILE; tile < end; tile += TILE) attend_tile<P, TC>(a, item, packed, sums, tile);
}

// Merges the partial softmax `next` of later keys into `sums`, for M queries.
static void merge_partial(PartialSoftmax& sums, const PartialSoftmax& next, int64_t M, int64_t Dp) {
  const float masked = -__builtin_inff();
  for (int64_t m = 0; m < M; m++) {
    if (next.max_score[m] == masked) continue;
    float new_max = max(sums.max_score[m], next.max_score[m]);
    // If all keys of the earlier chunks are masked, their factor is 0.
    vf factor = sums.max_score[m] == masked ? vf{} : exp(all(sums.max_score[m] - new_max));
    vf next_factor = exp(all(next.max_score[m] - new_max));
    auto add = [&](float* to, const float* from) { store(to, load(to) * factor + load(from) * next_factor); };
    sums.max_score[m] = new_max;
    add(sums.sum_exp + m * W, next.sum_exp + m * W);
    for (int64_t i = 0; i < Dp; i += W) add(sums.out + m * Dp + i, next.out + m * Dp + i);
  }
}

// Calls body(m, row, head) for the queries m of an item. `row` counts from the item's first row. `head` is the number
// of the query head in the layer.
template <class Body> INLINE void for_each_query(const Attention& a, const Item& item, Body body) {
  const int64_t first_head = item.kv_head * (a.H / a.K) + item.first_head;
  int64_t m = 0;
  for (int64_t row = 0; row < item.rows; row++)
    for (int64_t head = first_head; head < first_head + item.heads; head++) body(m++, row, head);
}

// Divides the weighted sums of values of an item by the sums of exponentials, including the sinks, and stores the
// results to `a.out`.
template <class P, class TQ>
static void store_results(const Attention& a, const Item& item, const PartialSoftmax& sums) {
  const int64_t Dp = padded_width(a.D), M = item.rows * item.heads;
  float totals[MAX_QUERIES + 4];
  for (int64_t m = 0; m < M; m += 4) {
    vf lanes[4];
    for (int64_t i = 0; i < 4; i++) lanes[i] = m + i < M ? load(sums.sum_exp + (m + i) * W) : vf{};
    const vf total = sum_each(lanes);
    for (int64_t i = 0; i < 4; i++) totals[m + i] = total[i];
  }
  for_each_query(a, item, [&](int64_t m, int64_t row, int64_t head) __attribute__((always_inline)) {
    float shrink_factor = 1, total = totals[m];
    if (a.sinks) {
      float max_score = max(sums.max_score[m], a.sinks[head]);
      shrink_factor = exp(all(sums.max_score[m] - max_score))[0];
      total = total * shrink_factor + exp(all(a.sinks[head] - max_score))[0];
    }
    TQ* out = (TQ*)a.out + ((item.first_row + row) * a.H + head) * a.D;
    const float *weighted_sums = sums.out + m * Dp, factor = shrink_factor / total;
    for (int64_t d = 0; d < a.D; d += 2 * W) {
      vf restored[2];
      load_restored<P>(weighted_sums + d, restored);
      for (int64_t v = 0; v < 2; v++) {
        const int64_t count = a.D - d - v * W;
        if (count >= W) store(out + d + v * W, restored[v] * factor);
        else if (count > 0) store(out + d + v * W, restored[v] * factor, count);
      }
    }
  });
}

template <class P, class TQ> static void pack_queries(const Attention& a, const Item& item, PackedOperands<P>& packed) {
  const int64_t M = item.rows * item.heads, units = padded_units<P>(a.D);
  for_each_query(a, item, [&](int64_t m, int64_t row, int64_t head) __attribute__((always_inline)) {
    const TQ* q = (const TQ*)a.q + (item.first_row + row) * a.q_row_stride + head * a.q_head_stride;
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
  const int64_t items_bytes = round_up(sizeof(Items) + (a.B + 1) * 8, 64);  // Items, then the array Items::first_items
  char* memory = nullptr;
  int64_t chunks = 1;
  auto store_items = [&] { *(Items*)memory = number_items(a, team.size, (int64_t*)(memory + sizeof(Items))); };
  if (team.rank == 0) {
    memory = (char*)penstock_scratch(SHARED, items_bytes);
    store_items();
  }
  memory = team.share(memory);
  Items items = *(const Items*)memory;
  const int64_t M = padded_count(items.max_rows * items.max_heads), partial_floats = PartialSoftmax::num_floats(M, Dp);
  const bool is_split = team.size > 1 && items.num_items < 4 * team.size && items.max_chunks > 2;
  if (is_split) {
    chunks = items.max_chunks;
    team.barrier();  // all threads have read the items
    if (team.rank == 0) {  // the larger scratch memory may have another address, so the items are stored again
      memory = (char*)penstock_scratch(SHARED, items_bytes + items.num_items * chunks * partial_floats * 4);
      store_items();
    }
    memory = team.share(memory);
    items = *(const Items*)memory;
  }
  float* partials = (float*)(memory + items_bytes);
  float* own_memory =
      (float*)penstock_scratch(PRIVATE, (PackedOperands<P>::num_floats(M, D, Dp) + 2 * partial_floats) * 4);
  PartialSoftmax sums(own_memory, M, Dp), next_sums(own_memory + partial_floats, M, Dp);
  PackedOperands<P> packed(own_memory + 2 * partial_floats, M, D, Dp);
  over_pieces(team, items.num_items * chunks, [&](int64_t task) {
    Item item = find_item(a, items, task / chunks), next_item;
    int64_t first_chunk = item.begin_key / CHUNK, last_chunk = (item.end_key - 1) / CHUNK;
    if (is_split) {
      int64_t chunk = first_chunk + task % chunks;
      if (chunk > last_chunk) return;
      pack_queries<P, TQ>(a, item, packed);
      PartialSoftmax task_sums(partials + task * partial_floats, M, Dp);
      attend_chunk<P, TC>(a, item, packed, task_sums, chunk);
      return;
    }
    if (task == team.rank) NextTile<TC>(a, item).prefetch_all();
    if (task + team.size < items.num_items) {
      next_item = find_item(a, items, task + team.size);
      item.next = &next_item;
    }
    pack_queries<P, TQ>(a, item, packed);
    attend_chunk<P, TC>(a, item, packed, sums, first_chunk);
    for (int64_t chunk = first_chunk + 1; chunk <= last_chunk; chunk++) {
      attend_chunk<P, TC>(a, item, packed, next_sums, chunk);
      merge_partial(sums, next_sums, item.rows * item.heads, Dp);
    }
    store_results<P, TQ>(a, item, sums);
  });
  if (!is_split) return;
  team.barrier();
  over_pieces(team, items.num_items, [&](int64_t item_index) {
    Item item = find_item(a, items, item_index);
    int64_t num_chunks = (item.end_key - 1) / CHUNK - item.begin_key / CHUNK + 1;
    PartialSoftmax merged(partials + item_index * chunks * partial_floats, M, Dp);
    for (int64_t i = 1; i < num_chunks; i++) {
      PartialSoftmax chunk_sums(partials + (item_index * chunks + i) * partial_floats, M, Dp);
      merge_partial(merged, chunk_sums, item.rows * item.heads, Dp);
    }
    store_results<P, TQ>(a, item, merged);
  });
}

static int64_t work(const Attention& a) {
  int64_t total = 0;
  for (int64_t b = 0; b < a.B; b++) {
    int64_t rows = a.row_offsets[b + 1] - a.row_offsets[b];
    total += rows * (a.window ? min<int64_t>(a.lengths[b], a.window + rows + a.keys_ahead) : a.lengths[b]) * a.H * a.D;
  }
  return 2 * total;  // products with the keys and with the values
}
#if PENSTOCK_DOT
// Returns whether a sequence has more than FEW_QUERIES queries for each kv head.
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
