// Samples one token per row of logits as Ops.sample defines it, without sorting the vocabulary.
//
// The score of a token is its logit in float32. Tokens are ordered by descending score, then by id. top_k and top_p
// keep a token if the amount of the tokens before it is below a target. The amount is the number of tokens (target k),
// or the sum of their weights (target: top_p times the sum of all weights). The cut is the score of the last kept
// token. A lower bound of the cut excludes most tokens. The cut is found among the remaining candidates by
// partitioning, as in quickselect.

// Vectors of WD doubles (vd), 64-bit integers (vl), and floats (vf_half).
typedef double vd __attribute__((vector_size(W * 4)));
typedef int64_t vl __attribute__((vector_size(W * 4)));
typedef float vf_half __attribute__((vector_size(W * 2)));
constexpr int WD = W / 2;

INLINE vd load(const double* p) {
  vd x;
  __builtin_memcpy(&x, p, sizeof x);
  return x;
}
INLINE void store(double* p, vd x) { __builtin_memcpy(p, &x, sizeof x); }

// Returns e^x for x <= 0 with an error of at most 2 ulp; 0 for x <= -708. Like the float version in vector.h, but with
// a longer Taylor sum.
INLINE vd exp(vd x) {
  const double rounder = 6755399441055744.0;  // 1.5 * 2^52
  vd shifted = x * 1.4426950408889634 + rounder;
  vd n = shifted - rounder;
  vd r = x - n * 0.693147180369123816490;  // the upper part of ln 2 has 32 bits: the product is exact
  r = r - n * 1.90821492927058770002e-10;
  vd p = vd{} + 1.0 / 6227020800;
  const double inverse_factorials[] = {1.0 / 479001600, 1.0 / 39916800, 1.0 / 3628800, 1.0 / 362880, 1.0 / 40320,
                                       1.0 / 5040,      1.0 / 720,      1.0 / 120,     1.0 / 24,     1.0 / 6,
                                       0.5,             1.0,            1.0};
  for (double c : inverse_factorials) p = p * r + c;
  vd y = (vd)((vl)p + ((vl)shifted << 52));
  return x > -708.0 ? y : vd{};
}

struct Candidates {
  float* scores;    // in the order of token ids
  double* weights;  // exp((score - max_score) / temperature); null before fill_weights
  int32_t* ids;     // token ids; null: candidate i is token i
  int64_t n;
  float max_score;  // the largest score
};

// The kept tokens: scores above `score`, and the first `num_ties` scores equal to it.
struct Cut {
  float score;
  int64_t num_ties;
};

struct Ranked {
  float score;
  double amount;  // weight of the candidate, or 1 if the candidates have no weights
};

// Finds the cut in an unordered list. `amount_before` is the amount of the tokens that rank before all tokens of the
// list.
static Cut find_cut_in_list(Ranked* list, int64_t n, double amount_before, double target) {
  for (;;) {
    float pivot = list[n / 2].score;
    int64_t num_above = 0, num_equal = 0;
    double above_amount = 0, equal_amount = 0;
    for (int64_t i = 0; i < n; i++) {  // moves higher scores to the front
      Ranked r = list[i];
      if (r.score > pivot) {
        list[i] = list[num_above];
        list[num_above++] = r;
        above_amount += r.amount;
      } else if (r.score == pivot) {
        num_equal++;
        equal_amount = r.amount;  // of each such candidate, because equal scores have equal amounts
      }
    }
    if (num_above && amount_before + above_amount >= target) {
      n = num_above;
      continue;
    }
    amount_before += above_amount;
    int64_t num_ties = 0;
    for (; num_ties < num_equal && amount_before < target; num_ties++) amount_before += equal_amount;
    if (num_ties < num_equal || amount_before >= target || num_above + num_equal == n) return {pivot, num_ties};
    int64_t num_below = 0;
    for (int64_t i = num_above; i < n; i++)
      if (list[i].score < pivot) list[num_below++] = list[i];
    n = num_below;
  }
}

// Finds the cut at the amount `target`. The amount is a sum of weights, or a number of candidates if they have no
// weights.
static Cut find_cut(const Candidates& c, double target, Ranked* list) {
  for (int64_t i = 0; i < c.n; i++) list[i] = {c.scores[i], c.weights ? c.weights[i] : 1};
  return find_cut_in_list(list, c.n, 0, target);
}

// Returns a lower bound of the k-th largest score: the k-th largest of the maxima of spans of consecutive scores, or
// -inf if there are fewer than k spans.
static float top_k_bound(const Candidates& c, int64_t k, Ranked* list) {
  constexpr int64_t SPAN = 4 * W;
  const int64_t num_spans = c.n / SPAN;
  if (k > num_spans) return -__builtin_inff();
  for (int64_t i = 0; i < num_spans; i++) {
    vf maxima = load(c.scores + i * SPAN);
    for (int64_t j = W; j < SPAN; j += W) maxima = vmax(maxima, load(c.scores + i * SPAN + j));
    list[i] = {largest(maxima), 1};
  }
  return find_cut_in_list(list, num_spans, 0, (double)k).score;
}

// Returns a lower bound of the score of the top_p cut. The candidates with a probability below (1 - top_p) / n have a
// total probability below 1 - top_p, so all of them rank after the cut. The bound is slightly lowered to allow for
// rounding errors.
static float top_p_bound(const Candidates& c, double top_p, double total, float temperature) {
  double min_weight = (1 - top_p) * total / (double)c.n;
  double distance = temperature * (__builtin_log(min_weight) - 0.001);
  return (float)(c.max_score + distance - 1e-6 * __builtin_fabs(c.max_score));
}

// Keeps the candidates i for which should_keep(i) is true, in their order. should_keep must be false for scores below
// `bound`, because W consecutive candidates whose scores are all below `bound` are skipped at once.
template <class Predicate>
INLINE void filter_candidates(Candidates& c, int32_t* ids, float bound, Predicate should_keep) {
  int64_t n = 0;
  for (int64_t begin = 0; begin < c.n; begin += W) {
    if (begin + W <= c.n && largest(load(c.scores + begin)) < bound) continue;
    for (int64_t i = begin; i < min<int64_t>(begin + W, c.n); i++) {
      if (!should_keep(i)) continue;
      ids[n] = c.ids ? c.ids[i] : (int32_t)i;
      if (c.weights) c.weights[n] = c.weights[i];
      c.scores[n++] = c.scores[i];
    }
  }
  c.ids = ids;
  c.n = n;
}

// Removes the candidates after the cut at the amount `target`. `bound` is a lower bound of the cut.
static void remove_after_cut(Candidates& c, int32_t* ids, float bound, double target, Ranked* list) {
  filter_candidates(c, ids, bound, [&](int64_t i) { return c.scores[i] >= bound; });
  Cut cut = find_cut(c, target, list);
  int64_t num_kept_ties = 0;
  filter_candidates(c, ids, cut.score, [&](int64_t i) {
    return c.scores[i] > cut.score || (c.scores[i] == cut.score && num_kept_ties++ < cut.num_ties);
  });
}

static void fill_weights(Candidates& c, double* weights, float temperature) {
  const double inverse = 1 / (double)temperature, max_score = c.max_score;
  c.weights = weights;
  for (int64_t i = 0; i < c.n; i += WD) {  // the memory is padded to whole vectors
    vf_half scores;
    __builtin_memcpy(&scores, c.scores + i, sizeof scores);
    store(weights + i, exp((__builtin_convertvector(scores, vd) - max_score) * inverse));
  }
}

// Returns the sum of weights. Uses several chains of additions, because each addition of a chain waits for the previous
// one.
static double sum_weights(const double* weights, int64_t n) {
  constexpr int CHAINS = 4;
  vd sums[CHAINS] = {};
  int64_t i = 0;
  for (; i + CHAINS * WD <= n; i += CHAINS * WD)
    for (int chain = 0; chain < CHAINS; chain++) sums[chain] += load(weights + i + chain * WD);
  vd lane_sums = (sums[0] + sums[1]) + (sums[2] + sums[3]);
  double sum = 0;
  for (int lane = 0; lane < WD; lane++) sum += lane_sums[lane];
  for (; i < n; i++) sum += weights[i];
  return sum;
}

// Returns the first candidate whose cumulative weight exceeds `uniform` times the total. `sums` is memory for one
// number per span.
static int64_t sample_candidate(const Candidates& c, double uniform, double* sums) {
  constexpr int64_t SPAN = 256;
  const int64_t num_spans = ceil_div(c.n, SPAN);
  for (int64_t i = 0; i < num_spans; i++) sums[i] = sum_weights(c.weights + i * SPAN, min(SPAN, c.n - i * SPAN));
  const double target = uniform * sum_weights(sums, num_spans);
  double sum_before = 0;
  for (int64_t span = 0; span < num_spans; span++) {
    double with_span = sum_before + sums[span];
    if (with_span > target)
      for (int64_t i = span * SPAN; i < min((span + 1) * SPAN, c.n); i++)
        if ((sum_before += c.weights[i]) > target) return i;
    sum_before = with_span;
  }
  // If uniform * total was rounded up to the total, no candidate was found. Returns the last candidate with a weight.
  int64_t last = c.n - 1;
  while (last > 0 && c.weights[last] == 0) last--;
  return last;
}

// Converts logits to float scores. Tokens that the bitmask forbids get -inf. Returns the largest score, or NaN if any
// logit is NaN or +inf.
template <class T> static float fill_scores(const T* logits, const uint32_t* bitmask, float* scores, int64_t n) {
  const vf masked = all(-__builtin_inff());
  vf maxima = masked;
  vi is_bad = {};
  for_vectors(n, EACH_VECTOR {
    vf score = load(logits + i, lanes);
    is_bad |= ~(vi)(score < __builtin_inff());
    if (bitmask) {
      vu allowed = (bitmask[i / 32] >> (vu)(lane_index() + (int32_t)(i % 32))) & 1;
      score = allowed != 0 ? score : masked;
    }
    store(scores + i, score, lanes);
    maxima = vmax(maxima, filled_for_maximum(score, lanes));
  });
  return largest(as_float((vu)is_bad & 0x3f800000)) > 0 ? __builtin_nanf("") : largest(maxima);
}

// Returns the index of the first score that equals `score`, which must occur.
static int64_t find_score(float score, const float* scores, int64_t n) {
  constexpr int64_t SPAN = 8 * W;
  int64_t i = 0;
  for (; i + SPAN <= n; i += SPAN) {
    vi is_equal = {};
    for (int64_t j = 0; j < SPAN; j += W) is_equal |= load(scores + i + j) == score;
    if (largest(as_float((vu)is_equal & 0x3f800000)) > 0) break;
  }
  while (scores[i] != score) i++;
  return i;
}

struct SamplingRule {  // the sampling parameters of a row
  float temperature, top_p, min_p;
  int64_t top_k;
  double uniform;
};

// Returns the sampled token; -1 if no allowed token has a logit above -inf, or if any logit is NaN or +inf.
template <class T>
static int64_t sample_row(const T* logits, const uint32_t* bitmask, int64_t V, const SamplingRule& rule, char* memory) {
  Candidates c = {(float*)memory, nullptr, nullptr, V, 0};
  c.max_score = fill_scores(logits, bitmask, c.scores, V);
  if (!(c.max_score > -__builtin_inff())) return -1;
  if (rule.temperature <= 0 || rule.top_k == 1) return find_score(c.max_score, c.scores, V);
  const int64_t num_scores = round_up(V, W);
  double* weights = (double*)(memory + num_scores * 4);
  Ranked* list = (Ranked*)(memory + num_scores * 12);
  int32_t* ids = (int32_t*)(memory + num_scores * 28);
  if (rule.top_k > 0 && rule.top_k < V)
    remove_after_cut(c, ids, top_k_bound(c, rule.top_k, list), (double)rule.top_k, list);
  fill_weights(c, weights, rule.temperature);
  if (rule.top_p < 1) {
    const double total = sum_weights(c.weights, c.n);
    // The first token is always kept, even with top_p 0.
    double target = max((double)rule.top_p * total, 1e-300);
    remove_after_cut(c, ids, top_p_bound(c, rule.top_p, total, rule.temperature), target, list);
  }
  if (rule.min_p > 0)
    for (int64_t i = 0; i < c.n; i++)
      if (c.weights[i] < rule.min_p) c.weights[i] = 0;  // the largest weight is 1
  int64_t sampled = sample_candidate(c, rule.uniform, (double*)list);
  return c.ids ? c.ids[sampled] : sampled;
}

struct Sample {  // logits [R, V], rows strided; bitmask [R, bitmask_words] or null; other tensors [R]
  int64_t type;
  const void* logits;
  int64_t logits_stride, R, V;
  const float* temperature;
  const int64_t* top_k;
  const float *top_p, *min_p;
  const double* uniforms;
  const uint32_t* bitmask;
  int64_t bitmask_words;
  int64_t* tokens;
};

static int64_t work(const Sample& a) { return a.R > 1 ? ELEMENT_WORK * a.R * a.V : 0; }
static void run(const Sample& a, const Team& team) {
  over_pieces(team, a.R, [=](int64_t r) {
    SamplingRule rule = {a.temperature[r], a.top_p[r], a.min_p[r], a.top_k[r], a.uniforms[r]};
    char* memory = (char*)penstock_scratch(PRIVATE, round_up(a.V, W) * 32);
    const uint32_t* mask = a.bitmask ? a.bitmask + r * a.bitmask_words : nullptr;
    WITH_TYPE(a.type, T, a.tokens[r] = sample_row((const T*)a.logits + r * a.logits_stride, mask, a.V, rule, memory));
  });
}
KERNEL(sample, Sample)
