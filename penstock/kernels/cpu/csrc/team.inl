// The team of threads that runs an operation. All threads call its `run`; barriers separate the phases of the work.
// Barriers spin, because the other threads are working and arrive within microseconds.

constexpr int64_t SPIN = 200000;  // ns that a thread spins at a barrier; then it sleeps, because another process may need the core

// State shared by the threads of a team, on the stack of the thread that opened the parallel region.
struct TeamState {
  alignas(64) int32_t arrived;  // number of threads at the barrier
  int32_t sleepers;
  alignas(64) int32_t generation;  // counts barriers; threads wait for it to change
  alignas(64) int64_t next;        // next piece of work to assign
  alignas(64) void* shared[2];     // indexed by generation: a slow thread may still read the previous value
  int64_t failed;                  // argument of `fail`; -1: none
  int64_t waited;                  // ns that thread 0 waited at barriers after spinning
  int64_t last;                    // step of a plan after which all threads but thread 0 leave; -1: none
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

// Memory that a thread will read soon. It prefetches the memory line by line while it waits.
struct Ahead {
  const char *next, *end;
  INLINE_MEMBER void fetch() {
    if (next < end) __builtin_prefetch(next, 0, 2);
    next += 64;
  }
};

// Waits until the generation differs from `old`. Returns the ns waited, or 0 if spinning was enough.
static __attribute__((noinline)) int64_t wait_for_generation(TeamState& state, int32_t old, Ahead& ahead) {
  const int64_t begin = nanoseconds();
  do {
    for (int i = 0; i < 64; i++) {
      if (__atomic_load_n(&state.generation, __ATOMIC_ACQUIRE) != old) return 0;
      if (ahead.next < ahead.end) ahead.fetch();
      else pause();
    }
  } while (nanoseconds() - begin < SPIN);
  // Another process uses one of the cores. While this thread sleeps, the thread that it waits for can run on this core.
#if defined(__linux__)
  __atomic_fetch_add(&state.sleepers, 1, __ATOMIC_SEQ_CST);
  while (__atomic_load_n(&state.generation, __ATOMIC_SEQ_CST) == old)
    syscall(SYS_futex, &state.generation, FUTEX_WAIT_PRIVATE, old, nullptr, nullptr, 0);
  __atomic_fetch_sub(&state.sleepers, 1, __ATOMIC_RELAXED);
#else
  while (__atomic_load_n(&state.generation, __ATOMIC_ACQUIRE) == old) sched_yield();
#endif
  return nanoseconds() - begin;
}

// The view that one thread has of its team; each thread has its own copy.
struct Team {
  int64_t size, rank;
  TeamState* state;
  int64_t record;  // index in the step plan; -1: none

  // Returns when all threads of the team have called it.
  INLINE_MEMBER void barrier() const {
    Ahead nothing = {};
    barrier(nothing);
  }
  INLINE_MEMBER void barrier(Ahead& ahead) const {
    if (size == 1) return;
    const int32_t generation = __atomic_load_n(&state->generation, __ATOMIC_RELAXED);  // waits for this thread
    if (__atomic_add_fetch(&state->arrived, 1, __ATOMIC_ACQ_REL) < size) {
      const int64_t waited = wait_for_generation(*state, generation, ahead);
      if (rank == 0) state->waited += waited;
      return;
    }
    state->arrived = 0;
    state->next = 0;
    __atomic_store_n(&state->generation, generation + 1, __ATOMIC_SEQ_CST);
#if defined(__linux__)
    if (__atomic_load_n(&state->sleepers, __ATOMIC_SEQ_CST))
      syscall(SYS_futex, &state->generation, FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0);
#endif
  }

  // Returns rank 0's pointer to all threads; acts as a barrier. Pointers of other ranks are ignored.
  template <class T> INLINE_MEMBER T* share(T* pointer) const {
    if (size == 1) return pointer;
    void** slot = &state->shared[__atomic_load_n(&state->generation, __ATOMIC_RELAXED) & 1];
    if (rank == 0) *slot = (void*)pointer;
    barrier();
    return (T*)*slot;
  }

  // Reports the index of a bad value, such as a row number outside its table. A single operation returns this index; a
  // plan returns the number of the first failed record. The operation continues, and its result is undefined.
  INLINE_MEMBER void fail(int64_t argument) const {
    int64_t none = -1;
    __atomic_compare_exchange_n(&state->failed, &none, record < 0 ? argument : record, false, __ATOMIC_RELAXED,
                                __ATOMIC_RELAXED);
  }
};

// Counts a finished piece of work as progress. Only rank 0 counts, to avoid contention for the cache line.
INLINE void count_progress(const Team& team) {
  if (team.rank) return;
  __atomic_store_n(penstock_progress, __atomic_load_n(penstock_progress, __ATOMIC_RELAXED) + 1, __ATOMIC_RELAXED);
}

// Calls body(piece) for the pieces 0:count, which are assigned to threads dynamically. The first piece of a thread is
// the number of its rank, so that the thread can prefetch for it. There is no barrier at the end. Call it at most once
// between two barriers, because barriers reset the counter of assigned pieces.
template <class Body> INLINE void over_pieces(const Team& team, int64_t count, Body body) {
  if (team.size == 1) {
    for (int64_t piece = 0; piece < count; piece++) {
      body(piece);
      count_progress(team);
    }
    return;
  }
  for (int64_t piece = team.rank; piece < count;
       piece = team.size + __atomic_fetch_add(&team.state->next, 1, __ATOMIC_RELAXED)) {
    body(piece);
    count_progress(team);
  }
}

// Calls body(begin, end) with one range of rows per thread; the ranges cover 0:rows. No barrier at the end.
template <class Body> INLINE void over_rows(const Team& team, int64_t rows, Body body) {
  const int64_t begin = rows * team.rank / team.size, end = rows * (team.rank + 1) / team.size;
  if (begin < end) body(begin, end);
}

// Operations with less work than this, in multiply-adds, run on a single thread, because starting the other threads
// would take longer than they save. In a plan the threads already run, so parallel work costs only one or two barriers.
constexpr int64_t MIN_PARALLEL_WORK_IN_PLAN = 1 << 16, MIN_PARALLEL_WORK = 4 * MIN_PARALLEL_WORK_IN_PLAN;
constexpr int64_t ELEMENT = 4;  // cost of loading, changing and storing an element, in multiply-adds

// Runs a single operation. Returns -1, or the argument of `fail`.
template <class Args> INLINE int64_t run_single(const Args& a) {
  TeamState state = {};
  state.failed = state.last = -1;
  if (work(a) < MIN_PARALLEL_WORK) {
    run(a, Team{1, 0, &state, -1});
    return state.failed;
  }
#pragma omp parallel
  run(a, Team{omp_get_num_threads(), omp_get_thread_num(), &state, -1});
  return state.failed;
}

// Returns the memory that a thread reads first, if it is known before the operation starts (weights). Operations
// overload this function; the default is nothing.
template <class Args> INLINE Ahead first_read(const Args&, const Team&) { return {}; }

// The functions with which a plan runs an operation of unknown argument type.
struct Operation {
  int64_t (*work)(const void* arguments);
  void (*run)(const void* arguments, const Team& team);
  Ahead (*first_read)(const void* arguments, const Team& team);
};

// Exports the kernel `name` as a function and as an operation of the step plan. Requires
//   int64_t work(const Args&)            in multiply-adds; known before the step starts, and equal for all threads
//   void run(const Args&, const Team&)   called by all threads of the team; the caller adds a barrier
// and optionally
//   Ahead first_read(const Args&, const Team&)
#define KERNEL(name, Args)                                                                          \
  EXPORT(int64_t, name)(const Args& a) { return run_single(a); }                                     \
  extern "C" {                                                                                      \
  VISIBLE extern const Operation SYMBOL(name##_operation);                                          \
  const Operation SYMBOL(name##_operation) = {                                                      \
      [](const void* arguments) -> int64_t { return work(*(const Args*)arguments); },               \
      [](const void* arguments, const Team& team) { run(*(const Args*)arguments, team); },          \
      [](const void* arguments, const Team& team) { return first_read(*(const Args*)arguments, team); }}; \
  }
