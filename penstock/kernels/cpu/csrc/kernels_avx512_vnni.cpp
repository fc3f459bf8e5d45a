// AVX-512 F, BW, VL and VNNI, for processors without its bfloat16: compiled with those flags, run only where the CPU has
// them all.
#define PENSTOCK_ISA avx512_vnni
#define PENSTOCK_LANES 16
#define PENSTOCK_DOT 0
#include "kernels.inl"
