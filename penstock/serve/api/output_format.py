"""Translates ``response_format``, ``structured_outputs`` and ``guided_...`` to a grammar for the output."""

from __future__ import annotations

import json
from collections.abc import Container

from penstock.grammar.schema_keywords import check_grammar, check_json_schema
from penstock.pipelines.core import Grammar
from penstock.serve.api.parameters import map_input_errors
from penstock.serve.api.schemas import ChatBody, GenerationBody, ResponseFormat, StructuredOutputs
from penstock.serve.http.problems import RequestProblem
from penstock.serve.services import Services


def output_grammar(services: Services, body: GenerationBody) -> tuple[Grammar, str] | None:
    """Return the grammar that a request sets, and the name of the field; None if it sets no grammar.

    Raises:
        RequestProblem: 400; two fields set a format, or the format is invalid, results in a grammar with more
            characters than ``--max-grammar-size``, or is a schema with an unsupported keyword.
    """
    formats = []
    if body.response_format is not None and body.response_format.type != "text":
        formats.append(("response_format", *_response_format_grammar(body.response_format)))
    if body.structured_outputs is not None:
        formats.append(("structured_outputs", *_structured_outputs_grammar(body.structured_outputs)))
    formats += [
        (name, *_guided_grammar(name, value))
        for name, value in _guided_fields(body).items()
        if value is not None
    ]
    if len(formats) > 1:
        names = " and ".join(name for name, *_ in formats)
        raise RequestProblem(400, f"{names} each set a format: send only one", param=formats[1][0])
    for param, grammar, field_path in formats:
        return _validated_grammar(services, grammar, field_path), param
    return None


def check_grammars_enabled(services: Services, body: GenerationBody, param: str) -> None:
    """Raise if the worker has no grammar back end, or if ``ignore_eos`` is set without ``stop_token_ids``.

    Raises:
        RequestProblem: 400; the message names the field.
    """
    if not services.worker.info.grammars_enabled:
        raise RequestProblem(
            400,
            f"{param} requires an optional package: pip install 'penstock-llm[grammar]'",
            param=param,
            code="unsupported_parameter",
        )
    if body.ignore_eos and not body.stop_token_ids:
        raise RequestProblem(
            400,
            f"with {param} the output ends when its format is complete: "
            "omit ignore_eos, or send stop_token_ids",
            param="ignore_eos",
        )


def check_tools(services: Services, body: ChatBody, tool_names: Container[str]) -> None:
    """Raise if the parameter schema of a tool is too long or cannot be translated to a grammar.

    Args:
        services: the objects that routes use.
        body: the request.
        tool_names: the names of tools whose calls must match their schemas.

    Raises:
        RequestProblem: 400; the message names the tool.
    """
    for index, tool in enumerate(body.tools or ()):
        if tool.function.name in tool_names and tool.function.parameters is not None:
            field_path = f"tools[{index}].function.parameters"
            _check_size(services, len(json.dumps(tool.function.parameters, ensure_ascii=False)), field_path)
            with map_input_errors(field_path):
                check_json_schema(tool.function.parameters)


def checked_grammar(services: Services, grammar: Grammar | None, field_path: str) -> Grammar | None:
    """Validate and return a grammar that was combined from several grammars. Returns None for None.

    Raises:
        RequestProblem: 400; the combined grammar is too large or has an invalid reference.
    """
    return None if grammar is None else _validated_grammar(services, grammar, field_path)


def _response_format_grammar(response_format: ResponseFormat) -> tuple[Grammar, str]:
    """Return the grammar, not yet validated, and the request field that sets it."""
    if response_format.type == "json_object":
        return Grammar("json_object"), "response_format"
    if response_format.type == "structural_tag":
        tag = {"type": "structural_tag", **(response_format.model_extra or {})}
        return Grammar("structural_tag", json.dumps(tag, ensure_ascii=False)), "response_format"
    if response_format.json_schema is None:
        raise RequestProblem(
            400,
            "response_format of type json_schema requires a json_schema",
            param="response_format.json_schema",
        )
    json_schema = response_format.json_schema
    schema = (
        json_schema.model_dump(exclude_unset=True, by_alias=True)
        if json_schema.is_plain_schema
        else json_schema.schema_
    )
    field_path = "response_format.json_schema"
    return _json_schema_grammar({} if schema is None else schema, field_path), field_path


def _structured_outputs_grammar(outputs: StructuredOutputs) -> tuple[Grammar, str]:
    formats = {
        name: value for name, value in _structured_outputs_fields(outputs).items() if value is not None
    }
    if len(formats) != 1:
        raise RequestProblem(
            400,
            f"structured_outputs has {', '.join(formats) or 'nothing'}: "
            "send exactly one of json, regex, choice, grammar, structural_tag",
            param="structured_outputs",
        )
    ((name, value),) = formats.items()
    field_path = f"structured_outputs.{name}"
    match name:
        case "json":
            grammar = _json_schema_grammar(_parsed_json(value, field_path), field_path)
        case "choice":
            grammar = Grammar("choice", json.dumps(value, ensure_ascii=False))
        case "structural_tag":
            grammar = Grammar(
                "structural_tag", json.dumps(_parsed_json(value, field_path), ensure_ascii=False)
            )
        case "grammar":
            grammar = Grammar("ebnf", str(value))
        case _:
            grammar = Grammar("regex", str(value))
    return grammar, field_path


def _guided_fields(body: GenerationBody) -> dict[str, object]:
    """Return the ``guided_...`` fields. Each is an alias of a member of ``structured_outputs``."""
    return {
        "guided_json": body.guided_json,
        "guided_regex": body.guided_regex,
        "guided_choice": body.guided_choice,
        "guided_grammar": body.guided_grammar,
    }


def _guided_grammar(name: str, value: object) -> tuple[Grammar, str]:
    match name:
        case "guided_json":
            return _json_schema_grammar(_parsed_json(value, name), name), name
        case "guided_choice":
            return Grammar("choice", json.dumps(value, ensure_ascii=False)), name
        case "guided_grammar":
            return Grammar("ebnf", str(value)), name
    return Grammar("regex", str(value)), name


def _structured_outputs_fields(outputs: StructuredOutputs) -> dict[str, object]:
    return {
        "json": outputs.json_,
        "regex": outputs.regex,
        "choice": outputs.choice,
        "grammar": outputs.grammar,
        "structural_tag": outputs.structural_tag,
    }


def _parsed_json(value: object, field_path: str) -> object:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise RequestProblem(400, f"{field_path} is not JSON: {error}", param=field_path) from None


def _json_schema_grammar(schema: object, field_path: str) -> Grammar:
    if not isinstance(schema, dict | bool):
        raise RequestProblem(
            400, f"{field_path} must be a JSON schema: an object or a boolean", param=field_path
        )
    return Grammar("json_schema", json.dumps(schema, ensure_ascii=False))


def _validated_grammar(services: Services, grammar: Grammar, field_path: str) -> Grammar:
    _check_size(services, len(grammar.text), field_path)
    with map_input_errors(field_path):
        check_grammar(grammar)
    return grammar


def _check_size(services: Services, num_characters: int, field_path: str) -> None:
    """Raise if a grammar or a JSON schema has more characters than ``--max-grammar-size``.

    Call it before parsing, because parsing a large grammar is slow.
    """
    limit = services.pipeline_config.structured_output.max_size
    if num_characters > limit:
        raise RequestProblem(
            400,
            f"{field_path} results in a grammar of {num_characters} characters, but the maximum is {limit}: "
            "shorten it, or raise --max-grammar-size",
            param=field_path,
        )
