// The kernels in plain C++, for all CPUs. The compiler maps vectors of four lanes to the vector instructions of the
// target, such as SSE2 or NEON.
#define PENSTOCK_ISA generic
#define PENSTOCK_LANES 4
#define PENSTOCK_DOT 0
#include "kernels.inl"
