// The step plan: the operations of a whole step in one parallel region.

struct Step {
  const Operation* operation;
  const void* arguments;
};

// Small operations run on one thread, and several in a row without a barrier.
static void run_steps(const Step* steps, int64_t count, Team team) {
  bool alone = false;  // whether thread 0 is ahead of the others
  for (int64_t i = 0; i < count; i++) {
    const Step& step = steps[i];
    team.record = i;
    if (team.size == 1 || step.operation->work(step.arguments) < ALONE_IN_PLAN) {
      if (team.rank == 0) step.operation->run(step.arguments, Team{1, 0, team.state, i});
      alone = true;
      continue;
    }
    if (alone) team.barrier();
    alone = false;
    step.operation->run(step.arguments, team);
    team.barrier();
  }
}

// -1, or the number of a step with a bad argument; the rest was run nevertheless.
EXPORT(int64_t, run_plan)(const Step* steps, int64_t count) {
  TeamState state = {};
  state.failed = -1;
#pragma omp parallel
  run_steps(steps, count, Team{omp_get_num_threads(), omp_get_thread_num(), &state, -1});
  return state.failed;
}
