// Declarations that the kernels of all instruction sets share.
#pragma once
#include <stddef.h>
#include <stdint.h>

// The two blocks of scratch memory of a thread, which are kept between calls. PRIVATE is used by the thread itself,
// SHARED by all threads of its team. SCRATCH_BLOCKS is the number of blocks.
enum Scratch { PRIVATE, SHARED, SCRATCH_BLOCKS };

// Returns a scratch block of the calling thread with at least `bytes` bytes, aligned to 64 bytes. Growing a block
// discards its contents.
extern "C" void* penstock_scratch(enum Scratch block, size_t bytes);

// Pointer to the counter of the pieces of work that thread 0 has completed. Another process reads the counter to detect
// hangs.
extern "C" int64_t* penstock_progress;

// When 8-bit floats are widened by table look-ups (`uses_fp8_tables`): with TABLES_IF_FAST, if a measurement shows that
// look-ups are fast. Must be TABLES_NEVER if the processor has no AVX-512 VBMI.
enum Tables { TABLES_NEVER, TABLES_IF_FAST, TABLES_ALWAYS };
extern "C" int32_t penstock_fp8_tables;
