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
  const int64_t* topk_ids;  // [rows, top_k]: expert ids; those of this rank are first_id to first_id + num_experts - 1
  int64_t topk_ids_stride;
  const float* topk_weights;  // [rows, top_k]
  int64_t topk_weights_stride;
  const ExpertWeights* table;  // [num_experts, 2]: the layers gate_up [2F, E] and down [E, F] of each expert
  void* out;
  int64_t rows, top_k, num_experts;  // num_experts: number of experts of this rank
  int64_t gate_up_encoding, down_encoding, E, F;
  int64_t first_id, is_part;  // id of the first expert; whether experts with other ids are on other ranks
  double alpha, limit;
};

constexpr int64_t MAX_JOB_ROWS = 240;  // maximum number of rows of a job; their sums fit in the cache of a core
constexpr int64_t MAX_ROUND_BYTES = 16 << 20;  // maximum bytes of the intermediate values of a round
constexpr int64_t MIN_PAIRS = 256;  // number of pairs up to which a round may exceed MAX_ROUND_BYTES; >= MAX_JOB_ROWS
// A piece of work is a run of up to MAX_RUN_PANELS consecutive panels. Runs are shorter if a thread would get fewer
// than RUNS_PER_THREAD runs.
constexpr int64_t RUNS_PER_THREAD = 8, MAX_RUN_PANELS = 4;

// Pairs of one expert: the entries begin:begin + rows of ExpertsMemory::sorted_pairs.
struct Job {
  int64_t expert, begin, rows;
};

// Returns the bytes of rows as the input of a linear layer, after their quantization if the encoding requires it.
INLINE int64_t input_bytes(int64_t encoding, int64_t element_bytes, int64_t rows, int64_t K) {
  if (!is_quantized(encoding)) return round_up(rows * K * element_bytes, LINE);
  return round_up(QuantizedRows::num_bytes(rows, K, groups_of(encoding, K)), LINE);
}

// The addresses of the intermediate values, in memory that the threads share. All threads compute the same addresses.
struct ExpertsMemory {
  int64_t* ends;           // [num_experts + 1]: end of each expert in `sorted_pairs`; last: number of sorted pairs
  int64_t* sorted_pairs;   // [pairs]: the numbers of the pairs, sorted by expert; pair p belongs to row p / top_k
  int64_t* positions;      // [rows, top_k]: the positions in `sorted_pairs` of the pairs of each row, ascending
  int64_t* num_positions;  // [rows]: number of positions of each row; less than top_k if experts are on other ranks
  Job* jobs;               // [<= pairs]
  int64_t* num_jobs;
  float* totals;      // [rows, E]: sums of the outputs of earlier rounds, if there are several rounds
  int64_t max_pairs;  // maximum number of pairs per round; the following memory is reused in each round
  char *x, *gates, *inner, *quantized, *y;
  int64_t bytes;

  ExpertsMemory(const Experts& a, char* memory) {
    const int64_t pairs = a.rows * a.top_k, element_bytes = a.type == 0 ? 4 : 2;
    const int64_t pair_bytes = input_bytes(a.gate_up_encoding, element_bytes, 1, a.E) + 3 * a.F * element_bytes +
                               input_bytes(a.down_encoding, element_bytes, 1, a.F) + a.E * element_bytes;
    max_pairs = min(pairs, max(MAX_ROUND_BYTES / pair_bytes, MIN_PAIRS));
    bytes = 0;
    auto take = [&](int64_t size) __attribute__((always_inline)) {
      char* begin = memory + bytes;
      bytes += round_up(size, LINE);
      return begin;
    };
    ends = (int64_t*)take((a.num_experts + 1) * 8);
    sorted_pairs = (int64_t*)take(pairs * 8);
    positions = (int64_t*)take(pairs * 8);
    num_positions = (int64_t*)take(a.rows * 8);
    jobs = (Job*)take(pairs * sizeof(Job));
    num_jobs = (int64_t*)take(8);
    totals = (float*)take(max_pairs < pairs ? a.rows * a.E * 4 : 0);
    x = take(input_bytes(a.gate_up_encoding, element_bytes, max_pairs, a.E));
    gates = take(max_pairs * 2 * a.F * element_bytes);
    inner = take(max_pairs * a.F * element_bytes);
    quantized =
        !is_quantized(a.down_encoding) ? inner : take(input_bytes(a.down_encoding, element_bytes, max_pairs, a.F));
    y = take(max_pairs * a.E * element_bytes);
  }
};

// Sorts the pairs by expert, and divides them into jobs. If `is_part`, pairs of experts on other ranks are left out.
// Otherwise, a pair whose expert does not exist is reported with `fail`.
static void sort_pairs(const Experts& a, const ExpertsMemory& memory, const Team& team) {
  const int64_t pairs = a.rows * a.top_k;
  int64_t* ends = memory.ends;
  auto find_expert = [&](int64_t pair) __attribute__((always_inline)) {
    const int64_t expert = a.topk_ids[pair / a.top_k * a.topk_ids_stride + pair % a.top_k] - a.first_id;
    if (expert >= 0 && expert < a.num_experts) return expert;
    if (a.is_part) return (int64_t)-1;
    team.fail(pair);
    return (int64_t)0;
  };
  __builtin_memset(ends, 0, (a.num_experts + 1) * 8);
  __builtin_memset(memory.num_positions, 0, a.rows * 8);
  for (int64_t pair = 0; pair < pairs; pair++) {
    const int64_t expert = find_expert(pair);
    if (expert >= 0) ends[expert + 1]++;
  }
  for (int64_t expert = 0; expert < a.num_experts; expert++) ends[expert + 1] += ends[expert];
  for (int64_t pair = 0; pair < pairs; pair++) {
    const int64_t expert = find_expert(pair);
    if (expert >= 0) memory.sorted_pairs[ends[expert]++] = pair;
  }
  for (int64_t i = 0; i < ends[a.num_experts - 1]; i++) {
    const int64_t row = memory.sorted_pairs[i] / a.top_k;
    memory.positions[row * a.top_k + memory.num_positions[row]++] = i;
  }
  int64_t jobs = 0;
  for (int64_t expert = 0, begin = 0; expert < a.num_experts; begin = ends[expert++]) {
    const int64_t rows = ends[expert] - begin, parts = ceil_div(rows, MAX_JOB_ROWS);
    for (int64_t part = 0; part < parts; part++) {
      const int64_t from = rows * part / parts, to = rows * (part + 1) / parts;
      memory.jobs[jobs++] = Job{expert, begin + from, to - from};
    }
  }
  *memory.num_jobs = jobs;
}

// Computes the outputs of the panels first_panel:end_panel of a layer for the rows begin:begin + rows. `x` has the
// quantized rows if the encoding needs them.
static void multiply_run(const Linear& a, const QuantizedRows& x, int64_t begin, int64_t rows, int64_t first_panel,
                         int64_t end_panel, void* sums) {
  const int64_t panel_stride = panel_bytes(a.encoding, a.K);
  for (int64_t panel = first_panel; panel < end_panel; panel++) {
    const int64_t next = panel + 1 < end_panel ? panel + 1 : -1;
    const char *w = (const char*)a.panels + panel * panel_stride, *ahead = next < 0 ? nullptr : w + panel_stride;
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

// Computes the gate_up layers (`layer_index` 0) or the down layers (1) for the jobs of a round. `layer` has the fields
// that all experts share. The weights come from the table.
static void multiply_jobs(const Experts& a, Linear layer, int64_t layer_index, int64_t max_pairs, const Job* jobs,
                          int64_t num_jobs, const Team& team) {
  const QuantizedRows x((char*)layer.x, max_pairs, layer.K, groups_of(layer.encoding, layer.K));
  const int64_t panels = ceil_div(layer.N, PANEL);
  const int64_t run_panels = min(max<int64_t>(panels * num_jobs / (team.size * RUNS_PER_THREAD), 1), MAX_RUN_PANELS);
  const int64_t runs_per_job = ceil_div(panels, run_panels);
  void* sums = penstock_scratch(PRIVATE, MAX_JOB_ROWS * PANEL * sizeof(float));
  over_pieces(team, runs_per_job * num_jobs, [&](int64_t piece) {
    const Job& job = jobs[piece / runs_per_job];
    const ExpertWeights& weights = a.table[2 * job.expert + layer_index];
    Linear linear = layer;
    // `order` stays null, because the inputs are already in the order of the panels.
    linear.panels = weights.panels, linear.scales = weights.scales, linear.bias = weights.bias;
    const int64_t first_panel = piece % runs_per_job * run_panels;
    const int64_t end_panel = min(first_panel + run_panels, panels);
    multiply_run(linear, x, job.begin - jobs->begin, job.rows, first_panel, end_panel, sums);
  });
}

// Computes the outputs of `num_jobs` jobs and adds them to the totals. The last round stores the sums in `a.out`.
template <class T>
static void multiply_round(const Experts& a, const ExpertsMemory& memory, const Job* jobs, int64_t num_jobs,
                           const Team& team) {
  const int64_t first_pair = jobs->begin, num_pairs = jobs[num_jobs - 1].begin + jobs[num_jobs - 1].rows - first_pair;
  const Team this_thread = {1, 0, team.state, team.operation_index};
  const QuantizedRows x(memory.x, memory.max_pairs, a.E, groups_of(a.gate_up_encoding, a.E));
  const QuantizedRows inner(memory.quantized, memory.max_pairs, a.F, groups_of(a.down_encoding, a.F));
  auto find_order = [&](int64_t i, int64_t layer_index) __attribute__((always_inline)) {
    const int64_t pair = memory.sorted_pairs[first_pair + i];
    const int64_t expert = a.topk_ids[pair / a.top_k * a.topk_ids_stride + pair % a.top_k] - a.first_id;
    return a.table[2 * (expert >= 0 && expert < a.num_experts ? expert : 0) + layer_index].order;  // as in `sort_pairs`
  };
  over_rows(team, num_pairs, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
      const T* row = (const T*)a.x + memory.sorted_pairs[first_pair + i] / a.top_k * a.x_stride;
      if (!is_quantized(a.gate_up_encoding)) __builtin_memcpy((T*)memory.x + i * a.E, row, a.E * sizeof(T));
      else quantize_row(row, a.E, a.gate_up_encoding, x.skip_rows(i), find_order(i, 0));
    }
  });
  team.barrier();
  const Linear gate_up = {a.gate_up_encoding, a.type,  memory.x,  a.E,     nullptr, nullptr, nullptr, nullptr,
                          memory.gates,       2 * a.F, num_pairs, 2 * a.F, a.E,     0};
  multiply_jobs(a, gate_up, 0, memory.max_pairs, jobs, num_jobs, team);
  team.barrier();
  over_rows(team, num_pairs, [&](int64_t begin, int64_t end) {
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
                       memory.y,        a.E,    num_pairs,        a.E, a.F,     0};
  multiply_jobs(a, down, 1, memory.max_pairs, jobs, num_jobs, team);
  team.barrier();
  const bool is_last_round = first_pair + num_pairs == memory.ends[a.num_experts - 1];
  over_rows(team, a.rows, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row++) {
      const int64_t *positions = memory.positions + row * a.top_k, count = memory.num_positions[row];
      int64_t first_position = 0, end_position = 0;
      while (first_position < count && positions[first_position] < first_pair) first_position++;
      for (end_position = first_position; end_position < count && positions[end_position] < first_pair + num_pairs;)
        end_position++;
      const float* topk_weights = a.topk_weights + row * a.topk_weights_stride;
      for_vectors(a.E, EACH_VECTOR {
        vf total = first_pair ? load(memory.totals + row * a.E + i, lanes) : vf{};
        for (int64_t j = first_position; j < end_position; j++)
          total += load((const T*)memory.y + (positions[j] - first_pair) * a.E + i, lanes) *
                   topk_weights[memory.sorted_pairs[positions[j]] - row * a.top_k];
        if (is_last_round) store((T*)a.out + row * a.E + i, total, lanes);
        else store(memory.totals + row * a.E + i, total, lanes);
      });
    }
  });
}

static int64_t work(const Experts& a) { return 3 * a.rows * a.top_k * a.E * a.F; }
static void run(const Experts& a, const Team& team) {
  if (!a.rows) return;
  char* shared = nullptr;
  if (team.rank == 0) {
    shared = (char*)penstock_scratch(SHARED, ExpertsMemory(a, nullptr).bytes);
    sort_pairs(a, ExpertsMemory(a, shared), team);
  }
  const ExpertsMemory memory(a, team.share(shared));
  const int64_t num_jobs = *memory.num_jobs;
  if (!num_jobs && team.rank == 0) __builtin_memset(a.out, 0, a.rows * a.E * (a.type == 0 ? 4 : 2));
  for (int64_t first_job = 0, next_job; first_job < num_jobs; first_job = next_job) {
    int64_t num_pairs = 0;
    next_job = first_job;
    for (; next_job < num_jobs && num_pairs + memory.jobs[next_job].rows <= memory.max_pairs; next_job++)
      num_pairs += memory.jobs[next_job].rows;
    WITH_TYPE(a.type, T, multiply_round<T>(a, memory, memory.jobs + first_job, next_job - first_job, team));
  }
}
KERNEL(experts, Experts)
