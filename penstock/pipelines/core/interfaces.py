"""Protocols between pipelines, contexts, tokenizers and the scheduler."""

from __future__ import annotations

from collections.abc import Collection, Container, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

import numpy as np
import numpy.typing as npt

from penstock.errors import PenstockError
from penstock.pipelines.core.requests import Grammar
from penstock.pipelines.core.responses import AudioGenerationResponse, LogProbabilities, TextResponse
from penstock.pipelines.core.sampling_params import SamplingParams
from penstock.pipelines.core.status import TextGenerationStatus

if TYPE_CHECKING:
    from torch import Tensor


class MissingValueError(ValueError, AttributeError):
    """A property has no value.

    It is an ``AttributeError``, because on Python 3.11 ``isinstance(context, InputContext)`` reads each
    property and propagates all other exceptions.
    """


class GrammarMatcher(Protocol):
    """Advances through a grammar token by token. `xgrammar.GrammarMatcher` implements it too."""

    @property
    def stop_token_ids(self) -> list[int]:
        """Tokens that end the output. The grammar never matches them as text."""

    def accept_token(self, token: int, /) -> bool:
        """Advance by a token. Return False, without a change, if the grammar does not allow it.

        Raises:
            InputError: the grammar exceeds a limit.
        """

    def rollback(self, num_tokens: int, /) -> None:
        """Revert the last ``num_tokens`` tokens, including a token that ended the output."""

    def reset(self) -> None:
        """Return to the initial state."""

    def is_terminated(self) -> bool:
        """Return whether a token has ended the output."""

    def is_completed(self) -> bool:
        """Return whether the output may end here or has ended."""

    def fill_next_token_bitmask(self, bitmask: Tensor, index: int = 0, /) -> object:
        """Write the allowed next tokens to a row of ``bitmask``, ``[R, ceil(V / 32)]`` int32."""

    def find_jump_forward_string(self) -> str:
        """Return the text that the grammar forces next; empty if it forces none.

        Raises:
            UnicodeDecodeError: the forced bytes are not whole characters.
        """


@runtime_checkable
class InputContext(Protocol):
    """A request: its tokens, the indices of computed tokens, and its parameters.

    See ``penstock/pipelines/core/tokens.py`` for the indices::

        | completed ....... | next_tokens ........ | rest of a chunked prompt | zeros ...... |
        0               start_idx              active_idx                  end_idx   N * CHUNK_SIZE
    """

    # Identity and parameters.
    @property
    def request_id(self) -> str:
        """Identifies the context in all components."""

    @property
    def adapter(self) -> str | None:
        """The LoRA adapter to use."""

    @property
    def cache_salt(self) -> str | None:
        """Only contexts with the same salt share cached prefixes."""

    @property
    def token_hash_overrides(self) -> dict[int, int]:
        """Maps token indices to the ids that block hashes use instead of the token ids, for images."""

    @property
    def priority(self) -> int:
        """Contexts with a higher number are scheduled first."""

    @property
    def client_id(self) -> str:
        """Client of the request, an opaque id. Clients share the batch evenly within each priority."""

    num_cached_tokens: int
    """Number of prompt tokens found in the prefix cache; set by the KV cache."""

    @property
    def eos_token_ids(self) -> set[int]:
        """Tokens that end the output."""

    @property
    def max_length(self) -> int | None:
        """Maximum number of tokens of prompt and output together."""

    @property
    def min_tokens(self) -> int:
        """Minimum number of tokens to generate."""

    @property
    def sampling_params(self) -> SamplingParams:
        """The sampling parameters."""

    @property
    def log_probabilities(self) -> int | None:
        """Number of top tokens whose log probabilities are reported for each token; 0 or None for none."""

    @property
    def log_probabilities_echo(self) -> bool:
        """Whether log probabilities of prompt tokens are reported too."""

    # The tokens and the indices into them.
    @property
    def tokens(self) -> npt.NDArray[np.integer]:
        """The whole array, including unused capacity."""

    @property
    def start_idx(self) -> int:
        """Start of the tokens to compute next."""

    @property
    def active_idx(self) -> int:
        """End of the tokens to compute next."""

    @property
    def end_idx(self) -> int:
        """Number of all tokens."""

    @property
    def committed_idx(self) -> int:
        """Number of leading tokens whose cache blocks are final."""

    @property
    def active_length(self) -> int:
        """Number of tokens to compute next."""

    @property
    def current_length(self) -> int:
        """Number of all tokens, computed or not."""

    @property
    def next_tokens(self) -> npt.NDArray[np.integer]:
        """The tokens to compute next, ``[active_length]``."""

    @property
    def all_tokens(self) -> npt.NDArray[np.integer]:
        """Prompt and generated tokens."""

    @property
    def prompt_tokens(self) -> npt.NDArray[np.integer]:
        """The prompt."""

    @property
    def generated_tokens(self) -> npt.NDArray[np.integer]:
        """The tokens after the prompt."""

    def set_token_indices(
        self,
        start_idx: int | None = None,
        active_idx: int | None = None,
        end_idx: int | None = None,
        committed_idx: int | None = None,
    ) -> None:
        """Set the given indices. Tokens do not change."""

    def bump_token_indices(
        self, start_idx: int = 0, active_idx: int = 0, end_idx: int = 0, committed_idx: int = 0
    ) -> None:
        """Move the indices by the given differences. Tokens do not change."""

    def boundary_before(self, idx: int) -> int:
        """Return the last index, at most ``idx``, at which the tokens can be split into two steps."""

    def boundary_after(self, idx: int) -> int:
        """Return the first index, at least ``idx``, at which the tokens can be split into two steps."""

    def compute_num_available_steps(self, max_seq_len: int) -> int:
        """Return how many single-token steps fit into ``max_seq_len``; may be 0 or less."""

    # Progress.
    @property
    def status(self) -> TextGenerationStatus:
        """The status of generation."""

    @property
    def is_done(self) -> bool:
        """True when generation has ended."""

    @property
    def generation_status(self) -> TextGenerationStatus:
        """The status of token generation.

        A context that has generated its last token but is not done stays in the batch, without tokens to
        compute and without blocks. Its pipeline computes the rest of the output, such as audio.
        """

    @property
    def is_initial_prompt(self) -> bool:
        """True until a token is generated, and again after :meth:`reset`."""

    @property
    def is_ce(self) -> bool:
        """Context encoding: whether the next step computes more than one token."""

    def update(self, new_token: int, log_probabilities: LogProbabilities | None = None) -> None:
        """Append a sampled token. After a prompt chunk, move the window to the rest of the prompt instead."""

    def jump_ahead(self, new_token: int) -> None:
        """Append a token that the grammar forces. The next step computes it."""

    def rollback(self, idx: int) -> None:
        """Remove ``idx`` tokens before ``active_idx``, and all tokens after it."""

    def reset(self) -> None:
        """Reset the window after a preemption, so that the next steps compute all tokens again."""

    def update_status(self, status: TextGenerationStatus) -> None:
        """Set the status."""

    def update_generation_status(self, status: TextGenerationStatus) -> None:
        """Set the status of token generation."""

    def outstanding_completion_tokens(self) -> list[tuple[int, LogProbabilities | None]]:
        """Return the output tokens that were not returned before."""

    def get_min_token_logit_mask(self, num_steps: int) -> list[npt.NDArray[np.int32]]:
        """Return for each step the end tokens that ``min_tokens`` forbids: ``[n, 2]`` rows (0, token id)."""

    def set_draft_offset(self, idx: int) -> None:
        """Set the number of tokens by which the draft model lags behind the target model."""

    # Slot in the KV cache, and grammar.
    @property
    def cache_seq_id(self) -> int:
        """The KV cache slot. Raises ``ValueError`` if the context has none."""

    @property
    def is_assigned_to_cache(self) -> bool:
        """Whether the context has a KV cache slot."""

    def assign_to_cache(self, cache_seq_id: int) -> None:
        """Set the KV cache slot. Raises ``RuntimeError`` if the context already has a slot."""

    def unassign_from_cache(self) -> None:
        """Remove the KV cache slot. Does nothing if the context has none."""

    @property
    def json_schema(self) -> str | None:
        """The JSON schema of the output."""

    @property
    def grammar(self) -> Grammar | None:
        """The grammar of the output."""

    @property
    def matcher(self) -> GrammarMatcher | None:
        """The grammar's matcher in its current state."""

    def set_matcher(self, matcher: GrammarMatcher) -> None:
        """Set the grammar's matcher."""


class PipelineOutput(Protocol):
    """The output of a pipeline for one context."""

    @property
    def is_done(self) -> bool:
        """True when this context has no further output."""


Context = TypeVar("Context", bound=InputContext)
AcceptedContext = TypeVar("AcceptedContext", bound=InputContext, contravariant=True)
Output = TypeVar("Output", bound=PipelineOutput)


class Pipeline(Protocol[AcceptedContext, Output]):
    """The protocol of the pipelines of all tasks, used by the scheduler."""

    @property
    def kv(self) -> Any:
        """The `penstock.kv_cache.interface.KVCache`; a ``NullKVCache`` for a pipeline without a cache."""

    def execute(self, batch: Mapping[str, AcceptedContext], num_steps: int = 1) -> dict[str, Output]:
        """Run up to ``num_steps`` steps of each context of ``batch`` (by request id).

        Assigns KV cache slots and reserves blocks, unless the batch is a `ReservedBatch`. After an exception,
        no context has new tokens. If only some contexts fail, their errors are in `failures`.
        """

    @property
    def failures(self) -> dict[str, PenstockError]:
        """Errors, by request id, of contexts that ended in the last `execute` without an output.

        The caller of `execute` clears this mapping and releases the failed contexts.
        """

    def release(self, context: AcceptedContext) -> None:
        """Free the resources of a context. Also called before ``context.reset()``."""


LaunchedStep = TypeVar("LaunchedStep")


class StepLauncher(Protocol[AcceptedContext, Output, LaunchedStep]):
    """Runs the steps of a pipeline in parts, so that a step can be launched while the previous step runs.

    The calls for each step are, in this order: ``launch``, ``collect`` of the previous step, ``sample``, and
    ``advance`` before ``launch`` of the next step.
    """

    def launch(self, batch: Mapping[str, AcceptedContext], after: LaunchedStep | None) -> LaunchedStep:
        """Launch the forward of a batch whose contexts have KV cache slots and blocks.

        Args:
            batch: the contexts, by request id. Contexts of ``after`` have advanced.
            after: the previous step if it is sampled and not collected yet, otherwise None.
        """

    def sample(self, step: LaunchedStep) -> Collection[str]:
        """Launch the sampling of a step and return the request ids of the sampled contexts.

        Contexts that have ended or changed since ``launch`` are not sampled.
        """

    def discard(self, step: LaunchedStep) -> None:
        """Wait for a step that is not sampled, because its result is not needed."""

    def advance(self, step: LaunchedStep, running: Container[str]) -> set[str]:
        """Move the ``running`` contexts of a sampled step past its tokens, whose values are not known yet.

        Returns the request ids of contexts that end with the step. These contexts do not move.
        """

    def can_run_several_steps(self, contexts: Sequence[AcceptedContext]) -> bool:
        """Return whether several steps of these contexts can run in one call, without work on the host."""

    def collects_first(self, step: LaunchedStep) -> bool:
        """Return whether a sampled step must be collected before the next step is launched."""

    def collect(self, step: LaunchedStep) -> dict[str, Output]:
        """Wait for a sampled step and return its outputs, like ``Pipeline.execute``.

        After an exception, the contexts have the token indices of the launch of the step.
        """


@runtime_checkable
class TokenGenerator(Protocol[Context]):
    """A pipeline that generates tokens."""

    def next_token(self, batch: dict[str, Context], num_steps: int) -> list[dict[str, TextResponse]]:
        """Generate up to ``num_steps`` tokens for each context. Returns a dict by request id for each step.

        The dict of a step contains only requests that had not ended before the step.
        """

    def release(self, context: Context) -> None:
        """Free the resources of a finished context."""


@runtime_checkable
class EmbeddingsGenerator(Protocol[Context]):
    """A pipeline that computes embeddings."""

    def encode(self, batch: dict[str, Context]) -> dict[str, object]:
        """Compute the embeddings of each context (by request id)."""


@runtime_checkable
class AudioGenerator(Protocol[Context]):
    """A pipeline that generates audio."""

    def next_chunk(self, batch: dict[str, Context], num_tokens: int) -> dict[str, AudioGenerationResponse]:
        """Generate up to ``num_tokens`` speech tokens per context, and return the new audio by request id."""

    def release(self, context: Context) -> None:
        """Free the resources of a finished context."""

    @property
    def decoder_sample_rate(self) -> int:
        """Samples per second."""


TokenizerContext = TypeVar("TokenizerContext")
TokenizerEncoded = TypeVar("TokenizerEncoded")
TokenizerRequest = TypeVar("TokenizerRequest", contravariant=True)


@runtime_checkable
class PipelineTokenizer(Protocol[TokenizerContext, TokenizerEncoded, TokenizerRequest]):
    """Converts text to tokens and back, and requests to contexts."""

    @property
    def eos(self) -> int:
        """The token that ends a sequence."""

    @property
    def expects_content_wrapping(self) -> bool:
        """Whether text parts of messages have the key ``content`` instead of ``text``."""

    async def new_context(self, request: TokenizerRequest) -> TokenizerContext:
        """Build the context of a request. Raises ``InputError`` if the request cannot be served."""

    async def encode(self, prompt: str, add_special_tokens: bool) -> TokenizerEncoded:
        """Return the tokens of a text. Raises ``ValueError`` if they exceed the maximum length."""

    async def decode(self, context: TokenizerContext, encoded: TokenizerEncoded, **kwargs: object) -> str:
        """Return the text of tokens."""
