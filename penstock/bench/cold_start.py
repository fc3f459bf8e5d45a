"""Measures the time from process start to the first token: ``python -m penstock.bench.cold_start``.

Reads a pickled configuration from standard input, which `workloads.cold_start` writes, and prints timestamps
as JSON. The clock is monotonic and shared by all processes of the machine, so the parent can subtract its own
timestamps.
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
    llm.pipeline.pack_all_pending()  # memory peaks while weights are packed after the first token
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
