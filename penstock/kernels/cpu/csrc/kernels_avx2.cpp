// AVX2 and FMA: compiled with those flags, run only where the CPU has them.
#define PENSTOCK_ISA avx2
#define PENSTOCK_LANES 8
#define PENSTOCK_DOT 0
#include "kernels.inl"
