"""What the parts of a pipeline promise each other."""

from __future__ import annotations

from collections.abc import Mapping
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


class GrammarMatcher(Protocol):
    """What advances through a grammar token by token; `xgrammar.GrammarMatcher` is one, too."""

    @property
    def stop_token_ids(self) -> list[int]:
        """The tokens that end an output. They are never matched as text."""

    def accept_token(self, token: int, /) -> bool:
        """Advances by a token; False, and nothing changes, where the grammar does not allow it.

        Raises:
            InputError: the grammar exceeds a limit.
        """

    def rollback(self, num_tokens: int, /) -> None:
        """Takes the last tokens back, one that ended the output among them."""

    def reset(self) -> None:
        """Goes back to the beginning."""

    def is_terminated(self) -> bool:
        """Whether a token has ended the output."""

    def is_completed(self) -> bool:
        """Whether the output may end here, or has ended."""

    def fill_next_token_bitmask(self, bitmask: Tensor, index: int = 0, /) -> object:
        """Writes a row of ``bitmask``, ``[R, ceil(V / 32)]`` int32: the tokens that may come next."""

    def find_jump_forward_string(self) -> str:
        """The text that must come next; empty where there is a choice.

        Raises:
            UnicodeDecodeError: the bytes that must come next are no whole characters.
        """


@runtime_checkable
class InputContext(Protocol):
    """A request on its way through the model: its tokens, how far they are computed, how it wants to go on.

    The tokens and the indices into them are drawn in ``penstock/pipelines/core/tokens.py``::

        | completed ....... | next_tokens ........ | rest of a chunked prompt | zeros ...... |
        0               start_idx              active_idx                  end_idx   N * CHUNK_SIZE
    """

    # Who asks, and for what.
    @property
    def request_id(self) -> str:
        """Everything outside the context knows it by this id."""

    @property
    def adapter(self) -> str | None:
        """The LoRA adapter to use."""

    @property
    def cache_salt(self) -> str | None:
        """Only contexts with the same salt share cached prefixes."""

    @property
    def token_hash_overrides(self) -> dict[int, int]:
        """Token index to the id that stands for it in block hashes: what tells equal image tokens apart."""

    @property
    def priority(self) -> int:
        """A higher number is served first."""

    @property
    def client_id(self) -> str:
        """Whose request it is: an opaque id. Clients share the batch evenly, within a priority."""

    num_cached_tokens: int
    """Prompt tokens found in the prefix cache; the KV cache writes it."""

    @property
    def eos_token_ids(self) -> set[int]:
        """Tokens that end the output."""

    @property
    def max_length(self) -> int | None:
        """The most tokens that prompt and output may have together."""

    @property
    def min_tokens(self) -> int:
        """The least number of tokens to generate."""

    @property
    def sampling_params(self) -> SamplingParams:
        """How the tokens are chosen."""

    @property
    def log_probabilities(self) -> int | None:
        """Report the log probabilities of this many top tokens for each token; 0 or None reports none."""

    @property
    def log_probabilities_echo(self) -> bool:
        """Whether the prompt's tokens are reported too."""

    # The tokens and the indices into them.
    @property
    def tokens(self) -> npt.NDArray[Any]:
        """The whole array, room for tokens to come included."""

    @property
    def start_idx(self) -> int:
        """Where the tokens to compute next begin."""

    @property
    def active_idx(self) -> int:
        """Where the tokens to compute next end."""

    @property
    def end_idx(self) -> int:
        """Where the tokens end."""

    @property
    def committed_idx(self) -> int:
        """Up to where cache blocks are final."""

    @property
    def active_length(self) -> int:
        """Number of tokens to compute next."""

    @property
    def current_length(self) -> int:
        """Number of all tokens, computed or not."""

    @property
    def next_tokens(self) -> npt.NDArray[Any]:
        """The tokens to compute next, ``[active_length]``."""

    @property
    def all_tokens(self) -> npt.NDArray[Any]:
        """Prompt and generated tokens."""

    @property
    def prompt_tokens(self) -> npt.NDArray[Any]:
        """The prompt."""

    @property
    def generated_tokens(self) -> npt.NDArray[Any]:
        """The tokens after the prompt."""

    def set_token_indices(
        self,
        start_idx: int | None = None,
        active_idx: int | None = None,
        end_idx: int | None = None,
        committed_idx: int | None = None,
    ) -> None:
        """Sets the indices that are given and leaves the tokens alone."""

    def bump_token_indices(
        self, start_idx: int = 0, active_idx: int = 0, end_idx: int = 0, committed_idx: int = 0
    ) -> None:
        """Moves the indices by the given differences and leaves the tokens alone."""

    def compute_num_available_steps(self, max_seq_len: int) -> int:
        """How many single-token steps fit until ``max_seq_len`` tokens are computed; can be 0 or less."""

    # How it goes on.
    @property
    def status(self) -> TextGenerationStatus:
        """Whether it still generates."""

    @property
    def is_done(self) -> bool:
        """True when it does not."""

    @property
    def is_initial_prompt(self) -> bool:
        """True until a token is generated, and again after :meth:`reset`."""

    @property
    def is_ce(self) -> bool:
        """Context encoding: more than one token is computed next."""

    def update(self, new_token: int, log_probabilities: LogProbabilities | None = None) -> None:
        """Takes the token that a step sampled; after a chunk it moves to the next chunk instead."""

    def jump_ahead(self, new_token: int) -> None:
        """Takes a token that was not sampled but is the only one possible, to be computed next."""

    def rollback(self, idx: int) -> None:
        """Removes the last ``idx`` tokens."""

    def reset(self) -> None:
        """Makes all tokens, generated ones too, a prompt to compute anew: the context was evicted."""

    def update_status(self, status: TextGenerationStatus) -> None:
        """Sets the status."""

    def outstanding_completion_tokens(self) -> list[tuple[int, LogProbabilities | None]]:
        """The tokens for the user that were not handed out yet; the next call gives only later ones."""

    def get_min_token_logit_mask(self, num_steps: int) -> list[npt.NDArray[np.int32]]:
        """For each of the next steps, ``[n, 2]``: (0, token id) of what must not be sampled in it yet."""

    def set_draft_offset(self, idx: int) -> None:
        """Says how far a draft model lags behind."""

    # Its slot in the KV cache, and its grammar.
    @property
    def cache_seq_id(self) -> int:
        """The slot; ``ValueError`` without one."""

    @property
    def is_assigned_to_cache(self) -> bool:
        """Whether it has a slot."""

    def assign_to_cache(self, cache_seq_id: int) -> None:
        """Gives it a slot; ``RuntimeError`` if it has one."""

    def unassign_from_cache(self) -> None:
        """Takes the slot away, if it has one."""

    @property
    def json_schema(self) -> str | None:
        """The JSON schema of the output."""

    @property
    def grammar(self) -> Grammar | None:
        """What the output must look like."""

    @property
    def matcher(self) -> GrammarMatcher | None:
        """The grammar's matcher, where it stands now."""

    def set_matcher(self, matcher: GrammarMatcher) -> None:
        """Sets the grammar's matcher."""


class PipelineOutput(Protocol):
    """What every pipeline gives for each context."""

    @property
    def is_done(self) -> bool:
        """True when nothing more will come for this context."""


Context = TypeVar("Context", bound=InputContext)
AcceptedContext = TypeVar("AcceptedContext", bound=InputContext, contravariant=True)
Output = TypeVar("Output", bound=PipelineOutput)


class Pipeline(Protocol[AcceptedContext, Output]):
    """The one protocol of every task: what the scheduler drives."""

    @property
    def kv(self) -> Any:
        """A ``penstock.kv_cache.interface.KVCache``; ``NullKVCache`` where there is no cache."""

    def execute(self, batch: Mapping[str, AcceptedContext], num_steps: int = 1) -> dict[str, Output]:
        """Computes up to ``num_steps`` steps of each context of ``batch`` (by request id).

        Claims and reserves what is not yet claimed and reserved. A context stays unchanged where it raises.
        One that cannot be served while the others can is missing from the result, and is in `failures`.
        """

    @property
    def failures(self) -> dict[str, PenstockError]:
        """Why contexts of the last `execute` (by request id) have no output: each ends with its error.

        Whoever calls `execute` empties it afterwards, and releases those contexts.
        """

    def release(self, context: AcceptedContext) -> None:
        """Gives back what the pipeline holds for ``context``; before ``context.reset()``, too."""


@runtime_checkable
class TokenGenerator(Protocol[Context]):
    """A pipeline that generates tokens."""

    def next_token(self, batch: dict[str, Context], num_steps: int) -> list[dict[str, TextResponse]]:
        """Computes the next ``num_steps`` tokens of each context (by request id).

        One dictionary a step; a request that is missing in one was done before.
        """

    def release(self, context: Context) -> None:
        """Gives back what is held for a finished context."""


@runtime_checkable
class EmbeddingsGenerator(Protocol[Context]):
    """A pipeline that computes embeddings."""

    def encode(self, batch: dict[str, Context]) -> dict[str, Any]:
        """Computes the embeddings of each context (by request id)."""


@runtime_checkable
class AudioGenerator(Protocol[Context]):
    """A pipeline that generates audio."""

    def next_chunk(self, batch: dict[str, Context], num_tokens: int) -> dict[str, AudioGenerationResponse]:
        """Generates ``num_tokens`` speech tokens for each context (by request id), which keeps them; the
        response has the audio that is new."""

    def release(self, context: Context) -> None:
        """Gives back what is held for a finished context."""

    @property
    def decoder_sample_rate(self) -> int:
        """Samples a second."""


TokenizerContext = TypeVar("TokenizerContext")
TokenizerEncoded = TypeVar("TokenizerEncoded")
TokenizerRequest = TypeVar("TokenizerRequest", contravariant=True)


@runtime_checkable
class PipelineTokenizer(Protocol[TokenizerContext, TokenizerEncoded, TokenizerRequest]):
    """Text to tokens and back, and requests to contexts."""

    @property
    def eos(self) -> int:
        """The token that ends a sequence."""

    @property
    def expects_content_wrapping(self) -> bool:
        """Whether text parts are ``{"type": "text", "content": ...}`` rather than ``"text": ...``."""

    async def new_context(self, request: TokenizerRequest) -> TokenizerContext:
        """Makes the context of a request; ``InputError`` where it cannot be served."""

    async def encode(self, prompt: str, add_special_tokens: bool) -> TokenizerEncoded:
        """Text to tokens; ``ValueError`` above the maximum length."""

    async def decode(self, context: TokenizerContext, encoded: TokenizerEncoded, **kwargs: Any) -> str:
        """Tokens to text."""
