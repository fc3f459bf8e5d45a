"""Fault isolation by bisection: finds the failing requests, or raises the error if every part fails."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.kv_contexts import text_context

from penstock.errors import InputError, PenstockError, RequestFailedError
from penstock.kv_cache import NullKVCache
from penstock.pipelines.core import TextContext, TextGenerationResponse, TextGenerationStatus
from penstock.scheduler.isolation import Isolation

DONE = TextGenerationStatus.END_OF_SEQUENCE


class FailingPipeline:
    """A pipeline that records its batches and raises ``failing_requests[name]`` for a batch with ``name``."""

    kv = NullKVCache()

    def __init__(self) -> None:
        self.failing_requests: dict[str, Exception] = {}
        self.failures: dict[str, PenstockError] = {}
        self.batches: list[str] = []
        self.outputs: list[str] = []

    def execute(
        self, batch: Mapping[str, TextContext], num_steps: int = 1
    ) -> dict[str, TextGenerationResponse]:
        self.batches.append("".join(batch))
        for name in batch:
            if name in self.failing_requests:
                self.failures[name] = RequestFailedError("not finished")
                raise self.failing_requests[name]
        self.outputs += batch
        return {name: TextGenerationResponse([], DONE) for name in batch}

    def release(self, context: TextContext) -> None:
        raise NotImplementedError


def make_batch(names: str) -> dict[str, TextContext]:
    return {name: text_context([1], request_id=name) for name in names}


def run_isolated(names: str, failing_names: str) -> tuple[FailingPipeline, dict[str, PenstockError]]:
    pipeline = FailingPipeline()
    pipeline.failing_requests = {name: ZeroDivisionError(name) for name in failing_names}
    outputs, failures = Isolation(pipeline).execute(make_batch(names), 1)
    assert list(outputs) == pipeline.outputs == [name for name in names if name not in failing_names]
    return pipeline, failures


def test_a_batch_without_errors_runs_once() -> None:
    assert run_isolated("abcde", "")[0].batches == ["abcde"]


def test_bisection_completes_each_healthy_request_once() -> None:
    pipeline, failures = run_isolated("abcdefgh", "cf")
    assert pipeline.batches == "abcdefgh abcd ab cd c d efgh ef e f gh".split()
    assert list(failures) == ["c", "f"]
    assert [str(error.__cause__) for error in failures.values()] == ["c", "f"]
    assert not pipeline.failures


def test_an_odd_batch_is_bisected_with_the_larger_half_first() -> None:
    assert run_isolated("abc", "c")[0].batches == ["abc", "ab", "c"]


@given(st.integers(2, 40), st.data())
def test_the_number_of_runs_is_logarithmic_in_the_batch_size(size: int, data: st.DataObject) -> None:
    names = "".join(chr(256 + number) for number in range(size))
    failing_names = "".join(data.draw(st.sets(st.sampled_from(names[1:]), max_size=min(5, size - 1))))
    pipeline, failures = run_isolated(names, failing_names)
    assert set(failures) == set(failing_names)
    assert all(type(error) is RequestFailedError for error in failures.values())
    assert len(pipeline.batches) <= 1 + 2 * len(failing_names) * (size - 1).bit_length()


def test_an_input_error_is_reported_unchanged() -> None:
    pipeline, error = FailingPipeline(), InputError("no such adapter")
    pipeline.failing_requests = {"b": error}
    _, failures = Isolation(pipeline).execute(make_batch("ab"), 1)
    assert failures == {"b": error}


def test_the_last_error_is_raised_if_every_part_fails() -> None:
    pipeline = FailingPipeline()
    pipeline.failing_requests = {name: ZeroDivisionError(name) for name in "ab"}
    with pytest.raises(ZeroDivisionError, match="b"):
        Isolation(pipeline).execute(make_batch("ab"), 1)
    assert pipeline.batches == ["ab", "a", "b"]
    assert not pipeline.failures


def test_bisection_stops_after_eight_consecutive_failures() -> None:
    pipeline, names = FailingPipeline(), [str(number) for number in range(100)]
    pipeline.failing_requests = {name: ZeroDivisionError(name) for name in names}
    with pytest.raises(ZeroDivisionError, match="7"):
        Isolation(pipeline).execute({name: text_context([1]) for name in names}, 1)


def test_any_number_of_requests_may_fail_after_one_has_succeeded() -> None:
    _, failures = run_isolated("abcdefghijklmnop", "bcdefghijklmnop")
    assert len(failures) == 15


def test_the_second_consecutive_failure_of_a_batch_of_one_is_raised() -> None:
    pipeline = FailingPipeline()
    pipeline.failing_requests = {name: ZeroDivisionError(name) for name in "abd"}
    isolation = Isolation(pipeline)
    assert list(isolation.execute(make_batch("a"), 1)[1]) == ["a"]
    with pytest.raises(ZeroDivisionError, match="b"):
        isolation.execute(make_batch("b"), 1)
    isolation.execute(make_batch("c"), 1)  # this batch succeeds, which resets the count of failures
    assert list(isolation.execute(make_batch("d"), 1)[1]) == ["d"]


def test_input_errors_do_not_count_as_consecutive_failures() -> None:
    pipeline = FailingPipeline()
    pipeline.failing_requests = dict.fromkeys("abc", InputError("refused"))
    isolation = Isolation(pipeline)
    for names in ("a", "b", "abc"):
        assert list(isolation.execute(make_batch(names), 1)[1]) == list(names)


def test_an_interrupt_is_raised_without_bisection() -> None:
    pipeline = FailingPipeline()
    pipeline.failing_requests = {"a": KeyboardInterrupt()}  # type: ignore[dict-item]
    with pytest.raises(KeyboardInterrupt):
        Isolation(pipeline).execute(make_batch("ab"), 1)
    assert pipeline.batches == ["ab"]
