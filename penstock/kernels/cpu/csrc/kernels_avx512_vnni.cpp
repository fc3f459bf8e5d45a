// AVX-512 F, BW, VL and VNNI, for processors without its bfloat16: compiled with those flags, run only where the CPU has
// them all.
#if defined(__GNUC__) && !defined(__clang__) && __GNUC__ < 13
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"  // both: the compiler's own header (GCC bug 105593)
#endif
#define PENSTOCK_ISA avx512_vnni
#define PENSTOCK_LANES 16
#define PENSTOCK_DOT 0
#include "kernels.inl"
