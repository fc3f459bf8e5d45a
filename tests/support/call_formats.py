"""Renderers of tool calls in each format, the inverse of `penstock.serve.parsers`, and parser helpers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

from penstock.serve.parsers import Event, OutputParser, ToolCallArguments, ToolCallStart, merge_events

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Find something.",
            "parameters": {
                "type": "object",
                "properties": {
                    "text": {"type": "string"},
                    "count": {"type": "integer"},
                    "ratio": {"type": "number"},
                    "exact": {"type": "boolean"},
                    "tags": {"type": "array"},
                    "filter": {"type": "object"},
                    "user": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                },
                "required": ["text"],
            },
        },
    },
    {"type": "function", "function": {"name": "now", "description": "The time.", "parameters": {}}},
]


@dataclass(frozen=True)
class Call:
    name: str
    arguments: dict[str, Any] = field(default_factory=dict)


def dump_json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def render_json_list(calls: Iterable[Call], key: str = "arguments") -> str:
    objects = [f'{{"name": "{call.name}", "{key}": {dump_json(call.arguments)}}}' for call in calls]
    return f"[{', '.join(objects)}]"


def template_renderer(template: str, separator: str = "") -> Callable[[Sequence[Call]], str]:
    """Return a renderer that fills a template with placeholders NAME and ARGUMENTS for each call."""

    def render(calls: Sequence[Call]) -> str:
        rendered_calls = [
            template.replace("NAME", call.name).replace("ARGUMENTS", dump_json(call.arguments))
            for call in calls
        ]
        return separator.join(rendered_calls)

    return render


def render_python_calls(calls: Sequence[Call]) -> list[str]:
    return [
        f"{call.name}({', '.join(f'{key}={value!r}' for key, value in call.arguments.items())})"
        for call in calls
    ]


def render_python_list(calls: Sequence[Call]) -> str:
    return f"[{', '.join(render_python_calls(calls))}]"


def render_apertus(calls: Sequence[Call]) -> str:
    objects = [f'{{"{call.name}": {dump_json(call.arguments)}}}' for call in calls]
    return f"<|tools_prefix|>[{', '.join(objects)}]<|tools_suffix|>"


def render_tags(call: Call, template: str) -> str:
    """Fill ``template`` for each argument; its placeholders are KEY, VALUE and IS_STRING.

    Strings are written without quotes.
    """
    return "".join(
        template.replace("KEY", key)
        .replace("IS_STRING", dump_json(isinstance(value, str)))
        .replace("VALUE", value if isinstance(value, str) else dump_json(value))
        for key, value in call.arguments.items()
    )


def render_qwen3_coder(calls: Sequence[Call]) -> str:
    parameter = "<parameter=KEY>\nVALUE\n</parameter>\n"
    return "\n".join(
        f"<tool_call>\n<function={call.name}>\n{render_tags(call, parameter)}</function>\n</tool_call>"
        for call in calls
    )


def render_seed_oss(calls: Sequence[Call]) -> str:
    parameter = "<parameter=KEY>VALUE</parameter>\n"
    return "\n".join(
        f"<seed:tool_call>\n<function={call.name}>\n{render_tags(call, parameter)}"
        "</function>\n</seed:tool_call>"
        for call in calls
    )


def render_glm(calls: Sequence[Call]) -> str:
    argument = "<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n"
    return "\n".join(f"<tool_call>{call.name}\n{render_tags(call, argument)}</tool_call>" for call in calls)


def dsml_renderer(outer_tag: str) -> Callable[[Sequence[Call]], str]:
    def render(calls: Sequence[Call]) -> str:
        parameter = '<|DSML|parameter name="KEY" string="IS_STRING">VALUE</|DSML|parameter>\n'
        # Bars of the markup become wide bars. Bars in values are not changed.
        parameter = parameter.replace("|", "\uff5c")
        invokes = [
            deepseek_markup(f'<|DSML|invoke name="{call.name}">\n')
            + render_tags(call, parameter)
            + deepseek_markup("</|DSML|invoke>\n")
            for call in calls
        ]
        return (
            deepseek_markup(f"<|DSML|{outer_tag}>\n")
            + "".join(invokes)
            + deepseek_markup(f"</|DSML|{outer_tag}>")
        )

    return render


def render_minimax_m2(calls: Sequence[Call]) -> str:
    parameter = '<parameter name="KEY">VALUE</parameter>\n'
    invokes = [f'<invoke name="{call.name}">\n{render_tags(call, parameter)}</invoke>\n' for call in calls]
    return f"<minimax:tool_call>\n{''.join(invokes)}</minimax:tool_call>"


def deepseek_markup(markup: str) -> str:
    return markup.replace("|", "\uff5c").replace("~", "\u2581")


def render_deepseek(calls: Sequence[Call], head: str, foot: str, separator: str) -> str:
    rendered_calls = [
        deepseek_markup("<|tool~call~begin|>")
        + deepseek_markup(head).replace("NAME", call.name)
        + dump_json(call.arguments)
        + deepseek_markup(f"{foot}<|tool~call~end|>")
        for call in calls
    ]
    return (
        deepseek_markup("<|tool~calls~begin|>")
        + separator.join(rendered_calls)
        + deepseek_markup("<|tool~calls~end|>")
    )


def render_kimi_k2(calls: Sequence[Call]) -> str:
    rendered_calls = [
        f"<|tool_call_begin|>functions.{call.name}:{index}<|tool_call_argument_begin|>"
        f"{dump_json(call.arguments)}<|tool_call_end|>"
        for index, call in enumerate(calls)
    ]
    return f"<|tool_calls_section_begin|>{''.join(rendered_calls)}<|tool_calls_section_end|>"


def render_gemma4_value(value: object) -> str:
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, dict):
        keys = [key if re.fullmatch(r"\w+", key) else f'<|"|>{key}<|"|>' for key in value]
        values = map(render_gemma4_value, value.values())
        return "{" + ",".join(f"{key}:{text}" for key, text in zip(keys, values, strict=True)) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(render_gemma4_value, value)) + "]"
    return dump_json(value)


def render_gemma4(calls: Sequence[Call]) -> str:
    return "".join(
        f"<|tool_call>call:{call.name}{render_gemma4_value(call.arguments)}<tool_call|>" for call in calls
    )


def render_cohere(calls: Sequence[Call]) -> str:
    rendered_calls = [
        f'    {{"tool_call_id": "{index}", "tool_name": "{call.name}", '
        f'"parameters": {dump_json(call.arguments)}}}'
        for index, call in enumerate(calls)
    ]
    return "<|START_ACTION|>[\n" + ",\n".join(rendered_calls) + "\n]<|END_ACTION|>"


RENDERERS: dict[str, Callable[[Sequence[Call]], str]] = {
    "hermes": template_renderer('<tool_call>\n{"name": "NAME", "arguments": ARGUMENTS}\n</tool_call>', "\n"),
    "granite": lambda calls: "<|tool_call|>" + render_json_list(calls),
    "apriel": lambda calls: f"<tool_calls>{render_json_list(calls)}</tool_calls>",
    "firefunction": lambda calls: "functools" + render_json_list(calls),
    "cohere": render_cohere,
    "llama3_json": template_renderer('{"name": "NAME", "parameters": ARGUMENTS}', "; "),
    "pythonic": render_python_list,
    "lfm2": lambda calls: f"<|tool_call_start|>{render_python_list(calls)}<|tool_call_end|>",
    "mistral": template_renderer("[TOOL_CALLS]NAME[ARGS]ARGUMENTS"),
    "mistral_v3": lambda calls: "[TOOL_CALLS]" + render_json_list(calls),
    "qwen3_coder": render_qwen3_coder,
    "seed_oss": render_seed_oss,
    "glm": render_glm,
    "deepseek_v3": lambda calls: render_deepseek(calls, "function<|tool~sep|>NAME\n```json\n", "\n```", "\n"),
    "deepseek_v31": lambda calls: render_deepseek(calls, "NAME<|tool~sep|>", "", ""),
    "minimax_m2": render_minimax_m2,
    "deepseek_v32": dsml_renderer("function_calls"),
    "deepseek_v4": dsml_renderer("tool_calls"),
    "kimi_k2": render_kimi_k2,
    "apertus": render_apertus,
    "olmo3": lambda calls: "<function_calls>" + "\n".join(render_python_calls(calls)) + "</function_calls>",
    "harmony": template_renderer(
        "<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>ARGUMENTS"
    ),
    "gemma4": render_gemma4,
    "functionary": template_renderer("<function=NAME>ARGUMENTS</function>"),
}
FORMATS_WITHOUT_MARKER = ("llama3_json", "pythonic")
"""Formats in which no marker begins a call."""
SINGLE_CALL_FORMATS = ("harmony",)
"""Formats whose output ends with its first call."""

VALUE_ENDS = {
    "qwen3_coder": "</parameter>",
    "seed_oss": "</parameter>",
    "glm": "</arg_value>",
    "gemma4": '<|"|>',
    "minimax_m2": "</parameter>",
    "deepseek_v32": deepseek_markup("</|DSML|parameter>"),
    "deepseek_v4": deepseek_markup("</|DSML|parameter>"),
}
"""The marker after a value, in formats that cannot escape it within a value."""


def split_text(text: str, sizes: Sequence[int]) -> Iterator[str]:
    """Yield the text in fragments of these sizes, repeated cyclically."""
    start, next_size = 0, cycle(sizes)
    while start < len(text):
        size = next(next_size)
        yield text[start : start + size]
        start += size


def parse(parser: OutputParser, text: str, sizes: Sequence[int] = (1 << 30,)) -> list[Event]:
    """Return all events of a text, with adjacent events merged."""
    events: list[Event] = []
    for fragment in split_text(text, sizes):
        events += parser.push(fragment)
    return merge_events(events + parser.finish())


def collect_calls(events: Iterable[Event]) -> list[Call]:
    """Return the calls in merged events. Their arguments must be JSON."""
    names: list[str] = []
    arguments: dict[int, str] = {}
    for event in events:
        if isinstance(event, ToolCallStart):
            assert event.index == len(names)
            names.append(event.name)
        elif isinstance(event, ToolCallArguments):
            arguments[event.index] = arguments.get(event.index, "") + event.text
    return [Call(name, json.loads(arguments[index])) for index, name in enumerate(names)]
