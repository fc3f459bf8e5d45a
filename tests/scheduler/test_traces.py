"""Workloads with tables of the number of rows (computed tokens) of each request in each step.

Above the dashes are the limits of the scheduler, and one line for each request: its name, the number of the
step before which it arrives, the number of prompt tokens, the number of new tokens, and optionally its
priority or the step before which it is cancelled. Below the dashes is a table with one column for each
request and one line for each step. A number is the number of rows of the request, ``.`` means no rows, ``-``
means that the request was preempted, and ``x`` that it was cancelled before the step.
"""

from __future__ import annotations

import re

import pytest
from support.fake_pipeline import FakePipeline, expected_output_tokens
from support.kv_contexts import kv_manager, text_context

from penstock.pipelines.core import TextContext, TextGenerationResponse
from penstock.scheduler import Scheduler

TABLES = {
    "requests join and leave": """
        blocks=100 batch=4 tokens=16 chunk=4
        a 0 5 3
        b 1 6 3
        c 2 2 1
        ---------
        a  b  c
        5  .  .
        1  6  .
        1  1  2
        .  1  .
        """,
    "two long prompts and a decoding request": """
        blocks=100 batch=4 tokens=10 chunk=4
        a 0  3 8
        b 1 14 2
        c 1 12 2
        ---------
        a  b  c
        3  .  .
        1  9  .
        1  5  4
        1  1  8
        1  .  1
        1  .  .
        1  .  .
        1  .  .
        """,
    "a request of high priority runs first, then running requests before waiting ones": """
        blocks=100 batch=2 tokens=8 chunk=4
        a 0 20 1
        b 0  6 2
        c 1  6 1 1
        ---------
        a  b  c
        8  .  .
        .  .  6
        8  .  .
        4  4  .
        .  2  .
        .  1  .
        """,
    "the youngest request is preempted and its tokens are recomputed": """
        blocks=6 batch=4 tokens=16 chunk=4 caching=0
        a 0 4 14
        b 0 4 10
        c 0 4  6
        ---------
        a  b  c
        4  4  4
        1  1  1
        1  1  1
        1  1  1
        1  1  1
        1  1  -
        1  1  .
        1  1  .
        1  1  .
        1  -  .
        1  .  .
        1  .  .
        1  .  .
        1  .  .
        .  13 .
        .  .  9
        """,
    "the request of the lowest priority is preempted even if it is the oldest": """
        blocks=5 batch=2 tokens=16 chunk=4 caching=0
        a 0 4 6 -1
        b 0 4 6
        ---------
        b  a
        4  4
        1  1
        1  1
        1  1
        1  1
        1  -
        .  9
        """,
    "a cancelled request frees its slot in the same step": """
        blocks=100 batch=1 tokens=16 chunk=4
        a 0 3 9 cancel=2
        b 0 3 2 cancel=1
        c 0 3 2
        ---------
        a  b  c
        3  .  .
        1  x  .
        x  .  3
        .  .  1
        """,
}


@pytest.mark.parametrize("name", TABLES)
def test_each_step_runs_the_expected_rows(name: str) -> None:
    workload_text, expected_table = re.split(r"\n *-+\n", TABLES[name])
    limits_line, *request_lines = workload_text.strip().splitlines()
    header, *lines = [line.split() for line in expected_table.strip().splitlines()]
    assert lines == run_workload(_parse_limits(limits_line), [line.split() for line in request_lines], header)


def run_workload(limits: dict[str, int], requests: list[list[str]], header: list[str]) -> list[list[str]]:
    """Run the workload and return its steps as a table."""
    pipeline = FakePipeline(
        kv_manager(limits["blocks"], enable_prefix_caching=bool(limits.get("caching", 1)))
    )
    scheduler: Scheduler[TextContext, TextGenerationResponse] = Scheduler(
        pipeline,
        max_batch_size=limits["batch"],
        max_batch_input_tokens=limits["tokens"],
        min_chunk_size=limits["chunk"],
    )
    contexts: dict[str, TextContext] = {}
    tokens: dict[str, list[int]] = {}
    lines: list[list[str]] = []
    while scheduler.has_work or len(contexts) < len(requests):
        cells = dict.fromkeys(header, ".")
        for name, arrival, prompt_length, num_new_tokens, *options in requests:
            if int(arrival) == len(lines):
                priority = int(options[0]) if options and "=" not in options[0] else 0
                contexts[name] = text_context(
                    [ord(name)] * int(prompt_length),
                    max_length=int(prompt_length) + int(num_new_tokens),
                    request_id=name,
                    priority=priority,
                )
                tokens[name] = []
                scheduler.submit(contexts[name])
            if f"cancel={len(lines)}" in options:
                scheduler.cancel(name)
                cells[name] = "x"
        running_names = {name for name, context in contexts.items() if context.is_assigned_to_cache}
        for name, output in scheduler.step().items():
            tokens[name] += [int(token.next_token) for token in output.tokens]
        if pipeline.trace[len(lines) :]:
            (rows,) = pipeline.trace[len(lines) :]
            cells |= {name: str(count) for name, count in rows.items()}
        for name in running_names:
            context = contexts[name]
            if not context.is_assigned_to_cache and not context.is_done and cells[name] == ".":
                cells[name] = "-"
        lines.append(list(cells.values()))
        assert len(lines) < 100
    for name, context in contexts.items():
        if context.is_done:
            new_context = text_context(context.prompt_tokens.tolist(), max_length=context.max_length)
            assert tokens[name] == expected_output_tokens(new_context)
    return lines


def _parse_limits(line: str) -> dict[str, int]:
    return {name: int(value) for name, value in (setting.split("=") for setting in line.split())}
