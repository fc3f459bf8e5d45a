"""A fake engine for the tests of the peer benchmarks. Each output token is the previous token plus one.

Usage: ``python fake_engine.py [FAULT]``. FAULT is one of:

- "dies": the engine exits at the first request to generate.
- "short": answers have one token less than requested.
- "large": a child process holds 32 MiB.
- "child": a child process does not end by itself.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable

from benchmarks.peers.drivers.request_loop import Generate, Settings, Tokens, answer_requests

FAULT = sys.argv[1] if len(sys.argv) > 1 else ""


HOLD_MEMORY = """
buffer = bytearray(32 << 20)
buffer[:: 1 << 12] = bytes(len(buffer[:: 1 << 12]))  # writes to each page, so that it is resident
print("held", flush=True)
input()
"""


def open_engine(settings: Settings) -> Generate:
    """Return a function that generates tokens: each is the previous token plus one."""
    print("loading", settings.model.name, flush=True)
    os.write(1, b"a line of the native library\n")
    if FAULT == "large":
        command = [sys.executable, "-c", HOLD_MEMORY]
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert child.stdout is not None
        child.stdout.readline()
    if FAULT == "child":
        print("child", subprocess.Popen(["sleep", "600"]).pid, file=sys.stderr, flush=True)

    def generate(prompts: Tokens, num_new_tokens: int, on_tokens: Callable[[int], None]) -> Tokens:
        if FAULT == "dies":
            sys.exit("out of tokens")
        if FAULT == "short":
            num_new_tokens -= 1
        on_tokens(2)
        time.sleep(0.01)
        on_tokens(num_new_tokens - 2)
        return [[prompt[-1] + 1 + i for i in range(num_new_tokens)] for prompt in prompts]

    return generate


if __name__ == "__main__":
    answer_requests(open_engine)
