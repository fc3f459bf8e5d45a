"""Chat templates of published models render the same text as transformers. Invalid templates are refused."""

from __future__ import annotations

import json
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import CheckpointError, ConfigError, InputError, UnsupportedFeatureError
from penstock.text.chat_template import ChatTemplate, find_templates

TEMPLATES = Path(__file__).resolve().parents[3] / "shared" / "data" / "chat_templates"
SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "</s>"}
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather in a <city>, é",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "c"}},
            "required": ["city"],
        },
    },
}
TOOL_CALL = {
    "id": "call12345",
    "type": "function",
    "function": {"name": "get_weather", "arguments": {"city": "Zürich"}},
}
CALL_WITH_ENCODED_ARGUMENTS = {
    **TOOL_CALL,
    "function": {"name": "get_weather", "arguments": '{"city": "Zürich"}'},
}
TOOL_RESULT = {"role": "tool", "content": "12 °C", "tool_call_id": "call12345", "name": "get_weather"}


def make_user_message(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def make_assistant_message(content: Any, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **fields}


CONTENT_PARTS = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
SYSTEM_MESSAGE = {"role": "system", "content": "Be brief."}
CHATS: dict[str, list[dict[str, Any]]] = {
    "single turn": [make_user_message("Is 1 < 2 & 'é'?")],
    "system": [SYSTEM_MESSAGE, make_user_message(" hello\n")],
    "turns": [SYSTEM_MESSAGE, make_user_message("a"), make_assistant_message("b"), make_user_message("c")],
    "final assistant message": [make_user_message("a"), make_assistant_message(" b ")],
    "two user messages": [make_user_message("a"), make_user_message("b")],
    "tool call": [make_user_message("w?"), make_assistant_message(None, tool_calls=[TOOL_CALL]), TOOL_RESULT],
    "tool call as text": [
        make_user_message("w?"),
        make_assistant_message("", tool_calls=[CALL_WITH_ENCODED_ARGUMENTS]),
        TOOL_RESULT,
        make_user_message("thanks"),
    ],
    "reasoning": [
        make_user_message("a"),
        make_assistant_message("<think>\nhm\n</think>\n\nb", reasoning_content="hm"),
        make_user_message("c"),
    ],
    "parts": [make_user_message(CONTENT_PARTS)],
    "no content": [make_user_message(None)],
    "an unknown role": [{"role": "wizard", "content": "x"}],
    "a role without content": [{"role": "user"}],
}
TEMPLATE_OPTIONS: list[dict[str, Any]] = [
    {},
    {"add_generation_prompt": False},
    {"enable_thinking": False, "functions": "[]", "datetime": "noon"},
    {"continue_final_message": True},
]


def read_published_templates() -> dict[str, str]:
    files = [path for path in sorted(TEMPLATES.rglob("*.jinja*")) if path.is_file()]
    templates = {f"{path.parent.name}/{path.stem}": path.read_text() for path in files}
    ollama_file = TEMPLATES / "ollama" / "templates.jsonl"
    for index, line in enumerate(ollama_file.read_text().splitlines() if ollama_file.is_file() else []):
        templates |= {f"ollama/{index} {name}": text for name, text in json.loads(line or "{}").items()}
    return templates


@pytest.mark.parametrize(
    ("name", "source"), read_published_templates().items(), ids=read_published_templates()
)
def test_published_templates_render_the_text_of_transformers(name: str, source: str) -> None:
    template = ChatTemplate({"default": source}, SPECIAL_TOKENS, name)
    num_rendered_chats = 0
    for chat_name, messages in CHATS.items():
        for tools in (None, [TOOL]):
            for options in TEMPLATE_OPTIONS:
                # Only newer versions of transformers replace None by an empty string.
                reference_messages = [
                    {**message, "content": ""} if message.get("content", "") is None else message
                    for message in messages
                ]
                expected = render_with_transformers(source, reference_messages, tools, options)
                assert render_with_penstock(template, messages, tools, options) == expected, (
                    chat_name,
                    bool(tools),
                    options,
                )
                num_rendered_chats += expected is not None
    assert num_rendered_chats > 0


@pytest.mark.parametrize(
    "source",
    [
        "{{ {'a': 'é<>&', 'b': [1]} | tojson }} {{ {'b': 1, 'a': 2} | tojson(indent=2, sort_keys=true) }}",
        "{{ [1, 2] | tojson(separators=(',', ':')) }} {{ 'é' | tojson(ensure_ascii=true) }}",
        "{% for i in range(5) %}{% if i == 2 %}{% continue %}{% endif %}{% if i == 4 %}{% break %}{% endif %}"
        "{{ i }}{% endfor %}",
        "a {% generation %}b{% set x = 1 %}{{ messages[0].content }}{% endgeneration %} [{{ x }}]",
        "  {% if true %}\n  x\n  {% endif %}\n{# c #}\ny\n",
        "{{ bos_token }}{{ eos_token }}{{ sep_token is defined }}{{ documents is none }}{{ tools is none }}",
        "{{ add_generation_prompt }}{{ undefined_name }}{{ undefined_name is defined }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ 1 / 0 }}",
        "{{ undefined_name.attribute }}",
        "{{ undefined_name | tojson }}",
        "{{ range(99999999) | list | length }}",
        "{{ messages[-1].content }} and {{ messages[-1].content | length }}",
        "{{ messages[-1].content | upper }}",
    ],
)
def test_small_templates_render_the_text_of_transformers(source: str) -> None:
    template = ChatTemplate({"default": source}, SPECIAL_TOKENS, "test")
    for options in ({}, {"add_generation_prompt": False}):
        expected = render_with_transformers(source, [make_user_message("hi")], None, options)
        assert render_with_penstock(template, [make_user_message("hi")], None, options) == expected


def test_strftime_now_gives_the_current_year() -> None:
    template = ChatTemplate({"default": "{{ strftime_now('%Y') }}"}, {}, "test")
    assert template.render([make_user_message("x")]) in (
        str(datetime.now().year),
        str(datetime.now().year - 1),
    )


def test_the_message_of_raise_exception_is_in_the_error() -> None:
    template = ChatTemplate({"default": "{{ raise_exception('Roles must alternate') }}"}, {}, "test")
    with pytest.raises(InputError, match="cannot render these messages: Roles must alternate"):
        template.render([make_user_message("x")])


def test_options_override_the_defaults() -> None:
    template = ChatTemplate(
        {"default": "{{ add_generation_prompt }} {{ style }} {{ eos_token }}"}, SPECIAL_TOKENS, "test"
    )
    assert template.render([make_user_message("x")]) == "True  </s>"
    options = {"add_generation_prompt": False, "style": "brief", "eos_token": "!"}
    assert template.render([make_user_message("x")], None, options) == "False brief !"


@pytest.mark.parametrize("name", ["self", "environment", "caller", "loop", "1 a"])
def test_options_may_have_names_that_jinja_reserves(name: str) -> None:
    template = ChatTemplate({"default": "{{ messages[0].content }}{{ self }}"}, {}, "test")
    assert template.render([make_user_message("x")], None, {name: "y"}).startswith("x")


@pytest.mark.parametrize("name", ["messages", "tools", "chat_template", "tokenize", "return_tensors"])
def test_options_that_are_parameters_of_apply_chat_template_are_refused(name: str) -> None:
    with pytest.raises(InputError, match=f"cannot set {name}"):
        ChatTemplate({"default": "x"}, {}, "test").render([make_user_message("x")], None, {name: 1})


@pytest.mark.parametrize(
    ("source", "content", "expected"),
    [
        ("[{{ messages[-1].content }}] end", " ab \n", "[ ab \n"),
        ("[{{ messages[-1].content | trim }}] end", " ab \n", "[ab"),
        ("[{{ messages[-1].content }}] a end", "a", "[a"),
        ("[{{ messages[-1].content[0].text }}]", [{"type": "text", "text": "a"}], "[a"),
    ],
)
def test_continue_final_message_cuts_the_text_after_the_message(
    source: str, content: Any, expected: str
) -> None:
    template = ChatTemplate({"default": source}, {}, "test")
    assert (
        template.render(
            [make_user_message("q"), make_assistant_message(content)], None, {"continue_final_message": True}
        )
        == expected
    )


@pytest.mark.parametrize(
    ("source", "content", "options", "message"),
    [
        ("{{ messages | length }}", "a", {}, "does not print the last message"),
        ("{{ messages[-1].content }}", [], {}, "needs a last message with text"),
        ("{{ messages[-1].content }}", [{"type": "text"}], {}, "needs a last message with text"),
        ("{{ messages[-1].content }}", "a", {"add_generation_prompt": True}, "exclude each other"),
    ],
)
def test_a_final_message_that_cannot_be_continued_is_refused(
    source: str, content: Any, options: dict[str, Any], message: str
) -> None:
    template = ChatTemplate({"default": source}, {}, "test")
    with pytest.raises(InputError, match=message):
        template.render([make_assistant_message(content)], None, {"continue_final_message": True, **options})


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "messages is empty"),
        (["hi"], r"messages\[0\] is 'hi'"),
        ([make_user_message("x"), {"content": "x"}], r"messages\[1\]"),
    ],
)
def test_values_that_are_not_messages_are_refused(messages: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        ChatTemplate({"default": "x"}, {}, "test").render(messages)


class TestNamedTemplates:
    def test_tools_select_the_tool_use_template(self) -> None:
        template = ChatTemplate({"default": "D", "tool_use": "T"}, {}, "test")
        assert (
            template.render([make_user_message("x")]),
            template.render([make_user_message("x")], [TOOL]),
        ) == ("D", "T")

    def test_without_a_default_template_tools_are_required(self) -> None:
        template = ChatTemplate({"rag": "R", "tool_use": "T"}, {}, "test")
        assert template.render([make_user_message("x")], [TOOL]) == "T"
        with pytest.raises(InputError, match="no default chat template, only rag, tool_use"):
            template.render([make_user_message("x")])

    def test_files_take_precedence_over_the_configuration(self, tmp_path: Path) -> None:
        config = {"chat_template": [{"name": "default", "template": "C"}, {"name": "rag", "template": "R"}]}
        assert find_templates(tmp_path, config) == {"default": "C", "rag": "R"}
        (tmp_path / "chat_template.jinja").write_text("F é", encoding="utf-8")
        (tmp_path / "additional_chat_templates").mkdir()
        (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("T")
        assert find_templates(tmp_path, config) == {"default": "F é", "rag": "R", "tool_use": "T"}
        assert find_templates(tmp_path, {"chat_template": "C"}) == {"default": "F é", "tool_use": "T"}

    def test_a_checkpoint_may_have_no_templates(self, tmp_path: Path) -> None:
        assert find_templates(tmp_path, {}) == {}

    @pytest.mark.parametrize("value", [1, {"default": "x"}, ["x"], [{"name": "x"}]])
    def test_an_invalid_configuration_is_refused(self, value: object, tmp_path: Path) -> None:
        with pytest.raises(CheckpointError, match=r"tokenizer_config.json: chat_template is neither"):
            find_templates(tmp_path, {"chat_template": value})


class TestTemplateFiles:
    @pytest.mark.parametrize("name", ["custom.jinja", "custom.txt"])
    def test_a_jinja_file_is_read(self, name: str, tmp_path: Path) -> None:
        (tmp_path / name).write_text("{{ bos_token }}{{ messages[0].content }}")
        assert (
            ChatTemplate.from_file(tmp_path / name, SPECIAL_TOKENS).render([make_user_message("x")]) == "<s>x"
        )

    def test_a_json_file_is_read(self, tmp_path: Path) -> None:
        (tmp_path / "t.json").write_text(json.dumps({"chat_template": "J"}))
        assert ChatTemplate.from_file(tmp_path / "t.json", {}).render([make_user_message("x")]) == "J"

    @pytest.mark.parametrize(
        ("name", "text", "message"),
        [
            ("t.jinja", "a\n{% if %}", "error in line 2"),
            ("t.json", "{}", "not a JSON object with the key chat_template"),
            ("t.json", "[", "not a JSON object with the key chat_template"),
            ("t.json", '{"chat_template": 3}', "not a JSON object with the key chat_template"),
        ],
    )
    def test_an_invalid_file_is_refused_at_once(
        self, name: str, text: str, message: str, tmp_path: Path
    ) -> None:
        (tmp_path / name).write_text(text)
        with pytest.raises(ConfigError, match=message):
            ChatTemplate.from_file(tmp_path / name, {})

    def test_a_missing_file_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"chat_template: cannot read .*none\.jinja"):
            ChatTemplate.from_file(tmp_path / "none.jinja", {})


@pytest.mark.parametrize("tools", ["get_weather", [1], {"type": "function"}, 5])
def test_values_that_are_not_a_list_of_tools_are_refused(tools: Any) -> None:
    with pytest.raises(InputError, match="tools must be a list of objects, was"):
        ChatTemplate({"default": "x"}, {}, "x").render([{"role": "user"}], tools)


def test_values_that_are_not_options_are_refused() -> None:
    with pytest.raises(InputError, match="chat_template_options must be names and values, was 'x'"):
        ChatTemplate({"default": "x"}, {}, "x").render([{"role": "user"}], options="x")  # type: ignore[arg-type]


def test_a_template_that_is_nested_too_deeply_is_refused() -> None:
    with pytest.raises(CheckpointError, match="the chat template 'default' is nested too deeply"):
        ChatTemplate({"default": "{{" + "(" * 5000 + "}}"}, {}, "x").render([{"role": "user"}])


def test_the_error_for_a_syntax_error_names_the_checkpoint() -> None:
    with pytest.raises(CheckpointError, match=r"folder: the chat template .* has an error in line 1"):
        ChatTemplate({"default": "{% endif %}"}, {}, "folder").render([make_user_message("x")])


class TestRequests:
    def test_a_template_for_strings_gets_joined_parts(self) -> None:
        template = ChatTemplate({"default": "<{{ messages[0].content }}>"}, {}, "test")
        assert not template.takes_parts
        assert template.render_request([make_user_message(CONTENT_PARTS)]) == "<a\nb>"
        assert template.render_request([make_user_message("a")]) == "<a>"

    def test_a_template_for_parts_gets_parts(self) -> None:
        source = (
            "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
            "{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}{% endfor %}"
        )
        template = ChatTemplate({"default": source}, {}, "test")
        assert template.takes_parts
        assert template.render_request([make_user_message(CONTENT_PARTS)]) == "ab"

    @pytest.mark.parametrize("part_type", ["image_url", "image", "input_audio", "video"])
    def test_the_error_for_content_that_is_not_text_names_its_type(self, part_type: str) -> None:
        with pytest.raises(UnsupportedFeatureError, match=f"content of type {part_type} is not supported"):
            ChatTemplate({"default": "x"}, {}, "test").render_request(
                [make_user_message([{"type": part_type}])]
            )

    @pytest.mark.parametrize(
        "content", [3, [3], [{"text": "x"}], [{"type": "text"}], [{"type": "text", "text": 3}]]
    )
    def test_values_that_are_not_content_are_refused(self, content: object) -> None:
        with pytest.raises(InputError, match=r"a message's content is text|a part of a message is"):
            ChatTemplate({"default": "x"}, {}, "test").render_request([make_user_message(content)])


def render_with_penstock(
    template: ChatTemplate, messages: Any, tools: Any, options: dict[str, Any]
) -> str | None:
    """Return the text that `ChatTemplate` renders, or None if the template raises."""
    try:
        return template.render(messages, tools, options)
    except InputError:
        return None


def render_with_transformers(source: str, messages: Any, tools: Any, options: dict[str, Any]) -> str | None:
    """Return the text that transformers renders, or None if the template raises."""
    adds_prompt = not options.get("continue_final_message", False)
    try:
        return load_reference_tokenizer().apply_chat_template(  # type: ignore[no-any-return]
            messages,
            tools,
            chat_template=source,
            tokenize=False,
            **{"add_generation_prompt": adds_prompt, **options},
        )
    except Exception:
        return None


@cache
def load_reference_tokenizer() -> Any:
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, models

    return transformers.PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), **SPECIAL_TOKENS)
