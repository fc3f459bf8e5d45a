// Operations of audio codecs over rows [T, C]: depthwise convolution, snake, scaled addition, group norm, polar and
// overlap-add. An inverse short-time Fourier transform consists of polar, a linear layer, and overlap-add. Convolutions
// with one group are linear layers (kernels/convolution.py).

// ---- sine and cosine ----
// An angle is reduced to x = n pi + r with |r| <= pi / 2. The Taylor sums in r have an error of at most 2.5e-7: 6e-8
// from the omitted terms, and the rest from rounding.

struct ReducedAngle {
  vf r;
  vu sign;  // the sign of (-1)^n in the highest bit
};
INLINE ReducedAngle reduce_angle(vf x) {
  const vf shifted = fma(x, all(0.318309886f), all(ROUNDER)), n = shifted - ROUNDER;
  vf r = fma(n, all(-3.140625f), x);  // the product is exact, because this part of pi has few bits
  r = fma(n, all(-9.67653589793e-4f), r);
  // Because 1 / pi is rounded, n can be wrong where x / pi is about halfway between two integers. |r| then exceeds
  // pi / 2 by up to about 4e-8 |x|.
  const vf limit = all(1.57079633f);
  r = r > limit ? limit : r;
  r = r < -limit ? -limit : r;
  return {r, as_bits(shifted) << 31};
}
INLINE vf sine_sum(vf r) {
  const vf square = r * r;
  vf p = all(-1.0f / 39916800);
  p = fma(p, square, all(1.0f / 362880));
  p = fma(p, square, all(-1.0f / 5040));
  p = fma(p, square, all(1.0f / 120));
  p = fma(p, square, all(-1.0f / 6));
  p = fma(p, square, all(1.0f));
  return p * r;
}
INLINE vf cosine_sum(vf r) {
  const vf square = r * r;
  vf p = all(1.0f / 479001600);
  p = fma(p, square, all(-1.0f / 3628800));
  p = fma(p, square, all(1.0f / 40320));
  p = fma(p, square, all(-1.0f / 720));
  p = fma(p, square, all(1.0f / 24));
  p = fma(p, square, all(-0.5f));
  return fma(p, square, all(1.0f));
}
INLINE vf with_sign(vf x, vu sign) { return as_float(as_bits(x) ^ sign); }

struct DepthwiseConv1d {  // x [T, C], rows strided; taps [kernel_size, C]; bias [C] or null; out [rows, C]
  int64_t type;
  const void* x;
  const float *taps, *bias;
  void* out;
  int64_t T, rows, C, x_stride, kernel_size, stride, dilation, padding;
};

constexpr int CONV_ROWS = 4;  // number of output rows for which the taps are loaded once

// Computes ROWS consecutive output rows from `row` on with the taps begin:end. Each sum is one chain of additions in
// the order of the taps.
template <class T, int ROWS>
INLINE void depthwise_rows(const DepthwiseConv1d& a, int64_t row, int64_t begin, int64_t end) {
  const int64_t row_step = a.stride * a.x_stride, tap_step = a.dilation * a.x_stride;
  const T* x = (const T*)a.x + (row * a.stride - a.padding) * a.x_stride;
  T* out = (T*)a.out + row * a.C;
  for_vectors(a.C, EACH_VECTOR {
    vf sums[ROWS];
    const vf bias = a.bias ? load(a.bias + i, lanes) : vf{};
    for (int r = 0; r < ROWS; r++) sums[r] = bias;
    for (int64_t j = begin; j < end; j++) {
      const vf tap = load(a.taps + j * a.C + i, lanes);
      for (int r = 0; r < ROWS; r++) sums[r] = fma(tap, load(x + j * tap_step + r * row_step + i, lanes), sums[r]);
    }
    for (int r = 0; r < ROWS; r++) store(out + r * a.C + i, sums[r], lanes);
  });
}

template <class T> static void depthwise_conv1d(const DepthwiseConv1d& a, const Team& team) {
  over_rows(team, a.rows, [=](int64_t first, int64_t last) {
    const int64_t reach = (a.kernel_size - 1) * a.dilation;
    for (int64_t row = first; row < last;) {
      const int64_t first_input = row * a.stride - a.padding;  // the input row of the first tap
      if (row + CONV_ROWS <= last && first_input >= 0 && first_input + (CONV_ROWS - 1) * a.stride + reach < a.T) {
        depthwise_rows<T, CONV_ROWS>(a, row, 0, a.kernel_size);
        row += CONV_ROWS;
        continue;
      }
      const int64_t begin = first_input < 0 ? min(ceil_div(-first_input, a.dilation), a.kernel_size) : 0;
      const int64_t end = first_input < a.T ? min(a.kernel_size, ceil_div(a.T - first_input, a.dilation)) : begin;
      depthwise_rows<T, 1>(a, row, begin, max(begin, end));
      row++;
    }
  });
}

static int64_t work(const DepthwiseConv1d& a) { return (ELEMENT_WORK + a.kernel_size) * a.rows * a.C; }
static void run(const DepthwiseConv1d& a, const Team& team) { WITH_TYPE(a.type, T, depthwise_conv1d<T>(a, team)); }
KERNEL(depthwise_conv1d, DepthwiseConv1d)

struct Snake {  // x [n, F], rows strided; alpha, beta [F]; out [n, F] = x + beta sin(alpha x)^2
  int64_t type;
  const void* x;
  const float *alpha, *beta;
  void* out;
  int64_t n, F, stride;
};

template <class T> static void snake(const Snake& a, const Team& team) {
  over_rows(team, a.n, [=](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row++) {
      const T* x = (const T*)a.x + row * a.stride;
      T* out = (T*)a.out + row * a.F;
      for_vectors(a.F, EACH_VECTOR {
        const vf v = load(x + i, lanes), sine = sine_sum(reduce_angle(load(a.alpha + i, lanes) * v).r);
        store(out + i, fma(load(a.beta + i, lanes) * sine, sine, v), lanes);
      });
    }
  });
}

static int64_t work(const Snake& a) { return 5 * ELEMENT_WORK * a.n * a.F; }
static void run(const Snake& a, const Team& team) { WITH_TYPE(a.type, T, snake<T>(a, team)); }
KERNEL(snake, Snake)

struct AddScaled {  // x, y [n, F], rows strided; factors [n]; out [n, F]
  int64_t type;
  const void *x, *y;
  const float* factors;
  void* out;
  int64_t n, F, x_stride, y_stride;
};

template <class T> static void add_scaled(const AddScaled& a, const Team& team) {
  over_rows(team, a.n, [=](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row++) {
      const T *x = (const T*)a.x + row * a.x_stride, *y = (const T*)a.y + row * a.y_stride;
      T* out = (T*)a.out + row * a.F;
      const vf factor = all(a.factors[row]);
      for_vectors(a.F, EACH_VECTOR { store(out + i, fma(factor, load(y + i, lanes), load(x + i, lanes)), lanes); });
    }
  });
}

static int64_t work(const AddScaled& a) { return ELEMENT_WORK * a.n * a.F; }
static void run(const AddScaled& a, const Team& team) { WITH_TYPE(a.type, T, add_scaled<T>(a, team)); }
KERNEL(add_scaled, AddScaled)

struct GroupNorm {  // x [n, C], rows strided: one sequence; weight, bias [C]; out [n, C]
  int64_t type;
  const void* x;
  const float *weight, *bias;
  void* out;
  int64_t n, C, groups, stride;
  double eps;
};

template <class T> static void group_norm(const GroupNorm& a, const Team& team) {
  const int64_t group_width = a.C / a.groups;
  const float num_elements = (float)(a.n * group_width);
  over_rows(team, a.groups, [=](int64_t begin, int64_t end) {
    for (int64_t group = begin; group < end; group++) {
      const T* x = (const T*)a.x + group * group_width;
      const float *weight = a.weight + group * group_width, *bias = a.bias + group * group_width;
      T* out = (T*)a.out + group * group_width;
      vf total = {}, squares = {};
      for (int64_t row = 0; row < a.n; row++)
        for_vectors(group_width, EACH_VECTOR { total += load(x + row * a.stride + i, lanes); });
      const vf mean = all(sum(total) / num_elements);
      for (int64_t row = 0; row < a.n; row++)
        for_vectors(group_width, EACH_VECTOR {
          vf deviation = filled(load(x + row * a.stride + i, lanes) - mean, 0, lanes);
          squares = fma(deviation, deviation, squares);
        });
      const vf factor = all(1 / __builtin_sqrtf(sum(squares) / num_elements + (float)a.eps));
      for (int64_t row = 0; row < a.n; row++)
        for_vectors(group_width, EACH_VECTOR {
          vf normed = (load(x + row * a.stride + i, lanes) - mean) * factor;
          store(out + row * a.C + i, fma(normed, load(weight + i, lanes), load(bias + i, lanes)), lanes);
        });
    }
  });
}

static int64_t work(const GroupNorm& a) { return 3 * ELEMENT_WORK * a.n * a.C; }
static void run(const GroupNorm& a, const Team& team) { WITH_TYPE(a.type, T, group_norm<T>(a, team)); }
KERNEL(group_norm, GroupNorm)

struct Polar {  // x [n, 2F]: log magnitudes, phases, rows strided; out [n, 2F]: real, imaginary parts
  int64_t type;
  const void* x;
  float* out;
  int64_t n, F, stride;
  double limit;  // maximum magnitude
};

template <class T> static void polar(const Polar& a, const Team& team) {
  const vf limit = all((float)a.limit);
  over_rows(team, a.n, [=](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row++) {
      const T *logs = (const T*)a.x + row * a.stride, *phases = logs + a.F;
      float* out = a.out + row * 2 * a.F;
      for_vectors(a.F, EACH_VECTOR {
        vf magnitude = exp(load(logs + i, lanes));
        magnitude = magnitude > limit ? limit : magnitude;
        const ReducedAngle phase = reduce_angle(load(phases + i, lanes));
        magnitude = with_sign(magnitude, phase.sign);
        store(out + i, magnitude * cosine_sum(phase.r), lanes);
        store(out + a.F + i, magnitude * sine_sum(phase.r), lanes);
      });
    }
  });
}

static int64_t work(const Polar& a) { return 12 * ELEMENT_WORK * a.n * a.F; }
static void run(const Polar& a, const Team& team) { WITH_TYPE(a.type, T, polar<T>(a, team)); }
KERNEL(polar, Polar)

struct OverlapAdd {  // frames [n, frame_size], rows strided: one sequence; window_squares [frame_size]; out [n * hop]
  const float *frames, *window_squares;
  float* out;
  int64_t n, frame_size, hop, frame_stride;  // frame_size is a multiple of hop
};

static int64_t work(const OverlapAdd& a) { return 2 * ELEMENT_WORK * a.n * a.frame_size; }
static void run(const OverlapAdd& a, const Team& team) {
  const int64_t num_dropped = (a.frame_size - a.hop) / 2, frames_per_sample = a.frame_size / a.hop;
  over_rows(team, a.n, [=](int64_t begin, int64_t end) {
    for (int64_t sample = begin * a.hop; sample < end * a.hop;) {
      // The set of overlapping frames is constant up to the start of the next frame.
      const int64_t position = sample + num_dropped, newest = position / a.hop;
      const int64_t next = min((newest + 1) * a.hop - num_dropped, end * a.hop);
      const int64_t first = max<int64_t>(newest - frames_per_sample + 1, 0), last = min(newest, a.n - 1);
      for_vectors(next - sample, EACH_VECTOR {
        vf total = {}, weights = {};
        for (int64_t frame = first; frame <= last; frame++) {
          const int64_t offset = position - frame * a.hop + i;
          total += load(a.frames + frame * a.frame_stride + offset, lanes);
          weights += load(a.window_squares + offset, lanes);
        }
        store(a.out + sample + i, total / weights, lanes);
      });
      sample = next;
    }
  });
}
KERNEL(overlap_add, OverlapAdd)
