"""Measures the time from process start to the first token: ``python -m penstock.bench.cold_start``.

It reads a pickled configuration from standard input, which `workloads.cold_start` writes, and prints
timestamps as JSON. All processes of a machine share the monotonic clock, so the parent process can subtract
its own timestamps.
"""

from time import perf_counter

began = perf_counter()

import json  # noqa: E402
import pickle  # noqa: E402
import sys  # noqa: E402

from penstock import LLM, SamplingParams  # noqa: E402

config = pickle.load(sys.stdin.buffer)
imported = perf_counter()
with LLM.from_config(config) as llm:
    loaded = perf_counter()
    llm.generate(
        [[0] * 8], SamplingParams(max_new_tokens=1, ignore_eos=True, detokenize=False), use_tqdm=False
    )
    ended = perf_counter()
    llm.pipeline.pack_all_pending()  # the parent measures the peak memory, which is reached while packing
print(
    json.dumps(
        {
            "began": began,
            "imports": imported - began,
            "model": loaded - imported,
            "first": ended - loaded,
            "ended": ended,
        }
    )
)
