"""A custom model in Penstock's pipeline in about forty lines, without a checkpoint and without attention.

The model is a trigram model: it predicts the token that most often followed the last two tokens in a text.
`TrigramModel` implements all methods that a pipeline calls. The pipeline handles sampling, stopping, several
steps per call, and batching.

    python examples/own_model.py
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.pipelines import (
    ModelOutputs,
    PipelineConfig,
    PipelineModel,
    TextGenerationPipeline,
    TextTokenizer,
)
from penstock.pipelines.core import SamplingParams, TextContext, TokenGeneratorRequest

TRAINING_TEXT = """\
The river runs to the mill, and the mill turns the wheel. The wheel turns the stone, and the
stone grinds the corn. The corn is sold in the town by the river, and the river runs to the sea."""


@dataclass(frozen=True)
class LastTwoTokens:
    """The last two tokens of each sequence: ``[B, 2]``."""

    tokens: Tensor


class TrigramModel(PipelineModel[TextContext]):
    """A model that counts which tokens follow each pair of tokens in `TRAINING_TEXT`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        tokenizer = TextTokenizer(self.pipeline_config.model.checkpoint)
        ids = tokenizer.encode_text(TRAINING_TEXT).tolist()
        self.vocab_size = tokenizer.vocab_size
        self.logits_by_pair: dict[tuple[int, int], Tensor] = {}
        for first, second, third in zip(ids, ids[1:], ids[2:], strict=False):
            row = self.logits_by_pair.setdefault((first, second), torch.full((self.vocab_size,), -20.0))
            row[third] = row[third].clamp_min(-1.0) + 1.0

    @classmethod
    def calculate_max_seq_len(cls, pipeline_config: PipelineConfig, huggingface_config: Any) -> int:
        return 1024

    @classmethod
    def estimate_weights_size(cls, pipeline_config: PipelineConfig) -> int:
        return 0

    def prepare_initial_token_inputs(
        self,
        replica_batches: Sequence[Sequence[TextContext]],
        kv_cache_inputs: Any = None,
        return_n_logits: int | Sequence[int] = 1,
        *,
        drafts: Sequence[Sequence[int]] | None = None,
    ) -> LastTwoTokens:
        assert drafts is None, "the model does not support speculation"
        rows = [context.all_tokens[-2:].tolist() for batch in replica_batches for context in batch]
        return LastTwoTokens(torch.tensor([[0] * (2 - len(row)) + row for row in rows]))

    def prepare_next_token_inputs(
        self, next_tokens: Tensor, prev_model_inputs: LastTwoTokens
    ) -> LastTwoTokens:
        return LastTwoTokens(torch.stack([prev_model_inputs.tokens[:, 1], next_tokens], dim=1))

    def execute(self, model_inputs: LastTwoTokens) -> ModelOutputs:
        equal_logits = torch.zeros(self.vocab_size)  # for a pair that is not in the text
        rows = [
            self.logits_by_pair.get((first, second), equal_logits)
            for first, second in model_inputs.tokens.tolist()
        ]
        return ModelOutputs(next_token_logits=torch.stack(rows))


def generate(prompts: list[str], num_tokens: int = 24) -> list[str]:
    """Return the prompts with their continuations. Runs one batch, four decode steps per call."""
    config = PipelineConfig()
    tokenizer = TextTokenizer(config.model.checkpoint)
    pipeline = TextGenerationPipeline(config, TrigramModel, tokenizer.eos)
    params = SamplingParams(temperature=0.2, top_k=5, seed=1, max_new_tokens=num_tokens)
    batch = {}
    for index, prompt in enumerate(prompts):
        request = TokenGeneratorRequest(str(index), index, "trigram", prompt=prompt, sampling_params=params)
        batch[str(index)] = tokenizer.build_context(request)
    running = dict(batch)
    while running:
        for request_id, response in pipeline.execute(running, num_steps=4).items():
            if response.is_done:
                pipeline.release(running.pop(request_id))
    return [tokenizer.decode_ids(context.all_tokens) for context in batch.values()]


if __name__ == "__main__":
    for text in generate(["The river runs", "The wheel turns"]):
        print(text)
