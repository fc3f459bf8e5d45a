"""Generate the tables of docs/ from the code: ``python tools/write_tables.py``.

A page has pairs of marks ``<!-- table: NAME -->`` and ``<!-- end -->``. The script writes the table of that
name between the marks.
"""

from __future__ import annotations

import importlib
import json
import re
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, cast

from prometheus_client.metrics import MetricWrapperBase

from penstock.architectures.registry import PIPELINE_REGISTRY
from penstock.grammar.schema import formats as string_formats
from penstock.grammar.schema import shapes
from penstock.lora import adapter_config
from penstock.pipelines.core import PipelineTask
from penstock.serve import playground
from penstock.serve.api import (
    adapters,
    chat,
    classification,
    completions,
    embedding_schemas,
    embeddings,
    models,
    operations,
    parameters,
    rerank,
    schemas,
    scores,
    speech,
    speech_schemas,
    tokenization,
    unsupported,
    validation,
)
from penstock.serve.api.llama_cpp import llama_cpp_routes, llama_cpp_schema
from penstock.serve.api.messages import message_routes, message_schema
from penstock.serve.api.ollama import ollama_routes, ollama_schema
from penstock.serve.api.responses import offered_tools, response_routes, response_schema
from penstock.serve.batches import batch_routes
from penstock.serve.http import middleware, problems
from penstock.serve.observability import metrics
from penstock.serve.parsers.formats import TOOL_FORMATS
from penstock.serve.parsers.reasoning import REASONING_FORMATS
from penstock.weights import gguf_names
from penstock.weights.formats import FORMATS

DOCS = Path(__file__).parents[1] / "docs"
PAGES = ("server.md", "compatibility.md")
ROUTERS = (
    chat,
    completions,
    response_routes,
    message_routes,
    ollama_routes,
    llama_cpp_routes,
    embeddings,
    rerank,
    scores,
    classification,
    speech,
    batch_routes,
    models,
    adapters,
    tokenization,
    operations,
    playground,
)
PENSTOCK_FIELDS = (  # fields that OpenAI's chat and completion requests do not have
    "add_generation_prompt allowed_token_ids bad_words cache_salt chat_template_kwargs"
    " continue_final_message guided_choice guided_grammar guided_json guided_regex ignore_eos"
    " include_reasoning include_stop_str_in_output min_p min_tokens priority prompt_logprobs repeat_penalty"
    " repetition_penalty return_token_ids return_tokens_as_token_ids skip_special_tokens stop_token_ids"
    " structured_outputs top_k truncate_prompt_tokens"
).split()

MAX_CELL_LENGTH = 90
"""Maximum length of the last cell of a row of `table_with_notes`."""

SHORT_REASONS = {
    "the server does not have this sampler: use top_k, top_p, min_p and temperature": "no such sampler",
    "the server has no beam search: use n and choose among the outputs": "no beam search",
}
"""Frequent reasons in error messages -> their short form in tables."""

_TABLE = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", flags=re.DOTALL)


def page(name: str) -> str:
    """Return the text of a page with its tables updated."""
    text = (DOCS / name).read_text()
    return _TABLE.sub(lambda match: f"{match[1]}\n{TABLES[match[2]]()}\n\n{match[3]}", text)


def table(head: str, rows: Iterable[Iterable[str]]) -> str:
    """Return a Markdown table. ``head`` has the column titles, separated by bars."""
    columns = [column.strip() for column in head.split("|")]
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


def table_with_notes(head: str, rows: Iterable[Iterable[str]]) -> str:
    """Return a Markdown table whose long last cells are notes below it, so that rows stay readable."""
    lines = [list(row) for row in rows]
    row_counts, notes = Counter(line[0] for line in lines), []
    for line in lines:
        if len(line[-1]) > MAX_CELL_LENGTH:
            name = line[0] if row_counts[line[0]] == 1 else f"{line[0]} of {line[1]}"
            notes.append(list_item(f"{name}: {line[-1]}"))
            line[-1] = "see below"
    return "\n".join([table(head, lines), *(["", *notes] if notes else [])])


def list_item(text: str) -> str:
    """Return a list item, wrapped at 120 columns."""
    return textwrap.fill(
        f"- {text}", width=120, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )


def code(value: str) -> str:
    """Format text as inline code. Supports text with backticks."""
    return f"`` {value} ``" if "`" in value else f"`{value}`"


# -- The server -----------------------------------------------------------------------------------------


def routes() -> str:
    """Return the table of routes: methods, path, whether an API key is needed, and description."""
    rows = []
    for router in chain.from_iterable(map(_routers, ROUTERS)):
        for route in router.routes:
            if not route.include_in_schema and route.path not in ("/", "/playground/stats"):
                continue  # static files of the playground
            text = (route.endpoint.__doc__ or "The playground.").strip().splitlines()[0].replace("``", "`")
            methods = " ".join(sorted(route.methods - {"HEAD"}))
            access = "open" if route.path in middleware.PUBLIC_PATHS else "key"
            rows.append([methods, code(route.path), access, text])
    return table("method | path | access | description", rows)


def _routers(module: Any) -> list[Any]:
    """Return the routers of a module."""
    return [value for name, value in vars(module).items() if name == "router" or name.endswith("_router")]


def fields() -> str:
    """Return the table of all fields of chat and completion requests."""
    kinds = (schemas.ChatBody, schemas.CompletionBody)
    supported_fields = {kind: validation.json_schema(kind)["properties"] for kind in kinds}
    tables = {kind: parameters.UNSUPPORTED[kind] for kind in kinds}
    names = sorted({name for kind in kinds for name in (*supported_fields[kind], *tables[kind])})
    return table_with_notes(
        "field | chat | completions | values",
        (
            [
                f"`{name}`{' *' if name in PENSTOCK_FIELDS else ''}",
                *(_support(name, supported_fields[kind], tables[kind]) for kind in kinds),
                _values(name, [supported_fields[kind] for kind in kinds], [tables[kind] for kind in kinds]),
            ]
            for name in names
        ),
    )


def request_fields(kind: type[schemas.RequestBody]) -> str:
    """Return the table of all fields of one kind of request."""
    supported_fields = validation.json_schema(kind)["properties"]
    refused = parameters.unsupported_fields(kind)
    rows = []
    for name in sorted({*supported_fields, *refused}):
        support = _support(name, supported_fields, refused)
        values = [_describe_values(supported_fields[name])] if name in supported_fields else []
        if name in refused:
            accepted = _accepted_values(refused[name])
            values.append(f"{accepted + ': ' if accepted else ''}{_reason(refused[name])}")
        rows.append([f"`{name}`", support, "; ".join(values)])
    return table_with_notes("field | support | values", rows)


def response_fields() -> str:
    """Return the table of all fields of a request to ``/v1/responses``."""
    return request_fields(response_schema.ResponsesBody)


def ollama_fields() -> str:
    """Return the table of all fields of requests to Ollama's routes, and of their options."""
    kinds = {
        "/api/chat": ollama_schema.OllamaChatBody,
        "/api/generate": ollama_schema.OllamaGenerateBody,
        "/api/embed": ollama_schema.OllamaEmbedBody,
        "options": ollama_schema.OllamaOptions,
    }
    rows: dict[tuple[str, str, str], list[str]] = {}
    for place, kind in kinds.items():
        supported_fields = validation.json_schema(kind)["properties"]
        refused = parameters.unsupported_fields(kind)
        for name in sorted({*supported_fields, *refused}):
            values = [_describe_values(supported_fields[name])] if name in supported_fields else []
            if name in refused:
                accepted = _accepted_values(refused[name])
                values.append(f"{accepted + ': ' if accepted else ''}{_reason(refused[name])}")
            rows.setdefault((name, _support(name, supported_fields, refused), "; ".join(values)), []).append(
                place
            )
    return table_with_notes(
        "field | in | support | values",
        (
            [code(name), ", ".join(where), support, values]
            for (name, support, values), where in sorted(rows.items())
        ),
    )


def message_fields() -> str:
    """Return the table of all fields of a request to ``/v1/messages``."""
    return request_fields(message_schema.MessagesBody)


def embedding_fields() -> str:
    """Return the table of all request fields of the routes of embedding models."""
    kinds = {
        "embeddings": embedding_schemas.EmbeddingsBody,
        "pooling": embedding_schemas.PoolingBody,
        "rerank": embedding_schemas.RerankBody,
        "score": embedding_schemas.ScoreBody,
        "classify": embedding_schemas.ClassifyBody,
    }
    supported_fields = {name: validation.json_schema(kind)["properties"] for name, kind in kinds.items()}
    fields = sorted({field for field_schemas in supported_fields.values() for field in field_schemas})
    rows = []
    for field in fields:
        where = [name for name in kinds if field in supported_fields[name]]
        description = _describe_values(supported_fields[where[0]][field])
        rows.append([f"`{field}`", "all" if len(where) == len(kinds) else ", ".join(where), description])
    return table_with_notes("field | routes | values", rows)


def no_effect() -> str:
    """Return the table of fields that are accepted only with values that have no effect."""
    places = {
        schemas.ChatBody: "chat",
        schemas.CompletionBody: "completions",
        embedding_schemas.EmbeddingsBody: "embeddings",
        embedding_schemas.PoolingBody: "pooling",
        embedding_schemas.ClassifyBody: "classify",
        embedding_schemas.RerankBody: "rerank",
        schemas.StreamOptions: "`stream_options`",
        schemas.ChatMessage: "a message",
        schemas.ToolCall: "a message's `tool_calls`",
        response_schema.ResponsesBody: "responses",
        response_schema.InputItem: "an item of responses",
        response_schema.InputPart: "a content part of responses",
        response_schema.ResponseTool: "a tool of responses",
        offered_tools.McpTool: "a tool server of responses",
        response_schema.ReasoningConfig: "`reasoning` of responses",
        message_schema.CountTokensBody: "count_tokens",
        message_schema.MessagesBody: "messages",
        message_schema.ResultBlock: "result and `system` blocks",
        message_schema.MessageBlock: "message blocks",
        message_schema.MessageTool: "tools of messages",
        message_schema.OutputConfig: "`output_config` of messages",
        speech_schemas.SpeechBody: "speech",
        llama_cpp_schema.LlamaCppCompletionBody: "/completion",
        llama_cpp_schema.InfillBody: "/infill",
        ollama_schema.OllamaOptions: "`options` of Ollama",
        ollama_schema.OllamaFunction: "a function of Ollama",
        ollama_schema.OllamaCall: "a call of Ollama",
        ollama_schema.OllamaChatBody: "/api/chat",
        ollama_schema.OllamaGenerateBody: "/api/generate",
        ollama_schema.OllamaEmbedBody: "/api/embed",
        ollama_schema.OllamaShowBody: "/api/show",
    }
    bases = {llama_cpp_schema.LlamaCppBody, ollama_schema.OllamaBody}
    kinds = {*parameters.UNSUPPORTED, *_classes_with_refused_fields(schemas.RequestBody)} - bases
    assert set(places) == kinds, set(places) ^ kinds
    rows: dict[tuple[str, str, str], list[str]] = {}
    for kind in places:
        for name, field in parameters.unsupported_fields(kind).items():
            if field.accepted or field.accepts_all:
                rows.setdefault((name, _accepted_values(field), _reason(field)), []).append(places[kind])
    return table(
        "field | in | values | why",
        (
            [f"`{name}`", ", ".join(where), values, reason]
            for (name, values, reason), where in sorted(rows.items())
        ),
    )


def _classes_with_refused_fields(kind: type[schemas.RequestBody]) -> Iterator[type[schemas.RequestBody]]:
    """Yield the classes of request objects that declare fields without support."""
    for subclass in kind.__subclasses__():
        if "unsupported" in vars(subclass):
            yield subclass
        yield from _classes_with_refused_fields(subclass)


def _accepted_values(field: unsupported.RefusedField) -> str:
    if field.accepts_all:
        return "all"
    values = [code(json.dumps(value)) for value in field.accepted]
    return ", ".join(values) if len(values) < 8 else f"{values[0]} to {values[-1]}"


def _reason(field: unsupported.RefusedField) -> str:
    """Return why a field has no effect or is refused. Frequent reasons are abbreviated."""
    return SHORT_REASONS.get(field.reason, field.reason)


def _support(
    name: str, supported_fields: Mapping[str, Any], refused: Mapping[str, unsupported.RefusedField]
) -> str:
    if name in parameters.LOGGED_FIELDS:
        return "log"
    if name in supported_fields:
        return "yes"
    if name not in refused:
        return "unknown"
    if refused[name].accepts_all:
        return "no effect"
    return "default only" if refused[name].accepted else "refused"


def _values(
    name: str,
    supported_fields: Iterable[Mapping[str, Any]],
    refused: Iterable[Mapping[str, unsupported.RefusedField]],
) -> str:
    descriptions = [
        _describe_values(properties[name]) if name in properties else "" for properties in supported_fields
    ]
    if all(descriptions) and len(set(descriptions)) > 1:
        descriptions_and_reasons = [f"chat: {descriptions[0]}; completions: {descriptions[1]}"]
    else:
        descriptions_and_reasons = [next(filter(None, descriptions))] if any(descriptions) else []
    for refused_fields in refused:
        if name in refused_fields:
            accepted = _accepted_values(refused_fields[name])
            descriptions_and_reasons.append(
                f"{accepted + ': ' if accepted else ''}{_reason(refused_fields[name])}"
            )
    return "; ".join(dict.fromkeys(descriptions_and_reasons))


def _describe_values(schema: Mapping[str, Any]) -> str:
    """Describe a JSON schema in a few words."""
    if "anyOf" in schema:
        options = [_describe_values(option) for option in schema["anyOf"] if option.get("type") != "null"]
        return " or ".join(dict.fromkeys(options))
    if "enum" in schema or "const" in schema:
        return ", ".join(code(json.dumps(value)) for value in schema.get("enum", [schema.get("const")]))
    kind = schema.get("type")
    if kind == "array":
        return f"list of {_plural(_describe_values(schema['items']))}"
    if kind == "object":
        return (
            "object"
            if "properties" not in schema
            else f"object: {', '.join(map(code, schema['properties']))}"
        )
    names = {"string": "text", "integer": "whole number", "number": "number", "boolean": "true, false"}
    bounds = [
        f"{words} {schema[keyword]}"
        for keyword, words in (
            ("minimum", "at least"),
            ("exclusiveMinimum", "above"),
            ("maximum", "at most"),
            ("exclusiveMaximum", "below"),
        )
        if keyword in schema and abs(schema[keyword]) < 2**31
    ]
    return " ".join([names.get(str(kind), "anything"), *([f"({', '.join(bounds)})"] if bounds else [])])


def _plural(words: str) -> str:
    kind, bracket, bounds = words.partition(" (")
    plurals = {"text": "texts", "whole number": "whole numbers", "number": "numbers"}
    plural = plurals.get(kind, kind.replace("list of", "lists of").replace("object:", "objects:"))
    return plural + bracket + bounds


def errors() -> str:
    """Return the table of exceptions and their HTTP responses."""
    rows = [
        [f"`{cls.__name__}`", str(status), code(kind), code(name) if name else ""]
        for cls, (status, kind, name) in problems.ERROR_TABLE.items()
    ]
    return table("exception | status | type | code", rows)


def statuses() -> str:
    """Return the table of error responses of the HTTP layer."""
    rows = [
        [str(status), code(kind), code(name or "")] for status, (kind, name) in problems._HTTP_ERRORS.items()
    ]
    return table("status | type | code", rows)


def metric_names() -> str:
    """Return the table of metrics of the server's registry and of metrics read from the worker."""
    rows = []
    server_metrics = metrics.Metrics(reports_process=False)
    labels = {
        metric._name: metric._labelnames
        for metric in vars(server_metrics).values()
        if isinstance(metric, MetricWrapperBase)
    }
    for family in server_metrics.registry.collect():
        ending = {"counter": "_total", "info": "_info"}.get(family.type, "")
        label_names = ", ".join(map(code, labels[family.name]))
        description = family.documentation + (f"; by {label_names}" if label_names else "")
        rows.append([code(family.name + ending), family.type, description])
    for metric in metrics.ENGINE_METRICS:
        kind = "counter" if metric.name.endswith("_total") else "gauge"
        rows.append([code(metric.name), kind, metric.help])
    return table("name | type | description", rows)


# -- Compatibility --------------------------------------------------------------------------------------


def architectures() -> str:
    """Return the table of all architectures in the registry, and the encodings in which they run."""
    rows: dict[tuple[str, str], list[str]] = {}
    encodings: dict[tuple[str, ...], list[str]] = {}
    for architecture in PIPELINE_REGISTRY.architectures:
        text = (importlib.import_module(cast(str, architecture.package)).__doc__ or "").split("\n\n")[0]
        description = " ".join(text.replace("``", "`").split()).rstrip(".")
        rows.setdefault((architecture.name, description), []).append(TASKS[architecture.task])
        encodings.setdefault(tuple(architecture.encodings), []).append(architecture.name)
    gguf_names_text = {name: ", ".join(map(code, names)) for name, names in GGUF_NAMES.items()}
    blocks = [
        table(
            "model_type | tasks | models | GGUF",
            (
                [
                    code(name),
                    ", ".join(task for task in dict.fromkeys(TASKS.values()) if task in tasks),
                    description,
                    gguf_names_text.get(name, ""),
                ]
                for (name, description), tasks in sorted(rows.items())
            ),
        ),
        "",
        list_item(
            "Tasks: `text` is `text-generation`, `embeddings` is `embeddings-generation`, `speech` is "
            "`speech-token-generation` and `audio-generation`."
        ),
    ]
    common_encodings = max(encodings, key=lambda names: len(encodings[names]))
    blocks.append(list_item(f"Encodings for float weights: {', '.join(map(code, common_encodings))}."))
    for rare_encodings in encodings.keys() - {common_encodings}:
        model_types = ", ".join(map(code, encodings[rare_encodings]))
        blocks.append(list_item(f"{model_types}: only {', '.join(map(code, rare_encodings))}."))
    blocks.append(list_item("GGUF: the name of the family in GGUF files, for text generation."))
    return "\n".join(blocks)


TASKS = {
    PipelineTask.TEXT_GENERATION: "text",
    PipelineTask.EMBEDDINGS_GENERATION: "embeddings",
    PipelineTask.SPEECH_TOKEN_GENERATION: "speech",
    PipelineTask.AUDIO_GENERATION: "speech",
}
"""Pipeline task -> its name in the table of architectures."""

GGUF_NAMES: Mapping[str, tuple[str, ...]] = {
    "gemma2": ("gemma2",),
    "gemma3_text": ("gemma3",),
    "gemma4_text": ("gemma4",),
    "gpt2": ("gpt2",),
    "granite": ("granite",),
    "llama": ("llama",),
    "mistral": ("llama",),
    "mixtral": ("llama",),
    "olmo2": ("olmo2",),
    "phi3": ("phi3",),
    "qwen2": ("qwen2",),
    "qwen3": ("qwen3",),
    "qwen3_moe": ("qwen3moe",),
    "qwen2_moe": ("qwen2moe",),
    "olmoe": ("olmoe",),
    "granitemoe": ("granitemoe",),
    "glm4_moe": ("glm4moe",),
    "minimax_m2": ("minimax-m2",),
    "ernie4_5_moe": ("ernie4_5-moe",),
    "phimoe": ("phimoe",),
    "llama4_text": ("llama4",),
    "smollm3": ("smollm3",),
    "arcee": ("arcee",),
    "ernie4_5": ("ernie4_5",),
    "exaone4": ("exaone4",),
    "gemma": ("gemma",),
    "glm": ("chatglm",),
    "glm4": ("glm4",),
    "olmo3": ("olmo2",),
    "seed_oss": ("seed_oss",),
    "cohere": ("command-r",),
    "cohere2": ("cohere2",),
    "gpt_neox": ("gptneox",),
    "hunyuan_v1_dense": ("hunyuan-dense",),
    "nemotron": ("nemotron",),
    "olmo": ("olmo",),
    "phi": ("phi2",),
    "stablelm": ("stablelm",),
    "starcoder2": ("starcoder2",),
    "apertus": ("apertus",),
    "ministral3": ("mistral3",),
}
"""``model_type`` -> the GGUF architectures that are loaded as this type."""


def gguf_blocks() -> str:
    """Return the list of supported number types of GGUF files."""
    kinds = {
        "Floats": gguf_names._FLOATS,
        "Quantized blocks": gguf_names.READABLE_BLOCKS,
        "Quantized blocks that need the extra `gguf`": gguf_names.PACKAGE_BLOCKS,
    }
    return "\n".join(list_item(f"{kind}: {', '.join(map(code, names))}.") for kind, names in kinds.items())


def checkpoint_formats() -> str:
    """Return the table of quantized checkpoint formats and the encodings that hold their layers."""
    rows = []
    for checkpoint_format in sorted(FORMATS.formats, key=lambda checkpoint_format: checkpoint_format.name):
        if not checkpoint_format.quant_methods:
            continue
        text = (importlib.import_module(type(checkpoint_format).__module__).__doc__ or "").split("\n\n")[0]
        description = " ".join(text.split()).partition(": ")[2].rstrip(".")
        encodings = ", ".join(map(code, checkpoint_format.kept_encodings)) or "none: layers are dequantized"
        rows.append([", ".join(map(code, checkpoint_format.quant_methods)), description, encodings])
    return table("quant_method | layers | encodings of the loaded layers", rows)


def tool_formats() -> str:
    """Return the table of the models of each tool-call format, and an example of each format."""
    models = table(
        "name | models", ([code(name), tool_format.models] for name, tool_format in TOOL_FORMATS.items())
    )
    examples = [
        f"- {code(name)}: {code(tool_format.example.replace(chr(10), chr(92) + 'n'))}"
        for name, tool_format in TOOL_FORMATS.items()
    ]
    return "\n".join([models, "", "An example of a call in each format:", "", *examples])


def reasoning_formats() -> str:
    """Return the table of the begin and end markers of each reasoning format."""
    rows = [
        [
            code(reasoning_format.name),
            *(
                " ".join(code(marker.replace("\n", "\\n")) for marker in markers)
                for markers in (reasoning_format.begin_markers, reasoning_format.end_markers)
            ),
        ]
        for reasoning_format in REASONING_FORMATS.values()
    ]
    return table("name | begins | ends", rows)


def peft_fields() -> str:
    """Return the table of fields of an adapter's configuration, and how Penstock treats each field."""
    rows = [[code(name), "read"] for name in sorted(adapter_config._READ_FIELDS)]
    rows += [
        [code(name), "no effect on a trained adapter"] for name in sorted(adapter_config._IGNORED_FIELDS)
    ]
    refused = sorted(adapter_config._REFUSED_FIELDS.items())
    rows += [[code(name), f"refused if set: {reason}"] for name, reason in refused]
    return table("field | treatment", sorted(rows))


SUPPORTED_SCHEMAS: Mapping[str, Any] = {
    "type": {"type": ["string", "null"]},
    "enum": {"enum": [1, "a", None]},
    "const": {"const": {"a": 1}},
    "minimum": {"type": "number", "minimum": 1.5},
    "maximum": {"type": "integer", "maximum": 7},
    "exclusiveMinimum": {"type": "number", "exclusiveMinimum": 0},
    "exclusiveMaximum": {"type": "number", "exclusiveMaximum": 1},
    "multipleOf": {"type": "integer", "multipleOf": 5},
    "minLength": {"type": "string", "minLength": 1},
    "maxLength": {"type": "string", "maxLength": 9},
    "pattern": {"type": "string", "pattern": "^[a-z]+$"},
    "format": {"type": "string", "format": "date-time"},
    "items": {"type": "array", "items": {"type": "integer"}},
    "prefixItems": {"type": "array", "prefixItems": [{"type": "integer"}], "items": False},
    "minItems": {"type": "array", "minItems": 1},
    "maxItems": {"type": "array", "maxItems": 3},
    "uniqueItems": {"type": "array", "items": {"enum": ["a", "b"]}, "uniqueItems": True},
    "unevaluatedItems": {"type": "array", "prefixItems": [{}], "unevaluatedItems": False},
    "properties": {"type": "object", "properties": {"a": {"type": "string"}}},
    "required": {"type": "object", "properties": {"a": {}}, "required": ["a"]},
    "additionalProperties": {"type": "object", "additionalProperties": {"type": "integer"}},
    "patternProperties": {"type": "object", "patternProperties": {"^x": {}}, "additionalProperties": False},
    "propertyNames": {"type": "object", "propertyNames": {"pattern": "^[a-z]+$"}},
    "minProperties": {"type": "object", "properties": {"a": {}, "b": {}}, "minProperties": 1},
    "maxProperties": {"type": "object", "properties": {"a": {}, "b": {}}, "maxProperties": 1},
    "unevaluatedProperties": {"type": "object", "properties": {"a": {}}, "unevaluatedProperties": False},
    "dependentRequired": {"properties": {"a": {}, "b": {}}, "dependentRequired": {"a": ["b"]}},
    "dependentSchemas": {
        "properties": {"a": {}},
        "dependentSchemas": {"a": {"properties": {"a": {"const": 1}}}},
    },
    "$ref": {
        "$ref": "#/$defs/a",
        "$defs": {"a": {"type": "object", "properties": {"next": {"$ref": "#/$defs/a"}}}},
    },
    "allOf": {"allOf": [{"type": "integer"}, {"minimum": 3}]},
    "anyOf": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
    "oneOf": {"oneOf": [{"type": "integer"}, {"type": "string"}]},
}
"""Keyword -> a supported schema with this keyword."""

KEYWORD_LIMITS: Mapping[str, tuple[str, Any]] = {
    "multipleOf": ("whole numbers only", {"multipleOf": 0.5}),
    "format": (
        f"{', '.join(string_formats.SUPPORTED_FORMATS)}; {', '.join(string_formats.UNSUPPORTED_FORMATS)} "
        "only with enum and const, whose values are tested; formats that the standard does not define are "
        "ignored",
        {"type": "string", "format": "regex"},
    ),
    "pattern": (
        "ECMA 262 without back references; lookaheads only directly after the initial ^",
        {"type": "string", "pattern": "(?=a)b"},
    ),
    "uniqueItems": (
        "items of enum, const, boolean or a small range of integers; in any order for up to 8 possible "
        "values; with more values, in the order of the schema, unless maxItems is small",
        {"type": "array", "items": {"type": "string"}, "uniqueItems": True},
    ),
    "items": (
        "a schema; an array of schemas, as in old drafts, is refused",
        {"items": [{"type": "integer"}]},
    ),
    "patternProperties": (
        "one pattern, if additionalProperties is false or absent",
        {"patternProperties": {"^a": {}, "^b": {}}},
    ),
    "propertyNames": (
        "an enum of names; other schemas only for objects without properties and required",
        {"properties": {"a": {}}, "propertyNames": {"pattern": "^a"}},
    ),
    "minProperties": ("if properties lists enough names", {"type": "object", "minProperties": 2}),
    "unevaluatedItems": (
        "true or false, not together with $ref, allOf, anyOf or oneOf",
        {"unevaluatedItems": {"type": "integer"}},
    ),
    "unevaluatedProperties": (
        "true or false, not together with $ref, allOf, anyOf or oneOf",
        {"allOf": [{}], "unevaluatedProperties": False},
    ),
    "$ref": (
        "references within the schema (#/...), including recursive ones",
        {"$ref": "https://example.org/schema"},
    ),
    "oneOf": ("branches that provably exclude each other", {"oneOf": [{"minimum": 1}, {"maximum": 2}]}),
}
"""Keyword -> the limits of its support, and a schema that is refused."""


def schema_keywords() -> str:
    """Return the table of JSON schema keywords and their support."""
    limits = {name: f": {text}" for name, (text, _) in KEYWORD_LIMITS.items()}
    rows = [[code(name), f"yes{limits.get(name, '')}"] for name in SUPPORTED_SCHEMAS]
    rows += [[code(name), f"refused: {reason}"] for name, reason in shapes.REFUSED_KEYWORDS.items()]
    return table_with_notes("keyword | supported", rows)


TABLES: Mapping[str, Callable[[], str]] = {
    "routes": routes,
    "fields": fields,
    "response_fields": response_fields,
    "message_fields": message_fields,
    "ollama_fields": ollama_fields,
    "embedding_fields": embedding_fields,
    "no_effect": no_effect,
    "errors": errors,
    "statuses": statuses,
    "metrics": metric_names,
    "architectures": architectures,
    "gguf_blocks": gguf_blocks,
    "checkpoint_formats": checkpoint_formats,
    "tool_formats": tool_formats,
    "reasoning_formats": reasoning_formats,
    "peft_fields": peft_fields,
    "schema_keywords": schema_keywords,
}

if __name__ == "__main__":
    for name in PAGES:
        (DOCS / name).write_text(page(name))
