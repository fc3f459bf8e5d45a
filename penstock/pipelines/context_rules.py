"""Checks of a single context in a text pipeline, and functions that append its sampled tokens."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.errors import InputError, UnsupportedFeatureError
from penstock.pipelines.core import TextContext, TextGenerationStatus
from penstock.pipelines.runner import SampledTokens


def check_context(
    context: TextContext, *, max_length: int, has_adapters: bool, compiles_grammars: bool
) -> None:
    """Check that a context can run.

    Raises:
        InputError: the context has ended, or is longer than the model's maximum length.
        UnsupportedFeatureError: the context uses an adapter but adapters are not enabled, or it has a grammar
            but no matcher.
    """
    status = context.generation_status
    if status is not TextGenerationStatus.ACTIVE:
        raise InputError(f"request {context.request_id} has ended ({status.value})")
    if context.adapter is not None and not has_adapters:
        raise UnsupportedFeatureError(
            f"adapter {context.adapter!r}", "no LoRA adapters are enabled for this model"
        )
    if context.grammar is not None and context.matcher is None:
        raise UnsupportedFeatureError(
            f"a {context.grammar.kind} grammar",
            "its matcher is still being compiled: wait until ready(context) of the pipeline returns True"
            if compiles_grammars
            else "no matcher was compiled for it: call set_matcher",
        )
    if context.current_length > max_length:
        raise InputError(
            f"request {context.request_id} has {context.current_length} tokens, "
            f"the model's maximum length is {max_length}"
        )


def check_sampled_tokens(context: TextContext, tokens: Sequence[int]) -> None:
    """Check that the tokens sampled under a grammar obey the request's token rules.

    The grammar's bitmask is applied last, so it can force a token that the request forbids. Tokens that end
    the output are always allowed.

    Raises:
        InputError: a token is forbidden.
    """
    rules = context.logit_rules
    if rules is None:
        return
    first = max(0, len(context.generated_tokens) - rules.longest_prefix)
    last_tokens = context.generated_tokens[first:].tolist()
    for token in tokens:
        is_allowed = rules.allowed is None or token in rules.allowed
        is_banned = token in rules.banned or token in rules.banned_after(last_tokens)
        last_tokens.append(token)
        if (not is_allowed or is_banned) and token not in context.eos_token_ids:
            raise InputError(
                f"after {len(context.generated_tokens)} tokens the grammar allows none of the tokens that "
                "allowed_token_ids, banned_token_ids and banned_sequences permit: change the grammar or the "
                "rules"
            )


def append_tokens(context: TextContext, sampled: SampledTokens) -> None:
    """Append the first sampled token to a context, and further tokens until the context ends."""
    for index, token in enumerate(sampled.tokens):
        if index and context.generation_status.is_done:
            break
        context.update(token, sampled.log_probabilities[index] if sampled.log_probabilities else None)


def appends_forced_tokens(context: TextContext) -> bool:
    """Return whether tokens that the grammar forces are appended to the context without sampling.

    With log probabilities, end sequences or token rules, each token must be checked. Forced tokens are then
    drafted instead, and verification always accepts them.
    """
    params = context.sampling_params
    has_token_rules = (
        params.allowed_token_ids is not None or params.banned_token_ids or params.banned_sequences
    )
    needs_checks = context.log_probabilities or context.eos_sequences or has_token_rules
    return context.matcher is not None and not needs_checks
