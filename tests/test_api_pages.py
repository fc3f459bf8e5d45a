"""Penstock has the names, members and signatures of three API pages of MAX (see `support.api_pages`)."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from importlib import import_module
from typing import Any, get_args, get_type_hints

import pytest
from support.api_pages import CORE, FACTORY, OPTIONAL, PAGES, parse

KEYWORD_ONLY = inspect.Parameter.KEYWORD_ONLY

NAMES = [(module, name) for module, page in PAGES.items() for name in page]
METHODS = [
    (module, name, method) for module, page in PAGES.items() for name in page for method in page[name].methods
]


def test_the_core_page_has_25_names_and_the_pages_have_over_50_methods() -> None:
    assert len(CORE) == 25
    assert len(METHODS) > 50


@pytest.mark.parametrize(("module", "name"), NAMES)
def test_the_name_is_exported_by_the_module_of_its_page(module: str, name: str) -> None:
    assert name in import_module(module).__all__
    assert callable(import_name(module, name))


@pytest.mark.parametrize(("module", "name"), [(m, n) for m, n in NAMES if PAGES[m][n].signature is not None])
def test_the_constructor_has_the_parameters_of_the_page(module: str, name: str) -> None:
    signature = PAGES[module][name].signature
    assert signature is not None
    assert find_differences(parse(signature), get_parameters(import_name(module, name))) == []


@pytest.mark.parametrize(("module", "name", "method"), METHODS)
def test_the_method_has_the_parameters_of_the_page(module: str, name: str, method: str) -> None:
    kind, _, method_name = method.rpartition(" ")
    attribute = inspect.getattr_static(import_name(module, name), method_name)
    assert isinstance(attribute, classmethod) is (kind == "classmethod")
    function = attribute.__func__ if isinstance(attribute, classmethod) else attribute
    assert inspect.iscoroutinefunction(function) is (kind == "async")
    parameters = get_parameters(function)[1:]  # without self or cls
    assert find_differences(parse(PAGES[module][name].methods[method]), parameters) == []


@pytest.mark.parametrize(("module", "name"), [(m, n) for m, n in NAMES if PAGES[m][n].attributes])
def test_the_class_has_the_attributes_of_the_page(module: str, name: str) -> None:
    cls = import_name(module, name)
    attributes = {name for base in cls.__mro__ for name in (*vars(base), *inspect.get_annotations(base))}
    assert set(PAGES[module][name].attributes.split()) - attributes == set()


@pytest.mark.parametrize(("module", "name"), [(m, n) for m, n in NAMES if PAGES[m][n].members])
def test_the_enum_has_the_values_of_the_page(module: str, name: str) -> None:
    cls = import_name(module, name)
    assert issubclass(cls, str)
    members = PAGES[module][name].members
    assert {member: cls[member].value for member in members} == members


@pytest.mark.parametrize(("module", "name"), [(m, n) for m, n in NAMES if PAGES[m][n].keys])
def test_the_typed_dictionary_requires_the_keys_of_the_page(module: str, name: str) -> None:
    cls = import_name(module, name)
    assert set(PAGES[module][name].keys.split()) <= cls.__required_keys__


@pytest.mark.parametrize(("module", "name"), [(m, n) for m, n in NAMES if PAGES[m][n].is_protocol])
def test_protocols_can_be_checked_at_run_time(module: str, name: str) -> None:
    # isinstance raises TypeError if the protocol is not runtime-checkable.
    assert not isinstance(object(), import_name(module, name))


def test_messages_accept_the_roles_of_the_page() -> None:
    message = import_name("penstock.pipelines.core", "TokenGeneratorRequestMessage")
    assert {"system", "user", "assistant"} <= set(get_args(get_type_hints(message)["role"]))


def test_both_modules_export_the_same_pipeline_model() -> None:
    assert import_name("penstock.pipelines", "PipelineModel") is import_name(
        "penstock.pipelines.pipeline", "PipelineModel"
    )


def test_the_page_of_text_context_lists_the_members_of_input_context() -> None:
    protocol_page, class_page = CORE["InputContext"], CORE["TextContext"]
    assert set(protocol_page.attributes.split()) <= set(class_page.attributes.split())
    assert protocol_page.methods == class_page.methods


@pytest.mark.parametrize(
    ("page", "function", "differences"),
    [
        ("(a, b=1)", lambda a, b=1: None, []),
        ("(a, b=1)", lambda a, b=1, *, c=2, _d=3: None, []),
        ("(a, *, b, c)", lambda a, *, c, b: None, []),
        ("(a, b=1)", lambda a: None, ["b is missing"]),
        ("(a, b=1)", lambda a, b=2: None, ["b: default 2, on the page 1"]),
        ("(a)", lambda a=1: None, ["a: default 1, on the page none"]),
        ("(a=OPTIONAL)", lambda a=1: None, []),
        ("(a)", lambda *, a: None, ["a: keyword-only, on the page positional or keyword"]),
        ("(a, b)", lambda b, a: None, ["positional parameters are b, a, on the page a, b"]),
        ("(a)", lambda a, b=1: None, ["b is not on the page: it must be keyword-only with a default"]),
        ("(a)", lambda a, *, b: None, ["b is not on the page: it must be keyword-only with a default"]),
    ],
)
def test_differences_of_signatures_are_reported(
    page: str, function: Callable[..., Any], differences: list[str]
) -> None:
    assert find_differences(parse(page), get_parameters(function)) == differences


def find_differences(
    page_parameters: list[inspect.Parameter], parameters: list[inspect.Parameter]
) -> list[str]:
    """Return the differences between the parameters on a page and the parameters of a function."""
    differences = []
    actual_parameters = {parameter.name: parameter for parameter in parameters}
    for expected in page_parameters:
        actual = actual_parameters.get(expected.name)
        if actual is None:
            differences.append(f"{expected.name} is missing")
            continue
        if actual.kind is not expected.kind:
            kinds = f"{actual.kind.description}, on the page {expected.kind.description}"
            differences.append(f"{expected.name}: {kinds}")
        if not _equal_defaults(actual.default, expected.default):
            differences.append(
                f"{expected.name}: default {_format_default(actual)}, on the page {_format_default(expected)}"
            )
    if differences:
        return differences
    if positional_names(page_parameters) != positional_names(
        p for p in parameters if p.name in {q.name for q in page_parameters}
    ):
        differences.append(
            f"positional parameters are {', '.join(positional_names(parameters))},"
            f" on the page {', '.join(positional_names(page_parameters))}"
        )
    for own_parameter in parameters:
        is_on_page = own_parameter.name in {parameter.name for parameter in page_parameters}
        if (
            not is_on_page
            and not own_parameter.name.startswith("_")
            and not _is_keyword_with_default(own_parameter)
        ):
            differences.append(
                f"{own_parameter.name} is not on the page: it must be keyword-only with a default"
            )
    return differences


def import_name(module: str, name: str) -> Any:
    return getattr(import_module(module), name)


def get_parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    return list(inspect.signature(function).parameters.values())


def positional_names(parameters: Iterable[inspect.Parameter]) -> list[str]:
    return [parameter.name for parameter in parameters if parameter.kind is not KEYWORD_ONLY]


def _equal_defaults(actual: Any, expected: Any) -> bool:
    if expected is OPTIONAL:
        return True
    if expected is FACTORY:
        return repr(actual) == repr(FACTORY) or actual == ()
    if expected is inspect.Parameter.empty:
        return actual is inspect.Parameter.empty
    return bool(actual == expected)


def _format_default(parameter: inspect.Parameter) -> str:
    return "none" if parameter.default is inspect.Parameter.empty else repr(parameter.default)


def _is_keyword_with_default(parameter: inspect.Parameter) -> bool:
    return parameter.kind is KEYWORD_ONLY and parameter.default is not inspect.Parameter.empty
