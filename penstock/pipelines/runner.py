"""`ModelRunner`: runs a model on a batch of contexts, from input preparation to sampled tokens.

``launch`` starts the forwards and the sampling of a batch, ``collect`` returns the tokens. All state of a
launch is in its handle. On a CPU, ``launch`` runs all forwards, and ``collect`` only verifies drafts and
computes log probabilities. The runner never changes a context.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter

import numpy as np
import torch
from torch import Tensor

from penstock.architectures.model import ModelInputs, ModelOutputs, PipelineModel
from penstock.architectures.vision import VisionModel
from penstock.engine import InferenceSession
from penstock.errors import UnsupportedFeatureError
from penstock.grammar import grammar_bitmask
from penstock.host.heartbeat import beat
from penstock.kernels import upload
from penstock.kv_cache import KVCache, KVCacheManager
from penstock.pipelines.core import LogProbabilities, SamplingParams, TextContext
from penstock.pipelines.encoder_cache import EncoderCache
from penstock.pipelines.image_rows import ImageRows
from penstock.pipelines.logit_rows import LogitRows, last_rows, rows_as_sequences
from penstock.pipelines.sampling import LogitEdits, Sampler
from penstock.pipelines.speculative import accept

_NO_ALLOWED_TOKEN = -2
"""The sampled token of a row whose grammar allows no token."""
_MAX_FUSED_STEPS = 8
"""Maximum result of `ModelRunner.num_steps_for` on a synchronous back end. More steps save little time."""
_MAX_QUEUED_STEPS = 32
"""The same maximum on an asynchronous back end (see `InferenceSession.queue`). It is higher, because the
device is idle while the host prepares the next call.
"""


@dataclass(slots=True)
class SampledTokens:
    """The tokens of one context from one launch."""

    tokens: list[int] = field(default_factory=list)
    """The accepted drafts and the token after them; without drafts one token per step."""
    log_probabilities: list[LogProbabilities] = field(default_factory=list)
    """One entry per token if requested. With echo, the first entry includes the prompt tokens."""
    fault: str | None = None
    """The reason why the tokens are invalid; None if they are valid."""
    has_no_allowed_token: bool = False
    """Whether the tokens are invalid because the grammar allows no token of the model's vocabulary."""


@dataclass(slots=True)
class LaunchHandle:
    """A launched batch whose tokens are not collected yet."""

    contexts: Sequence[TextContext]
    drafts: Sequence[list[int]]
    num_steps: int
    """Number of steps. Lower than requested if all sequences end before the last step of a fused call."""
    inputs: ModelInputs
    """Model inputs of the last forward, or of the first forward if the steps are fused."""
    rows: LogitRows
    """Rows of logits of the first forward."""
    sampled_tokens: list[Tensor] = field(default_factory=list)
    """The sampled tokens of each step, ``[R]`` int64. -1 marks a row with logits that are not finite,
    `_NO_ALLOWED_TOKEN` a row whose grammar allows no token."""
    fused_tokens: Tensor | None = None
    """The sampled tokens ``[n, B]`` of all steps if they ran as one call, instead of ``sampled_tokens``."""
    outputs: ModelOutputs | None = None
    """Outputs of the forward if log probabilities were requested."""
    launched_at: float | None = None
    """Time of the launch in seconds; None if a context computes several tokens or drafts are verified."""


class ModelRunner:
    """Runs a model on batches of contexts.

    Args:
        model: the model.
        session: the session of the model.
        kv: the KV cache with the blocks of the contexts.
    """

    def __init__(self, model: PipelineModel[TextContext], session: InferenceSession, kv: KVCache) -> None:
        self._model = model
        self._session = session
        self._kv = kv
        self._device = model.devices[0].torch_device
        self.images: ImageRows | None = None
        """Encodes the images of contexts; None for a model that reads text only."""
        if isinstance(model, VisionModel):
            cache = EncoderCache(model.memory_plan.encoder_cache_size)
            self.images = ImageRows(model, cache, self._device)
        self._sampler: Sampler | None = None
        self._step_seconds: float | None = None
        self.vocab_size: int | None = None
        """Number of logits V; None until a step has run as a separate forward."""

    def num_steps_for(self, seconds: float) -> int:
        """Estimate how many decode steps fit into ``seconds``, from the last recorded duration of a step.

        The result is at least 1 and at most `_MAX_FUSED_STEPS`, or `_MAX_QUEUED_STEPS` on an
        asynchronous back end. It is 1 before the first decode step.
        """
        if self._step_seconds is None:
            return 1
        max_steps = _MAX_FUSED_STEPS if self._session.queue is None else _MAX_QUEUED_STEPS
        return max(1, min(int(seconds / self._step_seconds), max_steps))

    def forward(
        self, contexts: Sequence[TextContext], num_logits: Sequence[int] | None = None
    ) -> Tensor:  # [R, V]
        """Run one forward over the tokens that each context computes next, and return logits.

        Args:
            contexts: the batch, with reserved cache blocks.
            num_logits: for each context the number of trailing rows whose logits are returned; None for one
                row per context.
        """
        outputs = self._model.execute(
            self._model_inputs(contexts, None, 1 if num_logits is None else num_logits)
        )
        return last_rows(outputs, num_logits or [1] * len(contexts))

    def execute(
        self,
        contexts: Sequence[TextContext],
        num_steps: int = 1,
        *,
        drafts: Sequence[list[int]] | None = None,
    ) -> list[SampledTokens]:
        """Launch a batch and collect its tokens; see `launch`."""
        return self.collect(self.launch(contexts, num_steps, drafts=drafts))

    def launch(
        self,
        contexts: Sequence[TextContext],
        num_steps: int = 1,
        *,
        drafts: Sequence[list[int]] | None = None,
        after: LaunchHandle | None = None,
    ) -> LaunchHandle:
        """Launch ``num_steps`` forwards of a batch with sampling, or one forward that verifies drafts.

        Args:
            contexts: the batch, with cache blocks reserved for all steps.
            num_steps: number of forwards; 1 with drafts or log probabilities, or if a context has penalties,
                banned sequences, a grammar or an unfinished prompt.
            drafts: drafted tokens of each context.
            after: an earlier launch of the same contexts, which this launch continues. It must have neither
                drafts nor log probabilities, and need not be collected yet. The blocks of both launches must
                be reserved before the first launch.

        Returns:
            A handle for `collect`. Further batches may be launched before this handle is collected.
        """
        drafts = drafts or [[]] * len(contexts)
        has_log_probabilities = any(context.log_probabilities for context in contexts)
        assert num_steps == 1 or not (has_log_probabilities or any(drafts)), (
            "drafts and log probabilities need one step"
        )
        sampler = self.batch_sampler([context.sampling_params for context in contexts])
        if after is None:
            rows = LogitRows.for_batch(contexts, drafts)
            inputs = self.prepare_step(contexts, drafts)
        else:
            assert not any(after.drafts), "steps cannot continue the verification of drafts"
            rows = after.rows.after_steps(after.num_steps)
            inputs = self._inputs_after(after)
        handle = LaunchHandle(contexts, drafts, num_steps, inputs, rows)
        has_single_rows = all(context.active_length == 1 for context in contexts)
        is_decoding = has_single_rows and len(rows.positions) == len(contexts)
        launched_at = perf_counter()
        handle.launched_at = launched_at if is_decoding else None
        if num_steps > 1 and is_decoding and not has_log_probabilities:
            handle.fused_tokens = self._run_fused_steps(sampler, handle)
        if handle.fused_tokens is None:
            self._run_steps(sampler, handle, has_log_probabilities)
        else:
            handle.num_steps = len(handle.fused_tokens)
        if is_decoding and self._session.queue is None:
            self.record_step((perf_counter() - launched_at) / handle.num_steps)
        return handle

    def record_step(self, seconds: float) -> None:
        """Record the duration of a decode step, for `num_steps_for`."""
        self._step_seconds = seconds

    def collect(self, handle: LaunchHandle) -> list[SampledTokens]:
        """Return the tokens of a launched batch, one entry per context.

        Raises:
            UnsupportedFeatureError: log probabilities were requested, but the model does not compute them.
        """
        results = [SampledTokens() for _ in handle.contexts]
        if handle.fused_tokens is None:
            tokens_by_step = [tokens.tolist() for tokens in handle.sampled_tokens]
        else:
            tokens_by_step = handle.fused_tokens.tolist()
        if handle.launched_at is not None and self._session.queue is not None:  # the device has finished
            self.record_step((perf_counter() - handle.launched_at) / handle.num_steps)
        for tokens in tokens_by_step:
            _append_sampled(results, handle.drafts, tokens)
        if handle.outputs is not None:
            self._add_log_probabilities(handle, handle.outputs, results)
        return results

    def _run_steps(self, sampler: Sampler, handle: LaunchHandle, has_log_probabilities: bool) -> None:
        """Run the steps of a launch as separate forwards."""
        for step in range(handle.num_steps):
            if step:
                # A row with an invalid token continues with token 0. Its further results are not used.
                tokens = handle.sampled_tokens[-1].clamp(min=0)
                handle.inputs = self._model.prepare_next_token_inputs(tokens, handle.inputs)
            outputs = self._model.execute(handle.inputs)
            beat()
            logits = last_rows(outputs, handle.rows.row_counts)
            self.vocab_size = logits.shape[-1]
            rows = handle.rows.after_steps(step)
            handle.sampled_tokens.append(self._sample(sampler, handle.contexts, handle.drafts, rows, logits))
            if has_log_probabilities:
                handle.outputs = outputs

    def _run_fused_steps(self, sampler: Sampler, handle: LaunchHandle) -> Tensor | None:  # [n, B]
        """Run all steps as one call and return the tokens; None if the model cannot run them as one call.

        Steps whose sampling parameters change the logits cannot run as one call.
        """
        contexts, num_steps = handle.contexts, handle.num_steps
        if any(context.sampling_params.changes_logits for context in contexts):
            return None
        positions = handle.rows.positions + np.arange(num_steps)[:, None]  # [n, B]
        stop_ids = [list(context.eos_token_ids) for context in contexts]
        width = max(1, max(map(len, stop_ids)))
        return self._model.execute_steps(
            handle.inputs,
            sampler.inputs,
            sampler.uniforms(positions),
            torch.tensor([ids + [-1] * (width - len(ids)) for ids in stop_ids]),
        )

    def _inputs_after(self, handle: LaunchHandle) -> ModelInputs:
        """Return the model inputs that follow the last step of a launch."""
        inputs = handle.inputs
        for tokens in handle.sampled_tokens[-1:] if handle.fused_tokens is None else handle.fused_tokens:
            inputs = self._model.prepare_next_token_inputs(tokens.clamp(min=0), inputs)
        return inputs

    def batch_sampler(self, params: list[SamplingParams]) -> Sampler:
        """Return the sampler of a batch. Reuses the previous sampler if the parameters are equal."""
        if self._sampler is None or self._sampler.params != params:
            self._sampler = Sampler.for_batch(params, self._device)
        return self._sampler

    def prepare_step(self, contexts: Sequence[TextContext], drafts: Sequence[list[int]]) -> ModelInputs:
        """Return the inputs of a step. They request the logits for sampling and for log probabilities."""
        if any(drafts):
            num_logits: int | Sequence[int] = [
                context.active_length + len(draft) if _requests_echo(context) else len(draft) + 1
                for context, draft in zip(contexts, drafts, strict=True)
            ]
            return self._model_inputs(contexts, drafts, num_logits)
        if any(_requests_echo(context) for context in contexts):
            num_logits = [context.active_length if _requests_echo(context) else 1 for context in contexts]
            return self._model_inputs(contexts, None, num_logits)
        return self._model_inputs(contexts, None, 1)

    def _model_inputs(
        self,
        contexts: Sequence[TextContext],
        drafts: Sequence[list[int]] | None,
        num_logits: int | Sequence[int],
    ) -> ModelInputs:
        row_counts = [context.active_length for context in contexts]
        if drafts is not None:
            row_counts = [count + len(draft) for count, draft in zip(row_counts, drafts, strict=True)]
        kv = self._kv.inputs(contexts, counts=row_counts) if isinstance(self._kv, KVCacheManager) else None
        if drafts is None:  # not passed, because a model may lack the parameter `drafts`
            inputs = self._model.prepare_initial_token_inputs([contexts], kv, num_logits)
        else:
            inputs = self._model.prepare_initial_token_inputs([contexts], kv, num_logits, drafts=drafts)
        image_embeds = self.images.embeddings(contexts, row_counts) if self.images is not None else None
        return inputs if image_embeds is None else replace(inputs, input_embeds=image_embeds)

    def _sample(
        self,
        sampler: Sampler,
        contexts: Sequence[TextContext],
        drafts: Sequence[list[int]],
        rows: LogitRows,
        logits: Tensor,  # [R, V]
    ) -> Tensor:  # [R] tokens
        """Sample the next token of each context and, to verify drafts, a token at each draft's position."""
        return self.sampling_function(sampler, contexts, drafts, rows, logits.shape[-1])(logits)

    def sampling_function(
        self,
        sampler: Sampler,
        contexts: Sequence[TextContext],
        drafts: Sequence[list[int]],
        rows: LogitRows,
        vocab_size: int,
    ) -> Callable[[Tensor], Tensor]:  # [R, V] -> [R] tokens
        """Return a function that samples from logits. Later changes of the contexts do not affect it.

        Args:
            sampler: the sampler of the contexts.
            contexts: the contexts. With penalties, banned sequences or a grammar, they must have all
                tokens before the tokens to sample.
            drafts: drafted tokens of each context.
            rows: the rows of logits.
            vocab_size: number of logits V.

        Raises:
            InputError: an id in ``logit_bias``, ``allowed_token_ids``, ``banned_token_ids`` or
                ``banned_sequences`` is outside the vocabulary.
        """
        edits = LogitEdits.for_batch(
            contexts, rows.context_indices, rows.positions, drafts, vocab_size, self._device
        )
        bitmask = grammar_bitmask(contexts, rows.context_indices, vocab_size, drafts)
        context_indices = rows.context_indices if any(drafts) else None
        has_allowed = None
        if bitmask is not None:
            has_allowed = bitmask.any(-1)
            has_allowed = None if has_allowed.all() else upload(has_allowed, self._device)
            bitmask = upload(bitmask, self._device)

        def sample(logits: Tensor) -> Tensor:
            if edits is not None:
                logits = edits.apply(logits)
            sampled = sampler(self._session.ops, logits, context_indices, rows.positions, bitmask)
            return sampled if has_allowed is None else sampled.where(has_allowed, _NO_ALLOWED_TOKEN)

        return sample

    def _add_log_probabilities(
        self, handle: LaunchHandle, outputs: ModelOutputs, results: Sequence[SampledTokens]
    ) -> None:
        """Append the log probabilities of a step's tokens to the results.

        If a step computes a chunk of a prompt, the scored token is the next token of the prompt. With
        drafts, each token after the first is scored as a separate sequence that has one row: the row of the
        draft before the token.
        """
        contexts, drafts, inputs = handle.contexts, handle.drafts, handle.inputs
        target_tokens, top_n, echo, context_indices = [], [], [], []
        for index, (context, result) in enumerate(zip(contexts, results, strict=True)):
            is_chunk = context.active_idx < context.end_idx
            scored_tokens = [int(context.all_tokens[context.active_idx])] if is_chunk else result.tokens
            if any(drafts) and not context.log_probabilities:
                scored_tokens = []
            target_tokens += scored_tokens
            context_indices += [index] * len(scored_tokens)
            top_n += [context.log_probabilities or 0] * len(scored_tokens)
            echo += [_requests_echo(context)] + [False] * (len(scored_tokens) - 1) if scored_tokens else []
        if any(drafts):
            inputs, outputs = rows_as_sequences(inputs, outputs, drafts, context_indices)
        try:
            entries = self._model.compute_log_probabilities(
                self._session, inputs, outputs, torch.tensor(target_tokens, device=self._device), top_n, echo
            )
        except NotImplementedError as error:
            raise UnsupportedFeatureError("log probabilities", str(error)) from error
        for index, entry in zip(context_indices, entries, strict=True):
            if entry is not None:
                results[index].log_probabilities.append(entry)


def _requests_echo(context: TextContext) -> bool:
    return bool(context.log_probabilities) and context.log_probabilities_echo


def _append_sampled(
    results: Sequence[SampledTokens], drafts: Sequence[list[int]], tokens: Sequence[int]
) -> None:
    """Verify drafts against the sampled tokens ``[R]`` and append the accepted tokens to the results.

    If the first accepted token is negative, the result gets a fault.
    """
    start = 0
    for result, draft in zip(results, drafts, strict=True):
        end = start + len(draft) + 1
        accepted = accept(draft, tokens[start:end]) if draft else [tokens[start]]
        first_fault = next((index for index, token in enumerate(accepted) if token < 0), 0)
        if first_fault:  # keep the valid tokens before the fault; the next step detects the fault again
            accepted = accepted[:first_fault]
        if min(accepted) < 0:
            result.has_no_allowed_token = _NO_ALLOWED_TOKEN in accepted
            result.fault = (
                "the grammar allows no token of the model's vocabulary"
                if result.has_no_allowed_token
                else "the model returned logits that are not finite numbers"
            )
            accepted = [max(token, 0) for token in accepted]  # valid ids, because the tokens may be scored
        result.tokens += accepted
        start = end
