"""Driver of Penstock: runs `LLM` in this process, without a prefix cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from benchmarks.peers.drivers.request_loop import Generate, Settings, Tokens, answer_requests
from penstock import LLM, SamplingParams
from penstock.llm.batch_runner import BatchRunner
from penstock.llm.outputs import OutputBuilder


class ReportingRunner(BatchRunner):
    """A batch runner that reports the number of new tokens of the first prompt after each scheduler call."""

    on_tokens: Callable[[int], None]
    """Called with the number of new tokens so far, unless it is 0."""

    def run(self, builders: Sequence[OutputBuilder], *, seconds: float) -> Iterator[list[OutputBuilder]]:
        for updated_builders in super().run(builders, seconds=seconds):
            if builders[0].num_new_tokens:
                self.on_tokens(builders[0].num_new_tokens)
            yield updated_builders


class ReportingLLM(LLM):
    """An `LLM` with a `ReportingRunner`."""

    _runner_class = ReportingRunner


def open_engine(settings: Settings) -> Generate:
    """Load a checkpoint or a GGUF file, and return the function that generates tokens."""
    llm = ReportingLLM(
        str(settings.model),
        quantization_encoding=None if settings.model.suffix == ".gguf" else settings.encoding,
        max_length=settings.max_length,
        max_batch_size=settings.num_prompts,
        num_threads=settings.num_threads,
        enable_prefix_caching=False,
    )

    runner = llm._runner
    assert isinstance(runner, ReportingRunner)

    def generate(prompts: Tokens, num_new_tokens: int, on_tokens: Callable[[int], None]) -> Tokens:
        runner.on_tokens = on_tokens
        params = SamplingParams(
            max_new_tokens=num_new_tokens, temperature=0, ignore_eos=True, detokenize=False
        )
        return [output.token_ids for output in llm.generate(prompts, params, use_tqdm=False)]

    return generate


if __name__ == "__main__":
    answer_requests(open_engine)
