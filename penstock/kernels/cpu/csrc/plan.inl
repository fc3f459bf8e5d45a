// Runs a plan, the operations of a whole forward step, in one parallel region. A Step in this file is one operation.

struct Step {
  const Operation* operation;
  const void* arguments;
};

// How much other processes use the cores. The caller keeps this state between runs. If another process uses one of the
// cores, the team waits milliseconds at every barrier for that core's thread. A single thread does not wait.
struct CoreContention {
  int64_t alone_until;  // ns: until this time one thread runs everything
  int64_t pause;        // ns: length of the last single-threaded period; 0 after a run without waiting
};

constexpr int64_t MAX_LOOKAHEAD = 8;    // number of steps to search
constexpr int64_t LONG_WAIT = 1000000;  // ns of waiting in a plan, after which thread 0 continues alone
constexpr int64_t SHORTEST_PAUSE = 20000000, LONGEST_PAUSE = 1000000000;  // ns; doubled while the waiting goes on

// Returns what this thread reads first in the next operation that has a `first_read`. The thread prefetches it while
// it waits at a barrier, when the memory is otherwise idle.
static Ahead next_read(const Step* steps, int64_t from, int64_t count, const Team& team) {
  for (int64_t i = from; i < min(from + MAX_LOOKAHEAD, count); i++) {
    Ahead ahead = steps[i].operation->first_read(steps[i].arguments, team);
    if (ahead.next) return ahead;
  }
  return {};
}

// Runs the steps of a plan, each of which is one operation. Small operations run on thread 0. There is no barrier
// between two of them.
static void run_steps(const Step* steps, int64_t count, Team team) {
  TeamState& state = *team.state;
  const int64_t begin = nanoseconds();
  bool needs_barrier = false;  // whether thread 0 has run steps since the last barrier
  Ahead ahead = team.size > 1 ? next_read(steps, 0, count, team) : Ahead{};
  for (int64_t i = 0; i < count; i++) {
    const Step& step = steps[i];
    team.record = i;
    if (team.size == 1 || step.operation->work(step.arguments) < MIN_PARALLEL_WORK_IN_PLAN) {
      if (team.rank == 0) step.operation->run(step.arguments, Team{1, 0, &state, i});
      needs_barrier = true;
      continue;
    }
    // Thread 0 has waited for more than a third of the time. Uneven work causes shorter waits, so the cause must be
    // another process that uses a core.
    if (team.rank == 0 && state.waited > LONG_WAIT && 3 * state.waited > nanoseconds() - begin)
      __atomic_store_n(&state.last, i, __ATOMIC_RELAXED);  // the other threads read it after the next barrier
    if (needs_barrier) team.barrier(ahead);
    needs_barrier = false;
    step.operation->run(step.arguments, team);
    if (step.operation->first_read(step.arguments, team).next) ahead = next_read(steps, i + 1, count, team);
    team.barrier(ahead);
    if (__atomic_load_n(&state.last, __ATOMIC_RELAXED) == i) {
      if (team.rank) return;
      team.size = 1;
    }
  }
}

// Calls body(team) on one thread or on all, and updates the contention of the cores.
template <class Body> INLINE void with_team(TeamState& state, CoreContention& contention, Body body) {
  if (omp_get_max_threads() == 1 || nanoseconds() < contention.alone_until) {
    body(Team{1, 0, &state, -1});
    return;
  }
#pragma omp parallel
  body(Team{omp_get_num_threads(), omp_get_thread_num(), &state, -1});
  contention.pause = state.last < 0 ? 0 : min(max(2 * contention.pause, SHORTEST_PAUSE), LONGEST_PAUSE);
  contention.alone_until = state.last < 0 ? 0 : nanoseconds() + contention.pause;
}

// Returns -1, or the index of the first step with a bad argument; the other steps have run too.
EXPORT(int64_t, run_plan)(const Step* steps, int64_t count, CoreContention& contention) {
  TeamState state = {};
  state.failed = state.last = -1;
  with_team(state, contention, [&](const Team& team) { run_steps(steps, count, team); });
  return state.failed;
}

// An input of the plan that differs between steps. `from` has num_bytes bytes for each step, one step after another.
struct VaryingArgument {
  char* to;
  const char* from;
  int64_t num_bytes;
};

// A plan that runs num_steps times. Its last operation samples one token per row into `tokens`, which the first
// operations read in the next run.
struct LoopArguments {
  const Step* steps;
  int64_t count;
  const VaryingArgument* varied;
  int64_t num_varied, num_steps, rows;
  int64_t* tokens;      // [rows]
  const int64_t* ends;  // [rows, num_ends]: tokens that end a row; -1: padding
  int64_t num_ends;
  int64_t* sampled;     // [num_steps, rows]
  int64_t done;         // steps that ran: all, or until every row has ended
};

// Stores the tokens of a step. Returns whether a row continues. A row of non-finite logits (-1) continues with token 0,
// because its later tokens are not used.
static bool store_tokens(const LoopArguments& a, int64_t step) {
  bool is_running = false;
  for (int64_t row = 0; row < a.rows; row++) {
    a.sampled[step * a.rows + row] = a.tokens[row];
    if (a.tokens[row] < 0) a.tokens[row] = 0;
    bool has_ended = false;
    for (int64_t i = 0; i <= step; i++)
      for (int64_t k = 0; k < a.num_ends; k++)
        has_ended |= a.sampled[i * a.rows + row] >= 0 && a.sampled[i * a.rows + row] == a.ends[row * a.num_ends + k];
    is_running |= !has_ended;
  }
  return is_running;
}

// Runs a plan several times, see LoopArguments. The result is as for run_plan.
EXPORT(int64_t, run_loop)(LoopArguments& a, CoreContention& contention) {
  TeamState state = {};
  state.failed = state.last = -1;
  a.done = 0;
  bool is_running = true;  // written by thread 0 between barriers
  with_team(state, contention, [&](Team team) {
    for (int64_t step = 0; step < a.num_steps && is_running && state.failed < 0; step++) {
      if (team.rank == 0) {
        for (int64_t i = 0; i < a.num_varied; i++)
          __builtin_memcpy(a.varied[i].to, a.varied[i].from + step * a.varied[i].num_bytes, a.varied[i].num_bytes);
        state.waited = 0;
      }
      team.barrier();
      run_steps(a.steps, a.count, team);
      if (state.last >= 0) {  // thread 0 continues alone
        if (team.rank) return;
        team.size = 1;
      }
      team.barrier();
      if (team.rank == 0) {
        is_running = store_tokens(a, step);
        a.done = step + 1;
      }
      team.barrier();
    }
  });
  return state.failed;
}
