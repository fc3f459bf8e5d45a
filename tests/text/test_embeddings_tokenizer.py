"""`EmbeddingsTokenizer`: requests become contexts of the embeddings task."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.tiny_embedder import CLS, POSITIONS, SEP, TOKENS, tiny_tokenizer, write_tiny_embedder

from penstock.errors import InputError, PromptTooLongError, UnsupportedFeatureError
from penstock.pipelines.core import (
    EmbeddingsContext,
    EmbeddingsContextBuilder,
    EmbeddingsGenerationRequest,
)
from penstock.text.embeddings_tokenizer import EmbeddingsTokenizer

CAT, SAT, HELLO = (TOKENS.index(word) for word in ("cat", "sat", "hello"))
PROMPTS = {"prompts": {"query": "query: ", "passage": "passage: "}}
POOLING_WITHOUT_PROMPT = {"pooling_mode_mean_tokens": True, "include_prompt": False}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> EmbeddingsTokenizer:
    folder = tmp_path_factory.mktemp("embedder")
    return EmbeddingsTokenizer(write_tiny_embedder(folder, settings=PROMPTS, max_seq_length=40))


def build_context(tokenizer: EmbeddingsTokenizer, text: Any, **fields: Any) -> EmbeddingsContext:
    return tokenizer.build_embeddings_context(EmbeddingsGenerationRequest(id="7", input=text, **fields))


def encode_request(tokenizer: EmbeddingsTokenizer, text: Any, **fields: Any) -> list[int]:
    ids: list[int] = build_context(tokenizer, text, **fields).next_tokens.tolist()
    return ids


def encode_with_library(text: str, text_pair: str | None = None) -> list[int]:
    ids: list[int] = tiny_tokenizer().encode(text, text_pair).ids
    return ids


def test_a_text_is_encoded_with_special_tokens(tokenizer: EmbeddingsTokenizer) -> None:
    context = build_context(tokenizer, "Cat sat", model_name="m", priority=3, adapter="a")
    assert context.next_tokens.tolist() == [CLS, CAT, SAT, SEP]
    assert (context.request_id, context.model_name, context.priority, context.adapter) == ("7", "m", 3, "a")
    assert context.prompt == "Cat sat"
    assert context.token_type_ids is None
    assert context.num_unpooled_tokens == 0


def test_options_are_set_on_the_context(tokenizer: EmbeddingsTokenizer) -> None:
    options: dict[str, Any] = {
        "outputs": ("multi_vector",),
        "pooling": "max",
        "dimensions": 5,
        "normalize": False,
        "activation": False,
    }
    context = build_context(tokenizer, "cat", **options)
    assert {name: getattr(context, name) for name in options} == options


def test_max_length_is_the_smallest_limit(tokenizer: EmbeddingsTokenizer, tmp_path: Path) -> None:
    assert tokenizer.max_length == 40
    folder = write_tiny_embedder(tmp_path, max_seq_length=POSITIONS * 2)
    assert EmbeddingsTokenizer(folder).max_length == POSITIONS
    assert EmbeddingsTokenizer(folder, max_length=9).max_length == 9


def test_a_prompt_precedes_the_text(tokenizer: EmbeddingsTokenizer) -> None:
    assert encode_request(tokenizer, "cat", prompt_name="query") == encode_with_library("query: cat")
    assert encode_request(tokenizer, "cat", prompt="the ") == encode_with_library("the cat")
    with pytest.raises(InputError, match="prompt_name 'q' is unknown: the checkpoint has query, passage"):
        build_context(tokenizer, "cat", prompt_name="q")
    with pytest.raises(InputError, match="prompt and prompt_name are both given"):
        build_context(tokenizer, "cat", prompt="a", prompt_name="query")


def test_the_default_prompt_is_used_for_a_text_without_a_prompt(tmp_path: Path) -> None:
    settings = PROMPTS | {"default_prompt_name": "passage"}
    tokenizer = EmbeddingsTokenizer(write_tiny_embedder(tmp_path, settings=settings))
    assert encode_request(tokenizer, "cat") == encode_with_library("passage: cat")
    assert encode_request(tokenizer, "cat", prompt_name="query") == encode_with_library("query: cat")
    assert encode_request(tokenizer, "cat", prompt="") == encode_with_library("cat")
    assert encode_request(tokenizer, [CLS, CAT, SEP]) == [CLS, CAT, SEP]


def test_prompt_tokens_can_be_excluded_from_pooling(tmp_path: Path) -> None:
    tokenizer = EmbeddingsTokenizer(
        write_tiny_embedder(tmp_path, settings=PROMPTS, pooling=POOLING_WITHOUT_PROMPT)
    )
    # The tokens "[CLS]", "query" and ":".
    assert build_context(tokenizer, "cat", prompt_name="query").num_unpooled_tokens == 3
    assert build_context(tokenizer, "cat").num_unpooled_tokens == 0
    truncated_context = build_context(
        tokenizer, "cat", prompt="the big red cat sat on ", truncate=True, max_tokens=5
    )
    assert truncated_context.num_unpooled_tokens == 4, "at least one token is pooled"


def test_a_pair_has_token_types(tokenizer: EmbeddingsTokenizer) -> None:
    context = build_context(tokenizer, "cat", text_pair="hello cat")
    assert context.next_tokens.tolist() == [CLS, CAT, SEP, HELLO, CAT, SEP]
    assert context.token_type_ids is not None
    assert context.token_type_ids.tolist() == [0, 0, 0, 1, 1, 1]
    with pytest.raises(InputError, match="text_pair needs a text as input, not token ids"):
        build_context(tokenizer, [CAT], text_pair="cat")


def test_truncation_keeps_special_tokens(tokenizer: EmbeddingsTokenizer) -> None:
    text = "cat " * 100
    assert encode_request(tokenizer, text, truncate=True) == [CLS, *[CAT] * 38, SEP]
    assert encode_request(tokenizer, text, truncate=True, max_tokens=4) == [CLS, CAT, CAT, SEP]
    assert encode_request(tokenizer, text, truncate=True, max_tokens=90) == [CLS, *[CAT] * 38, SEP]
    pair_ids = encode_request(tokenizer, "hello", text_pair=text, truncate=True, max_tokens=8)
    assert pair_ids == [CLS, HELLO, SEP, CAT, CAT, CAT, CAT, SEP], "only the longer text is cut"
    assert len(encode_request(tokenizer, "cat " * 30)) == 32, (
        "an earlier request with truncation has no effect"
    )
    with pytest.raises(
        InputError, match="because the tokenizer adds 2 special tokens: raise max_tokens to 3"
    ):
        build_context(tokenizer, text, truncate=True, max_tokens=2)
    with pytest.raises(InputError, match="max_tokens must be at least 1, was 0"):
        build_context(tokenizer, text, truncate=True, max_tokens=0)
    with pytest.raises(InputError, match="max_tokens is 4 but truncate is False"):
        build_context(tokenizer, text, max_tokens=4)


def test_a_too_long_input_is_refused_with_length_and_limit(tokenizer: EmbeddingsTokenizer) -> None:
    with pytest.raises(
        PromptTooLongError, match=r"the input has 42 tokens, .* length is 40 tokens: shorten it"
    ):
        build_context(tokenizer, "cat " * 40)
    with pytest.raises(
        PromptTooLongError, match=r"input has more than .* maximum length is 40 tokens: shorten it"
    ):
        build_context(tokenizer, "cat " * 5000)
    with pytest.raises(PromptTooLongError, match="41 tokens, but the maximum length is 40"):
        build_context(tokenizer, [CAT] * 41)


def test_token_ids_get_no_special_tokens_and_no_prompt(tokenizer: EmbeddingsTokenizer) -> None:
    assert encode_request(tokenizer, [CLS, CAT, SEP]) == [CLS, CAT, SEP]
    assert build_context(tokenizer, np.array([CAT])).prompt == [CAT]
    assert encode_request(tokenizer, [CLS, CAT, SAT, CAT, SEP], truncate=True, max_tokens=3) == [
        CLS,
        CAT,
        SEP,
    ]
    assert encode_request(tokenizer, [CAT, SAT, CAT], truncate=True, max_tokens=2) == [CAT, SAT]
    with pytest.raises(InputError, match="token 1 of the prompt is 99999: ids are integers from 0"):
        build_context(tokenizer, [CAT, 99999])
    with pytest.raises(InputError, match="a prompt needs a text as input, not token ids"):
        build_context(tokenizer, [CAT], prompt_name="query")


@pytest.mark.parametrize("text", ["", []])
def test_an_empty_input_is_refused(tokenizer: EmbeddingsTokenizer, text: Any) -> None:
    with pytest.raises(InputError, match="the input is empty"):
        build_context(tokenizer, text)


def test_an_instruction_without_a_template_is_refused(tokenizer: EmbeddingsTokenizer) -> None:
    with pytest.raises(UnsupportedFeatureError, match=r"instruction.*no template"):
        build_context(tokenizer, "cat", instruction="find cats")


def test_surrogates_are_replaced_and_the_lower_case_setting_is_read(
    tokenizer: EmbeddingsTokenizer, tmp_path: Path
) -> None:
    assert encode_request(tokenizer, "cat \ud800") == encode_with_library("cat �")
    folder = write_tiny_embedder(tmp_path, max_seq_length=20)
    (folder / "sentence_bert_config.json").write_text('{"do_lower_case": true}')
    assert EmbeddingsTokenizer(folder).layout.lower_case


def test_a_context_is_built_asynchronously(tokenizer: EmbeddingsTokenizer) -> None:
    request = EmbeddingsGenerationRequest(id="7", input="cat")
    context = asyncio.run(tokenizer.new_embeddings_context(request))
    assert context.next_tokens.tolist() == [CLS, CAT, SEP]


def test_contexts_of_a_batch_equal_the_contexts_of_single_inputs(
    tokenizer: EmbeddingsTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields: list[dict[str, Any]] = [
        {"input": "the cat sat"},
        {"input": "hello", "prompt_name": "query"},
        {"input": "hello", "text_pair": "the cat"},
        {"input": "cat " * 100, "truncate": True},
        {"input": "cat " * 100, "truncate": True, "max_tokens": 6},
        {"input": [CAT, SAT]},
        {"input": "cat \ud800"},
    ]
    requests = [
        EmbeddingsGenerationRequest(id=str(i), **request_fields) for i, request_fields in enumerate(fields)
    ]
    single_contexts = [tokenizer.build_embeddings_context(request) for request in requests]
    counts = count_encoded_texts(monkeypatch)
    assert list(tokenizer.build_embeddings_contexts(requests)) == single_contexts
    assert counts == [4, 1, 1]  # one call for each length limit


def test_inputs_before_an_invalid_one_get_their_contexts(tokenizer: EmbeddingsTokenizer) -> None:
    invalid_fields: list[dict[str, Any]] = [
        {"input": ""},
        {"input": "cat", "prompt_name": "question"},
        {"input": "cat", "truncate": True, "max_tokens": 2},
        {"input": "cat " * 5000},
    ]
    valid_request = EmbeddingsGenerationRequest(id="6", input="cat")
    for fields in invalid_fields:
        contexts = tokenizer.build_embeddings_contexts(
            [valid_request, EmbeddingsGenerationRequest(id="7", **fields), valid_request]
        )
        assert next(contexts) == tokenizer.build_embeddings_context(valid_request)
        with pytest.raises(InputError):
            next(contexts)


def test_the_default_batch_method_builds_a_context_for_each_request() -> None:
    class LengthTokenizer(EmbeddingsContextBuilder):
        def build_embeddings_context(self, request: EmbeddingsGenerationRequest) -> EmbeddingsContext:
            tokens = np.array([len(request.input)])
            return EmbeddingsContext(prompt="", max_length=1, tokens=tokens, request_id=request.id)

    requests = [EmbeddingsGenerationRequest(id=text, input=text) for text in ("a", "bcd")]
    contexts = LengthTokenizer().build_embeddings_contexts(requests)
    assert [(context.request_id, context.next_tokens.tolist()) for context in contexts] == [
        ("a", [1]),
        ("bcd", [3]),
    ]


def count_encoded_texts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list to which each call of `_encode_batch` appends its number of texts."""
    counts: list[int] = []
    original_encode = EmbeddingsTokenizer._encode_batch

    def count_and_encode(self: EmbeddingsTokenizer, text_inputs: Any, max_tokens: int | None) -> Any:
        counts.append(len(text_inputs))
        return original_encode(self, text_inputs, max_tokens)

    monkeypatch.setattr(EmbeddingsTokenizer, "_encode_batch", count_and_encode)
    return counts
