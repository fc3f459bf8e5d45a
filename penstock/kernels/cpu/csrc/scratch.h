// What kernels share that does not depend on the instruction set.
#pragma once
#include <stddef.h>
#include <stdint.h>

// Memory that a thread keeps from call to call, so that kernels allocate nothing once they are warm.

enum Scratch { OWN, SHARED, SCRATCHES };  // for the thread's own work; for what it shares with its team

// At least `bytes` bytes, aligned to 64; what was there before may be gone.
extern "C" void* penstock_scratch(enum Scratch which, size_t bytes);

// Counts the pieces of work that are done, where another process may look whether this one still works.
extern "C" int64_t* penstock_progress;
