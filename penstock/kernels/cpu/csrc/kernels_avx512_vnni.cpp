// The kernels for AVX-512 F, BW, VL and VNNI, for CPUs without AVX-512 BF16. They run only on CPUs that have all these
// extensions.
#define PENSTOCK_ISA avx512_vnni
#define PENSTOCK_LANES 16
#define PENSTOCK_DOT 0
#include "kernels.inl"
