"""`TextTokenizer`: tokens equal those of transformers, and each field of a request has its effect."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.random_draws import num_examples
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from penstock.errors import CheckpointError, InputError, PromptTooLongError, UnsupportedFeatureError
from penstock.pipelines.core import (
    Grammar,
    PipelineTokenizer,
    SamplingParams,
    TextContext,
    TokenGeneratorRequest,
)
from penstock.testing import FakeTokenizer
from penstock.text.tokenizer import TextTokenizer
from penstock.text.tokenizer_files import TokenizerFiles

TOKENIZERS = ["tokenizers/bert-base-uncased", "tokenizers/gpt2", "tokenizers/qwen3", "tokenizers/tinyllama"]
TOKENIZERS += ["models/stories260K", "models/llama2xs"]
TEXT_PARTS = [
    "a",
    "the ",
    " ",
    "\n",
    "\t",
    "12",
    ".",
    "'t",
    "é",
    "漢字",
    "🎉",
    "ﬁ",
    "▁",
    "<0x41>",
    "\x00",
    "[MASK]",
    "[SEP]",
]
TEXT_PARTS += ["<s>", "</s>", "<|im_end|>", "<|endoftext|>", "<tool_call>"]
TEXTS = st.lists(st.sampled_from(TEXT_PARTS), max_size=25).map("".join)
TOKENIZER = FakeTokenizer(max_length=40)
HELLO_IDS = list(b"hello")
USER_MESSAGE = {"role": "user", "content": "hi"}


class TestEqualToTransformers:
    @pytest.mark.parametrize("name", TOKENIZERS)
    def test_tokens_of_a_text_equal_those_of_transformers(self, name: str, shared_data: Path) -> None:
        tokenizer, reference = (
            load_tokenizer(shared_data / name),
            load_transformers_tokenizer(shared_data / name),
        )

        @given(text=TEXTS, add_special_tokens=st.booleans())
        @settings(max_examples=num_examples(50))
        def check(text: str, add_special_tokens: bool) -> None:
            ids = reference(text, add_special_tokens=add_special_tokens)["input_ids"]
            assert tokenizer.encode_text(text, add_special_tokens).tolist() == ids
            for skip in (True, False):
                assert tokenizer.decode_ids(ids, skip) == reference.decode(ids, skip_special_tokens=skip)

        check()

    @pytest.mark.parametrize("name", ["tokenizers/qwen3", "tokenizers/tinyllama"])
    def test_tokens_of_a_chat_equal_those_of_transformers(self, name: str, shared_data: Path) -> None:
        tokenizer, reference = (
            load_tokenizer(shared_data / name),
            load_transformers_tokenizer(shared_data / name),
        )
        messages: Any = [
            {"role": "system", "content": "Brief."},
            USER_MESSAGE,
            {"role": "assistant", "content": "yo"},
            USER_MESSAGE,
        ]
        context = tokenizer.build_context(make_request(messages=messages))
        text = reference.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert context.prompt == tokenizer.render_chat(messages) == text
        assert context.prompt_tokens.tolist() == reference(text, add_special_tokens=False)["input_ids"]

    @pytest.mark.parametrize("name", TOKENIZERS)
    def test_special_tokens_and_vocabulary_size_equal_those_of_transformers(
        self, name: str, shared_data: Path
    ) -> None:
        tokenizer, reference = (
            load_tokenizer(shared_data / name),
            load_transformers_tokenizer(shared_data / name),
        )
        assert tokenizer.special_tokens == reference.special_tokens_map
        assert tokenizer.vocab_size == len(reference)
        assert tokenizer.eos_token_ids == ({reference.eos_token_id} - {None})

    def test_long_text_is_not_truncated(self, shared_data: Path) -> None:
        # The tokenizer.json of this tokenizer truncates at 512 tokens.
        tokenizer = load_tokenizer(shared_data / "tokenizers/tinyllama")
        assert len(tokenizer.encode_text("hello " * 1000)) > 1000


class TestText:
    def test_a_text_tokenizer_implements_the_pipeline_tokenizer_protocol(self) -> None:
        assert isinstance(TOKENIZER, PipelineTokenizer)
        assert TOKENIZER.expects_content_wrapping is False
        assert TOKENIZER.encode_text("hello").dtype == np.int64

    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("a\ud83cb", "a\N{REPLACEMENT CHARACTER}b"),
            ("\udf89", "\N{REPLACEMENT CHARACTER}"),
            ("\ud83c\udf89", "🎉"),
        ],
    )
    def test_lone_surrogates_are_replaced(self, text: str, expected: str) -> None:
        assert TOKENIZER.decode_ids(TOKENIZER.encode_text(text)) == expected
        assert TOKENIZER.build_context(make_request(text)).prompt_tokens.tolist() == list(expected.encode())

    @pytest.mark.parametrize("ids", [np.array(HELLO_IDS, dtype=np.int32), tuple(HELLO_IDS), HELLO_IDS])
    def test_any_sequence_of_ids_is_decoded(self, ids: Sequence[int]) -> None:
        assert TOKENIZER.decode_ids(ids) == "hello"

    @pytest.mark.parametrize("invalid", [-1, 2**40, "a", 1.5])
    def test_the_error_for_an_invalid_token_id_names_the_id(self, invalid: Any) -> None:
        with pytest.raises(InputError, match=rf"^{invalid!r} is not a token id"):
            TOKENIZER.decode_ids([1, invalid])

    def test_special_tokens_are_skipped_unless_requested(self) -> None:
        ids = [*HELLO_IDS, TOKENIZER.EOS]
        assert (TOKENIZER.decode_ids(ids), TOKENIZER.decode_ids(ids, False)) == ("hello", "hello<|end|>")
        assert not TOKENIZER.is_visible(TOKENIZER.EOS)
        assert TOKENIZER.is_visible(TOKENIZER.EOS, skip_special_tokens=False)
        assert not TOKENIZER.is_visible(999, skip_special_tokens=False)

    async def test_async_methods_equal_the_synchronous_ones(self) -> None:
        context = await TOKENIZER.new_context(make_request("hello"))
        assert context == TOKENIZER.build_context(make_request("hello"))
        assert (await TOKENIZER.encode("hello", True)).tolist() == HELLO_IDS
        assert await TOKENIZER.decode(context, HELLO_IDS) == "hello"
        assert await TOKENIZER.decode(context, np.array(HELLO_IDS)) == "hello"
        assert await TOKENIZER.decode(context, ord("x")) == "x"
        assert await TOKENIZER.decode(context, np.int64(ord("x"))) == "x"  # type: ignore[arg-type]
        assert await TOKENIZER.decode(context, [TOKENIZER.EOS], skip_special_tokens=False) == "<|end|>"
        with pytest.raises(TypeError):
            await TOKENIZER.decode(context, HELLO_IDS, unknown=True)

    def test_concurrent_encoding_equals_sequential_encoding(self, shared_data: Path) -> None:
        tokenizer = TextTokenizer(shared_data / "models/stories260K", max_length=10_000)
        texts = [f"Once upon {i} times é🎉 " * (i % 7) for i in range(200)]
        expected = [tokenizer.encode_text(text).tolist() for text in texts]
        with ThreadPoolExecutor(8) as threads:
            assert [ids.tolist() for ids in threads.map(tokenizer.encode_text, texts)] == expected
            decoded_texts = list(threads.map(tokenizer.decode_ids, expected))
        assert decoded_texts == [tokenizer.decode_ids(ids) for ids in expected]

    async def test_concurrent_requests_equal_sequential_requests(self) -> None:
        requests = [make_request("x" * (i % 30 + 1), id=str(i)) for i in range(100)]
        contexts = await asyncio.gather(*map(TOKENIZER.new_context, requests))
        assert contexts == [TOKENIZER.build_context(request) for request in requests]


class TestEndOfSequence:
    def test_eos_ids_of_all_sources_are_combined(self, shared_data: Path, tmp_path: Path) -> None:
        folder = copy_stories_tokenizer(shared_data, tmp_path)
        (folder / "config.json").write_text(json.dumps({"eos_token_id": 7, "vocab_size": 512}))
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 8]}))
        tokenizer = TextTokenizer(folder, eos_token_ids=[9, 7, 5000])
        assert tokenizer.eos_token_ids == {2, 7, 8, 9}  # 5000 is outside the vocabulary
        assert tokenizer.eos == 2
        assert TextTokenizer(folder).build_context(make_request("x")).eos_token_ids == {2, 7, 8}

    def test_a_checkpoint_without_eos_tokens_has_no_eos(self, shared_data: Path) -> None:
        tokenizer = load_tokenizer(shared_data / "tokenizers/bert-base-uncased")
        assert tokenizer.eos_token_ids == set()
        with pytest.raises(CheckpointError, match="bert-base-uncased: has no end-of-sequence token"):
            _ = tokenizer.eos

    def test_stop_ids_of_a_request_do_not_change_the_tokenizer(self) -> None:
        context = TOKENIZER.build_context(make_request("x", stop_token_ids=[5, 6]))
        assert context.eos_token_ids == {TOKENIZER.EOS, 5, 6}
        context.eos_token_ids.add(7)
        TOKENIZER.eos_token_ids.add(8)
        assert (
            TOKENIZER.eos_token_ids
            == TOKENIZER.build_context(make_request("x")).eos_token_ids
            == {TOKENIZER.EOS}
        )

    def test_ignore_eos_keeps_only_stop_ids_of_the_request(self) -> None:
        context = TOKENIZER.build_context(make_request("x", ignore_eos=True))
        assert (context.eos_token_ids, context.ignore_eos) == (set(), True)
        assert TOKENIZER.build_context(
            make_request("x", ignore_eos=True, stop_token_ids=[5])
        ).eos_token_ids == {5}

    def test_a_stop_id_outside_the_vocabulary_is_refused(self) -> None:
        with pytest.raises(InputError, match="stop_token_ids has 257: ids are integers from 0 to 256"):
            TOKENIZER.build_context(make_request("x", stop_token_ids=[257]))

    @pytest.mark.parametrize(
        ("stop", "param_stop", "expected"),
        [
            ("a", ["b"], ["a", "b"]),
            (["a", "b"], ["b", "c"], ["a", "b", "c"]),
            (None, None, None),
            ("", [""], None),
        ],
    )
    def test_stop_strings_of_request_and_sampling_params_are_combined(
        self, stop: Any, param_stop: Any, expected: list[str] | None
    ) -> None:
        context = TOKENIZER.build_context(
            make_request("x", stop=stop, sampling_params=SamplingParams(stop=param_stop))
        )
        assert context.sampling_params.stop == expected
        assert len(context.eos_sequences) == len(expected or [])

    async def test_stop_strings_become_token_sequences_unless_stops_as_tokens_is_false(self) -> None:
        stop_request = make_request("x", stop=["END", ""], sampling_params=SamplingParams(stop=["é"]))
        context = await TOKENIZER.new_context(stop_request)
        assert context.eos_sequences == [list(b"END"), list("é".encode())]
        assert context.sampling_params.stop == ["END", "é"]
        context.eos_sequences[0].clear()
        assert TOKENIZER.build_context(stop_request).eos_sequences[0] == list(b"END")
        assert TOKENIZER.build_context(stop_request, stops_as_tokens=False).eos_sequences == []
        assert (await TOKENIZER.new_context(stop_request, stops_as_tokens=False)).eos_sequences == []

    def test_a_stop_value_that_is_not_a_string_is_refused(self) -> None:
        with pytest.raises(InputError, match=r"stop must be a string or a list of strings, was \[3\]"):
            TOKENIZER.build_context(make_request("x", stop=[3]))


class TestLengths:
    @pytest.mark.parametrize(
        ("max_new_tokens", "max_length"), [(None, 40), (1, 6), (35, 40), (100, 40), (0, 5)]
    )
    def test_max_length_includes_prompt_and_output(self, max_new_tokens: int | None, max_length: int) -> None:
        context = TOKENIZER.build_context(make_request("hello", max_new_tokens=max_new_tokens))
        assert (context.max_length, context.current_length) == (max_length, 5)

    @pytest.mark.parametrize(
        "request_fields", [{"prompt": "x" * 40}, {"prompt": [1] * 40}, {"messages": [USER_MESSAGE] * 4}]
    )
    def test_a_prompt_without_room_for_output_is_refused(self, request_fields: dict[str, Any]) -> None:
        with pytest.raises(
            PromptTooLongError, match=r"has 4\d tokens, but the maximum length is 40"
        ) as caught:
            TOKENIZER.build_context(make_request(**request_fields))
        assert (caught.value.num_tokens >= 40, caught.value.max_length) == (True, 40)

    def test_a_prompt_of_maximum_length_is_accepted_without_output(self) -> None:
        assert TOKENIZER.build_context(make_request("x" * 40, max_new_tokens=0)).max_length == 40
        with pytest.raises(PromptTooLongError):
            TOKENIZER.build_context(make_request("x" * 41, max_new_tokens=0))

    def test_encode_refuses_text_above_the_maximum_length(self) -> None:
        assert len(TOKENIZER.encode_text("x" * 40)) == 40
        with pytest.raises(PromptTooLongError, match="has 41 tokens, but the maximum length is 40"):
            TOKENIZER.encode_text("x" * 41)

    @pytest.mark.parametrize("method", ["prompt", "messages", "encode"])
    def test_a_prompt_that_exceeds_the_limit_is_not_fully_encoded(
        self, method: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        tokenizer, text = FakeTokenizer(max_length=40), "x" * 100_000
        lengths: list[int] = []
        original_encode = tokenizer.backend.encode_batch_fast

        def count_encoded(texts: list[str], **options: Any) -> Any:
            lengths.append(len(texts[0]))
            return original_encode(texts, **options)

        counting_tokenizer = SimpleNamespace(tokenizer=SimpleNamespace(encode_batch_fast=count_encoded))
        monkeypatch.setattr(tokenizer, "_thread_tokenizers", counting_tokenizer)
        calls: dict[str, Callable[[], object]] = {
            "prompt": lambda: tokenizer.build_context(make_request(text)),
            "messages": lambda: tokenizer.build_context(
                make_request(messages=[{**USER_MESSAGE, "content": text}])
            ),
            "encode": lambda: tokenizer.encode_text(text),
        }
        with pytest.raises(PromptTooLongError, match="more than 320 tokens, but the maximum length is 40"):
            calls[method]()
        assert lengths == [320]

    def test_a_long_text_of_few_tokens_is_encoded(self, tmp_path: Path) -> None:
        """Prefixes of increasing length are encoded until the whole text fits or the limit is exceeded."""
        backend = Tokenizer(WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
        backend.pre_tokenizer = WhitespaceSplit()
        files = TokenizerFiles(
            origin="words",
            tokenizer=backend,
            special_tokens={},
            templates={},
            eos_token_ids=(),
            vocab_size=2,
            max_length=None,
        )
        tokenizer = TextTokenizer(files, max_length=40)
        assert len(tokenizer.encode_text((" " * 999 + "a") * 40)) == 40
        with pytest.raises(PromptTooLongError, match="has 41 tokens"):
            tokenizer.encode_text((" " * 999 + "a") * 41)
        with pytest.raises(PromptTooLongError, match="more than 81 tokens"):
            tokenizer.encode_text((" " * 999 + "a") * 5000)

    @pytest.mark.parametrize("name", TOKENIZERS)
    def test_only_texts_above_the_limit_are_refused(self, name: str, shared_data: Path) -> None:
        limit = 64
        tokenizer = TextTokenizer(shared_data / name, max_length=limit)
        for text in (*TEXT_PARTS, " " * 80, "=" * 70, "a b", "ab" * 40):
            for count in (limit // 4, limit, 10 * limit):
                is_too_long = len(tokenizer.encode_text(text * count, limited=False)) > limit
                with pytest.raises(PromptTooLongError) if is_too_long else nullcontext():
                    tokenizer.encode_text(text * count)

    def test_the_tokens_of_a_text_above_the_maximum_length_can_be_counted(self) -> None:
        tokenizer = FakeTokenizer(max_length=40)
        assert len(tokenizer.encode_request_prompt(make_request("x" * 100_000))[1]) == 100_000
        assert len(tokenizer.encode_text("x" * 100_000, limited=False)) == 100_000

    def test_without_a_maximum_length_the_request_must_have_a_limit(self) -> None:
        tokenizer = FakeTokenizer(max_length=None)
        assert tokenizer.build_context(make_request("x" * 5000, max_new_tokens=3)).max_length == 5003
        with pytest.raises(InputError, match="max_new_tokens is needed"):
            tokenizer.build_context(make_request("x"))

    def test_min_new_tokens_beyond_the_limit_is_refused(self) -> None:
        with pytest.raises(InputError, match="min_new_tokens is 36, but only 35 tokens can follow"):
            TOKENIZER.build_context(make_request("hello", min_new_tokens=36))

    def test_the_configured_limit_overrides_the_checkpoint(self, shared_data: Path) -> None:
        assert TextTokenizer(shared_data / "models/stories260K", max_length=10).max_length == 10
        assert TextTokenizer(shared_data / "models/stories260K").max_length == 512


class TestPrompts:
    def test_special_tokens_are_added_to_a_text_but_not_to_a_chat(
        self, shared_data: Path, tmp_path: Path
    ) -> None:
        folder = copy_stories_tokenizer(shared_data, tmp_path)
        (folder / "chat_template.jinja").write_text("{{ bos_token }}{{ messages[0].content }}")
        tokenizer = TextTokenizer(folder)
        expected = tokenizer.encode_text("Once").tolist()
        assert expected[0] == 1
        assert tokenizer.build_context(make_request("Once")).prompt_tokens.tolist() == expected
        chat = tokenizer.build_context(make_request(messages=[{"role": "user", "content": "Once"}]))
        assert chat.prompt_tokens.tolist().count(1) == 1
        assert chat.prompt == "<s>Once"

    @pytest.mark.parametrize(
        "ids", [HELLO_IDS, tuple(HELLO_IDS), np.array(HELLO_IDS), np.array(HELLO_IDS, dtype=np.uint16)]
    )
    def test_token_ids_are_used_unchanged(self, ids: Any) -> None:
        context = TOKENIZER.build_context(make_request(ids))
        assert context.prompt == context.prompt_tokens.tolist() == HELLO_IDS

    @pytest.mark.parametrize("invalid", [-1, 257, 2**70, 1.0, True, "a", None])
    def test_the_error_for_an_invalid_token_id_names_its_position(self, invalid: Any) -> None:
        with pytest.raises(
            InputError, match=rf"token 1 of the prompt is {invalid!r}: ids are integers from 0 to 256"
        ):
            TOKENIZER.build_context(make_request([1, invalid, -7]))

    @pytest.mark.parametrize("invalid", [3, b"x", {"a": 1}, np.array([[1, 2]]), np.array([0.5]), np.array(5)])
    def test_values_that_are_not_prompts_are_refused(self, invalid: Any) -> None:
        with pytest.raises(InputError, match=r"a prompt is text or|of the prompt is"):
            TOKENIZER.build_context(make_request(invalid))

    @pytest.mark.parametrize("empty_prompt", ["", [], np.array([], dtype=np.int64)])
    def test_an_empty_prompt_is_refused(self, empty_prompt: Any) -> None:
        with pytest.raises(InputError, match="the prompt is empty"):
            TOKENIZER.build_context(make_request(empty_prompt))

    @pytest.mark.parametrize(
        "fields", [{}, {"prompt": "x", "messages": [USER_MESSAGE]}, {"prompt": "", "messages": []}]
    )
    def test_exactly_one_of_prompt_and_messages_is_required(self, fields: dict[str, Any]) -> None:
        with pytest.raises(InputError, match="either a prompt or messages"):
            TOKENIZER.build_context(make_request(**fields))

    @pytest.mark.parametrize(
        "field", [{"tools": [{"type": "function"}]}, {"chat_template_options": {"a": 1}}]
    )
    def test_template_options_need_messages(self, field: dict[str, Any]) -> None:
        with pytest.raises(InputError, match="tools and chat_template_options need messages"):
            TOKENIZER.build_context(make_request("x", **field))

    def test_tools_and_options_are_variables_of_the_template(self) -> None:
        template = "{{ tools[0].type }} {{ style }} {{ add_generation_prompt }}"
        context = FakeTokenizer(template=template).build_context(
            make_request(
                messages=[USER_MESSAGE], tools=[{"type": "function"}], chat_template_options={"style": "s"}
            )
        )
        assert context.prompt == "function s True"

    def test_messages_without_a_template_are_refused(self) -> None:
        with pytest.raises(InputError, match="no chat template: pass a prompt, or a template"):
            FakeTokenizer(template=None).build_context(make_request(messages=[USER_MESSAGE]))

    def test_an_error_of_the_template_is_reported(self) -> None:
        with pytest.raises(InputError, match="these messages: only one turn"):
            FakeTokenizer(template="{{ raise_exception('only one turn') }}").render_chat([USER_MESSAGE])

    def test_a_custom_template_replaces_the_template_of_the_checkpoint(
        self, shared_data: Path, tmp_path: Path
    ) -> None:
        (tmp_path / "custom.jinja").write_text("custom {{ eos_token }}")
        tokenizer = TextTokenizer(
            shared_data / "tokenizers/tinyllama", chat_template=str(tmp_path / "custom.jinja")
        )
        assert tokenizer.render_chat([USER_MESSAGE]) == "custom </s>"

    def test_images_are_refused(self) -> None:
        with pytest.raises(UnsupportedFeatureError, match="images is not supported"):
            TOKENIZER.build_context(make_request(messages=[USER_MESSAGE], images=[b"png"]))
        content_parts = [{"type": "image_url", "image_url": {"url": "x"}}]
        with pytest.raises(UnsupportedFeatureError, match="content of type image_url"):
            TOKENIZER.build_context(make_request(messages=[{"role": "user", "content": content_parts}]))

    def test_tokens_without_an_embedding_are_refused(self, shared_data: Path, tmp_path: Path) -> None:
        folder = copy_stories_tokenizer(shared_data, tmp_path)
        (folder / "config.json").write_text(json.dumps({"vocab_size": 300}))
        with pytest.raises(
            InputError, match=r"token \d of the prompt is \d+: ids are integers from 0 to 299"
        ):
            TextTokenizer(folder).build_context(make_request("Once upon a time"))


class TestOtherFields:
    def test_fields_are_set_on_the_context(self) -> None:
        context = TOKENIZER.build_context(
            make_request(
                "x", id="r1", model_name="m", logprobs=3, echo=True, adapter="a", cache_salt="s", priority=4
            )
        )
        assert (context.request_id, context.model_name, context.priority) == ("r1", "m", 4)
        assert (context.log_probabilities, context.log_probabilities_echo) == (3, True)
        assert (context.adapter, context.cache_salt) == ("a", "s")
        assert not context.is_assigned_to_cache

    def test_absent_fields_have_defaults(self) -> None:
        context = TOKENIZER.build_context(make_request("x"))
        assert (context.log_probabilities, context.log_probabilities_echo) == (None, False)
        assert (context.json_schema, context.grammar, context.adapter, context.cache_salt) == (None,) * 4

    @pytest.mark.parametrize("invalid", [-1, True, "3"])
    def test_invalid_logprobs_are_refused(self, invalid: Any) -> None:
        with pytest.raises(InputError, match="logprobs must be an integer of at least 0"):
            TOKENIZER.build_context(make_request("x", logprobs=invalid))

    @pytest.mark.parametrize("envelope", [None, {}, {"name": "answer", "strict": True}])
    def test_a_json_schema_becomes_a_grammar(self, envelope: dict[str, Any] | None) -> None:
        schema = {"type": "object", "properties": {"é": {"type": "string"}}}
        response_schema = schema if envelope is None else {**envelope, "schema": schema}
        context = TOKENIZER.build_context(
            make_request("x", response_format={"type": "json_schema", "json_schema": response_schema})
        )
        assert context.json_schema is not None
        assert json.loads(context.json_schema) == schema
        assert context.grammar == Grammar("json_schema", context.json_schema)

    def test_a_response_format_or_a_grammar_sets_the_grammar_of_the_context(self) -> None:
        context = TOKENIZER.build_context(make_request("x", response_format={"type": "json_object"}))
        assert (context.grammar, context.json_schema) == (Grammar("json_object"), None)
        assert TOKENIZER.build_context(make_request("x", response_format={"type": "text"})).grammar is None
        regex = Grammar("regex", "[a-z]+")
        assert TOKENIZER.build_context(make_request("x", grammar=regex)).grammar == regex

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            (
                {"response_format": {"type": "yaml"}},
                "has type 'yaml': it can be text, json_object or json_schema",
            ),
            ({"response_format": {"type": "json_schema"}}, "needs a json_schema"),
            ({"response_format": {"type": "json_schema", "json_schema": "{}"}}, "needs a json_schema"),
            (
                {"response_format": {"type": "json_schema", "json_schema": {"schema": True}}},
                "needs a json_schema",
            ),
            ({"response_format": {"type": "json_schema", "json_schema": {"type": {1}}}}, "is not JSON"),
            ({"response_format": {"type": "json_object"}, "grammar": Grammar("regex", "a")}, "not both"),
            ({"grammar": "[a-z]"}, "must be a Grammar"),
            ({"priority": "high"}, "priority must be an integer"),
        ],
    )
    def test_invalid_formats_and_fields_are_refused(self, fields: dict[str, Any], message: str) -> None:
        with pytest.raises(InputError, match=message):
            TOKENIZER.build_context(make_request("x", **fields))


def make_request(
    prompt: Any = None, *, id: str = "1", model_name: str = "fake", **fields: Any
) -> TokenGeneratorRequest:
    """Return a request. Names of sampling parameters except ``stop`` are accepted as fields."""
    param_names = SamplingParams.__dataclass_fields__.keys() & fields.keys() - {"stop"}
    if param_names:
        fields["sampling_params"] = SamplingParams(**{name: fields.pop(name) for name in param_names})
    return TokenGeneratorRequest(id, 0, model_name, prompt=prompt, **fields)


def copy_stories_tokenizer(shared_data: Path, folder: Path) -> Path:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((shared_data / "models" / "stories260K" / name).read_bytes())
    return folder


@cache
def load_tokenizer(folder: Path) -> TextTokenizer:
    return TextTokenizer(folder, max_length=100_000)


@cache
def load_transformers_tokenizer(folder: Path) -> Any:
    return pytest.importorskip("transformers").AutoTokenizer.from_pretrained(str(folder))


def test_build_context_returns_a_text_context() -> None:
    assert type(TOKENIZER.build_context(make_request("x"))) is TextContext


def test_encoding_a_long_prompt_releases_the_gil() -> None:
    """The event loop of a server continues while a thread encodes a prompt."""
    tokenizer = FakeTokenizer(max_length=None)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(tokenizer.encode_text, "a").result()
        encoding_future, num_iterations = pool.submit(tokenizer.encode_text, "ab c" * 200_000), 0
        while not encoding_future.done():
            time.sleep(0.001)
            num_iterations += 1
    assert len(encoding_future.result()) == 800_000
    assert num_iterations > 3  # would be 1 if encoding held the global interpreter lock
