// Runs a plan in one parallel region. A plan is a list of the operations of one forward step, with their arguments.

struct PlanOperation {
  const Operation* operation;
  const void* arguments;
};

// Whether other processes use the cores, as detected from waiting times. The caller keeps this state between runs. If
// another process uses one of the cores, all threads wait milliseconds at every barrier for the thread of that core. A
// single thread does not wait, so plans then run on one thread for a period.
struct CoreContention {
  int64_t alone_until;        // ns, monotonic clock: plans run on one thread until this time
  int64_t last_alone_period;  // ns: length of the last single-threaded period; 0 after a run without contention
};

constexpr int64_t MAX_LOOKAHEAD = 8;    // maximum number of operations in which `next_read` searches
constexpr int64_t LONG_WAIT = 1000000;  // ns that thread 0 must have waited in a plan before it continues alone
// Minimum and maximum length of a single-threaded period, in ns. The length doubles while the contention continues.
constexpr int64_t SHORTEST_ALONE_PERIOD = 20000000, LONGEST_ALONE_PERIOD = 1000000000;

// Returns the memory that this thread reads first in the first of the next MAX_LOOKAHEAD operations that has a
// `first_read`; an empty range if none has. The thread prefetches this memory while it waits at a barrier.
static PrefetchRange next_read(const PlanOperation* operations, int64_t first, int64_t num_operations,
                               const Team& team) {
  for (int64_t i = first; i < min(first + MAX_LOOKAHEAD, num_operations); i++) {
    PrefetchRange range = operations[i].operation->first_read(operations[i].arguments, team);
    if (range.next) return range;
  }
  return {};
}

// Runs the operations of a plan. Small operations run on thread 0, without a barrier between two small operations.
static void run_operations(const PlanOperation* operations, int64_t num_operations, Team team) {
  TeamState& state = *team.state;
  const int64_t begin_time = nanoseconds();
  bool needs_barrier = false;  // whether thread 0 has run small operations since the last barrier
  PrefetchRange range = team.size > 1 ? next_read(operations, 0, num_operations, team) : PrefetchRange{};
  for (int64_t i = 0; i < num_operations; i++) {
    const PlanOperation& current = operations[i];
    team.operation_index = i;
    if (team.size == 1 || current.operation->work(current.arguments) < MIN_PARALLEL_WORK_IN_PLAN) {
      if (team.rank == 0) current.operation->run(current.arguments, Team{1, 0, &state, i});
      needs_barrier = true;
      continue;
    }
    // If thread 0 has waited for more than LONG_WAIT and a third of the time since the plan began, another process
    // probably uses a core, because uneven work causes shorter waits. Thread 0 then runs the operations after this one
    // alone.
    if (team.rank == 0 && state.wait_time > LONG_WAIT && 3 * state.wait_time > nanoseconds() - begin_time)
      __atomic_store_n(&state.last_parallel, i, __ATOMIC_RELAXED);  // the other threads read it after the next barrier
    if (needs_barrier) team.barrier(range);
    needs_barrier = false;
    current.operation->run(current.arguments, team);
    if (current.operation->first_read(current.arguments, team).next)
      range = next_read(operations, i + 1, num_operations, team);
    team.barrier(range);
    if (__atomic_load_n(&state.last_parallel, __ATOMIC_RELAXED) == i) {
      if (team.rank) return;
      team.size = 1;
    }
  }
}

// Calls body(team) on one thread during a single-threaded period or if there is only one thread, else on all threads.
// Updates the contention state after a call on all threads.
template <class Body> INLINE void with_team(TeamState& state, CoreContention& contention, Body body) {
  if (omp_get_max_threads() == 1 || nanoseconds() < contention.alone_until) {
    body(Team{1, 0, &state, -1});
    return;
  }
#pragma omp parallel
  body(Team{omp_get_num_threads(), omp_get_thread_num(), &state, -1});
  contention.last_alone_period =
      state.last_parallel < 0
          ? 0
          : min(max(2 * contention.last_alone_period, SHORTEST_ALONE_PERIOD), LONGEST_ALONE_PERIOD);
  contention.alone_until = state.last_parallel < 0 ? 0 : nanoseconds() + contention.last_alone_period;
}

// Runs a plan. Returns -1, or the index of the first operation that failed. All operations run in both cases.
EXPORT(int64_t, run_plan)(const PlanOperation* operations, int64_t num_operations, CoreContention& contention) {
  TeamState state = {};
  state.failure = state.last_parallel = -1;
  with_team(state, contention, [&](const Team& team) { run_operations(operations, num_operations, team); });
  return state.failure;
}

// An input of the plan that differs between forward steps. `source` has num_bytes bytes for each step, in order.
struct StepInput {
  char* destination;
  const char* source;
  int64_t num_bytes;
};

// The arguments of a plan that runs num_steps times, once per forward step. Its last operation samples one token per
// row into `tokens`. The next step reads `tokens`.
struct LoopArguments {
  const PlanOperation* operations;
  int64_t num_operations;
  const StepInput* step_inputs;
  int64_t num_step_inputs, num_steps, rows;
  int64_t* tokens;             // [rows]
  const int64_t* stop_tokens;  // [rows, num_stop_tokens]: tokens that end a row; padded with -1
  int64_t num_stop_tokens;
  int64_t* sampled_tokens;  // [num_steps, rows]
  int64_t num_steps_run;    // number of steps that ran; below num_steps if all rows ended or an operation failed
};

// Stores the tokens of a step. Returns whether any row continues. A row whose sampling failed has the token -1. It
// continues with token 0, because its later tokens are not used.
static bool store_tokens(const LoopArguments& a, int64_t step) {
  bool is_running = false;
  for (int64_t row = 0; row < a.rows; row++) {
    a.sampled_tokens[step * a.rows + row] = a.tokens[row];
    if (a.tokens[row] < 0) a.tokens[row] = 0;
    bool has_ended = false;
    const int64_t* stop_tokens = a.stop_tokens + row * a.num_stop_tokens;
    for (int64_t i = 0; i <= step; i++) {
      const int64_t token = a.sampled_tokens[i * a.rows + row];
      for (int64_t k = 0; k < a.num_stop_tokens; k++) has_ended |= token >= 0 && token == stop_tokens[k];
    }
    is_running |= !has_ended;
  }
  return is_running;
}

// Runs a plan several times, see LoopArguments. Stops after a step in which an operation failed. Returns -1, or the
// index of the first operation that failed.
EXPORT(int64_t, run_loop)(LoopArguments& a, CoreContention& contention) {
  TeamState state = {};
  state.failure = state.last_parallel = -1;
  a.num_steps_run = 0;
  bool is_running = true;  // written by thread 0 between barriers
  with_team(state, contention, [&](Team team) {
    for (int64_t step = 0; step < a.num_steps && is_running && state.failure < 0; step++) {
      if (team.rank == 0) {
        for (int64_t i = 0; i < a.num_step_inputs; i++) {
          const StepInput& input = a.step_inputs[i];
          __builtin_memcpy(input.destination, input.source + step * input.num_bytes, input.num_bytes);
        }
        state.wait_time = 0;
      }
      team.barrier();
      run_operations(a.operations, a.num_operations, team);
      if (state.last_parallel >= 0) {  // thread 0 continues alone
        if (team.rank) return;
        team.size = 1;
      }
      team.barrier();
      if (team.rank == 0) {
        is_running = store_tokens(a, step);
        a.num_steps_run = step + 1;
      }
      team.barrier();
    }
  });
  return state.failure;
}
