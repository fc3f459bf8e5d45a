// Collectives between the ranks of one host, in memory that the ranks share (`SharedRegion` in
// penstock/distributed/region.py). The last kernel looks up tokens in a rank's part of an embedding table.
//
// A message is a block of at most `capacity` bytes. Messages are numbered from 1; all ranks use the same numbers. For
// message n, each rank
//   1. writes its block into its buffer n & 1,
//   2. publishes n,
//   3. waits until the other ranks have published n or more,
//   4. reads their buffers n & 1.
// A rank publishes n + 1 only after it has read the messages n of all ranks. A rank writes message n + 2 into buffer n
// & 1 only after all ranks have published n + 1, so it never overwrites a message that another rank still reads. In the
// functions, `message` is the number of a message.

constexpr int64_t ABORT_CHECK_INTERVAL = 20000000;  // maximum ns between two checks of a waiting rank for an abort

struct Region {
  int64_t aborted;  // not 0: all collectives fail
  int64_t timeout;  // ns
  int64_t capacity, num_ranks;  // bytes of a message buffer; number of ranks
  int64_t padding[4];
};

struct RankControl {
  int64_t published;     // number of the last published message
  int32_t num_sleepers;  // number of ranks that sleep until `published` changes
  int32_t padding[13];
};

INLINE RankControl& rank_control(Region* region, int64_t rank) { return ((RankControl*)(region + 1))[rank]; }

INLINE char* message_buffer(Region* region, int64_t rank, int64_t message) {
  char* buffers = (char*)&rank_control(region, region->num_ranks);
  return buffers + (2 * rank + (message & 1)) * region->capacity;
}

// Publishes a message of this rank and wakes the ranks that sleep.
static void publish(Region* region, int64_t rank, int64_t message) {
  RankControl& control = rank_control(region, rank);
  __atomic_store_n(&control.published, message, __ATOMIC_SEQ_CST);
#if defined(__linux__)
  if (__atomic_load_n(&control.num_sleepers, __ATOMIC_SEQ_CST))
    syscall(SYS_futex, &control.published, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
#endif
}

// Waits until `rank` has published `message` or a later message. Returns false if the collectives are aborted or the
// time limit is exceeded. Exceeding the time limit aborts the collectives of all ranks.
static __attribute__((noinline)) bool wait_for_message(Region* region, int64_t rank, int64_t message) {
  RankControl& control = rank_control(region, rank);
  auto has_published = [&]() __attribute__((always_inline)) {
    return __atomic_load_n(&control.published, __ATOMIC_ACQUIRE) >= message;
  };
  if (has_published()) return !__atomic_load_n(&region->aborted, __ATOMIC_RELAXED);
  const int64_t begin_time = nanoseconds();
  do {
    for (int i = 0; i < 64; i++) {
      if (has_published()) return !__atomic_load_n(&region->aborted, __ATOMIC_RELAXED);
      pause();
    }
  } while (nanoseconds() - begin_time < SPIN_TIME);
  while (!__atomic_load_n(&region->aborted, __ATOMIC_RELAXED)) {
    if (nanoseconds() - begin_time > region->timeout) {
      __atomic_store_n(&region->aborted, 1, __ATOMIC_SEQ_CST);
      return false;
    }
#if defined(__linux__)
    __atomic_fetch_add(&control.num_sleepers, 1, __ATOMIC_SEQ_CST);
    const int64_t published = __atomic_load_n(&control.published, __ATOMIC_SEQ_CST);
    const timespec interval = {0, ABORT_CHECK_INTERVAL};
    if (published < message)
      syscall(SYS_futex, &control.published, FUTEX_WAIT, (int32_t)published, &interval, nullptr, 0);
    __atomic_fetch_sub(&control.num_sleepers, 1, __ATOMIC_RELAXED);
#else
    sched_yield();
#endif
    if (has_published()) return !__atomic_load_n(&region->aborted, __ATOMIC_RELAXED);
  }
  return false;
}

// Publishes a message and waits for the same message of the other ranks. All threads of a team call this function after
// they have written their parts of the message. If `wait_for_message` fails, reports this with `fail` and returns false
// on all threads.
static bool exchange(Region* region, int64_t rank, int64_t message, const Team& team) {
  team.barrier();
  Region* failed_region = nullptr;
  if (team.rank == 0) {
    publish(region, rank, message);
    for (int64_t other = 0; other < region->num_ranks && !failed_region; other++)
      if (other != rank && !wait_for_message(region, other, message)) failed_region = region;
  }
  if (team.share(failed_region)) {
    team.fail(0);
    return false;
  }
  return true;
}

// Calls body(first_row, rows, first_column, columns, message) for each block of a matrix [rows, width]. A block fits in
// one message. Stops when body returns false.
template <class Body>
static void over_blocks(Region* region, int64_t rank, int64_t rows, int64_t width, int64_t element_bytes, Body body) {
  const int64_t block_columns = min(width, region->capacity / element_bytes);
  const int64_t block_rows = max<int64_t>(region->capacity / (block_columns * element_bytes), 1);
  int64_t message = rank_control(region, rank).published;
  for (int64_t row = 0; row < rows; row += block_rows)
    for (int64_t column = 0; column < width; column += block_columns)
      if (!body(row, min(block_rows, rows - row), column, min(block_columns, width - column), ++message)) return;
}

struct AllReduce {  // x [rows, width], rows strided; out [rows, width] contiguous: the sum over the ranks
  int64_t type;
  const void* x;
  int64_t x_stride;
  void* out;
  int64_t rows, width;
  Region* region;
  int64_t rank;
};

template <class T> static void all_reduce(const AllReduce& a, const Team& team) {
  const int64_t num_ranks = a.region->num_ranks;
  const auto exchange_block = [&](int64_t first_row, int64_t rows, int64_t first_column, int64_t columns,
                                 int64_t message) {
    T* own_buffer = (T*)message_buffer(a.region, a.rank, message);
    over_rows(team, rows, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; i++)
        __builtin_memcpy(own_buffer + i * columns, (const T*)a.x + (first_row + i) * a.x_stride + first_column,
                         columns * sizeof(T));
    });
    if (!exchange(a.region, a.rank, message, team)) return false;
    over_rows(team, rows, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; i++) {
        T* out = (T*)a.out + (first_row + i) * a.width + first_column;
        const int64_t block_offset = i * columns;
        for_vectors(columns, EACH_VECTOR {
          vf total = load((const T*)message_buffer(a.region, 0, message) + block_offset + i, lanes);
          for (int64_t rank = 1; rank < num_ranks; rank++)
            total += load((const T*)message_buffer(a.region, rank, message) + block_offset + i, lanes);
          store(out + i, total, lanes);
        });
      }
    });
    return true;
  };
  over_blocks(a.region, a.rank, a.rows, a.width, sizeof(T), exchange_block);
}

static int64_t work(const AllReduce& a) { return ELEMENT_WORK * a.rows * a.width; }
static void run(const AllReduce& a, const Team& team) { WITH_TYPE(a.type, T, all_reduce<T>(a, team)); }
KERNEL(all_reduce, AllReduce)

struct AllGather {  // x [rows, widths[rank]], rows strided; out [rows, sum of widths] contiguous, by rank
  int64_t element_bytes;
  const char* x;
  int64_t x_stride;  // bytes
  char* out;
  int64_t rows;
  const int64_t* widths;
  Region* region;
  int64_t rank;
};

static int64_t work(const AllGather& a) {
  int64_t total_width = 0;
  for (int64_t rank = 0; rank < a.region->num_ranks; rank++) total_width += a.widths[rank];
  return ELEMENT_WORK * a.rows * total_width;
}

static void run(const AllGather& a, const Team& team) {
  const int64_t num_ranks = a.region->num_ranks;
  int64_t max_width = 0, total_width = 0;
  for (int64_t rank = 0; rank < num_ranks; rank++)
    max_width = max(max_width, a.widths[rank]), total_width += a.widths[rank];
  const auto exchange_block = [&](int64_t first_row, int64_t rows, int64_t first_column, int64_t columns,
                                 int64_t message) {
    const auto row_bytes = [&](int64_t rank) __attribute__((always_inline)) {
      return max(min(columns, a.widths[rank] - first_column), (int64_t)0) * a.element_bytes;
    };
    char* own_buffer = message_buffer(a.region, a.rank, message);
    over_rows(team, rows, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; i++)
        __builtin_memcpy(own_buffer + i * columns * a.element_bytes,
                         a.x + (first_row + i) * a.x_stride + first_column * a.element_bytes, row_bytes(a.rank));
    });
    if (!exchange(a.region, a.rank, message, team)) return false;
    over_rows(team, rows, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; i++) {
        char* out = a.out + (first_row + i) * total_width * a.element_bytes + first_column * a.element_bytes;
        for (int64_t rank = 0; rank < num_ranks; out += a.widths[rank++] * a.element_bytes)
          __builtin_memcpy(out, message_buffer(a.region, rank, message) + i * columns * a.element_bytes,
                           row_bytes(rank));
      }
    });
    return true;
  };
  over_blocks(a.region, a.rank, a.rows, max_width, a.element_bytes, exchange_block);
}
KERNEL(all_gather, AllGather)

struct FromRank0 {  // copies the `data` of rank 0 to the `data` of the other ranks
  char* data;
  int64_t num_bytes;  // at most the `capacity` of the region
  Region* region;
  int64_t rank;
};

static int64_t work(const FromRank0& a) { return a.num_bytes; }
static void run(const FromRank0& a, const Team& team) {
  const int64_t message = rank_control(a.region, a.rank).published + 1;
  if (team.rank == 0 && a.rank == 0) __builtin_memcpy(message_buffer(a.region, 0, message), a.data, a.num_bytes);
  if (!exchange(a.region, a.rank, message, team)) return;
  if (team.rank == 0 && a.rank) __builtin_memcpy(a.data, message_buffer(a.region, 0, message), a.num_bytes);
}
KERNEL(from_rank_0, FromRank0)

// Copies the rows of tokens from a part of an embedding table to out [rows, row_bytes]. The part has table_rows rows,
// table_stride bytes apart, for the tokens first_token to first_token + table_rows - 1. Rows of other tokens become 0.
struct EmbeddingPart {
  const int64_t* tokens;
  const char* table;
  char* out;
  int64_t rows, first_token, table_rows, row_bytes, table_stride;
};

static int64_t work(const EmbeddingPart& a) { return ELEMENT_WORK * a.rows * a.row_bytes / 4; }
static void run(const EmbeddingPart& a, const Team& team) {
  over_rows(team, a.rows, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row++) {
      const int64_t table_row = a.tokens[row] - a.first_token;
      char* out = a.out + row * a.row_bytes;
      if (table_row >= 0 && table_row < a.table_rows)
        __builtin_memcpy(out, a.table + table_row * a.table_stride, a.row_bytes);
      else __builtin_memset(out, 0, a.row_bytes);
    }
  });
}
KERNEL(embedding_part, EmbeddingPart)
