// Rotary position embedding of queries and keys.

struct Rotary {  // q [n, H, D], k [n, K, D] with strides; cos, sin [n, half]; outputs contiguous. half: rotated pairs
  int64_t type;
  const void *q, *k;
  const float *cos, *sin;
  void *q_out, *k_out;
  int64_t n, H, K, D, half, q_row_stride, q_head_stride, k_row_stride, k_head_stride;
  int64_t interleaved;  // 0: pairs are (i, i + half); 1: pairs are (2 i, 2 i + 1)
};

// Rotates the pairs (i, i + half) of the heads of a row.
template <class T>
INLINE void rotate_halves(const T* x, const float* cos, const float* sin, T* out, int64_t heads, int64_t head_stride,
                       int64_t D, int64_t half) {
  for (int64_t h = 0; h < heads; h++, x += head_stride, out += D) {
    for_vectors(half, EACH_VECTOR {
      vf first = load(x + i, lanes), second = load(x + half + i, lanes);
      vf c = load(cos + i, lanes), s = load(sin + i, lanes);
      store(out + i, first * c - second * s, lanes);
      store(out + half + i, second * c + first * s, lanes);
    });
    __builtin_memcpy(out + 2 * half, x + 2 * half, (D - 2 * half) * sizeof(T));
  }
}

// Rotates pairs of adjacent dimensions. `cos` and `sin` have each number twice, and the sine for the first dimension of
// a pair is negated. Both dimensions of a pair are in the same vector, because a vector has an even number of lanes.
template <class T>
INLINE void rotate_pairs(const T* x, const float* cos, const float* sin, T* out, int64_t heads, int64_t head_stride,
                         int64_t D, int64_t half) {
  for (int64_t h = 0; h < heads; h++, x += head_stride, out += D) {
    for_vectors(2 * half, EACH_VECTOR {
      const vf v = load(x + i, lanes);
      store(out + i, v * load(cos + i, lanes) + swapped_lanes(v, 1) * load(sin + i, lanes), lanes);
    });
    __builtin_memcpy(out + 2 * half, x + 2 * half, (D - 2 * half) * sizeof(T));
  }
}

template <class T> static void rotary(const Rotary& a, const Team& team) {
  over_rows(team, a.n, [=](int64_t begin, int64_t end) {
    float* cosines = a.interleaved ? (float*)penstock_scratch(PRIVATE, 4 * a.half * sizeof(float)) : nullptr;
    for (int64_t t = begin; t < end; t++) {
      const float *cos = a.cos + t * a.half, *sin = a.sin + t * a.half;
      const T *q = (const T*)a.q + t * a.q_row_stride, *k = (const T*)a.k + t * a.k_row_stride;
      T *q_out = (T*)a.q_out + t * a.H * a.D, *k_out = (T*)a.k_out + t * a.K * a.D;
      if (!a.interleaved) {
        rotate_halves(q, cos, sin, q_out, a.H, a.q_head_stride, a.D, a.half);
        rotate_halves(k, cos, sin, k_out, a.K, a.k_head_stride, a.D, a.half);
        continue;
      }
      float* sines = cosines + 2 * a.half;
      for (int64_t i = 0; i < a.half; i++) {
        cosines[2 * i] = cosines[2 * i + 1] = cos[i];
        sines[2 * i] = -sin[i], sines[2 * i + 1] = sin[i];
      }
      rotate_pairs(q, cosines, sines, q_out, a.H, a.q_head_stride, a.D, a.half);
      rotate_pairs(k, cosines, sines, k_out, a.K, a.k_head_stride, a.D, a.half);
    }
  });
}

static int64_t work(const Rotary& a) { return ELEMENT_WORK * a.n * (a.H + a.K) * a.D; }
static void run(const Rotary& a, const Team& team) { WITH_TYPE(a.type, T, rotary<T>(a, team)); }
KERNEL(rotary, Rotary)
