// Tries libpenstock_cpu.so without Python, for another architecture under emulation: the library loads, has
// the given ABI, and its kernel `add` gives exact sums.
//   try_library LIBRARY ABI
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

struct add {
  int64_t type;
  const void *x, *y;
  void *out;
  int64_t n, features, x_stride, y_stride;
};

enum { ROWS = 5, FEATURES = 37 };

int main(int argc, char **argv) {
  if (argc != 3) return fprintf(stderr, "try_library LIBRARY ABI\n"), 2;
  void *library = dlopen(argv[1], RTLD_NOW);
  if (!library) return fprintf(stderr, "%s\n", dlerror()), 1;
  int (*abi)(void) = (int (*)(void))dlsym(library, "penstock_abi");
  int64_t (*add)(const struct add *) = (int64_t(*)(const struct add *))dlsym(library, "penstock_add_generic");
  if (!abi || !add) return fprintf(stderr, "a function is missing\n"), 1;
  if (abi() != atoi(argv[2])) return fprintf(stderr, "ABI %d, not %s\n", abi(), argv[2]), 1;
  static float x[ROWS * FEATURES], y[ROWS * FEATURES], out[ROWS * FEATURES];
  for (int i = 0; i < ROWS * FEATURES; i++) x[i] = i, y[i] = 0.25f * i;
  struct add arguments = {0, x, y, out, ROWS, FEATURES, FEATURES, FEATURES};
  add(&arguments);
  for (int i = 0; i < ROWS * FEATURES; i++)
    if (out[i] != 1.25f * i) return fprintf(stderr, "sum %d is %g, not %g\n", i, out[i], 1.25f * i), 1;
  printf("ABI %d, %d sums are exact\n", abi(), ROWS * FEATURES);
  return 0;
}
