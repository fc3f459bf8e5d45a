// The kernels for AVX-512 F, BW, VL, BF16 and VNNI. They run only on CPUs that have all these extensions.
#define PENSTOCK_ISA avx512
#define PENSTOCK_LANES 16
#define PENSTOCK_DOT 1
#include "kernels.inl"
