// All kernels. The files kernels_*.cpp compile them once per instruction set, and define
//   PENSTOCK_ISA    the suffix of the exported symbols: generic, avx2, avx512_vnni or avx512
//   PENSTOCK_LANES  number of floats in a vector
//   PENSTOCK_DOT    1 if there are bfloat16 dot products (AVX-512 BF16), else 0
//
// The C ABI: each kernel takes one struct of 8-byte fields, which Python packs as bytes. In the code, `a` is this
// struct. Strides are in elements unless a comment says bytes. Types are 0 = float32, 1 = bfloat16, unless a comment
// lists others. The caller checks shapes and types; kernels do not. A kernel returns -1, or the index of a bad value. A
// collective returns 0 if it waits for another rank in vain. A kernel may be called with or without the GIL. Only one
// thread of a process should call kernels, because OpenMP creates a team of threads for each calling thread.

#include <omp.h>
#include <sched.h>
#include <stdint.h>
#include <stdlib.h>
#include <time.h>
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif
#if PENSTOCK_LANES == 16 && defined(__GNUC__) && !defined(__clang__) && __GNUC__ < 13
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"  // both warnings are in the compiler's own header (GCC bug 105593)
#endif
#if PENSTOCK_LANES > 4
#include <immintrin.h>
#elif defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "scratch.h"

#define JOIN_(a, b, c) a##b##_##c
#define JOIN(a, b, c) JOIN_(a, b, c)
#define SYMBOL(name) JOIN(penstock_, name, PENSTOCK_ISA)
#define VISIBLE __attribute__((visibility("default")))
#define EXPORT(type, name) extern "C" VISIBLE type SYMBOL(name)

// Defines T as the element type of `type`, and runs the statements.
#define WITH_TYPE(type, T, ...) \
  do {                          \
    if ((type) == 0) {          \
      typedef float T;          \
      __VA_ARGS__;              \
    } else {                    \
      typedef bf16 T;           \
      __VA_ARGS__;              \
    }                           \
  } while (0)

// Each instruction set has a namespace, so that the linker does not merge functions of different instruction sets.
namespace PENSTOCK_ISA {

constexpr int W = PENSTOCK_LANES;
#include "vector.h"
#include "team.inl"
#include "elementwise.inl"
#include "pooling.inl"
#include "rotary.inl"
#include "routing.inl"
#include "collectives.inl"
#include "convolution.inl"
#include "store_kv.inl"
#include "recurrent.inl"
#include "product.inl"
#include "attention.inl"
#include "short_attention.inl"
#include "linear.inl"
#include "pack.inl"
#include "lora.inl"
#include "experts.inl"
#include "sampling.inl"
#include "plan.inl"

}  // namespace PENSTOCK_ISA
