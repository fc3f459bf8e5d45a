// Memory that a thread keeps from call to call, so that kernels allocate nothing once they are warm.
#pragma once
#include <stddef.h>

enum Scratch { OWN, SHARED, SCRATCHES };  // for the thread's own work; for what it shares with its team

// At least `bytes` bytes, aligned to 64; what was there before may be gone.
extern "C" void* penstock_scratch(enum Scratch which, size_t bytes);
