"""`TextContext`: the state of a request, sent to the worker once. Only its methods change its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast
from uuid import uuid4

import msgspec
import numpy as np
import numpy.typing as npt

from penstock.errors import InputError
from penstock.pipelines.core.interfaces import GrammarMatcher, InputContext, MissingValueError
from penstock.pipelines.core.log_probability_rows import join_rows, without_first, without_last
from penstock.pipelines.core.logit_rules import LogitRules, TokenCounts
from penstock.pipelines.core.requests import Grammar, resolved_grammar
from penstock.pipelines.core.responses import LogProbabilities, TextGenerationResponse, TextResponse
from penstock.pipelines.core.sampling_params import SamplingParams
from penstock.pipelines.core.status import TextGenerationStatus
from penstock.pipelines.core.tokens import TokenBuffer
from penstock.plain_numbers import plain

_ACTIVE = TextGenerationStatus.ACTIVE


class TextContext(TokenBuffer, kw_only=True, tag=True, omit_defaults=True, dict=True):
    """A text request: tokens (:class:`TokenBuffer`), parameters and progress.

    Contexts are equal when all their fields are equal. They can be pickled and encoded with
    ``msgpack_numpy_encoder``. A grammar's matcher is not encoded; the worker rebuilds it from ``grammar``.

        >>> import numpy as np
        >>> context = TextContext(prompt="1 2 3", max_length=8, tokens=np.array([1, 2, 3]))
        >>> context.update(4)
        >>> context.next_tokens.tolist(), context.outstanding_completion_tokens()
        ([4], [(4, None)])
    """

    prompt: str | Sequence[int]
    """The prompt of the request, text or token ids."""
    max_length: int
    """Maximum number of tokens of prompt and output together."""
    eos_token_ids: set[int] = msgspec.field(default_factory=set)
    """Tokens that end the output."""
    eos_sequences: list[list[int]] = msgspec.field(default_factory=list)
    """Sequences of generated tokens that end the output. Empty sequences are removed."""
    log_probabilities: int | None = None
    """The number of top tokens whose log probabilities are reported for each token; 0 or None for none."""
    log_probabilities_echo: bool = False
    """Whether log probabilities of prompt tokens are reported too."""
    ignore_eos: bool = False
    """Whether the end-of-sequence tokens of the model are left out of ``eos_token_ids``."""
    json_schema: str | None = None
    """The JSON schema of the output; equivalent to a ``grammar`` of kind ``json_schema``."""
    sampling_params: SamplingParams = msgspec.field(default_factory=SamplingParams)

    request_id: str = msgspec.field(default_factory=lambda: uuid4().hex)
    """Identifies the context in all components."""
    model_name: str = ""
    grammar: Grammar | None = None
    """The grammar of the output."""
    adapter: str | None = None
    """The LoRA adapter to use."""
    cache_salt: str | None = None
    """Only contexts with the same salt share cached prefixes."""
    token_hash_overrides: dict[int, int] = msgspec.field(default_factory=dict)
    """Maps token indices to the ids that block hashes use instead of the token ids."""
    priority: int = 0
    """Contexts with a higher number are scheduled first."""
    client_id: str = ""
    """Client of the request. Clients share the batch evenly within each priority."""
    session_id: str = ""
    """Session of the request. With several workers, all requests of a session go to the same worker."""
    num_cached_tokens: int = 0
    """Number of prompt tokens found in the prefix cache; set by the KV cache."""

    _status: TextGenerationStatus = _ACTIVE
    _cache_seq_id: int | None = None
    _is_initial_prompt: bool = True
    _draft_offset: int = 0
    _log_probabilities_data: dict[int, LogProbabilities] = msgspec.field(default_factory=dict)
    _prompt_log_probabilities: LogProbabilities | None = None
    _scored_idx: int = 0  # with echo: the log probabilities before this index were already reported

    def __post_init__(self) -> None:
        super().__post_init__()
        self._convert_fields()
        if self.min_tokens + self._prompt_len > self.max_length:
            raise InputError(
                f"min_tokens ({self.min_tokens}) + prompt_len ({self._prompt_len}) must be less than or "
                f"equal to max_length ({self.max_length})"
            )
        if self.log_probabilities is not None and self.log_probabilities < 0:
            raise InputError(f"log_probabilities must be at least 0, was {self.log_probabilities}")
        if not isinstance(self.prompt, str):
            self.prompt = [int(token) for token in self.prompt]
        self.grammar, self.json_schema = resolved_grammar(self.grammar, self.json_schema)
        self._check_end_tokens()

    # Progress. `update` is called after each step until `is_done`.

    def update(self, new_token: int, log_probabilities: LogProbabilities | None = None) -> None:
        """Append a sampled token, with the log probabilities of the step's positions.

        After any chunk of the prompt except the last, ``new_token`` is dropped, and the rest of the prompt is
        computed next. With ``log_probabilities_echo`` the log probabilities of the chunk's tokens are stored
        (:attr:`prompt_log_probabilities`). The token that reaches ``max_length`` is part of the output.
        An end-of-sequence token, or the last token of an end sequence, is not part of the output.
        """
        if self._active_idx < self._end_idx:
            if log_probabilities is not None and self.log_probabilities_echo:
                self._keep_for_prompt(self._unreported_rows(log_probabilities))
            self._start_idx = self._active_idx
            self._active_idx = self._end_idx
            return
        self._advance_matcher(new_token)
        rows = None if log_probabilities is None else self._unreported_rows(log_probabilities)
        self._start_idx = position = self._append(new_token)
        self._update_counts(position, new_token)
        self._is_initial_prompt = False
        is_output = self._status is _ACTIVE and not self._ends_with(new_token)
        if is_output:
            self._add_output(position)
            if self._active_idx >= self.max_length:
                self._status = TextGenerationStatus.MAXIMUM_LENGTH
        elif self._status is _ACTIVE:
            self._status = TextGenerationStatus.END_OF_SEQUENCE
        if rows is not None:
            self._keep_log_probabilities(position, rows, is_output)

    def jump_ahead(self, new_token: int) -> None:
        """Append a token that the grammar forces. The next step computes it.

        ``eos_token_ids`` end the output. ``eos_sequences`` and ``max_length`` are not checked: the caller
        must limit the length. Raises ``RuntimeError`` while a prompt is computed in chunks.
        """
        if self._active_idx < self._end_idx:
            raise RuntimeError(
                f"cannot jump ahead in the middle of a prompt: {self._end_idx - self._active_idx} of its "
                f"{self._end_idx} tokens are left to compute"
            )
        self._advance_matcher(new_token)
        position = self._append(new_token)
        self._update_counts(position, new_token)
        self._is_initial_prompt = False
        if self._status is _ACTIVE:
            if new_token in self.eos_token_ids:
                self._status = TextGenerationStatus.END_OF_SEQUENCE
            else:
                self._add_output(position)

    def rollback(self, idx: int) -> None:
        """Remove the last ``idx`` tokens (:meth:`TokenBuffer.rollback`).

        If the token that ended the output is removed, the context becomes active again. A context that has
        reached its maximum length stays ended. The matcher is not rolled back.
        """
        output_end = self._completion_end_idx  # the index of the token that ended the output, if one did
        super().rollback(idx)
        if idx > 0:
            for position in range(self._end_idx, self._end_idx + idx):
                self._log_probabilities_data.pop(position, None)
            self._scored_idx = min(self._scored_idx, self._end_idx)
            if self._status is TextGenerationStatus.END_OF_SEQUENCE and self._end_idx <= output_end:
                self._status = _ACTIVE

    def reset(self) -> None:
        """Remove the KV cache slot and set ``start_idx`` and ``committed_idx`` to 0.

        The next steps compute all tokens again. ``prompt_tokens``, ``generated_tokens`` and the tokens that
        were already returned do not change.
        """
        self.unassign_from_cache()
        self._start_idx = 0
        self._committed_idx = 0
        self._is_initial_prompt = True

    def outstanding_completion_tokens(self) -> list[tuple[int, LogProbabilities | None]]:
        """Return the output tokens that were not returned before, each with its log probabilities.

        The status does not change. With ``log_probabilities_echo`` the log probabilities of the prompt
        precede the log probabilities of the first token.
        """
        return [
            (cast(int, token.next_token), token.log_probabilities)
            for token in self.outstanding_response().tokens
        ]

    def outstanding_response(self) -> TextGenerationResponse:
        """Return the tokens that `outstanding_completion_tokens` would return, and the status."""
        start, end = self._completion_start_idx, self._completion_end_idx
        if start >= end:
            return TextGenerationResponse([], self._status)
        self._completion_start_idx = end
        tokens = self.tokens[start:end].tolist()
        if not self._log_probabilities_data:
            return TextGenerationResponse(list(map(TextResponse, tokens)), self._status)
        pop = self._log_probabilities_data.pop
        responses = [TextResponse(token, pop(i, None)) for i, token in enumerate(tokens, start)]
        return TextGenerationResponse(responses, self._status)

    @property
    def prompt_log_probabilities(self) -> LogProbabilities | None:
        """Log probabilities of prompt tokens that were not returned with an output token yet.

        Set only with ``log_probabilities_echo``: between two chunks, or if the first token ends the output.
        """
        return self._prompt_log_probabilities

    # Status.

    @property
    def status(self) -> TextGenerationStatus:
        """The status of generation."""
        return self._status

    def update_status(self, status: TextGenerationStatus) -> None:
        """Set the status."""
        self._status = status

    @property
    def is_done(self) -> bool:
        """True when generation has ended."""
        return self._status is not _ACTIVE

    @property
    def generation_status(self) -> TextGenerationStatus:
        """The status of token generation. For some tasks, a context is not done when generation has ended."""
        return self._status

    def update_generation_status(self, status: TextGenerationStatus) -> None:
        """Set the status of token generation."""
        self._status = status

    @property
    def is_initial_prompt(self) -> bool:
        """True until a token is generated, and again after :meth:`reset`."""
        return self._is_initial_prompt

    @property
    def is_ce(self) -> bool:
        """Context encoding: whether the next step computes more than one token."""
        return self._active_idx - self._start_idx > 1

    # Token rules.

    @property
    def min_tokens(self) -> int:
        """Minimum number of tokens to generate."""
        return self.sampling_params.min_new_tokens

    def get_min_token_logit_mask(self, num_steps: int) -> list[npt.NDArray[np.int32]]:
        """Return for each of the next ``num_steps`` steps the tokens that must not be sampled, ``[n, 2]``.

        The rows are (0, token id). While fewer than ``min_tokens`` tokens are generated, the tokens are all
        ``eos_token_ids``; later there are none. Callers add the row of the batch to the first column.
        """
        positions = range(self._active_idx, self._active_idx + num_steps)
        masked_positions = range(self._prompt_len, self._prompt_len + self.min_tokens)
        rows = [(0, token) for token in sorted(self.eos_token_ids)]
        return [
            np.array(rows if position in masked_positions else [], dtype=np.int32).reshape(-1, 2)
            for position in positions
        ]

    @property
    def logit_rules(self) -> LogitRules | None:
        """Logit bias, allowed and banned tokens as arrays; None if the request sets none of them."""
        if not self.sampling_params.has_logit_rules:
            return None
        rules: LogitRules | None = self.__dict__.get("_logit_rules")
        if rules is None:
            rules = self.__dict__["_logit_rules"] = LogitRules(self.sampling_params)
        return rules

    @property
    def token_counts(self) -> TokenCounts:
        """Token counts for penalties. Prompt tokens are included only with a repetition penalty."""
        counts: TokenCounts | None = self.__dict__.get("_token_counts")
        if counts is None or self._prompt_len + counts.end != self._end_idx:
            prompt_len = self._prompt_len if self.sampling_params.repetition_penalty != 1 else 0
            counts = TokenCounts(self.tokens[: min(prompt_len, self._end_idx)], self.generated_tokens)
            self.__dict__["_token_counts"] = counts
        return counts

    @property
    def matcher(self) -> GrammarMatcher | None:
        """The grammar's matcher in its current state; None if no matcher is set."""
        # Not a field, because a matcher must be neither compared nor encoded.
        return self.__dict__.get("_matcher")

    def set_matcher(self, matcher: GrammarMatcher) -> None:
        """Set the grammar's matcher. Each new token advances it."""
        self.__dict__["_matcher"] = matcher

    @property
    def draft_offset(self) -> int:
        """Number of tokens by which the draft model lags behind the target model."""
        return self._draft_offset

    def set_draft_offset(self, idx: int) -> None:
        """Set the number of tokens by which the draft model lags behind the target model."""
        self._draft_offset = idx

    # The slot in the KV cache.

    @property
    def cache_seq_id(self) -> int:
        """The KV cache slot. Raises ``ValueError`` if the context has none."""
        if self._cache_seq_id is None:
            raise MissingValueError(f"{type(self).__name__} is not currently assigned to cache slot.")
        return self._cache_seq_id

    @property
    def is_assigned_to_cache(self) -> bool:
        """Whether the context has a KV cache slot."""
        return self._cache_seq_id is not None

    def assign_to_cache(self, cache_seq_id: int) -> None:
        """Set the KV cache slot. Raises ``RuntimeError`` if the context already has a slot."""
        if self._cache_seq_id is not None:
            raise RuntimeError(
                f"Context is already assigned to a cache slot: {self._cache_seq_id}, not {cache_seq_id}"
            )
        self._cache_seq_id = cache_seq_id

    def unassign_from_cache(self) -> None:
        """Remove the KV cache slot. Does nothing if the context has none."""
        self._cache_seq_id = None

    def _convert_fields(self) -> None:
        """Convert numpy scalars, because they cannot be encoded, and copy the caller's sets and lists."""
        self.max_length = plain(self.max_length)
        self.log_probabilities = plain(self.log_probabilities)
        self.log_probabilities_echo = plain(self.log_probabilities_echo)
        self.ignore_eos = plain(self.ignore_eos)
        self.priority = plain(self.priority)
        self.eos_token_ids = {plain(token_id) for token_id in self.eos_token_ids}
        self.eos_sequences = [[plain(token) for token in ids] for ids in self.eos_sequences if len(ids) > 0]

    def _check_end_tokens(self) -> None:
        allowed = self.sampling_params.allowed_token_ids
        if self.min_tokens and allowed is not None and self.eos_token_ids.issuperset(allowed):
            raise InputError(
                f"min_new_tokens is {self.min_tokens}, but each of the {len(allowed)} tokens of "
                "allowed_token_ids ends the output: allow a token that does not end it"
            )

    def _update_counts(self, position: int, token: int) -> None:
        """Update the token counts if they are in use."""
        counts: TokenCounts | None = self.__dict__.get("_token_counts")
        if counts is None:
            return
        if self._prompt_len + counts.end == position:
            counts.add(token)
        else:  # recount after a rollback
            del self.__dict__["_token_counts"]

    def _advance_matcher(self, token: int) -> None:
        matcher = self.__dict__.get("_matcher")
        if matcher is not None and not matcher.accept_token(token):
            raise AssertionError(f"the grammar does not accept token {token}, so its mask was not applied")

    def _ends_with(self, new_token: int) -> bool:
        """Return whether ``new_token``, the last token, ends the output."""
        if new_token in self.eos_token_ids:
            return True
        if not self.eos_sequences:
            return False
        return any(
            sequence[-1] == new_token
            and self._end_idx - len(sequence) >= self._prompt_len  # only generated tokens are compared
            and self.tokens[self._end_idx - len(sequence) : self._end_idx].tolist() == sequence
            for sequence in self.eos_sequences
        )

    # Log probabilities: one row per position. The last row is for the token at active_idx.

    def _unreported_rows(self, rows: LogProbabilities) -> LogProbabilities:
        """Return ``rows`` without rows that were reported before a preemption, and update `_scored_idx`.

        Returns ``rows`` itself without ``log_probabilities_echo``.
        """
        if not self.log_probabilities_echo:
            return rows
        reported_end, self._scored_idx = self._scored_idx, max(self._scored_idx, self._active_idx + 1)
        first = self._active_idx + 1 - len(rows.token_log_probabilities)
        return without_first(rows, reported_end - first) if first < reported_end else rows

    def _keep_for_prompt(self, rows: LogProbabilities) -> None:
        self._prompt_log_probabilities = join_rows(self._prompt_log_probabilities, rows)

    def _keep_log_probabilities(self, position: int, rows: LogProbabilities, is_output: bool) -> None:
        if is_output:
            self._log_probabilities_data[position] = join_rows(self._prompt_log_probabilities, rows)
            self._prompt_log_probabilities = None
        elif self.log_probabilities_echo and len(rows.token_log_probabilities) > 1:
            self._keep_for_prompt(without_last(rows))


InputContext.register(TextContext)
