"""Alternating runs of two engines (A B A B). Each pair of runs has new prompts, the same for both engines."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any

from benchmarks.peers.engines import Engine
from benchmarks.peers.works import Opener, Result, Work, prompts_of, run, run_fresh

Probe = Callable[[], dict[str, float]]


@dataclass(frozen=True)
class Contest:
    """The two engines and the settings of a comparison."""

    ours: Opener
    theirs: Opener
    vocabulary: int
    pairs: int
    probe: Probe
    """Measures the machine before each pair."""
    log: Callable[[str], None]
    """Prints progress."""


def compare(works: Sequence[Work], contest: Contest) -> dict[str, Any]:
    """Return the rows of all workloads and the versions of both engines.

    Workloads on loaded engines run first and share the engines. Each workload has a warm-up run that does not
    count. For workloads that start a new process, the warm-up run brings the files into the page cache.

    Raises:
        EngineError: an engine failed.
    """
    rows: list[dict[str, Any]] = []
    versions: dict[str, dict[str, str]] = {}
    random = Random()
    loaded = [work for work in works if not work.is_fresh]
    openers = [
        _record_versions(versions, name, opener)
        for name, opener in (("penstock", contest.ours), ("peer", contest.theirs))
    ]
    with ExitStack() as stack:
        engines = [stack.enter_context(opener(False)) for opener in openers] if loaded else []
        for work in loaded:
            rows += _rows(work, [partial(run, work, engine) for engine in engines], contest, random)
    for work in works:
        if work.is_fresh:
            runners = [partial(run_fresh, work, opener) for opener in openers]
            rows += _rows(work, runners, contest, random)
    return {"rows": rows, "versions": versions}


def _record_versions(versions: dict[str, dict[str, str]], name: str, opener: Opener) -> Opener:
    """Wrap ``opener`` so that it also stores the engine's versions in ``versions[name]``."""

    @contextmanager
    def opened(watch_memory: bool) -> Iterator[Engine]:
        with opener(watch_memory) as engine:
            versions[name] = engine.versions
            yield engine

    return opened


Runner = Callable[[list[list[int]]], Result]


def _rows(work: Work, runners: Sequence[Runner], contest: Contest, random: Random) -> list[dict[str, Any]]:
    found: list[list[Result]] = []
    probes: list[dict[str, float]] = []
    for pair in range(contest.pairs + 1):
        prompts = prompts_of(work, contest.vocabulary, random)
        machine = contest.probe()
        results = [runner(prompts) for runner in runners]
        figures = " ".join(f"{value:.4g}" for one in results for value in one.figures.values())
        contest.log(f"{work.name} {pair or 'warm-up'}: {figures}")
        if pair:
            found.append(results)
            probes.append(machine)
    return [row_of(work, of, found, probes) for of in found[0][0].figures]


def row_of(
    work: Work, of: str, found: Sequence[Sequence[Result]], probes: Sequence[Mapping[str, float]]
) -> dict[str, Any]:
    """Return the row of one figure of a workload: the runs of both engines, their medians and the ratio.

    Args:
        work: the workload.
        of: the name of the figure.
        found: for each pair of runs, the results of Penstock and of the peer.
        probes: the measurement of the machine before each pair.
    """
    ours, theirs = ([pair[side].figures[of] for pair in found] for side in (0, 1))
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    return {
        "work": work.name,
        "of": of,
        "unit": work.unit or ("" if of == "share" else "tokens/s"),
        "less_is_better": work.less_is_better,
        "ours": ours,
        "theirs": theirs,
        "median_ours": statistics.median(ours),
        "median_theirs": statistics.median(theirs),
        "ratio": statistics.median(ratios),
        "lowest": min(ratios),
        "highest": max(ratios),
        "same_first_token": sum(a.tokens[0] == b.tokens[0] for a, b in found),
        "machine": [dict(one) for one in probes],
        "gb_s": statistics.median(one["gb_s"] for one in probes),
        "tflop_s": statistics.median(one["tflop_s"] for one in probes),
    }
