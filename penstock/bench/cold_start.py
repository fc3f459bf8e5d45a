"""Measures the time from process start to the first token: ``python -m penstock.bench.cold_start``.

The parent process, `workloads.cold_start`, writes a pickled configuration to standard input. This program
prints two timestamps and three durations in seconds as JSON. All processes of a machine share the monotonic
clock, so the parent process can subtract its own timestamps.
"""

from time import perf_counter

start_time = perf_counter()

import json  # noqa: E402
import pickle  # noqa: E402
import sys  # noqa: E402

from penstock import LLM, SamplingParams  # noqa: E402

config = pickle.load(sys.stdin.buffer)
import_time = perf_counter()
with LLM.from_config(config) as llm:
    load_time = perf_counter()
    llm.generate(
        [[0] * 8], SamplingParams(max_new_tokens=1, ignore_eos=True, detokenize=False), use_tqdm=False
    )
    end_time = perf_counter()
    llm.pipeline.pack_all_pending()  # reaches the peak memory, which the parent measures
print(
    json.dumps(
        {
            "start_time": start_time,
            "import_seconds": import_time - start_time,
            "load_seconds": load_time - import_time,
            "first_token_seconds": end_time - load_time,
            "end_time": end_time,
        }
    )
)
