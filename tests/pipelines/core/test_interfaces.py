"""Small implementations of the protocols, and the packages that importing the protocols loads."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from penstock.pipelines.core import (
    AudioGenerator,
    EmbeddingsGenerator,
    InputContext,
    Pipeline,
    PipelineTokenizer,
    TextContext,
    TextGenerationResponse,
    TextGenerationStatus,
    TextResponse,
    TokenGenerator,
)


class EchoPipeline:
    """A pipeline that repeats each context's last token."""

    kv: Any = None

    def execute(
        self, batch: Mapping[str, TextContext], num_steps: int = 1
    ) -> dict[str, TextGenerationResponse]:
        return {name: self._response(context, num_steps) for name, context in batch.items()}

    def next_token(self, batch: dict[str, TextContext], num_steps: int) -> list[dict[str, TextResponse]]:
        responses = self.execute(batch, num_steps)
        return [
            {name: response.tokens[step] for name, response in responses.items()} for step in range(num_steps)
        ]

    def release(self, context: TextContext) -> None:
        context.unassign_from_cache()

    def _response(self, context: TextContext, num_steps: int) -> TextGenerationResponse:
        response = TextGenerationResponse([], TextGenerationStatus.ACTIVE)
        for _ in range(num_steps):
            context.update(int(context.all_tokens[-1]))
        for token, log_probabilities in context.outstanding_completion_tokens():
            response.append_token(TextResponse(token, log_probabilities))
        return response


class CharacterTokenizer:
    """A tokenizer whose tokens are character codes."""

    eos = 0
    expects_content_wrapping = False

    async def new_context(self, request: str) -> TextContext:
        tokens = await self.encode(request, False)
        return TextContext(prompt=request, max_length=99, tokens=np.array(tokens))

    async def encode(self, prompt: str, add_special_tokens: bool) -> list[int]:
        return [ord(character) for character in prompt] + [self.eos] * add_special_tokens

    async def decode(self, context: TextContext, encoded: list[int], **kwargs: Any) -> str:
        return "".join(map(chr, encoded))


async def test_a_request_runs_through_tokenizer_and_pipeline() -> None:
    tokenizer: PipelineTokenizer[TextContext, list[int], str] = CharacterTokenizer()
    pipeline: Pipeline[TextContext, TextGenerationResponse] = EchoPipeline()
    generator: TokenGenerator[TextContext] = EchoPipeline()
    context: InputContext = await tokenizer.new_context("abc")
    assert isinstance(context, TextContext)
    response = pipeline.execute({context.request_id: context}, 2)[context.request_id]
    steps = generator.next_token({context.request_id: context}, 2)
    tokens = [token.next_token for token in response.tokens]
    tokens += [step[context.request_id].next_token for step in steps]
    ids = [token for token in tokens if isinstance(token, int)]
    assert await tokenizer.decode(context, ids) == "cccc"


def test_implementations_are_instances_of_their_protocols() -> None:
    assert isinstance(EchoPipeline(), TokenGenerator)
    assert not isinstance(EchoPipeline(), EmbeddingsGenerator)
    assert not isinstance(EchoPipeline(), AudioGenerator)
    assert isinstance(CharacterTokenizer(), PipelineTokenizer)
    assert not isinstance(EchoPipeline(), PipelineTokenizer)


def test_importing_core_loads_only_numpy_and_msgspec() -> None:
    code = (
        "import sys, numpy, msgspec, uuid; before = set(sys.modules); import penstock.pipelines.core;"
        "print(*sorted(name for name in set(sys.modules) - before"
        " if name.split('.')[0] not in sys.stdlib_module_names | {'numpy', 'msgspec'}))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded_names = run.stdout.split()
    expected_names = {"penstock", "penstock.errors", "penstock.pipelines", "penstock.plain_numbers"}
    expected_names |= {"penstock.host", "penstock.host.lazy_names"}
    assert {name for name in loaded_names if not name.startswith("penstock.pipelines.core")} == expected_names
