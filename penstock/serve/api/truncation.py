"""``truncate_prompt_tokens``: a context of the last tokens of a prompt."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from penstock.pipelines.core import TextContext, TokenGeneratorRequest
from penstock.text.tokenizer import TextTokenizer


def build_context(tokenizer: TextTokenizer, request: TokenGeneratorRequest, most: int | None) -> TextContext:
    """Return the context of a request whose prompt has at most so many tokens.

    A token that begins every text (BOS) stays at the beginning. Stop strings are left to the text.

    Args:
        tokenizer: of the model.
        request: with a prompt or messages.
        most: tokens of the prompt that are kept; None keeps all, -1 as many as leave room for the output.

    Raises:
        InputError: as `TextTokenizer.build_context`.
    """
    if most is None:
        return tokenizer.build_context(request, stops_as_tokens=False)
    text, encoded = tokenizer.prompt_of(request)
    tokens: list[int] = encoded.tolist()
    if most == -1:
        wanted = request.sampling_params.max_new_tokens
        room = len(tokens) if tokenizer.max_length is None else tokenizer.max_length
        most = max(1, room - (1 if wanted is None else wanted))
    if len(tokens) > most:
        begins_as_always = most > 1 and tokens[0] == _bos(tokenizer)
        tokens = tokens[len(tokens) - most :] if not begins_as_always else [tokens[0], *tokens[1 - most :]]
        is_chat = request.messages is not None
        text = tokenizer.decode_ids(tokens, skip_special_tokens=False) if is_chat else None
    as_tokens = replace(request, prompt=tokens, messages=None, tools=None, chat_template_options=None)
    context = tokenizer.build_context(as_tokens, stops_as_tokens=False)
    return context if text is None else msgspec.structs.replace(context, prompt=text)


def _bos(tokenizer: TextTokenizer) -> int | None:
    text = tokenizer.special_tokens.get("bos_token")
    return None if text is None else tokenizer.backend.token_to_id(text)
