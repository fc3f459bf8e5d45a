// Plain C++: four-lane vectors that every compiler lowers to what the target has (SSE2, NEON).
#define PENSTOCK_ISA generic
#define PENSTOCK_LANES 4
#define PENSTOCK_DOT 0
#include "kernels.inl"
