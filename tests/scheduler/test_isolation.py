"""Fault isolation by bisection: failing requests are found; if no part runs, the error is raised."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.paged import text_context

from penstock.errors import InputError, PenstockError, RequestFailedError
from penstock.kv_cache import NullKVCache
from penstock.pipelines.core import TextContext, TextGenerationResponse, TextGenerationStatus
from penstock.scheduler.isolation import Isolation

DONE = TextGenerationStatus.END_OF_SEQUENCE


class FailingPipeline:
    """A pipeline that records its batches and fails if a batch contains one of the given requests."""

    kv = NullKVCache()

    def __init__(self) -> None:
        self.culprits: dict[str, Exception] = {}
        self.failures: dict[str, PenstockError] = {}
        self.parts: list[str] = []
        self.outputs: list[str] = []

    def execute(
        self, batch: Mapping[str, TextContext], num_steps: int = 1
    ) -> dict[str, TextGenerationResponse]:
        self.parts.append("".join(batch))
        for name in batch:
            if name in self.culprits:
                self.failures[name] = RequestFailedError("half done")
                raise self.culprits[name]
        self.outputs += batch
        return {name: TextGenerationResponse([], DONE) for name in batch}

    def release(self, context: TextContext) -> None:
        raise NotImplementedError


def batch(names: str) -> dict[str, TextContext]:
    return {name: text_context([1], request_id=name) for name in names}


def run(names: str, faults: str) -> tuple[FailingPipeline, dict[str, PenstockError]]:
    forwards = FailingPipeline()
    forwards.culprits = {name: ZeroDivisionError(name) for name in faults}
    outputs, failures = Isolation(forwards).execute(batch(names), 1)
    assert list(outputs) == forwards.outputs == [name for name in names if name not in faults]
    return forwards, failures


def test_a_batch_without_errors_runs_once() -> None:
    assert run("abcde", "")[0].parts == ["abcde"]


def test_bisection_runs_every_other_request_once() -> None:
    forwards, failures = run("abcdefgh", "cf")
    assert forwards.parts == "abcdefgh abcd ab cd c d efgh ef e f gh".split()
    assert list(failures) == ["c", "f"]
    assert [str(error.__cause__) for error in failures.values()] == ["c", "f"]
    assert not forwards.failures


def test_bisection_of_an_odd_batch() -> None:
    assert run("abc", "c")[0].parts == ["abc", "ab", "c"]


@given(st.integers(2, 40), st.data())
def test_only_failing_requests_end_after_few_runs(size: int, data: st.DataObject) -> None:
    names = "".join(chr(256 + number) for number in range(size))
    faults = "".join(data.draw(st.sets(st.sampled_from(names[1:]), max_size=min(5, size - 1))))
    forwards, failures = run(names, faults)
    assert set(failures) == set(faults)
    assert all(type(error) is RequestFailedError for error in failures.values())
    assert len(forwards.parts) <= 1 + 2 * len(faults) * (size - 1).bit_length()


def test_a_request_error_is_not_changed() -> None:
    forwards, refusal = FailingPipeline(), InputError("no such adapter")
    forwards.culprits = {"b": refusal}
    _, failures = Isolation(forwards).execute(batch("ab"), 1)
    assert failures == {"b": refusal}


def test_the_last_error_is_raised_if_no_part_runs() -> None:
    forwards = FailingPipeline()
    forwards.culprits = {name: ZeroDivisionError(name) for name in "ab"}
    with pytest.raises(ZeroDivisionError, match="b"):
        Isolation(forwards).execute(batch("ab"), 1)
    assert forwards.parts == ["ab", "a", "b"]
    assert not forwards.failures


def test_bisection_stops_after_several_failures_in_a_row() -> None:
    forwards, names = FailingPipeline(), [str(number) for number in range(100)]
    forwards.culprits = {name: ZeroDivisionError(name) for name in names}
    with pytest.raises(ZeroDivisionError, match="7"):
        Isolation(forwards).execute({name: text_context([1]) for name in names}, 1)


def test_many_failing_requests_end_if_another_one_runs() -> None:
    _, failures = run("abcdefghijklmnop", "bcdefghijklmnop")
    assert len(failures) == 15


def test_two_failures_of_a_single_request_in_a_row_raise() -> None:
    forwards = FailingPipeline()
    forwards.culprits = {name: ZeroDivisionError(name) for name in "abd"}
    isolation = Isolation(forwards)
    assert list(isolation.execute(batch("a"), 1)[1]) == ["a"]
    with pytest.raises(ZeroDivisionError, match="b"):
        isolation.execute(batch("b"), 1)
    isolation.execute(batch("c"), 1)  # runs
    assert list(isolation.execute(batch("d"), 1)[1]) == ["d"]


def test_errors_of_requests_do_not_count() -> None:
    forwards = FailingPipeline()
    forwards.culprits = dict.fromkeys("abc", InputError("refused"))
    isolation = Isolation(forwards)
    for names in ("a", "b", "abc"):
        assert list(isolation.execute(batch(names), 1)[1]) == list(names)


def test_an_interrupt_is_not_a_fault() -> None:
    forwards = FailingPipeline()
    forwards.culprits = {"a": KeyboardInterrupt()}  # type: ignore[dict-item]
    with pytest.raises(KeyboardInterrupt):
        Isolation(forwards).execute(batch("ab"), 1)
    assert forwards.parts == ["ab"]
