"""Driver of Penstock through `LLM`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from benchmarks.peers.drivers.answering import Generate, Settings, Tokens, answer_requests
from penstock import LLM, SamplingParams
from penstock.llm.outputs import OutputBuilder


class Watched(LLM):
    """An `LLM` that calls ``arrived`` with the number of new tokens of the first prompt after each step."""

    arrived: Callable[[int], None]

    def _run(self, answers: Sequence[OutputBuilder], *, seconds: float) -> Iterator[list[OutputBuilder]]:
        for stepped in super()._run(answers, seconds=seconds):
            if stepped and stepped[0].num_new_tokens:
                self.arrived(stepped[0].num_new_tokens)
            yield stepped


def open_engine(settings: Settings) -> Generate:
    """Load a checkpoint."""
    llm = Watched(
        str(settings.model),
        quantization_encoding=settings.encoding,
        max_length=settings.max_length,
        max_batch_size=settings.prompts,
        num_threads=settings.threads,
        enable_prefix_caching=False,
    )

    def generate(prompts: Tokens, new_tokens: int, arrived: Callable[[int], None]) -> Tokens:
        llm.arrived = arrived
        params = SamplingParams(max_new_tokens=new_tokens, temperature=0, ignore_eos=True, detokenize=False)
        return [output.token_ids for output in llm.generate(prompts, params, use_tqdm=False)]

    return generate


if __name__ == "__main__":
    answer_requests(open_engine)
