// Code that is compiled once for all instruction sets: CPU features, and the scratch memory of threads.

#include <stdlib.h>

#include "scratch.h"

#define VISIBLE __attribute__((visibility("default")))

// Version of the argument structs and of the panel layouts. library.py refuses a library with another version.
extern "C" VISIBLE int penstock_abi() { return 23; }

// Returns the best instruction set of this CPU: 0 generic, 1 avx2, 2 avx512_vnni, 3 avx512. __builtin_cpu_supports also
// checks that the operating system saves the wide registers.
extern "C" VISIBLE int penstock_best_isa() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni");
  if (!avx2) return 0;
  return !avx512 ? 1 : !__builtin_cpu_supports("avx512bf16") ? 2 : 3;
#else
  return 0;
#endif
}

static int32_t default_tables() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512vbmi")) return TABLES_IF_FAST;
#endif
  return TABLES_NEVER;
}
VISIBLE int32_t penstock_fp8_tables = default_tables();  // C linkage, as declared in scratch.h; tests set it

// Returns the features of this CPU that the kernels can use, separated by spaces.
extern "C" VISIBLE const char* penstock_cpu_features() {
#if defined(__x86_64__)
  static char names[128];
  char* end = names;
  __builtin_cpu_init();
#define FEATURE(name)                                                              \
  if (__builtin_cpu_supports(name)) {                                              \
    for (const char* c = name; *c; c++) *end++ = *c;                               \
    *end++ = ' ';                                                                  \
  }
  end = names;
  FEATURE("avx2") FEATURE("fma") FEATURE("avx512f") FEATURE("avx512bw") FEATURE("avx512vl")
  FEATURE("avx512vnni") FEATURE("avx512bf16") FEATURE("avx512vbmi")
  *end = 0;
  return names;
#elif defined(__aarch64__)
  return "neon";
#else
  return "";
#endif
}

static int64_t progress;
int64_t* penstock_progress = &progress;  // C linkage, as declared in scratch.h

// Makes the kernels count their progress in `counter`, which must outlive all kernel calls. Must not be called while a
// kernel runs.
extern "C" VISIBLE void penstock_count_progress_in(int64_t* counter) { penstock_progress = counter; }

extern "C" void* penstock_scratch(enum Scratch block, size_t bytes) {
  static thread_local void* blocks[SCRATCH_BLOCKS];
  static thread_local size_t sizes[SCRATCH_BLOCKS];
  if (sizes[block] < bytes) {
    free(blocks[block]);
    size_t rounded = (bytes + 4095) & ~(size_t)4095;
    blocks[block] = aligned_alloc(64, rounded);
    if (!blocks[block]) abort();  // out of memory
    sizes[block] = rounded;
  }
  return blocks[block];
}
