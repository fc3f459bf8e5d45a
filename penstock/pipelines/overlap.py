"""`OverlappedSteps`: launches the forward of a step while the previous step of a text pipeline runs.

One step is launched in two parts. The forward needs the tokens of the previous step on the device only.
Sampling needs these tokens in the contexts, because grammars, penalties and stop conditions depend on them::

    launch(1)  sample(1)  advance(1)  launch(2)  collect(1)  sample(2)  advance(2)  launch(3)  collect(2)  ...

``collect(1)`` comes before ``launch(2)`` if `OverlappedSteps.collects_first` is true for step 1.

Between ``advance`` and ``collect``, the last token of a context is a placeholder. ``collect`` removes the
placeholder and appends the sampled token. ``sample`` of the following step then checks whether the forward of
that step has computed the tokens of the context. If the context has ended, or if its grammar has appended
further tokens, the row of the forward is dropped. If the tokens of a dropped row are still needed, the next
step computes them again, so results do not change.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import NamedTuple

import numpy as np
from torch import Tensor

from penstock.architectures.model import ModelInputs, ModelOutputs, PipelineModel
from penstock.host.heartbeat import beat
from penstock.kernels import DeviceQueue, HostCopy, SubmittedWork, upload
from penstock.pipelines.context_rules import appends_forced_tokens
from penstock.pipelines.core import TextContext, TextGenerationResponse
from penstock.pipelines.logit_rows import LogitRows, last_rows
from penstock.pipelines.runner import LaunchHandle, ModelRunner, SampledTokens

_logger = logging.getLogger(__name__)


class _Window(NamedTuple):
    """The token indices of a context when its forward was launched."""

    start_idx: int
    active_idx: int
    end_idx: int

    @classmethod
    def from_context(cls, context: TextContext) -> _Window:
        return cls(context.start_idx, context.active_idx, context.end_idx)


class _Forward(NamedTuple):
    """The outputs of a forward, on the device."""

    inputs: ModelInputs
    outputs: ModelOutputs
    logits: Tensor  # [B, V]


@dataclass(slots=True, eq=False)
class OverlappedStep:
    """A launched step that has not been collected yet."""

    batch: Mapping[str, TextContext]
    windows: list[_Window]  # [B]
    rows: LogitRows
    forward: SubmittedWork[_Forward]
    launched_at: float
    """Time of the launch in seconds."""
    sampled_indices: list[int] = field(default_factory=list)
    """The indices of the contexts whose rows were sampled, ascending."""
    sampled_tokens: SubmittedWork[Tensor] | None = None  # [len(sampled_indices)] int64
    """The tokens on the device; None before `OverlappedSteps.sample`."""
    host_tokens: HostCopy | None = None
    """The copy of the tokens to the host, which may still be running."""
    pending_tokens: dict[str, int] = field(default_factory=dict)
    """For each context with a placeholder, by request id: the index of its token in ``sampled_tokens``."""
    advanced_indices: list[int] = field(default_factory=list)
    """The indices of the contexts that ``advance`` has moved."""

    @property
    def contexts(self) -> list[TextContext]:
        return list(self.batch.values())


class OverlappedSteps:
    """The `StepLauncher` of text pipelines.

    Args:
        runner: prepares inputs and samples.
        model: the model of the runner.
        queue: the queue of the model's device.
        check: checks a batch before it is launched.
        take_tokens: passes the sampled tokens to the contexts of a batch and returns their responses.
    """

    def __init__(
        self,
        runner: ModelRunner,
        model: PipelineModel[TextContext],
        queue: DeviceQueue,
        *,
        check: Callable[[Sequence[TextContext]], None],
        take_tokens: Callable[
            [Mapping[str, TextContext], Sequence[SampledTokens]], dict[str, TextGenerationResponse]
        ],
    ) -> None:
        self._runner, self._model, self._queue = runner, model, queue
        self._check, self._take_tokens = check, take_tokens
        self._device = model.devices[0].torch_device
        self._collected_at = float("-inf")
        """Time at which the last step was collected, in seconds."""

    def launch(self, batch: Mapping[str, TextContext], after: OverlappedStep | None) -> OverlappedStep:
        """Launch the forward of a batch.

        Args:
            batch: the contexts, with KV cache slots, and with blocks reserved for one step.
            after: the previous step if it is not collected yet. Contexts that are in both batches have
                advanced.

        Raises:
            PenstockError: a context cannot be served. Nothing was launched.
        """
        contexts = list(batch.values())
        self._check(contexts)
        drafts: list[list[int]] = [[] for _ in contexts]
        rows = LogitRows.for_batch(contexts, drafts)
        previous_tokens: SubmittedWork[Tensor] | None = None
        source_indices: list[int] = []
        target_indices: list[int] = []
        if after is not None:
            previous_tokens, end = after.sampled_tokens, 0
            for request_id, context in batch.items():
                end += context.active_length
                if request_id in after.pending_tokens and after.batch[request_id] is context:
                    source_indices.append(after.pending_tokens[request_id])
                    target_indices.append(end - 1)
        inputs = self._runner.prepare_step(contexts, drafts)
        sources, targets = upload(np.array([source_indices, target_indices], np.int64), self._device)

        def forward() -> _Forward:
            forward_inputs = inputs
            if previous_tokens is not None and source_indices:
                # A row without finite logits continues with token 0. Its further results are not used.
                sampled = previous_tokens.value[sources].clamp(min=0)
                forward_inputs = replace(inputs, tokens=inputs.tokens.index_copy(0, targets, sampled))
            outputs = self._model.execute(forward_inputs)
            beat()
            return _Forward(forward_inputs, outputs, last_rows(outputs, rows.row_counts))

        windows = [_Window.from_context(context) for context in contexts]
        launched_at = perf_counter()
        return OverlappedStep(batch, windows, rows, self._queue.submit(forward), launched_at)

    def sample(self, step: OverlappedStep) -> list[str]:
        """Launch the sampling of a step, after the previous step was collected.

        Drops the rows of contexts that have ended, and of contexts whose tokens differ from the tokens that
        the forward has computed.

        Returns:
            The request ids of the contexts whose rows are kept.

        Raises:
            InputError: the token rules of a context are invalid. No row is sampled.
        """
        all_contexts = step.contexts
        step.sampled_indices = [
            index
            for index, (context, window) in enumerate(zip(all_contexts, step.windows, strict=True))
            if not context.generation_status.is_done
            and (context.start_idx, context.end_idx) == (window.start_idx, window.end_idx)
        ]
        # If the previous step computed a chunk of a prompt, `collect` has moved the end of the window.
        for index in step.sampled_indices:
            all_contexts[index].set_token_indices(active_idx=step.windows[index].active_idx)
        contexts = [all_contexts[index] for index in step.sampled_indices]
        forward = step.forward
        if not step.sampled_indices:
            step.sampled_tokens = self._queue.submit(lambda: forward.value.logits[:0, 0].long())
        else:
            if self._runner.vocab_size is None:
                self._runner.vocab_size = forward.value.logits.shape[-1]
            context_indices = np.arange(len(contexts))
            rows = LogitRows([1] * len(contexts), context_indices, step.rows.positions[step.sampled_indices])
            sampler = self._runner.batch_sampler([context.sampling_params for context in contexts])
            drafts: list[list[int]] = [[] for _ in contexts]
            sample = self._runner.sampling_function(sampler, contexts, drafts, rows, self._runner.vocab_size)
            sampled_rows = None
            if len(step.sampled_indices) < len(step.windows):
                sampled_rows = upload(np.array(step.sampled_indices, np.int64), self._device)
            step.sampled_tokens = self._queue.submit(
                lambda: sample(
                    forward.value.logits if sampled_rows is None else forward.value.logits[sampled_rows]
                )
            )
        step.host_tokens = self._queue.fetch(step.sampled_tokens)
        return [context.request_id for context in contexts]

    def discard(self, step: OverlappedStep) -> None:
        """Wait for a step that is not sampled, because its result is not needed. Errors are only logged."""
        try:
            self._queue.fetch(self._queue.submit(lambda: step.forward.value.logits[:0])).wait()
        except Exception:
            _logger.debug("a step whose result is not needed failed", exc_info=True)

    def can_run_several_steps(self, contexts: Sequence[TextContext]) -> bool:
        """Return whether several steps of these contexts can run in one call.

        Contexts with a grammar, changed logits or log probabilities need work on the host after each step.
        """
        return all(
            not context.log_probabilities
            and not context.sampling_params.changes_logits
            and context.matcher is None
            for context in contexts
        )

    def collects_first(self, step: OverlappedStep) -> bool:
        """Return whether a step must be collected before the next step is launched.

        True with log probabilities, because they are computed when the step is collected. If the next step
        were launched before `collect`, the device would run the next step first. Also true if a grammar may
        force tokens after the step, because recurrent states cannot go back to these tokens.
        """
        contexts = step.contexts
        has_states = self._model.kv_cache_spec is not None and self._model.kv_cache_spec.states is not None
        return any(
            contexts[index].log_probabilities or (has_states and appends_forced_tokens(contexts[index]))
            for index in step.sampled_indices
        )

    def advance(self, step: OverlappedStep, running: Container[str]) -> set[str]:
        """Move the contexts of a sampled step past its tokens, whose values are not known yet.

        Args:
            step: the sampled step.
            running: request ids of the contexts that are still running.

        Returns:
            The request ids of contexts that reach their maximum length with this step. They have not moved.
        """
        ending = set()
        contexts = step.contexts
        for position, index in enumerate(step.sampled_indices):
            context = contexts[index]
            if context.request_id not in running:
                continue
            if context.active_idx == context.end_idx:
                if context.end_idx + 1 >= context.max_length:
                    ending.add(context.request_id)
                    continue
                step.pending_tokens[context.request_id] = position
            context.advance()
            step.advanced_indices.append(index)
        return ending

    def collect(self, step: OverlappedStep) -> dict[str, TextGenerationResponse]:
        """Wait for a sampled step, append its tokens to the contexts, and return their responses.

        Raises:
            Exception: the device failed. The contexts have the token indices of the launch of the step.
        """
        assert step.host_tokens is not None, "the step was not sampled"
        contexts = step.contexts
        for index in step.advanced_indices:
            start, active, end = step.windows[index]
            contexts[index].set_token_indices(start_idx=start, active_idx=active, end_idx=end)
        tokens = step.host_tokens.wait()
        now = perf_counter()
        if len(step.forward.value.inputs.tokens) == len(contexts):
            # The device starts a step when the previous step has ended, or at the launch if it is idle then.
            self._runner.record_step(now - max(self._collected_at, step.launched_at))
        self._collected_at = now
        sampled = tokens.new_zeros(len(contexts))
        sampled[step.sampled_indices] = tokens
        forward = step.forward.value
        handle = LaunchHandle(contexts, [[]] * len(contexts), 1, forward.inputs, step.rows, [sampled])
        if self.collects_first(step):
            handle.outputs = forward.outputs
        results = self._runner.collect(handle)
        sampled_contexts = {contexts[index].request_id: contexts[index] for index in step.sampled_indices}
        return self._take_tokens(sampled_contexts, [results[index] for index in step.sampled_indices])
