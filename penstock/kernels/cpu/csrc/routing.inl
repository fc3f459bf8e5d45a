// Routers, which select the experts of each row and compute their weights, and operations that scale or widen rows.

struct Route {  // logits [n, N] of n rows and N experts, rows strided; topk_weights, topk_ids [n, top_k]
  int64_t type, rule;  // 0: softmax over all experts; 1: as 0, selected weights sum to 1; 2: softmax of selected logits
  const void* logits;
  float* topk_weights;
  int64_t* topk_ids;
  int64_t n, N, top_k, logits_stride;
};

constexpr float REMOVED = -__builtin_inff();  // rank of an expert or group that cannot be selected any more

// Returns the smallest index that is not in the list. This function is called if no rank is above REMOVED, for example
// because all logits are NaN. Any distinct indices are valid in this case.
INLINE int64_t smallest_missing(const int64_t* numbers, int64_t count) {
  for (int64_t number = 0;; number++) {
    bool is_listed = false;
    for (int64_t i = 0; i < count; i++) is_listed |= numbers[i] == number;
    if (!is_listed) return number;
  }
}

// Selects the index of the largest of N ranks, the numbers by which experts or groups are selected. If no rank is above
// REMOVED, selects the smallest index that is not in ids[0:k]. Writes the index to ids[k], sets its rank to REMOVED,
// and returns the index. No index is selected twice.
INLINE int64_t take_largest(float* ranks, int64_t N, int64_t* ids, int64_t k) {
  int64_t best = -1;
  float largest = REMOVED;
  for (int64_t i = 0; i < N; i++)
    if (ranks[i] > largest) largest = ranks[i], best = i;
  if (best < 0) best = smallest_missing(ids, k);
  ranks[best] = REMOVED;
  return ids[k] = best;
}

template <class T> static void route(const Route& a, const Team& team) {
  over_rows(team, a.n, [=](int64_t begin, int64_t end) {
    // The logits of the experts that are not selected yet.
    float* unselected_logits = (float*)penstock_scratch(PRIVATE, (2 * a.N + a.top_k) * sizeof(float));
    float *wide_logits = unselected_logits + a.N, *scores = wide_logits + a.N;
    for (int64_t row = begin; row < end; row++) {
      const T* logits = (const T*)a.logits + row * a.logits_stride;
      vf maxima = all(REMOVED), total = {};
      for_vectors(a.N, EACH_VECTOR {
        vf logit = load(logits + i, lanes);
        store(unselected_logits + i, logit, lanes);
        store(wide_logits + i, logit, lanes);
        maxima = vmax(maxima, filled_for_maximum(logit, lanes));
      });
      const float max_logit = largest(maxima);
      if (a.rule == 0)
        for_vectors(a.N, EACH_VECTOR {
          total += filled(exp(load(unselected_logits + i, lanes) - max_logit), 0, lanes);
        });
      float selected_sum = 0;
      for (int64_t k = 0; k < a.top_k; k++) {
        scores[k] =
            exp(all(wide_logits[take_largest(unselected_logits, a.N, a.topk_ids + row * a.top_k, k)] - max_logit))[0];
        selected_sum += scores[k];
      }
      const float score_sum = a.rule == 0 ? sum(total) : selected_sum;
      for (int64_t k = 0; k < a.top_k; k++) a.topk_weights[row * a.top_k + k] = scores[k] / score_sum;
    }
  });
}

static int64_t work(const Route& a) { return ELEMENT_WORK * a.n * a.N * (a.top_k + 4); }
static void run(const Route& a, const Team& team) { WITH_TYPE(a.type, T, route<T>(a, team)); }
KERNEL(route, Route)

struct RouteScores {  // tensors as in Route; bias [N] or null; fields of ScoreRouting (kernels/routing.py)
  int64_t type;
  const void* logits;
  const float* bias;
  float* topk_weights;
  int64_t* topk_ids;
  int64_t n, N, top_k, logits_stride, is_sigmoid, is_normed, groups, top_groups;
  double scale, min_sum;
};

// Selects the groups with the largest sums of their two largest ranks, or the largest ranks if groups have one expert.
// Sets the ranks in all other groups to REMOVED.
static void mask_unselected_groups(const RouteScores& a, float* ranks, float* sums, int64_t* selected_groups) {
  const int64_t group_size = a.N / a.groups;
  for (int64_t group = 0; group < a.groups; group++) {
    float first = REMOVED, second = REMOVED;
    for (int64_t i = group * group_size; i < (group + 1) * group_size; i++) {
      if (ranks[i] > first) second = first, first = ranks[i];
      else if (ranks[i] > second) second = ranks[i];
    }
    sums[group] = group_size > 1 ? first + second : first;
  }
  for (int64_t k = 0; k < a.top_groups; k++) take_largest(sums, a.groups, selected_groups, k);
  for (int64_t group = 0; group < a.groups; group++) {
    bool is_selected = false;
    for (int64_t k = 0; k < a.top_groups; k++) is_selected |= selected_groups[k] == group;
    for (int64_t i = group * group_size; i < (group + 1) * group_size; i++)
      if (!is_selected) ranks[i] = REMOVED;
  }
}

template <class T> static void route_scores(const RouteScores& a, const Team& team) {
  over_rows(team, a.n, [=](int64_t begin, int64_t end) {
    const int64_t num_floats = round_up(2 * a.N + a.groups, 2);
    float* scores = (float*)penstock_scratch(PRIVATE, num_floats * sizeof(float) + a.top_groups * sizeof(int64_t));
    float *ranks = scores + a.N, *sums = ranks + a.N;
    int64_t* selected_groups = (int64_t*)(scores + num_floats);
    const bool by_logits = !a.bias && a.groups == 1;
    for (int64_t row = begin; row < end; row++) {
      const T* logits = (const T*)a.logits + row * a.logits_stride;
      vf maxima = all(REMOVED), totals = {};
      for_vectors(a.N, EACH_VECTOR { maxima = vmax(maxima, filled_for_maximum(load(logits + i, lanes), lanes)); });
      const float max_logit = a.is_sigmoid ? 0 : largest(maxima);
      for_vectors(a.N, EACH_VECTOR {
        vf logit = load(logits + i, lanes);
        vf score = a.is_sigmoid ? 1 / (1 + exp(-logit)) : exp(logit - max_logit);
        totals += filled(score, 0, lanes);
        store(scores + i, score, lanes);
      });
      const vf score_sum = all(a.is_sigmoid ? 1 : sum(totals));
      for_vectors(a.N, EACH_VECTOR {
        vf score = load(scores + i, lanes) / score_sum;
        store(scores + i, score, lanes);
        store(ranks + i, by_logits ? load(logits + i, lanes) : a.bias ? score + load(a.bias + i, lanes) : score, lanes);
      });
      if (a.groups > 1) mask_unselected_groups(a, ranks, sums, selected_groups);
      float* weights = a.topk_weights + row * a.top_k;
      float total = 0;
      for (int64_t k = 0; k < a.top_k; k++) {
        weights[k] = scores[take_largest(ranks, a.N, a.topk_ids + row * a.top_k, k)];
        total += weights[k];
      }
      const float divisor = a.is_normed ? max(total, (float)a.min_sum) : 1;
      for (int64_t k = 0; k < a.top_k; k++) weights[k] = weights[k] / divisor * (float)a.scale;
    }
  });
}

static int64_t work(const RouteScores& a) { return ELEMENT_WORK * a.n * a.N * (a.top_k + 8); }
static void run(const RouteScores& a, const Team& team) { WITH_TYPE(a.type, T, route_scores<T>(a, team)); }
KERNEL(route_scores, RouteScores)

struct RouteSparseMixer {  // tensors as in Route; eps of SparseMixer (kernels/routing.py)
  int64_t type;
  const void* logits;
  float* topk_weights;
  int64_t* topk_ids;
  int64_t n, N, top_k, logits_stride;
  double eps;
};

template <class T> static void route_sparse_mixer(const RouteSparseMixer& a, const Team& team) {
  over_rows(team, a.n, [=](int64_t begin, int64_t end) {
    float* wide_logits = (float*)penstock_scratch(PRIVATE, 2 * a.N * sizeof(float));
    float* unselected_logits = wide_logits + a.N;  // logits of the experts that are not selected yet
    for (int64_t row = begin; row < end; row++) {
      const T* logits = (const T*)a.logits + row * a.logits_stride;
      for_vectors(a.N, EACH_VECTOR {
        store(wide_logits + i, load(logits + i, lanes), lanes);
        store(unselected_logits + i, load(logits + i, lanes), lanes);
      });
      for (int64_t k = 0; k < a.top_k; k++) {
        const int64_t best = take_largest(unselected_logits, a.N, a.topk_ids + row * a.top_k, k);
        const float best_logit = wide_logits[best];
        float total = 1;  // exp(0) of the selected expert
        for (int64_t i = 0; i < a.N; i++) {
          const float magnitude = wide_logits[i] < 0 ? -wide_logits[i] : wide_logits[i];
          const bool is_far = (best_logit - wide_logits[i]) / max(magnitude, best_logit) > (float)(2 * a.eps);
          if (!is_far && unselected_logits[i] != REMOVED) total += exp(all(unselected_logits[i] - best_logit))[0];
        }
        a.topk_weights[row * a.top_k + k] = 1 / total;
      }
    }
  });
}

static int64_t work(const RouteSparseMixer& a) { return 2 * ELEMENT_WORK * a.n * a.N * a.top_k; }
static void run(const RouteSparseMixer& a, const Team& team) { WITH_TYPE(a.type, T, route_sparse_mixer<T>(a, team)); }
KERNEL(route_sparse_mixer, RouteSparseMixer)

struct ScaleRows {  // x [n, F], rows strided; factors [n, 1], strided; out [n, F]
  int64_t type, factor_type;
  const void *x, *factors;
  void* out;
  int64_t n, F, stride, factor_stride, are_logits;
};

template <class T, class TF> static void scale_rows(const ScaleRows& a, const Team& team) {
  over_rows(team, a.n, [=](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row++) {
      const T* x = (const T*)a.x + row * a.stride;
      T* out = (T*)a.out + row * a.F;
      vf factor = all(widen(((const TF*)a.factors)[row * a.factor_stride]));
      if (a.are_logits) factor = 1 / (1 + exp(-factor));
      for_vectors(a.F, EACH_VECTOR { store(out + i, load(x + i, lanes) * factor, lanes); });
    }
  });
}

static int64_t work(const ScaleRows& a) { return ELEMENT_WORK * a.n * a.F; }
static void run(const ScaleRows& a, const Team& team) {
  WITH_TYPE(a.type, T, WITH_TYPE(a.factor_type, TF, scale_rows<T, TF>(a, team)));
}
KERNEL(scale_rows, ScaleRows)

struct Widen {  // x [n, F], rows strided; out [n, F]
  int64_t type;
  const void* x;
  float* out;
  int64_t n, F, stride;
};

template <class T> static void widen_rows(const Widen& a, const Team& team) {
  over_rows(team, a.n, [=](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row++) {
      const T* x = (const T*)a.x + row * a.stride;
      for_vectors(a.F, EACH_VECTOR { store(a.out + row * a.F + i, load(x + i, lanes), lanes); });
    }
  });
}

static int64_t work(const Widen& a) { return ELEMENT_WORK * a.n * a.F; }
static void run(const Widen& a, const Team& team) { WITH_TYPE(a.type, T, widen_rows<T>(a, team)); }
KERNEL(widen, Widen)
