// Operations on single rows: norms, activations, sums, and copies of indexed rows.

// Writes the RMS norm of a row of E numbers, multiplied by the weight.
template <class T, class TW>
INLINE void norm_row(const T* x, const TW* weight, T* out, int64_t E, float eps) {
  const vf squares = sum_of_vectors(E, ADD_VECTOR {
    const vf v = load(x + i, lanes);
    return fma(v, v, sum_so_far);
  });
  vf factor = all(1 / __builtin_sqrtf(sum(squares) / (float)E + eps));
  for_vectors(E, EACH_VECTOR {
    // Rounds to T before the weight is applied, as in the training of most models, unless the types of x and weight
    // differ.
    vf normed = load(x + i, lanes) * factor;
    if (sizeof(T) == sizeof(TW)) normed = rounded_to(x, normed);
    store(out + i, normed * load(weight + i, lanes), lanes);
  });
}

struct RmsNorm {  // x [n0, n1, E] with strides stride0, stride1; out [n0, n1, E] contiguous
  int64_t type, weight_type;
  const void *x, *weight;
  void* out;
  int64_t n0, n1, stride0, stride1, E;
  double eps;
};

template <class T, class TW> static void rms_norm(const RmsNorm& a, const Team& team) {
  over_rows(team, a.n0 * a.n1, [=](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row++)
      norm_row((const T*)a.x + row / a.n1 * a.stride0 + row % a.n1 * a.stride1, (const TW*)a.weight,
               (T*)a.out + row * a.E, a.E, (float)a.eps);
  });
}

static int64_t work(const RmsNorm& a) { return ELEMENT_WORK * a.n0 * a.n1 * a.E; }
static void run(const RmsNorm& a, const Team& team) {
  WITH_TYPE(a.type, T, WITH_TYPE(a.weight_type, TW, rms_norm<T, TW>(a, team)));
}
KERNEL(rms_norm, RmsNorm)

struct AddRmsNorm {  // x, residual [n, E], rows strided; normed, total [n, E] contiguous
  int64_t type, weight_type;
  const void *x, *residual, *weight;
  void *normed, *total;
  int64_t n, x_stride, residual_stride, E;
  double eps;
};

template <class T, class TW> static void add_rms_norm(const AddRmsNorm& a, const Team& team) {
  over_rows(team, a.n, [=](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row++) {
      const T *x = (const T*)a.x + row * a.x_stride, *residual = (const T*)a.residual + row * a.residual_stride;
      T* total = (T*)a.total + row * a.E;
      for_vectors(a.E, EACH_VECTOR { store(total + i, load(x + i, lanes) + load(residual + i, lanes), lanes); });
      norm_row(total, (const TW*)a.weight, (T*)a.normed + row * a.E, a.E, (float)a.eps);
    }
  });
}

static int64_t work(const AddRmsNorm& a) { return ELEMENT_WORK * a.n * a.E; }
static void run(const AddRmsNorm& a, const Team& team) {
  WITH_TYPE(a.type, T, WITH_TYPE(a.weight_type, TW, add_rms_norm<T, TW>(a, team)));
}
KERNEL(add_rms_norm, AddRmsNorm)

struct Silu {
  INLINE vf of(vf x) { return x / (1 + exp(-x)); }
};
struct Gelu {
  INLINE vf of(vf x) { return 0.5f * x * (1 + erf(x * 0.70710678f)); }
};
struct GeluTanh {  // 0.5 (1 + tanh(u)) = 1 / (1 + e^-2u)
  INLINE vf of(vf x) {
    const vf y = x / (1 + exp(-1.59576912f * (x + 0.044715f * x * x * x)));
    // For x <= -20 the result is 0, or NaN for -inf. y is not 0 there, because `exp` returns at most 2.3e38.
    return x > -20.0f ? y : x * 0.0f;
  }
};
struct Relu {
  INLINE vf of(vf x) { return vmax(x, vf{}); }
};
struct Relu2 {
  INLINE vf of(vf x) { return Relu::of(x) * Relu::of(x); }
};

// Returns the activation of x, exact enough for rounding to type T.
template <class T, class Activation> INLINE vf activated(vf x) { return Activation::of(x); }
#if PENSTOCK_DOT
// Computes 1 / (1 + e^-2u) with a relative error of 2e-4, a tenth of the rounding error of bfloat16. This takes half
// the time of the exact version.
template <> INLINE_MEMBER vf activated<bf16, GeluTanh>(vf x) {
  const vf y = x * (vf)_mm512_rcp14_ps(1 + exp2_to_bf16(x * fma(x * x, all(-0.102943241f), all(-2.30220820f))));
  return x > -20.0f ? y : x * 0.0f;
}
#endif

// Calls body with the activation function of the code `activation`, for results of type T. Does nothing for codes above
// 4.
template <class T, class Body> INLINE void with_activation(int64_t activation, Body body) {
  if (activation == 0) body([](vf x) __attribute__((always_inline)) { return activated<T, Silu>(x); });
  if (activation == 1) body([](vf x) __attribute__((always_inline)) { return activated<T, Gelu>(x); });
  if (activation == 2) body([](vf x) __attribute__((always_inline)) { return activated<T, GeluTanh>(x); });
  if (activation == 3) body([](vf x) __attribute__((always_inline)) { return activated<T, Relu>(x); });
  if (activation == 4) body([](vf x) __attribute__((always_inline)) { return activated<T, Relu2>(x); });
}

struct GatedActivation {  // x [n, 2F], rows strided; out [n, F]
  int64_t type, activation;
  const void* x;
  void* out;
  int64_t n, F, stride;
};

template <class T, class Activation> static void gate(const GatedActivation& a, const Team& team) {
  over_rows(team, a.n, [=](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row++) {
      const T *gates = (const T*)a.x + row * a.stride, *up = gates + a.F;
      T* out = (T*)a.out + row * a.F;
      for_vectors(a.F, EACH_VECTOR {
        store(out + i, rounded_to(out, activated<T, Activation>(load(gates + i, lanes))) * load(up + i, lanes), lanes);
      });
    }
  });
}

static int64_t work(const GatedActivation& a) { return 8 * ELEMENT_WORK * a.n * a.F; }
static void run(const GatedActivation& a, const Team& team) {
  WITH_TYPE(a.type, T, {
    if (a.activation == 0) gate<T, Silu>(a, team);
    if (a.activation == 1) gate<T, Gelu>(a, team);
    if (a.activation == 2) gate<T, GeluTanh>(a, team);
    if (a.activation == 3) gate<T, Relu>(a, team);
    if (a.activation == 4) gate<T, Relu2>(a, team);
  });
}
KERNEL(gated_activation, GatedActivation)

// Copies the rows `indices` [num_indices] of table [table_rows, row_bytes] to out [num_indices, row_bytes]. The stride
// is in bytes.
struct TakeRows {
  const char* table;
  const int64_t* indices;
  char* out;
  int64_t num_indices, table_rows, row_bytes, table_stride;
};

static int64_t work(const TakeRows& a) { return ELEMENT_WORK * a.num_indices * a.row_bytes; }
// Reports the position of an index outside 0:table_rows with `fail`. The output row of such an index becomes 0.
static void run(const TakeRows& a, const Team& team) {
  over_rows(team, a.num_indices, [=](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
      const int64_t row = a.indices[i];
      if (row < 0 || row >= a.table_rows) {
        __builtin_memset(a.out + i * a.row_bytes, 0, a.row_bytes);
        team.fail(i);
        continue;
      }
      __builtin_memcpy(a.out + i * a.row_bytes, a.table + row * a.table_stride, a.row_bytes);
    }
  });
}
KERNEL(take_rows, TakeRows)

// Copies x [n, row_bytes] to out, and then values [num_indices, row_bytes] to the rows `indices` [num_indices] of out.
// Strides are in bytes.
struct PutRows {
  const char *x, *values;
  const int64_t* indices;
  char* out;
  int64_t n, num_indices, row_bytes, x_stride, values_stride;
};

static int64_t work(const PutRows& a) { return ELEMENT_WORK * a.n * a.row_bytes; }
// Reports the position of an index outside 0:n with `fail`. The values of such an index are not stored.
static void run(const PutRows& a, const Team& team) {
  over_rows(team, a.n, [=](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) __builtin_memcpy(a.out + i * a.row_bytes, a.x + i * a.x_stride, a.row_bytes);
    for (int64_t i = 0; i < a.num_indices; i++) {
      const int64_t row = a.indices[i];
      if (row < 0 || row >= a.n) team.fail(i);
      else if (row >= begin && row < end)
        __builtin_memcpy(a.out + row * a.row_bytes, a.values + i * a.values_stride, a.row_bytes);
    }
  });
}
KERNEL(put_rows, PutRows)

// x [n0, n1, E] has the strides stride0, stride1. out [n0, n1, E] is contiguous. weight and bias are [E] or [n1, E], of
// one type.
struct LayerNorm {
  int64_t type, weight_type;
  const void *x, *weight, *bias;
  void* out;
  int64_t n0, n1, stride0, stride1, E, weight_stride;  // weight_stride: 0 if all rows share the weights
  double eps;
};

template <class T, class TW, class TO>
INLINE void layer_norm_row(const T* x, const TW* weight, const TW* bias, TO* out, int64_t E, float eps) {
  const vf total = sum_of_vectors(E, ADD_VECTOR { return sum_so_far + load(x + i, lanes); });
  const vf mean = all(sum(total) / (float)E);
  const vf squares = sum_of_vectors(E, ADD_VECTOR {
    const vf deviation = filled(load(x + i, lanes) - mean, 0, lanes);
    return fma(deviation, deviation, sum_so_far);
  });
  const vf factor = all(1 / __builtin_sqrtf(sum(squares) / (float)E + eps));
  for_vectors(E, EACH_VECTOR {
    vf normed = (load(x + i, lanes) - mean) * factor;
    store(out + i, fma(normed, load(weight + i, lanes), load(bias + i, lanes)), lanes);
  });
}

template <class T, class TW> static void layer_norm(const LayerNorm& a, const Team& team) {
  over_rows(team, a.n0 * a.n1, [=](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row++) {
      const int64_t outer = row / a.n1, inner = row % a.n1, weights = inner * a.weight_stride;
      layer_norm_row((const T*)a.x + outer * a.stride0 + inner * a.stride1, (const TW*)a.weight + weights,
                     (const TW*)a.bias + weights, (T*)a.out + row * a.E, a.E, (float)a.eps);
    }
  });
}

static int64_t work(const LayerNorm& a) { return 2 * ELEMENT_WORK * a.n0 * a.n1 * a.E; }
static void run(const LayerNorm& a, const Team& team) {
  WITH_TYPE(a.type, T, WITH_TYPE(a.weight_type, TW, layer_norm<T, TW>(a, team)));
}
KERNEL(layer_norm, LayerNorm)

struct AddLayerNorm {  // x, residual [n, E], rows strided; normed, total [n, E] contiguous; weight, bias of one type
  int64_t type, weight_type;
  const void *x, *residual, *weight, *bias;
  void *normed, *total;
  int64_t n, x_stride, residual_stride, E;
  double eps;
};

template <class T, class TW> static void add_layer_norm(const AddLayerNorm& a, const Team& team) {
  over_rows(team, a.n, [=](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row++) {
      const T *x = (const T*)a.x + row * a.x_stride, *residual = (const T*)a.residual + row * a.residual_stride;
      T* total = (T*)a.total + row * a.E;
      for_vectors(a.E, EACH_VECTOR { store(total + i, load(x + i, lanes) + load(residual + i, lanes), lanes); });
      layer_norm_row(total, (const TW*)a.weight, (const TW*)a.bias, (T*)a.normed + row * a.E, a.E, (float)a.eps);
    }
  });
}

static int64_t work(const AddLayerNorm& a) { return 3 * ELEMENT_WORK * a.n * a.E; }
static void run(const AddLayerNorm& a, const Team& team) {
  WITH_TYPE(a.type, T, WITH_TYPE(a.weight_type, TW, add_layer_norm<T, TW>(a, team)));
}
KERNEL(add_layer_norm, AddLayerNorm)

struct LayerNormOfSum {  // x, residual [n, E], rows strided; out [n, E] contiguous; weight, bias of one type
  int64_t type, weight_type;
  const void *x, *residual, *weight, *bias;
  void* out;
  int64_t n, x_stride, residual_stride, E;
  double eps;
};

template <class T, class TW> static void layer_norm_of_sum(const LayerNormOfSum& a, const Team& team) {
  float* total = (float*)penstock_scratch(PRIVATE, a.E * sizeof(float));
  over_rows(team, a.n, [=](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row++) {
      const T *x = (const T*)a.x + row * a.x_stride, *residual = (const T*)a.residual + row * a.residual_stride;
      for_vectors(a.E, EACH_VECTOR { store(total + i, load(x + i, lanes) + load(residual + i, lanes), lanes); });
      layer_norm_row(total, (const TW*)a.weight, (const TW*)a.bias, (T*)a.out + row * a.E, a.E, (float)a.eps);
    }
  });
}

static int64_t work(const LayerNormOfSum& a) { return 3 * ELEMENT_WORK * a.n * a.E; }
static void run(const LayerNormOfSum& a, const Team& team) {
  WITH_TYPE(a.type, T, WITH_TYPE(a.weight_type, TW, layer_norm_of_sum<T, TW>(a, team)));
}
KERNEL(layer_norm_of_sum, LayerNormOfSum)

struct Operands {  // x, y [n, F], rows strided; out [n, F]
  int64_t type;
  const void *x, *y;
  void* out;
  int64_t n, F, x_stride, y_stride;
};
struct Add : Operands {};
struct Multiply : Operands {};

template <class T, class Function> static void combine(const Operands& a, const Team& team, Function function) {
  over_rows(team, a.n, [=](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row++) {
      const T *x = (const T*)a.x + row * a.x_stride, *y = (const T*)a.y + row * a.y_stride;
      T* out = (T*)a.out + row * a.F;
      for_vectors(a.F, EACH_VECTOR { store(out + i, function(load(x + i, lanes), load(y + i, lanes)), lanes); });
    }
  });
}

static int64_t work(const Operands& a) { return ELEMENT_WORK * a.n * a.F; }
static void run(const Add& a, const Team& team) {
  WITH_TYPE(a.type, T, combine<T>(a, team, [](vf x, vf y) __attribute__((always_inline)) { return x + y; }));
}
static void run(const Multiply& a, const Team& team) {
  WITH_TYPE(a.type, T, combine<T>(a, team, [](vf x, vf y) __attribute__((always_inline)) { return x * y; }));
}
KERNEL(add, Add)
KERNEL(multiply, Multiply)

struct ApplyFunction {  // applies a function to each element of x [n, F], rows strided; out [n, F]
  // Functions: 0 to 4 the activations, 5 x * factor, 6 factor * tanh(x / factor), 7 x clamped to low..factor.
  int64_t type, function;
  const void* x;
  void* out;
  int64_t n, F, stride;
  double factor, low;
};

template <class T, class Function>
INLINE void apply_function(const ApplyFunction& a, const Team& team, Function function) {
  over_rows(team, a.n, [=](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row++) {
      const T* x = (const T*)a.x + row * a.stride;
      T* out = (T*)a.out + row * a.F;
      for_vectors(a.F, EACH_VECTOR { store(out + i, function(load(x + i, lanes)), lanes); });
    }
  });
}

static int64_t work(const ApplyFunction& a) {
  return (a.function == 5 || a.function == 7 ? 1 : 8) * ELEMENT_WORK * a.n * a.F;
}
static void run(const ApplyFunction& a, const Team& team) {
  const float factor = (float)a.factor, low = (float)a.low;
  WITH_TYPE(a.type, T, {
    with_activation<T>(a.function, [&](auto activation) __attribute__((always_inline)) {
      apply_function<T>(a, team, activation);
    });
    if (a.function == 5) apply_function<T>(a, team, [=](vf x) __attribute__((always_inline)) { return x * factor; });
    if (a.function == 6)
      apply_function<T>(a, team, [=](vf x) __attribute__((always_inline)) { return factor * tanh(x / factor); });
    if (a.function == 7)
      apply_function<T>(a, team, [=](vf x) __attribute__((always_inline)) {
        return x > all(factor) ? all(factor) : x < all(low) ? all(low) : x;
      });
  });
}
KERNEL(apply_function, ApplyFunction)

struct Xielu {  // x [n, F], rows strided; out [n, F]
  int64_t type;
  const void* x;
  void* out;
  int64_t n, F, stride;
  double positive, negative, slope, max_exponent;  // fields of XIELU (kernels/activations.py); max_exponent: its `eps`
};

template <class T> static void xielu(const Xielu& a, const Team& team) {
  const float positive = (float)a.positive, negative = (float)a.negative, slope = (float)a.slope;
  const vf max_exponent = all((float)a.max_exponent);
  over_rows(team, a.n, [=](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row++) {
      const T* x = (const T*)a.x + row * a.stride;
      T* out = (T*)a.out + row * a.F;
      for_vectors(a.F, EACH_VECTOR {
        const vf v = load(x + i, lanes);
        const vf below = negative * ((exp(v < max_exponent ? v : max_exponent) - 1) - v);
        store(out + i, slope * v + (v > vf{} ? positive * v * v : below), lanes);
      });
    }
  });
}

static int64_t work(const Xielu& a) { return 8 * ELEMENT_WORK * a.n * a.F; }
static void run(const Xielu& a, const Team& team) { WITH_TYPE(a.type, T, xielu<T>(a, team)); }
KERNEL(xielu, Xielu)

struct ClampedSwiGLU {  // x [n, 2F]: gates, ups, rows strided; out [n, F]
  int64_t type;
  const void* x;
  void* out;
  int64_t n, F, stride;
  double alpha, limit;
};

template <class T> static void clamped_swiglu(const ClampedSwiGLU& a, const Team& team) {
  const float alpha = (float)a.alpha;
  const vf limit = all((float)a.limit);
  over_rows(team, a.n, [=](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row++) {
      const T *gates = (const T*)a.x + row * a.stride, *ups = gates + a.F;
      T* out = (T*)a.out + row * a.F;
      for_vectors(a.F, EACH_VECTOR {
        vf gate = load(gates + i, lanes), up = load(ups + i, lanes);
        gate = gate > limit ? limit : gate;
        up = up > limit ? limit : up < -limit ? -limit : up;
        store(out + i, gate / (1 + exp(-alpha * gate)) * (up + 1), lanes);
      });
    }
  });
}

static int64_t work(const ClampedSwiGLU& a) { return 8 * ELEMENT_WORK * a.n * a.F; }
static void run(const ClampedSwiGLU& a, const Team& team) { WITH_TYPE(a.type, T, clamped_swiglu<T>(a, team)); }
KERNEL(clamped_swiglu, ClampedSwiGLU)
