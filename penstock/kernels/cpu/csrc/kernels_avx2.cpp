// The kernels for AVX2 and FMA. They are compiled with -mavx2 -mfma, and run only on CPUs that have both extensions.
#define PENSTOCK_ISA avx2
#define PENSTOCK_LANES 8
#define PENSTOCK_DOT 0
#include "kernels.inl"
