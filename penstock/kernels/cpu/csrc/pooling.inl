// Pooling of the hidden states of whole sequences.

struct SequenceMeans {  // x [T, E], rows strided; out [B, E] float32; row_offsets [B + 1]
  int64_t type;
  const void* x;
  const int32_t* row_offsets;
  float* out;
  int64_t B, E, x_stride;
};

// Adds the rows of a sequence in order, so that the bits of a mean do not depend on the batch.
template <class T> static void sequence_means(const SequenceMeans& a, const Team& team) {
  over_rows(team, a.B, [=](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; b++) {
      const int64_t first_row = a.row_offsets[b], num_rows = a.row_offsets[b + 1] - first_row;
      const T* rows = (const T*)a.x + first_row * a.x_stride;
      for_vectors(a.E, EACH_VECTOR {
        vf total = {};
        for (int64_t row = 0; row < num_rows; row++) total += load(rows + row * a.x_stride + i, lanes);
        store(a.out + b * a.E + i, total / (float)num_rows, lanes);
      });
    }
  });
}

static int64_t work(const SequenceMeans& a) { return a.B ? ELEMENT_WORK * a.row_offsets[a.B] * a.E : 0; }
static void run(const SequenceMeans& a, const Team& team) { WITH_TYPE(a.type, T, sequence_means<T>(a, team)); }
KERNEL(sequence_means, SequenceMeans)
