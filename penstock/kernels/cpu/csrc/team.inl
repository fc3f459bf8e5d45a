// The team of threads that runs an operation. All threads call the operation's `run`; barriers separate the phases of
// the work. Barriers spin, because the other threads usually arrive within microseconds.

// Time that a thread spins at a barrier, in ns. Then it sleeps, because another process may need the core.
constexpr int64_t SPIN_TIME = 200000;

// State shared by the threads of a team, on the stack of the thread that opened the parallel region.
struct TeamState {
  alignas(64) int32_t num_arrived;   // number of threads at the barrier
  int32_t num_sleepers;              // number of threads that sleep at the barrier
  alignas(64) int32_t generation;    // number of barriers passed, modulo 2^32; threads wait for it to change
  alignas(64) int64_t num_assigned;  // number of pieces of work that were assigned dynamically, see `over_pieces`
  // For `share`, indexed by generation & 1, because a slow thread may still read the previous pointer.
  alignas(64) void* shared_pointers[2];
  int64_t failure;        // what the first call of `fail` stored; -1: not called
  int64_t wait_time;      // ns that thread 0 waited at those barriers at which it slept
  int64_t last_parallel;  // index of the last operation of a plan that all threads run; -1: no such limit
};

INLINE int64_t nanoseconds() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1000000000 + now.tv_nsec;
}

INLINE void pause() {
#if PENSTOCK_LANES > 4
  _mm_pause();
#elif defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

// Memory that a thread will read soon. The thread prefetches one cache line after another while it waits.
struct PrefetchRange {
  const char *next, *end;
  INLINE_MEMBER void fetch() {
    if (next < end) __builtin_prefetch(next, 0, 2);
    next += 64;
  }
};

// Waits until the generation differs from `old_generation`, and prefetches `range`. Returns the waiting time in ns; 0
// if the thread did not have to sleep.
static __attribute__((noinline)) int64_t wait_for_generation(TeamState& state, int32_t old_generation,
                                                             PrefetchRange& range) {
  const int64_t begin_time = nanoseconds();
  do {
    for (int i = 0; i < 64; i++) {
      if (__atomic_load_n(&state.generation, __ATOMIC_ACQUIRE) != old_generation) return 0;
      if (range.next < range.end) range.fetch();
      else pause();
    }
  } while (nanoseconds() - begin_time < SPIN_TIME);
  // Another process probably uses one of the cores. While this thread sleeps, a thread that has not arrived can run
  // on this core.
#if defined(__linux__)
  __atomic_fetch_add(&state.num_sleepers, 1, __ATOMIC_SEQ_CST);
  while (__atomic_load_n(&state.generation, __ATOMIC_SEQ_CST) == old_generation)
    syscall(SYS_futex, &state.generation, FUTEX_WAIT_PRIVATE, old_generation, nullptr, nullptr, 0);
  __atomic_fetch_sub(&state.num_sleepers, 1, __ATOMIC_RELAXED);
#else
  while (__atomic_load_n(&state.generation, __ATOMIC_ACQUIRE) == old_generation) sched_yield();
#endif
  return nanoseconds() - begin_time;
}

// A thread's handle of its team. Each thread has its own copy.
struct Team {
  int64_t size, rank;
  TeamState* state;
  int64_t operation_index;  // index of the current operation in its plan; -1 outside a plan

  // Returns when all threads of the team have called it.
  INLINE_MEMBER void barrier() const {
    PrefetchRange nothing = {};
    barrier(nothing);
  }
  INLINE_MEMBER void barrier(PrefetchRange& range) const {
    if (size == 1) return;
    // The generation cannot change before this thread arrives.
    const int32_t generation = __atomic_load_n(&state->generation, __ATOMIC_RELAXED);
    if (__atomic_add_fetch(&state->num_arrived, 1, __ATOMIC_ACQ_REL) < size) {
      const int64_t wait_time = wait_for_generation(*state, generation, range);
      if (rank == 0) state->wait_time += wait_time;
      return;
    }
    state->num_arrived = 0;
    state->num_assigned = 0;
    __atomic_store_n(&state->generation, generation + 1, __ATOMIC_SEQ_CST);
#if defined(__linux__)
    if (__atomic_load_n(&state->num_sleepers, __ATOMIC_SEQ_CST))
      syscall(SYS_futex, &state->generation, FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0);
#endif
  }

  // Returns the pointer of thread 0 on all threads. Acts as a barrier. Pointers of other threads are ignored.
  template <class T> INLINE_MEMBER T* share(T* pointer) const {
    if (size == 1) return pointer;
    void** slot = &state->shared_pointers[__atomic_load_n(&state->generation, __ATOMIC_RELAXED) & 1];
    if (rank == 0) *slot = (void*)pointer;
    barrier();
    return (T*)*slot;
  }

  // Reports the index of a bad value, such as a row number outside its table. The kernel of a single operation returns
  // this index. A plan returns the index of the failed operation instead. The operation continues, and its result is
  // undefined.
  INLINE_MEMBER void fail(int64_t bad_index) const {
    int64_t none = -1;
    __atomic_compare_exchange_n(&state->failure, &none, operation_index < 0 ? bad_index : operation_index, false,
                                __ATOMIC_RELAXED, __ATOMIC_RELAXED);
  }
};

// Counts a finished piece of work as progress. Only thread 0 counts, to avoid contention for the cache line.
INLINE void count_progress(const Team& team) {
  if (team.rank) return;
  __atomic_store_n(penstock_progress, __atomic_load_n(penstock_progress, __ATOMIC_RELAXED) + 1, __ATOMIC_RELAXED);
}

// Calls body(piece) for the pieces of work 0 to num_pieces - 1. The first piece of a thread has the number of its rank,
// so that the thread can prefetch its data. All other pieces are assigned dynamically. There is no barrier at the end.
// Call this function at most once between two barriers, because only barriers reset the counter of assigned pieces.
template <class Body> INLINE void over_pieces(const Team& team, int64_t num_pieces, Body body) {
  if (team.size == 1) {
    for (int64_t piece = 0; piece < num_pieces; piece++) {
      body(piece);
      count_progress(team);
    }
    return;
  }
  for (int64_t piece = team.rank; piece < num_pieces;
       piece = team.size + __atomic_fetch_add(&team.state->num_assigned, 1, __ATOMIC_RELAXED)) {
    body(piece);
    count_progress(team);
  }
}

// Calls body(begin, end) on each thread with its range of rows, unless the range is empty. The ranges cover 0:rows.
// There is no barrier at the end.
template <class Body> INLINE void over_rows(const Team& team, int64_t rows, Body body) {
  const int64_t begin = rows * team.rank / team.size, end = rows * (team.rank + 1) / team.size;
  if (begin < end) body(begin, end);
}

// Operations with less work than this, in multiply-adds, run on a single thread, because starting the other threads
// would take longer than the time that they save. In a plan the threads already run, so a parallel operation costs only
// one or two barriers.
constexpr int64_t MIN_PARALLEL_WORK_IN_PLAN = 1 << 16, MIN_PARALLEL_WORK = 4 * MIN_PARALLEL_WORK_IN_PLAN;
constexpr int64_t ELEMENT_WORK = 4;  // cost of loading, changing and storing an element, in multiply-adds

// Runs a single operation. Returns -1, or the first value reported with `fail`.
template <class Args> INLINE int64_t run_single(const Args& a) {
  TeamState state = {};
  state.failure = state.last_parallel = -1;
  if (work(a) < MIN_PARALLEL_WORK) {
    run(a, Team{1, 0, &state, -1});
    return state.failure;
  }
#pragma omp parallel
  run(a, Team{omp_get_num_threads(), omp_get_thread_num(), &state, -1});
  return state.failure;
}

// Returns the memory that a thread reads first in an operation, if it is known before the operation starts (weights).
// Operations can overload this function. By default the range is empty.
template <class Args> INLINE PrefetchRange first_read(const Args&, const Team&) { return {}; }

// The functions of an operation for a plan, which does not know the type of the arguments.
struct Operation {
  int64_t (*work)(const void* arguments);
  void (*run)(const void* arguments, const Team& team);
  PrefetchRange (*first_read)(const void* arguments, const Team& team);
};

// Exports the kernel `name` as a function and as an operation for plans. Requires
//   int64_t work(const Args&)            in multiply-adds; known before the operation starts, equal for all threads
//   void run(const Args&, const Team&)   called by all threads of the team; the caller adds a barrier after it
// and optionally
//   PrefetchRange first_read(const Args&, const Team&)
#define KERNEL(name, Args)                                                                          \
  EXPORT(int64_t, name)(const Args& a) { return run_single(a); }                                    \
  extern "C" {                                                                                      \
  VISIBLE extern const Operation SYMBOL(name##_operation);                                          \
  const Operation SYMBOL(name##_operation) = {                                                      \
      [](const void* arguments) -> int64_t { return work(*(const Args*)arguments); },               \
      [](const void* arguments, const Team& team) { run(*(const Args*)arguments, team); },          \
      [](const void* arguments, const Team& team) { return first_read(*(const Args*)arguments, team); }}; \
  }
