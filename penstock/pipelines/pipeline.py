"""`TextGenerationPipeline`: a batch of contexts in, tokens out.

A call goes: claim and reserve cache blocks, prepare inputs, then ``num_steps`` times forward and sample,
then hand the tokens to the contexts and commit full blocks to the prefix cache. Contexts change only
after the last forward has returned.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.driver import load_devices
from penstock.engine import InferenceSession
from penstock.errors import InputError, InsufficientBlocksError, UnsupportedFeatureError
from penstock.pipelines.config import PipelineConfig
from penstock.pipelines.core import (
    LogProbabilities,
    TextContext,
    TextGenerationResponse,
    TextGenerationStatus,
    TextResponse,
    TTSContext,
)
from penstock.pipelines.kv_cache import KVCache, KVCacheManager, NullKVCache
from penstock.pipelines.model import KVCacheMixin, ModelInputs, ModelOutputs, PipelineModel
from penstock.pipelines.sampling import Sampler, apply_penalties, mask_min_tokens
from penstock.pipelines.speculative import DraftProposer, accept
from penstock.pipelines.structured_output import grammar_bitmask

__all__ = [
    "KVCacheMixin",
    "ModelInputs",
    "ModelOutputs",
    "PipelineModel",
    "TextGenerationPipeline",
]


class TextGenerationPipeline:
    """Generates tokens with any `PipelineModel`.

    Args:
        pipeline_config: the configuration.
        pipeline_model: the class of the model; the pipeline makes the one instance.
        eos_token_id: ends contexts that bring no end-of-sequence ids of their own (unless they ignore it);
            None where the tokenizer names none.
        proposer: drafts tokens for the model to verify.
    """

    def __init__(
        self,
        pipeline_config: PipelineConfig,
        pipeline_model: type[PipelineModel[Any]],
        eos_token_id: int | None,
        *,
        proposer: DraftProposer | None = None,
    ) -> None:
        self.config = pipeline_config
        self.eos_token_id = eos_token_id
        self.proposer = proposer
        self.session = InferenceSession(
            load_devices(pipeline_config.model.devices),
            deterministic=pipeline_config.deterministic,
            num_threads=pipeline_config.num_threads,
        )
        self.model = pipeline_model(pipeline_config, self.session)
        self.memory_plan = self.model.memory_plan
        self.device = self.model.devices[0].torch_device
        self.kv: KVCache = NullKVCache()
        if isinstance(self.model, KVCacheMixin):
            planned = self.model.kv_cache_spec is not None
            self.kv = self.model.load_kv_manager(
                self.session,
                self.memory_plan.kv_cache_size if planned else self.model.estimate_memory_footprint(),
            )

    def execute(
        self, batch: Mapping[str, TextContext], num_steps: int = 1
    ) -> dict[str, TextGenerationResponse]:
        """Runs up to ``num_steps`` steps and returns the new tokens of each context.

        Whole prompts, prompt chunks (``active_idx < end_idx``; they yield no token) and single tokens may
        stand side by side. Fewer steps run where a context would outgrow its maximum length or needs a
        look at each token: chunks, grammars, penalties, log probabilities, drafts.

        Raises:
            InputError: a context cannot be served; no context has changed.
            InsufficientBlocksError: the KV cache is full; no context has changed, but those that were
                given their blocks before keep them.
        """
        if not batch:
            return {}
        if num_steps < 1:
            raise InputError(f"num_steps must be at least 1, was {num_steps}")
        contexts = list(batch.values())
        self._check(contexts)
        drafts = self._propose(contexts)
        num_steps = 1 if any(drafts) else self._num_steps(contexts, num_steps)
        drafts, num_steps = self._reserve(contexts, drafts, num_steps)
        for context in contexts:
            if self.eos_token_id is not None and not (context.eos_token_ids or context.ignore_eos):
                context.eos_token_ids.add(self.eos_token_id)
        sampled, log_probabilities = self._run(contexts, drafts, num_steps)
        responses = {}
        for i, (request_id, context) in enumerate(batch.items()):
            responses[request_id] = _advance(context, sampled[i], log_probabilities[i])
            self.kv.commit(context)
        return responses

    def next_token(
        self, batch: Mapping[str, TextContext], num_steps: int = 1
    ) -> list[dict[str, TextResponse]]:
        """`execute` as a list with one dict a step; a context that has ended is missing from later ones."""
        responses = self.execute(batch, num_steps)
        longest = max((len(response.tokens) for response in responses.values()), default=0)
        return [
            {
                request_id: response.tokens[step]
                for request_id, response in responses.items()
                if step < len(response.tokens)
            }
            for step in range(longest)
        ]

    def release(self, context: TextContext) -> None:
        """Gives back the context's cache slot and blocks; twice is once."""
        self.kv.release(context)

    def _reserve(
        self, contexts: Sequence[TextContext], drafts: list[list[int]], num_steps: int
    ) -> tuple[list[list[int]], int]:
        """Slots and blocks for the batch; without drafts and in one step where there are too few for more."""
        for context in contexts:
            self.kv.claim(context)
            self.kv.reserve(context)
        try:
            for context, draft in zip(contexts, drafts, strict=True):
                self.kv.reserve(context, max(num_steps - 1, len(draft)))
        except InsufficientBlocksError:  # all have what one step needs; some keep a block or two more
            drafts, num_steps = [[] for _ in contexts], 1
        return drafts, num_steps

    def _run(
        self, contexts: Sequence[TextContext], drafts: Sequence[list[int]], num_steps: int
    ) -> tuple[list[list[int]], list[LogProbabilities | None]]:
        """The forwards of one call: the tokens sampled for each context, and their log probabilities."""
        sampler = Sampler.for_batch([context.sampling_params for context in contexts], self.device)
        inputs = self._initial_inputs(contexts, drafts)
        log_probabilities: list[LogProbabilities | None] = [None] * len(contexts)
        columns: list[list[list[int]]] = []  # one per step: the tokens of each context
        for step in range(num_steps):
            outputs = self.model.execute(inputs)
            tokens, sequences = self._sample(sampler, contexts, drafts, outputs, step)
            columns.append(_by_sequence(tokens, sequences, len(contexts)))
            if any(context.log_probabilities for context in contexts):
                firsts = [column[0] for column in columns[-1]]  # where they are wanted there is no second
                log_probabilities = self._log_probabilities(contexts, inputs, outputs, firsts)
            if step + 1 < num_steps:
                inputs = self.model.prepare_next_token_inputs(tokens, inputs)
        if any(drafts):
            accepted = [accept(draft, row) for draft, row in zip(drafts, columns[0], strict=True)]
            return accepted, log_probabilities
        return [[token for column in columns for token in column[i]] for i in range(len(contexts))], (
            log_probabilities
        )

    def _sample(
        self,
        sampler: Sampler,
        contexts: Sequence[TextContext],
        drafts: Sequence[list[int]],
        outputs: ModelOutputs,
        step: int,
    ) -> tuple[Tensor, np.ndarray]:  # [R] tokens, [R] sequences
        """Samples behind each context's last row, and in place of each of its drafts."""
        counts = np.array([len(draft) + 1 for draft in drafts])
        sequences = np.arange(len(contexts)).repeat(counts)  # [R]
        within = np.arange(len(sequences)) - (counts.cumsum() - counts).repeat(counts)
        ends = np.array([context.active_idx for context in contexts])
        positions = ends[sequences] + within + step
        logits = _last_rows(outputs, counts)
        logits = apply_penalties(logits, contexts, sequences)
        logits = mask_min_tokens(logits, contexts, sequences, positions)
        bitmask = grammar_bitmask(contexts, sequences, logits.shape[-1])
        if bitmask is not None:
            bitmask = bitmask.to(self.device)
        return sampler(self.session.ops, logits, sequences, positions, bitmask), sequences

    def _initial_inputs(self, contexts: Sequence[TextContext], drafts: Sequence[list[int]]) -> Any:
        kv = None
        if isinstance(self.kv, KVCacheManager):
            active = np.array([context.active_length for context in contexts])
            kv = self.kv.inputs(contexts, counts=active + [len(draft) for draft in drafts])
        wanted = [
            context.active_length if _echoes(context) else len(draft) + 1
            for context, draft in zip(contexts, drafts, strict=True)
        ]
        options: dict[str, Any] = {"drafts": drafts} if any(drafts) else {}
        rows: Any = 1 if set(wanted) == {1} else wanted
        return self.model.prepare_initial_token_inputs([contexts], kv, rows, **options)

    def _log_probabilities(
        self, contexts: Sequence[TextContext], inputs: Any, outputs: ModelOutputs, tokens: Sequence[int]
    ) -> list[LogProbabilities | None]:
        """Those of the sampled tokens; behind a prompt chunk stands the prompt's own next token."""
        targets = [
            int(context.all_tokens[context.active_idx]) if context.active_idx < context.end_idx else token
            for context, token in zip(contexts, tokens, strict=True)
        ]
        try:
            return self.model.compute_log_probabilities(
                self.session,
                inputs,
                outputs,
                torch.tensor(targets, device=self.device),
                [context.log_probabilities or 0 for context in contexts],
                [_echoes(context) for context in contexts],
            )
        except NotImplementedError as error:
            raise UnsupportedFeatureError("log probabilities", str(error)) from error

    def _check(self, contexts: Sequence[TextContext]) -> None:
        """Refuses what cannot be served before anything has changed."""
        if len({context.request_id for context in contexts}) < len(contexts):
            raise InputError("a request stands twice in the batch: give each context a request_id of its own")
        for context in contexts:
            status = _status(context)
            if status.is_done:
                raise InputError(f"request {context.request_id} has ended ({status.value})")
            if context.adapter is not None and self.model.lora_manager is None:
                raise UnsupportedFeatureError(
                    f"adapter {context.adapter!r}", "no LoRA adapters are enabled for this model"
                )
            if context.grammar is not None and context.matcher is None:
                raise UnsupportedFeatureError(
                    f"a {context.grammar.kind} grammar", "no matcher was compiled for it: call set_matcher"
                )
            if context.current_length > self.model.max_seq_len:
                raise InputError(
                    f"request {context.request_id} has {context.current_length} tokens, "
                    f"the model's maximum length is {self.model.max_seq_len}"
                )

    def _num_steps(self, contexts: Sequence[TextContext], num_steps: int) -> int:
        if any(_needs_each_token(context) for context in contexts):
            return 1
        return max(1, min(num_steps, *map(self._room, contexts)))

    def _room(self, context: TextContext) -> int:
        """How many more tokens a context may get."""
        return min(self.model.max_seq_len, context.max_length) - context.current_length

    def _propose(self, contexts: Sequence[TextContext]) -> list[list[int]]:
        """Drafts for the contexts that can take them, no more than fit under their maximum length."""
        if self.proposer is None:
            return [[] for _ in contexts]
        drafts = []
        for context, draft in zip(contexts, self.proposer.propose(contexts), strict=True):
            room = 0 if _needs_each_token(context) else max(self._room(context) - 1, 0)
            drafts.append(draft[:room])
        return drafts


def _advance(
    context: TextContext, tokens: Sequence[int], log_probabilities: LogProbabilities | None
) -> TextGenerationResponse:
    """Hands the sampled tokens to the context until it ends; what was sampled beyond is dropped."""
    for token in tokens:
        context.update(token, log_probabilities)
        if _status(context).is_done:
            break
    outstanding = context.outstanding_completion_tokens()
    return TextGenerationResponse(
        [TextResponse(token, logs) for token, logs in outstanding], _status(context)
    )


def _status(context: TextContext) -> TextGenerationStatus:
    """How far the language model has come, which for speech is not how far the audio has."""
    return context.speech_token_status if isinstance(context, TTSContext) else context.status


def _needs_each_token(context: TextContext) -> bool:
    """Whether a context must be looked at after every token."""
    return (
        context.active_idx < context.end_idx
        or context.matcher is not None
        or bool(context.log_probabilities)
        or context.sampling_params.needs_penalties
    )


def _echoes(context: TextContext) -> bool:
    return bool(context.log_probabilities) and context.log_probabilities_echo


def _last_rows(outputs: ModelOutputs, counts: np.ndarray) -> Tensor:  # [R, V]
    """The last ``counts [B]`` rows of logits of each sequence."""
    if outputs.next_token_logits is not None and counts.max() == 1:
        return outputs.next_token_logits
    assert outputs.logits is not None, "the model returned no logits"
    if counts.sum() == outputs.logits.shape[0]:
        return outputs.logits
    assert outputs.logit_offsets is not None, "logits of several rows need logit_offsets"
    offsets = outputs.logit_offsets.cpu().numpy()
    assert (np.diff(offsets) >= counts).all(), "the model returned fewer rows of logits than it was asked for"
    ends = offsets[1:]
    rows = np.concatenate([np.arange(end - count, end) for end, count in zip(ends, counts, strict=True)])
    return outputs.logits[torch.from_numpy(rows).to(outputs.logits.device)]


def _by_sequence(tokens: Tensor, sequences: np.ndarray, num_sequences: int) -> list[list[int]]:
    result: list[list[int]] = [[] for _ in range(num_sequences)]
    for sequence, token in zip(sequences.tolist(), tokens.tolist(), strict=True):
        result[sequence].append(token)
    return result
