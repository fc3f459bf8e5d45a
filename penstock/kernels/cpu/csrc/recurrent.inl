// Linear attention: the causal convolution, the gated delta rule, and output gates. A sequence whose number of
// rows is its length begins with a state of zeros. Other sequences continue from the state at their slot.

constexpr int64_t MAX_WIDTH = 8;       // largest width of the convolution
constexpr int64_t MAX_KEY_DIM = 256;   // largest size of a key head
constexpr int64_t NUM_SAVES = 2;       // saves [B, NUM_SAVES, 2]: number of rows; slot that gets the state after them
constexpr int64_t TILE_VECTORS = 4;    // vectors of columns of a state that one piece of work updates

INLINE vf sigmoid(vf x) { return 1 / (1 + exp(-x)); }

// x [T, C], rows strided; weight [K, C]; inputs [N, K - 1, C]: the last inputs of each state; out [T, C].
struct ShortConvolution {
  int64_t type;
  const void* x;
  const float* weight;
  void* inputs;
  const int64_t *slots, *saves;
  const int32_t *row_offsets, *lengths;
  void* out;
  int64_t B, C, K, x_stride;
};

// Computes all rows of one sequence for one vector of channels, which begins at `channel`.
template <class T, class Lanes>
INLINE void convolve(const ShortConvolution& a, int64_t b, int64_t channel, Lanes lanes) {
  const int64_t first_row = a.row_offsets[b], num_rows = a.row_offsets[b + 1] - first_row, num_previous = a.K - 1;
  T* state = (T*)a.inputs + a.slots[b] * num_previous * a.C + channel;
  const T* x = (const T*)a.x + first_row * a.x_stride + channel;
  T* out = (T*)a.out + first_row * a.C + channel;
  const int64_t* saves = a.saves + b * 2 * NUM_SAVES;
  vf window[MAX_WIDTH], weight[MAX_WIDTH];  // window: the last K - 1 inputs, oldest first, and the current input
  for (int64_t j = 0; j < num_previous; j++) window[j] = num_rows == a.lengths[b] ? vf{} : load(state + j * a.C, lanes);
  for (int64_t j = 0; j < a.K; j++) weight[j] = load(a.weight + j * a.C + channel, lanes);
  for (int64_t t = 0; t < num_rows; t++) {
    window[num_previous] = load(x + t * a.x_stride, lanes);
    vf total = window[0] * weight[0];
    for (int64_t j = 1; j < a.K; j++) total = fma(window[j], weight[j], total);
    store(out + t * a.C, total * sigmoid(total), lanes);
    for (int64_t j = 0; j < num_previous; j++) window[j] = window[j + 1];
    for (int64_t i = 0; i < NUM_SAVES; i++)
      if (saves[2 * i] == t + 1)
        for (int64_t j = 0; j < num_previous; j++)
          store((T*)a.inputs + (saves[2 * i + 1] * num_previous + j) * a.C + channel, window[j], lanes);
  }
  for (int64_t j = 0; j < num_previous; j++) store(state + j * a.C, window[j], lanes);
}

template <class T> static void short_convolution(const ShortConvolution& a, const Team& team) {
  const int64_t vectors = ceil_div(a.C, (int64_t)W);
  over_rows(team, a.B * vectors, [=](int64_t begin, int64_t end) {
    for (int64_t piece = begin; piece < end; piece++) {
      const int64_t b = piece / vectors, i = piece % vectors * W;
      if (i + W <= a.C) convolve<T>(a, b, i, FullVector{});
      else convolve<T>(a, b, i, PartialVector{a.C - i});
    }
  });
}

static int64_t work(const ShortConvolution& a) {
  return a.B ? (8 + a.K) * ELEMENT_WORK * a.row_offsets[a.B] * a.C : 0;
}
static void run(const ShortConvolution& a, const Team& team) { WITH_TYPE(a.type, T, short_convolution<T>(a, team)); }
KERNEL(short_convolution, ShortConvolution)

// qkv [T, 2 K D + H F] and gates [T, 2 H], rows strided; decay [2, H]: a factor and a bias per head; states
// [N, H, D, F]; out [T, H, F]. K is the number of key heads, H that of value heads.
struct GatedDeltaRule {
  int64_t type;
  const void *qkv, *gates;
  const float* decay;
  float* states;
  const int64_t *slots, *saves;
  const int32_t *row_offsets, *lengths;
  void* out;
  int64_t B, H, K, D, F, T, qkv_stride, gates_stride;
};

// Writes x [D], divided by its norm and multiplied by `scale`, to out. 1e-6 is added to the square of the norm.
template <class T> INLINE void normalize(const T* x, float* out, int64_t D, float scale) {
  const vf squares = sum_of_vectors(D, ADD_VECTOR {
    const vf v = load(x + i, lanes);
    return fma(v, v, sum_so_far);
  });
  const vf factor = all(scale / __builtin_sqrtf(sum(squares) + 1e-6f));
  for_vectors(D, EACH_VECTOR { store(out + i, load(x + i, lanes) * factor, lanes); });
}

INLINE float softplus(float x) { return x > 20 ? x : __builtin_log1pf(__builtin_expf(x)); }

// Updates V vectors of columns of one state with one row, and writes the output of these columns.
template <class T, int V, class Lanes>
INLINE void update_columns(float* state, const float* q, const float* k, const T* v, T* out, float decay, float rate,
                           int64_t D, int64_t F, Lanes lanes) {
  vf change[V] = {}, result[V] = {};
  for (int64_t d = 0; d < D; d++)
#pragma GCC unroll 4
    for (int i = 0; i < V; i++) change[i] = fma(load(state + d * F + i * W, lanes), all(k[d]), change[i]);
#pragma GCC unroll 4
  for (int i = 0; i < V; i++) change[i] = (load(v + i * W, lanes) - change[i] * decay) * rate;
  for (int64_t d = 0; d < D; d++)
#pragma GCC unroll 4
    for (int i = 0; i < V; i++) {
      const vf new_state = fma(all(k[d]), change[i], load(state + d * F + i * W, lanes) * decay);
      store(state + d * F + i * W, new_state, lanes);
      result[i] = fma(new_state, all(q[d]), result[i]);
    }
#pragma GCC unroll 4
  for (int i = 0; i < V; i++) store(out + i * W, result[i], lanes);
}

// Computes all rows of head h of sequence b, for the columns `begin` to `end` of the state.
template <class T> static void delta_rule_of_head(const GatedDeltaRule& a, int64_t b, int64_t h, int64_t begin,
                                                  int64_t end) {
  const int64_t first_row = a.row_offsets[b], num_rows = a.row_offsets[b + 1] - first_row;
  const int64_t key_offset = h / (a.H / a.K) * a.D;
  float* state = a.states + (a.slots[b] * a.H + h) * a.D * a.F;
  const int64_t* saves = a.saves + b * 2 * NUM_SAVES;
  float q[MAX_KEY_DIM], k[MAX_KEY_DIM];
  if (num_rows == a.lengths[b])
    for (int64_t d = 0; d < a.D; d++) __builtin_memset(state + d * a.F + begin, 0, (end - begin) * sizeof(float));
  for (int64_t t = first_row; t < first_row + num_rows; t++) {
    const T *row = (const T*)a.qkv + t * a.qkv_stride, *gates = (const T*)a.gates + t * a.gates_stride;
    normalize(row + key_offset, q, a.D, 1 / __builtin_sqrtf((float)a.D));
    normalize(row + a.K * a.D + key_offset, k, a.D, 1);
    const float rate = 1 / (1 + __builtin_expf(-widen(gates[h])));
    const float decay = __builtin_expf(-a.decay[h] * softplus(widen(gates[a.H + h]) + a.decay[a.H + h]));
    const T* v = row + 2 * a.K * a.D + h * a.F;
    T* out = (T*)a.out + (t * a.H + h) * a.F;
    int64_t i = begin;
    for (; i + TILE_VECTORS * W <= end; i += TILE_VECTORS * W)
      update_columns<T, TILE_VECTORS>(state + i, q, k, v + i, out + i, decay, rate, a.D, a.F, FullVector{});
    for (; i + W <= end; i += W)
      update_columns<T, 1>(state + i, q, k, v + i, out + i, decay, rate, a.D, a.F, FullVector{});
    if (i < end)
      update_columns<T, 1>(state + i, q, k, v + i, out + i, decay, rate, a.D, a.F, PartialVector{end - i});
    for (int64_t save = 0; save < NUM_SAVES; save++)
      if (saves[2 * save] == t + 1 - first_row)
        for (int64_t d = 0; d < a.D; d++)
          __builtin_memcpy(a.states + ((saves[2 * save + 1] * a.H + h) * a.D + d) * a.F + begin,
                           state + d * a.F + begin, (end - begin) * sizeof(float));
  }
}

template <class T> static void gated_delta_rule(const GatedDeltaRule& a, const Team& team) {
  const int64_t width = TILE_VECTORS * W, tiles = ceil_div(a.F, width);
  over_rows(team, a.B * a.H * tiles, [=](int64_t begin, int64_t end) {
    for (int64_t piece = begin; piece < end; piece++) {
      const int64_t head = piece / tiles, tile = piece % tiles;
      delta_rule_of_head<T>(a, head / a.H, head % a.H, tile * width, min(a.F, (tile + 1) * width));
      count_progress(team);
    }
  });
}

static int64_t work(const GatedDeltaRule& a) { return 4 * a.T * a.H * a.D * a.F; }
static void run(const GatedDeltaRule& a, const Team& team) { WITH_TYPE(a.type, T, gated_delta_rule<T>(a, team)); }
KERNEL(gated_delta_rule, GatedDeltaRule)

// x [n0, n1, D] with strides x_stride0, x_stride1; gate [n0, n1, D] with strides gate_stride0, gate_stride1; out
// contiguous.
struct ApplyGate {
  int64_t type, function;  // function: 0 sigmoid, 1 SiLU
  const void *x, *gate;
  void* out;
  int64_t n0, n1, D, x_stride0, x_stride1, gate_stride0, gate_stride1;
};

template <class T> static void apply_gate(const ApplyGate& a, const Team& team) {
  over_rows(team, a.n0 * a.n1, [=](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row++) {
      const T* x = (const T*)a.x + row / a.n1 * a.x_stride0 + row % a.n1 * a.x_stride1;
      const T* gates = (const T*)a.gate + row / a.n1 * a.gate_stride0 + row % a.n1 * a.gate_stride1;
      T* out = (T*)a.out + row * a.D;
      for_vectors(a.D, EACH_VECTOR {
        const vf gate = load(gates + i, lanes);
        store(out + i, load(x + i, lanes) * (a.function ? gate * sigmoid(gate) : sigmoid(gate)), lanes);
      });
    }
  });
}

static int64_t work(const ApplyGate& a) { return 8 * ELEMENT_WORK * a.n0 * a.n1 * a.D; }
static void run(const ApplyGate& a, const Team& team) { WITH_TYPE(a.type, T, apply_gate<T>(a, team)); }
KERNEL(apply_gate, ApplyGate)
