// The step plan: the operations of a whole step in one parallel region.

struct Step {
  const Operation* operation;
  const void* arguments;
};

// Kept by the caller from one run to the next. Where another process uses a core of ours, the team waits at every
// barrier until that core's thread gets its turn, milliseconds each time; one thread alone is never stopped long.
struct Neighbours {
  int64_t alone_until;  // ns: one thread runs all until then
  int64_t pause;        // ns, of the last time; 0 where no waiting was seen since
};

constexpr int64_t FARTHEST = 8;  // steps that are looked ahead
constexpr int64_t LONG_WAIT = 1000000;                             // ns in a step, before the team is given up
constexpr int64_t SHORTEST_PAUSE = 20000000, LONGEST_PAUSE = 1000000000;  // ns; doubled while waiting goes on

// What this thread reads first of the next operation that says so. It is fetched while the thread waits for others:
// for the end of an operation, or while small ones run on another thread. Memory would have nothing to do meanwhile.
static Ahead next_read(const Step* steps, int64_t from, int64_t count, const Team& team) {
  for (int64_t i = from; i < min(from + FARTHEST, count); i++) {
    Ahead ahead = steps[i].operation->first_read(steps[i].arguments, team);
    if (ahead.next) return ahead;
  }
  return {};
}

// Small operations run on one thread, and several in a row without a barrier.
static void run_steps(const Step* steps, int64_t count, Team team) {
  TeamState& state = *team.state;
  const int64_t begin = nanoseconds();
  bool alone = false;  // whether thread 0 is ahead of the others
  Ahead ahead = team.size > 1 ? next_read(steps, 0, count, team) : Ahead{};
  for (int64_t i = 0; i < count; i++) {
    const Step& step = steps[i];
    team.record = i;
    if (team.size == 1 || step.operation->work(step.arguments) < ALONE_IN_PLAN) {
      if (team.rank == 0) step.operation->run(step.arguments, Team{1, 0, &state, i});
      alone = true;
      continue;
    }
    // Waiting for a third of the time is no uneven share of the work.
    if (team.rank == 0 && state.waited > LONG_WAIT && 3 * state.waited > nanoseconds() - begin)
      __atomic_store_n(&state.last, i, __ATOMIC_RELAXED);  // the others read it behind the next barrier
    if (alone) team.barrier(ahead);
    alone = false;
    step.operation->run(step.arguments, team);
    if (step.operation->first_read(step.arguments, team).next) ahead = next_read(steps, i + 1, count, team);
    team.barrier(ahead);
    if (__atomic_load_n(&state.last, __ATOMIC_RELAXED) == i) {
      if (team.rank) return;
      team.size = 1;
    }
  }
}

// What one thread alone, or a team, does: body(team). Keeps what it learns about others who use the cores.
template <class Body> INLINE void with_team(TeamState& state, Neighbours& neighbours, Body body) {
  if (omp_get_max_threads() == 1 || nanoseconds() < neighbours.alone_until) {
    body(Team{1, 0, &state, -1});
    return;
  }
#pragma omp parallel
  body(Team{omp_get_num_threads(), omp_get_thread_num(), &state, -1});
  neighbours.pause = state.last < 0 ? 0 : min(max(2 * neighbours.pause, SHORTEST_PAUSE), LONGEST_PAUSE);
  neighbours.alone_until = state.last < 0 ? 0 : nanoseconds() + neighbours.pause;
}

// -1, or the number of a step with a bad argument; the rest was run nevertheless.
EXPORT(int64_t, run_plan)(const Step* steps, int64_t count, Neighbours& neighbours) {
  TeamState state = {};
  state.failed = state.last = -1;
  with_team(state, neighbours, [&](const Team& team) { run_steps(steps, count, team); });
  return state.failed;
}

// An input of the plan that differs from round to round: the first round's `bytes` lie at `from`, then the next one's.
struct Varied {
  char* to;
  const char* from;
  int64_t bytes;
};

// A plan whose last step samples a token for each row into `tokens`, where its first steps read them in the next round.
struct Rounds {
  const Step* steps;
  int64_t count;
  const Varied* varied;
  int64_t num_varied, rounds, rows;
  int64_t* tokens;      // [rows]
  const int64_t* ends;  // [rows, num_ends]: tokens after which a row's further ones are not wanted; -1: none
  int64_t num_ends;
  int64_t* sampled;     // [rounds, rows]
  int64_t done;         // rounds that were run: all, or until each row has had an end
};

// Puts a round's tokens away; whether some row goes on. -1 stands for a row that is no distribution: it goes on with
// any token, as what comes of it is not used.
static bool take_tokens(const Rounds& a, int64_t round) {
  bool goes_on = false;
  for (int64_t row = 0; row < a.rows; row++) {
    a.sampled[round * a.rows + row] = a.tokens[row];
    if (a.tokens[row] < 0) a.tokens[row] = 0;
    bool has_ended = false;
    for (int64_t i = 0; i <= round; i++)
      for (int64_t k = 0; k < a.num_ends; k++)
        has_ended |= a.sampled[i * a.rows + row] >= 0 && a.sampled[i * a.rows + row] == a.ends[row * a.num_ends + k];
    goes_on |= !has_ended;
  }
  return goes_on;
}

// As run_plan, several times in a row.
EXPORT(int64_t, run_loop)(Rounds& a, Neighbours& neighbours) {
  TeamState state = {};
  state.failed = state.last = -1;
  a.done = 0;
  bool goes_on = true;  // written by thread 0 between barriers
  with_team(state, neighbours, [&](Team team) {
    for (int64_t round = 0; round < a.rounds && goes_on && state.failed < 0; round++) {
      if (team.rank == 0) {
        for (int64_t i = 0; i < a.num_varied; i++)
          __builtin_memcpy(a.varied[i].to, a.varied[i].from + round * a.varied[i].bytes, a.varied[i].bytes);
        state.waited = 0;
      }
      team.barrier();
      run_steps(a.steps, a.count, team);
      if (state.last >= 0) {  // the team was given up
        if (team.rank) return;
        team.size = 1;
      }
      team.barrier();
      if (team.rank == 0) {
        goes_on = take_tokens(a, round);
        a.done = round + 1;
      }
      team.barrier();
    }
  });
  return state.failed;
}
