// AVX-512 F, BW, VL, BF16 and VNNI: compiled with those flags, run only where the CPU has them all.
#define PENSTOCK_ISA avx512
#define PENSTOCK_LANES 16
#define PENSTOCK_DOT 1
#include "kernels.inl"
