// Experts: out [rows, E] is the weighted sum of down(gate(gate_up(x))) over the top-k experts of each row, without
// experts on other ranks.
//
// A pair consists of a row and one of its experts. Pairs are sorted by expert, so that the weights of an expert are
// read once for all of its rows. Pairs are processed in rounds, which limits the memory of the intermediate values. The
// products use the functions for single panels in linear.inl, quantized.inl and fp8.inl, and the activations the
// kernels in elementwise.inl. The outputs of a row are added in the order of the expert numbers. The bits of a row
// therefore do not depend on other rows.

struct ExpertWeights {  // addresses of the tensors of a linear layer; null for a missing tensor
  const void* panels;
  const float* scales;
  const int32_t* order;
  const void* bias;
};

struct Experts {  // x, topk_ids and topk_weights have strided rows; out is contiguous
  int64_t type, gating;  // gating: 0 to 4 for the activations (elementwise.inl), 5 for clamped SwiGLU
  const void* x;
  int64_t x_stride;
  const int64_t* topk_ids;  // [rows, top]: expert ids; the experts of this rank have the ids first to first + count - 1
  int64_t topk_ids_stride;
  const float* topk_weights;  // [rows, top]
  int64_t topk_weights_stride;
  const ExpertWeights* table;  // [count, 2]: the layers gate_up [2F, E] and down [E, F] of each expert
  void* out;
  int64_t rows, top, count;  // count: number of experts of this rank
  int64_t gate_up_encoding, down_encoding, E, F;
  int64_t first, is_part;  // id of the first expert; whether experts with other ids are on other ranks
  double alpha, limit;
};

constexpr int64_t JOB_ROWS = 240;          // maximum number of rows of a job; their sums fit in the cache of a core
constexpr int64_t ROUND_BYTES = 16 << 20;  // maximum bytes of the intermediate values of a round
constexpr int64_t MIN_PAIRS = 256;         // number of pairs up to which a round may exceed ROUND_BYTES; >= JOB_ROWS
// A piece of work is a run of up to MAX_RUN consecutive panels. Runs are shorter if a thread would get fewer than
// RUNS_PER_THREAD runs.
constexpr int64_t RUNS_PER_THREAD = 8, MAX_RUN = 4;

// Pairs of one expert: the entries begin:begin + rows of ExpertsMemory::order.
struct Job {
  int64_t expert, begin, rows;
};

// Returns the bytes of rows as the input of a linear layer, after their quantization if the encoding requires it.
INLINE int64_t input_bytes(int64_t encoding, int64_t element, int64_t rows, int64_t K) {
  if (!is_quantized(encoding)) return round_up(rows * K * element, LINE);
  return round_up(QuantizedRows::bytes(rows, K, groups_of(encoding, K)), LINE);
}

// The addresses of the intermediate values, in memory that the threads share. All threads compute the same addresses.
struct ExpertsMemory {
  int64_t* ends;    // [count + 1]: end of the pairs of each expert in `order`
  int64_t* order;   // [pairs]: the numbers of the pairs, sorted by expert; pair p belongs to row p / top
  int64_t* positions;      // [rows, top]: the positions in `order` of the pairs of each row, ascending
  int64_t* num_positions;  // [rows]: number of positions of each row; less than top if experts are on other ranks
  Job* jobs;        // [<= pairs]
  int64_t* num_jobs;
  float* totals;      // [rows, E]: sums of the outputs of earlier rounds, if there are several rounds
  int64_t max_pairs;  // maximum number of pairs per round; the following memory is reused in each round
  char *x, *gates, *inner, *quantized, *y;
  int64_t bytes;

  ExpertsMemory(const Experts& a, char* memory) {
    const int64_t pairs = a.rows * a.top, element = a.type == 0 ? 4 : 2;
    const int64_t pair_bytes = input_bytes(a.gate_up_encoding, element, 1, a.E) + 3 * a.F * element +
                               input_bytes(a.down_encoding, element, 1, a.F) + a.E * element;
    max_pairs = min(pairs, max(ROUND_BYTES / pair_bytes, MIN_PAIRS));
    bytes = 0;
    auto take = [&](int64_t size) __attribute__((always_inline)) {
      char* begin = memory + bytes;
      bytes += round_up(size, LINE);
      return begin;
    };
    ends = (int64_t*)take((a.count + 1) * 8);
    order = (int64_t*)take(pairs * 8);
    positions = (int64_t*)take(pairs * 8);
    num_positions = (int64_t*)take(a.rows * 8);
    jobs = (Job*)take(pairs * sizeof(Job));
    num_jobs = (int64_t*)take(8);
    totals = (float*)take(max_pairs < pairs ? a.rows * a.E * 4 : 0);
    x = take(input_bytes(a.gate_up_encoding, element, max_pairs, a.E));
    gates = take(max_pairs * 2 * a.F * element);
    inner = take(max_pairs * a.F * element);
    quantized = !is_quantized(a.down_encoding) ? inner : take(input_bytes(a.down_encoding, element, max_pairs, a.F));
    y = take(max_pairs * a.E * element);
  }
};

// Sorts the pairs by expert, and divides them into jobs. If `is_part`, pairs of experts on other ranks are left out.
// Otherwise, a pair whose expert does not exist is reported with `fail`.
static void sort_pairs(const Experts& a, const ExpertsMemory& memory, const Team& team) {
  const int64_t pairs = a.rows * a.top;
  int64_t* ends = memory.ends;
  auto find_expert = [&](int64_t pair) __attribute__((always_inline)) {
    const int64_t expert = a.topk_ids[pair / a.top * a.topk_ids_stride + pair % a.top] - a.first;
    if (expert >= 0 && expert < a.count) return expert;
    if (a.is_part) return (int64_t)-1;
    team.fail(pair);
    return (int64_t)0;
  };
  __builtin_memset(ends, 0, (a.count + 1) * 8);
  __builtin_memset(memory.num_positions, 0, a.rows * 8);
  for (int64_t pair = 0; pair < pairs; pair++) {
    const int64_t expert = find_expert(pair);
    if (expert >= 0) ends[expert + 1]++;
  }
  for (int64_t expert = 0; expert < a.count; expert++) ends[expert + 1] += ends[expert];
  for (int64_t pair = 0; pair < pairs; pair++) {
    const int64_t expert = find_expert(pair);
    if (expert >= 0) memory.order[ends[expert]++] = pair;
  }
  for (int64_t i = 0; i < ends[a.count - 1]; i++) {
    const int64_t row = memory.order[i] / a.top;
    memory.positions[row * a.top + memory.num_positions[row]++] = i;
  }
  int64_t jobs = 0;
  for (int64_t expert = 0, begin = 0; expert < a.count; begin = ends[expert++]) {
    const int64_t rows = ends[expert] - begin, parts = ceil_div(rows, JOB_ROWS);
    for (int64_t part = 0; part < parts; part++) {
      const int64_t from = rows * part / parts, to = rows * (part + 1) / parts;
      memory.jobs[jobs++] = Job{expert, begin + from, to - from};
    }
  }
  *memory.num_jobs = jobs;
}

// Computes the outputs of the panels first:last of a layer for the rows begin:begin + rows. `x` has the quantized rows
// if the encoding needs them.
static void multiply_run(const Linear& a, const QuantizedRows& x, int64_t begin, int64_t rows, int64_t first,
                         int64_t last, void* sums) {
  const int64_t bytes = panel_bytes(a.encoding, a.K);
  for (int64_t panel = first; panel < last; panel++) {
    const int64_t next = panel + 1 < last ? panel + 1 : -1;
    const char *w = (const char*)a.panels + panel * bytes, *ahead = next < 0 ? nullptr : w + bytes;
    if (a.encoding == 0) multiply_panel<FloatSteps>(a, begin, rows, w, ahead, panel * PANEL, (float*)sums);
    if (a.encoding == 1) multiply_panel<PairSteps>(a, begin, rows, w, ahead, panel * PANEL, (float*)sums);
    with_units(a.encoding, [&](auto form) {
      multiply_panel<decltype(form)>(a, x.skip_rows(begin), begin, rows, panel, next, (uint32_t*)sums);
    });
    if (a.encoding == 7) {
#if PENSTOCK_DOT
      const FlushedDenormals mode;
#endif
      multiply_fp8_panel<Fp8Steps>(a, begin, rows, panel, next, (float*)sums);
    }
  }
}

// Computes the gate_up layers (`which` 0) or the down layers (1) for the jobs of a round. `layer` has the fields that
// all experts share. The weights come from the table.
static void multiply_jobs(const Experts& a, Linear layer, int64_t which, int64_t max_pairs, const Job* jobs,
                          int64_t count, const Team& team) {
  const QuantizedRows x((char*)layer.x, max_pairs, layer.K, groups_of(layer.encoding, layer.K));
  const int64_t panels = ceil_div(layer.N, PANEL);
  const int64_t run = min(max<int64_t>(panels * count / (team.size * RUNS_PER_THREAD), 1), MAX_RUN);
  const int64_t runs = ceil_div(panels, run);
  void* sums = penstock_scratch(PRIVATE, JOB_ROWS * PANEL * sizeof(float));
  over_pieces(team, runs * count, [&](int64_t piece) {
    const Job& job = jobs[piece / runs];
    const ExpertWeights& weights = a.table[2 * job.expert + which];
    Linear linear = layer;
    // `order` stays null, because the inputs are already in the order of the panels.
    linear.panels = weights.panels, linear.scales = weights.scales, linear.bias = weights.bias;
    const int64_t first = piece % runs * run;
    multiply_run(linear, x, job.begin - jobs->begin, job.rows, first, min(first + run, panels), sums);
  });
}

// Computes the outputs of `count` jobs and adds them to the totals. The last round stores the sums in `a.out`.
template <class T>
static void multiply_round(const Experts& a, const ExpertsMemory& memory, const Job* jobs, int64_t count,
                           const Team& team) {
  const int64_t first = jobs->begin, pairs = jobs[count - 1].begin + jobs[count - 1].rows - first;
  const Team this_thread = {1, 0, team.state, team.operation_index};
  const QuantizedRows x(memory.x, memory.max_pairs, a.E, groups_of(a.gate_up_encoding, a.E));
  const QuantizedRows inner(memory.quantized, memory.max_pairs, a.F, groups_of(a.down_encoding, a.F));
  auto find_order = [&](int64_t i, int64_t which) __attribute__((always_inline)) {
    const int64_t pair = memory.order[first + i];
    const int64_t expert = a.topk_ids[pair / a.top * a.topk_ids_stride + pair % a.top] - a.first;
    return a.table[2 * (expert >= 0 && expert < a.count ? expert : 0) + which].order;  // as in `sort_pairs`
  };
  over_rows(team, pairs, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
      const T* row = (const T*)a.x + memory.order[first + i] / a.top * a.x_stride;
      if (!is_quantized(a.gate_up_encoding)) __builtin_memcpy((T*)memory.x + i * a.E, row, a.E * sizeof(T));
      else quantize_row(row, a.E, a.gate_up_encoding, x.skip_rows(i), find_order(i, 0));
    }
  });
  team.barrier();
  const Linear gate_up = {a.gate_up_encoding, a.type,       memory.x, a.E,    nullptr,   nullptr, nullptr, nullptr,
                          memory.gates,       2 * a.F, pairs,   2 * a.F, a.E,     0};
  multiply_jobs(a, gate_up, 0, memory.max_pairs, jobs, count, team);
  team.barrier();
  over_rows(team, pairs, [&](int64_t begin, int64_t end) {
    const T* gates = (const T*)memory.gates + begin * 2 * a.F;
    T* gated_rows = (T*)memory.inner + begin * a.F;
    if (a.gating < 5) run(GatedActivation{a.type, a.gating, gates, gated_rows, end - begin, a.F, 2 * a.F}, this_thread);
    else run(ClampedSwiGLU{a.type, gates, gated_rows, end - begin, a.F, 2 * a.F, a.alpha, a.limit}, this_thread);
    if (!is_quantized(a.down_encoding)) return;
    for (int64_t i = begin; i < end; i++)
      quantize_row((const T*)memory.inner + i * a.F, a.F, a.down_encoding, inner.skip_rows(i), find_order(i, 1));
  });
  team.barrier();
  const Linear down = {a.down_encoding, a.type, memory.quantized, a.F, nullptr, nullptr, nullptr, nullptr,
                       memory.y,        a.E,    pairs,           a.E, a.F,     0};
  multiply_jobs(a, down, 1, memory.max_pairs, jobs, count, team);
  team.barrier();
  const bool last = first + pairs == memory.ends[a.count - 1];
  over_rows(team, a.rows, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row++) {
      const int64_t *positions = memory.positions + row * a.top, count = memory.num_positions[row];
      int64_t from = 0, to = 0;
      while (from < count && positions[from] < first) from++;
      for (to = from; to < count && positions[to] < first + pairs;) to++;
      const float* topk_weights = a.topk_weights + row * a.topk_weights_stride;
      for_vectors(a.E, EACH_VECTOR {
        vf total = first ? load(memory.totals + row * a.E + i, lanes) : vf{};
        for (int64_t j = from; j < to; j++)
          total += load((const T*)memory.y + (positions[j] - first) * a.E + i, lanes) *
                   topk_weights[memory.order[positions[j]] - row * a.top];
        if (last) store((T*)a.out + row * a.E + i, total, lanes);
        else store(memory.totals + row * a.E + i, total, lanes);
      });
    }
  });
}

static int64_t work(const Experts& a) { return 3 * a.rows * a.top * a.E * a.F; }
static void run(const Experts& a, const Team& team) {
  if (!a.rows) return;
  char* shared = nullptr;
  if (team.rank == 0) {
    shared = (char*)penstock_scratch(SHARED, ExpertsMemory(a, nullptr).bytes);
    sort_pairs(a, ExpertsMemory(a, shared), team);
  }
  const ExpertsMemory memory(a, team.share(shared));
  const int64_t jobs = *memory.num_jobs;
  if (!jobs && team.rank == 0) __builtin_memset(a.out, 0, a.rows * a.E * (a.type == 0 ? 4 : 2));
  for (int64_t first = 0, next; first < jobs; first = next) {
    int64_t pairs = 0;
    for (next = first; next < jobs && pairs + memory.jobs[next].rows <= memory.max_pairs; next++)
      pairs += memory.jobs[next].rows;
    WITH_TYPE(a.type, T, multiply_round<T>(a, memory, memory.jobs + first, next - first, team));
  }
}
KERNEL(experts, Experts)
