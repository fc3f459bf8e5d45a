"""Renders messages to prompt text with the Jinja chat template of a checkpoint.

Templates run in Jinja's immutable sandbox with the environment that Hugging Face defines: ``messages``,
``tools``, ``documents``, ``add_generation_prompt``, the special tokens (``bos_token``, ``eos_token``, ...),
the functions ``raise_exception`` and ``strftime_now``, ``tojson`` without HTML escapes, ``{% break %}`` and
``{% continue %}``, and ``{% generation %}``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import NoReturn

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from penstock.errors import CheckpointError, ConfigError, InputError, UnsupportedFeatureError

Message = Mapping[str, object]

RESERVED_OPTIONS = frozenset(
    {"messages", "conversation", "tools", "chat_template", "tokenize", "padding", "truncation", "max_length"}
    | {"return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"}
)
"""Parameters of transformers' ``apply_chat_template`` that options for the template cannot set."""


class ChatTemplate:
    """The named chat templates of a checkpoint.

    Requests with tools use ``tool_use``, if present. All other requests use ``default``.

    Args:
        sources: name -> Jinja text.
        special_tokens: name -> text of the special tokens, which are variables of the templates.
        origin: the file or folder of the templates, for error messages.
    """

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str], origin: object) -> None:
        self.sources = dict(sources)
        self._special_tokens = dict(special_tokens)
        self._origin = origin
        self._compiled_templates: dict[str, Template] = {}
        self.reads_images = False
        """Whether parts of messages may be images. The tokenizer of a model that reads images sets it."""

    @classmethod
    def from_file(cls, path: Path, special_tokens: Mapping[str, str]) -> ChatTemplate:
        """Read the file of ``--chat-template``: Jinja, or (``.json``) an object with ``chat_template``.

        Raises:
            ConfigError: the file cannot be read, a JSON file has no valid ``chat_template``, or a template
                has a syntax error or is nested too deeply.
        """
        sources = _read_template_option(path)
        template = cls(sources, special_tokens, path)
        for name in sources:
            try:
                template._compile(name)
            except CheckpointError as error:
                raise ConfigError("chat_template", str(error)) from error
        return template

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, object]] | None = None,
        options: Mapping[str, object] | None = None,
    ) -> str:
        """Return the prompt text of messages.

        Args:
            messages: each has a role and usually content. Content None is treated as an empty string. The
                template determines which other keys are used.
            tools: descriptions of functions that the model can call.
            options: variables for the template. With ``continue_final_message=True`` the prompt ends with
                the text of the last message, which the model continues. Otherwise the default of
                ``add_generation_prompt`` is True.

        Raises:
            InputError: an argument is invalid, the checkpoint has no default template, or the template raised
                an error, whose message is included.
            CheckpointError: the template has a syntax error, or is nested too deeply.
        """
        _check_messages(messages)
        _check_tools(tools)
        variables = _checked_variables(options)
        continues_last_message = bool(variables.pop("continue_final_message", False))
        messages = [_with_content(message) for message in messages]
        messages = _with_end_mark(messages) if continues_last_message else messages
        template = self._compile(self._template_name(tools))
        try:
            # The variables are passed as a mapping, because a variable named "self" would conflict with a
            # parameter.
            text = template.render(
                {"messages": messages, "tools": tools, **self._special_tokens, **variables}
            )
        except Exception as error:  # templates can raise any exception
            raise InputError(f"the chat template cannot render these messages: {error}") from error
        return _cut_at_end_mark(text) if continues_last_message else text

    def render_request(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, object]] | None = None,
        options: Mapping[str, object] | None = None,
    ) -> str:
        """Return the prompt text of a request's messages, whose content is text or a list of text parts.

        If the template does not support lists of parts, and no message has an image, the parts are joined by
        newlines. If the template supports only lists, text that is not empty becomes a list with one part. If
        `reads_images` is set, a part may be an image.

        Raises:
            UnsupportedFeatureError: a part is neither text nor an image that the model reads.
            InputError: see `render`.
        """
        _check_messages(messages)
        part_flags = [_has_parts(message, reads_images=self.reads_images) for message in messages]
        has_images = any(map(_has_images, messages))
        if self.needs_parts:
            messages = [
                message if has_parts else _with_single_part(message)
                for message, has_parts in zip(messages, part_flags, strict=True)
            ]
        elif any(part_flags) and not has_images and not self.takes_parts:
            messages = [
                _with_joined_parts(message) if has_parts else message
                for message, has_parts in zip(messages, part_flags, strict=True)
            ]
        return self.render(messages, tools, options)

    @cached_property
    def takes_parts(self) -> bool:
        """Whether the template renders a list with one text part in the same way as this text as a string."""
        part = {"type": "text", "text": "Dear reader"}
        try:
            text_without_parts = self.render([{"role": "user", "content": part["text"]}])
            text_with_parts = self.render([{"role": "user", "content": [part]}])
        except InputError:
            return False
        return text_without_parts == text_with_parts

    @cached_property
    def needs_parts(self) -> bool:
        """Whether the template prints text parts but omits strings, as some templates of vision models do."""
        text = "Dear reader"
        try:
            text_without_parts = self.render([{"role": "user", "content": text}])
            text_with_parts = self.render([{"role": "user", "content": [{"type": "text", "text": text}]}])
        except InputError:
            return False
        return text not in text_without_parts and text in text_with_parts

    @cached_property
    def takes_argument_objects(self) -> bool:
        """Whether the template supports a tool call's arguments as an object, as transformers passes them.

        Some templates concatenate the arguments with text, and therefore support only strings.
        """
        call = {"type": "function", "id": "call00000", "function": {"name": "find", "arguments": {"a": "b"}}}
        user_message = {"role": "user", "content": "Dear reader"}
        try:
            self.render([user_message, {"role": "assistant", "content": "", "tool_calls": [call]}])
        except InputError:
            return False
        return True

    def mentions(self, word: str) -> bool:
        """Return whether the source of any template contains ``word`` as a whole word."""
        pattern = re.compile(rf"\b{re.escape(word)}\b")
        return any(pattern.search(source) for source in self.sources.values())

    def _template_name(self, tools: Sequence[Mapping[str, object]] | None) -> str:
        if tools is not None and "tool_use" in self.sources:
            return "tool_use"
        if "default" in self.sources:
            return "default"
        names = ", ".join(sorted(self.sources))
        raise InputError(f"the model has no default chat template, only {names}: pass --chat-template")

    def _compile(self, name: str) -> Template:
        if name not in self._compiled_templates:
            try:
                self._compiled_templates[name] = _ENVIRONMENT.from_string(self.sources[name])
            except TemplateSyntaxError as error:
                problem = f"the chat template {name!r} has an error in line {error.lineno}: {error.message}"
                raise CheckpointError(self._origin, problem) from error
            except RecursionError as error:
                problem = f"the chat template {name!r} is nested too deeply"
                raise CheckpointError(self._origin, problem) from error
        return self._compiled_templates[name]


def find_templates(checkpoint: Path, tokenizer_config: Mapping[str, object]) -> dict[str, str]:
    """Return name -> Jinja text of a checkpoint's templates. Jinja files override ``tokenizer_config``."""
    sources = _templates_by_name(tokenizer_config.get("chat_template"), checkpoint / "tokenizer_config.json")
    default_file = checkpoint / "chat_template.jinja"
    if default_file.is_file():
        sources["default"] = _read_template(default_file)
    for path in sorted((checkpoint / "additional_chat_templates").glob("*.jinja")):
        sources[path.stem] = _read_template(path)
    return sources


def _read_template(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(path, f"cannot be read: {getattr(error, 'strerror', error)}") from error


def _read_template_option(path: Path) -> dict[str, str]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("chat_template", f"cannot read {path}: {error}") from error
    if path.suffix != ".json":
        return {"default": text}
    try:
        sources = _templates_by_name(json.loads(text)["chat_template"], path)
    except (ValueError, TypeError, KeyError, CheckpointError) as error:
        raise ConfigError(
            "chat_template", f"{path} is not a JSON object with the key chat_template"
        ) from error
    return sources


def _templates_by_name(value: object, path: Path) -> dict[str, str]:
    """Return name -> template of a string, of a list ``[{"name": ..., "template": ...}]`` or of None."""
    match value:
        case None:
            return {}
        case str():
            return {"default": value}
        case list() if all(
            isinstance(entry, dict) and {"name", "template"} <= entry.keys() for entry in value
        ):
            return {str(entry["name"]): str(entry["template"]) for entry in value}
    raise CheckpointError(path, "chat_template is neither text nor a list of names and templates")


def _check_messages(messages: Sequence[Message]) -> None:
    if not messages:
        raise InputError("messages is empty: a chat needs at least one message")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or "role" not in message:
            raise InputError(
                f"messages[{index}] is {message!r}: a message is an object with a role and content"
            )


def _check_tools(tools: Sequence[Mapping[str, object]] | None) -> None:
    is_list = isinstance(tools, Sequence) and not isinstance(tools, str | bytes)
    if tools is not None and not (is_list and all(isinstance(tool, Mapping) for tool in tools)):
        raise InputError(f"tools must be a list of objects, was {tools!r}")


def _has_parts(message: Message, *, reads_images: bool = False) -> bool:
    """Return whether the content of a message is a list of parts. Raise `InputError` for invalid parts."""
    content = message.get("content")
    if content is None or isinstance(content, str):
        return False
    if not isinstance(content, list):
        raise InputError(f"a message's content is text or a list of parts, not {type(content).__name__}")
    for part in content:
        part_type = part.get("type") if isinstance(part, Mapping) else None
        if part_type == "text" and isinstance(part.get("text"), str):
            continue
        if part_type == "image" and reads_images:
            continue
        if not isinstance(part_type, str) or part_type == "text":
            raise InputError(
                f'a part of a message is {part!r}: a text part is {{"type": "text", "text": "..."}}'
            )
        raise UnsupportedFeatureError(
            f"content of type {part_type}",
            f"this model reads {'text and images' if reads_images else 'text'} only",
        )
    return True


def _has_images(message: Message) -> bool:
    content = message.get("content")
    return isinstance(content, list) and any(part["type"] == "image" for part in content)


def _with_single_part(message: Message) -> Message:
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if content else message


def _with_joined_parts(message: Message) -> Message:
    content = message["content"]
    assert isinstance(content, list)
    return {**message, "content": "\n".join(part["text"] for part in content)}


def _checked_variables(options: Mapping[str, object] | None) -> dict[str, object]:
    if options is not None and not isinstance(options, Mapping):
        raise InputError(f"chat_template_options must be names and values, was {options!r}")
    variables = dict(options or {})
    reserved_options = sorted(RESERVED_OPTIONS & variables.keys())
    if reserved_options:
        raise InputError(f"chat_template_options cannot set {', '.join(reserved_options)}")
    if variables.get("continue_final_message"):
        if variables.get("add_generation_prompt"):
            raise InputError("continue_final_message and add_generation_prompt exclude each other")
        variables["add_generation_prompt"] = False
    return {"documents": None, "add_generation_prompt": True, **variables}


# No known template changes these characters. A space follows the mark in the content. If the rendered text
# lacks this space, the template strips content.
_END_MARK = "⟦⁂⟧⟦⁂⟧"


def _with_content(message: Message) -> Message:
    """Return the message with "" instead of the content None, which templates would print or refuse."""
    if "content" in message and message["content"] is None:
        return {**message, "content": ""}
    return message


def _with_end_mark(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with `_END_MARK` and a space appended to the text of the last message."""
    *earlier_messages, last_message = messages
    content = last_message.get("content")
    if isinstance(content, str):
        return [*earlier_messages, {**last_message, "content": f"{content}{_END_MARK} "}]
    parts = list(content) if isinstance(content, list) else []
    for index in reversed(range(len(parts))):
        if isinstance(parts[index], Mapping) and isinstance(parts[index].get("text"), str):
            parts[index] = {**parts[index], "text": f"{parts[index]['text']}{_END_MARK} "}
            return [*earlier_messages, {**last_message, "content": parts}]
    raise InputError("continue_final_message needs a last message with text content")


def _cut_at_end_mark(text: str) -> str:
    """Return the text before `_END_MARK`, without white space at its end if the template strips content."""
    end = text.rfind(_END_MARK)
    if end < 0:
        raise InputError(
            "continue_final_message: the chat template does not print the last message unchanged"
        )
    is_stripped = not text.startswith(f"{_END_MARK} ", end)
    return text[:end].rstrip() if is_stripped else text[:end]


class _GenerationTag(Extension):
    """The tag ``{% generation %}...{% endgeneration %}``, which marks training text. Renders its content."""

    tags = frozenset({"generation"})  # type: ignore[assignment]  # jinja2 declares a mutable set

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's tojson is not used, because it escapes <, > and & for HTML, which would change the prompt.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationTag]
    )
    functions: dict[str, Callable[..., str]] = {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
    }
    environment.globals.update(functions)
    environment.filters["tojson"] = _tojson
    return environment


_ENVIRONMENT = _environment()
