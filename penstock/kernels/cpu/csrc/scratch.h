// Declarations that the kernels of all instruction sets share.
#pragma once
#include <stddef.h>
#include <stdint.h>

// Memory that a thread keeps between calls, so that later calls do not allocate.
enum Scratch { OWN, SHARED, SCRATCHES };  // private to the thread; shared with its team

// Returns at least `bytes` bytes, aligned to 64. Previous contents may be lost.
extern "C" void* penstock_scratch(enum Scratch which, size_t bytes);

// Counts completed pieces of work. Another process reads the counter to detect hangs.
extern "C" int64_t* penstock_progress;

// Whether 8-bit floats are widened by table look-ups. TABLES_NEVER if the processor has no AVX-512 VBMI.
enum Tables { TABLES_NEVER, TABLES_IF_FAST, TABLES_ALWAYS };
extern "C" int32_t penstock_fp8_tables;
