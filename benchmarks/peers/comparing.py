"""Alternating runs of two engines (A B A B). Both engines of a pair of runs get the same new prompts."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any

from benchmarks.peers.engines import Engine
from benchmarks.peers.workloads import Opener, Result, Workload, random_prompts, run, run_in_new_process

Probe = Callable[[], dict[str, float]]


@dataclass(frozen=True)
class Comparison:
    """The two engines and the settings of a comparison."""

    ours: Opener
    theirs: Opener
    vocab_size: int
    """Prompts use the token ids from 3 to ``vocab_size - 1``."""
    num_pairs: int
    """Number of pairs of runs, without the warm-up."""
    probe: Probe
    """Measures the current speed of the machine. Called before each pair and each warm-up."""
    log: Callable[[str], None]
    """Prints progress."""


def compare(workloads: Sequence[Workload], comparison: Comparison) -> dict[str, Any]:
    """Run workloads on both engines. Returns ``rows`` of the report, and ``versions`` of both engines.

    Workloads that run on loaded engines come first and share the engines. Each workload begins with a warm-up
    run, which is not in the results. If a workload starts a new process, its warm-up run reads the files into
    the page cache.

    Raises:
        EngineError: an engine failed.
    """
    rows: list[dict[str, Any]] = []
    versions: dict[str, dict[str, str]] = {}
    random = Random()
    on_loaded_engines = [workload for workload in workloads if not workload.starts_process]
    openers = [
        _record_versions(versions, name, opener)
        for name, opener in (("penstock", comparison.ours), ("peer", comparison.theirs))
    ]
    with ExitStack() as stack:
        engines = [stack.enter_context(opener(False)) for opener in openers] if on_loaded_engines else []
        for workload in on_loaded_engines:
            runners = [partial(run, workload, engine) for engine in engines]
            rows += _run_pairs(workload, runners, comparison, random)
    for workload in workloads:
        if workload.starts_process:
            runners = [partial(run_in_new_process, workload, opener) for opener in openers]
            rows += _run_pairs(workload, runners, comparison, random)
    return {"rows": rows, "versions": versions}


def _record_versions(versions: dict[str, dict[str, str]], name: str, opener: Opener) -> Opener:
    """Return an opener that also stores the versions of the engine's packages in ``versions[name]``."""

    @contextmanager
    def open_and_record(watch_memory: bool) -> Iterator[Engine]:
        with opener(watch_memory) as engine:
            versions[name] = engine.versions
            yield engine

    return open_and_record


Runner = Callable[[list[list[int]]], Result]
"""Runs a workload on one engine with the given prompts."""


def _run_pairs(
    workload: Workload, runners: Sequence[Runner], comparison: Comparison, random: Random
) -> list[dict[str, Any]]:
    """Run a warm-up and all pairs of a workload. Returns one row per figure of the workload."""
    pairs: list[list[Result]] = []
    probes: list[dict[str, float]] = []
    for pair_number in range(comparison.num_pairs + 1):
        prompts = random_prompts(workload, comparison.vocab_size, random)
        machine_speed = comparison.probe()
        results = [runner(prompts) for runner in runners]
        figures = " ".join(f"{value:.4g}" for result in results for value in result.figures.values())
        comparison.log(f"{workload.name} {pair_number or 'warm-up'}: {figures}")
        if pair_number:
            pairs.append(results)
            probes.append(machine_speed)
    return [report_row(workload, figure, pairs, probes) for figure in pairs[0][0].figures]


def report_row(
    workload: Workload, figure: str, pairs: Sequence[Sequence[Result]], probes: Sequence[Mapping[str, float]]
) -> dict[str, Any]:
    """Return the row of one figure of a workload: the values of both engines, their medians and the ratio.

    Args:
        workload: the workload.
        figure: the name of the figure.
        pairs: for each pair of runs, the results of Penstock and of the peer.
        probes: the speed of the machine before each pair.
    """
    ours, theirs = ([pair[side].figures[figure] for pair in pairs] for side in (0, 1))
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    return {
        "work": workload.name,
        "of": figure,
        "unit": workload.unit or ("" if figure == "share" else "tokens/s"),
        "less_is_better": workload.less_is_better,
        "ours": ours,
        "theirs": theirs,
        "median_ours": statistics.median(ours),
        "median_theirs": statistics.median(theirs),
        "ratio": statistics.median(ratios),
        "lowest": min(ratios),
        "highest": max(ratios),
        "same_first_token": sum(a.tokens[0] == b.tokens[0] for a, b in pairs),
        "machine": [dict(probe) for probe in probes],
        "gb_s": statistics.median(probe["gb_s"] for probe in probes),
        "tflop_s": statistics.median(probe["tflop_s"] for probe in probes),
    }
