"""Everything on the API pages exists: each name, each parameter with its kind and its default."""

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


def test_the_tables_are_complete() -> None:
    assert len(CORE) == 25
    assert len(METHODS) > 50


@pytest.mark.parametrize(("module", "name"), NAMES)
def test_the_name_is_where_the_page_puts_it(module: str, name: str) -> None:
    assert name in import_module(module).__all__
    assert callable(named(module, name))


@pytest.mark.parametrize(("module", "name"), [(m, n) for m, n in NAMES if PAGES[m][n].signature is not None])
def test_the_constructor_has_the_parameters_of_the_page(module: str, name: str) -> None:
    signature = PAGES[module][name].signature
    assert signature is not None
    assert faults(parse(signature), parameters_of(named(module, name))) == []


@pytest.mark.parametrize(("module", "name", "method"), METHODS)
def test_the_method_has_the_parameters_of_the_page(module: str, name: str, method: str) -> None:
    kind, _, bare = method.rpartition(" ")
    static = inspect.getattr_static(named(module, name), bare)
    assert isinstance(static, classmethod) is (kind == "classmethod")
    function = static.__func__ if isinstance(static, classmethod) else static
    assert inspect.iscoroutinefunction(function) is (kind == "async")
    ours = parameters_of(function)[1:]  # without self or cls
    assert faults(parse(PAGES[module][name].methods[method]), ours) == []


@pytest.mark.parametrize(("module", "name"), [(m, n) for m, n in NAMES if PAGES[m][n].attributes])
def test_the_attributes_are_there(module: str, name: str) -> None:
    cls = named(module, name)
    there = {name for base in cls.__mro__ for name in (*vars(base), *inspect.get_annotations(base))}
    assert set(PAGES[module][name].attributes.split()) - there == set()


@pytest.mark.parametrize(("module", "name"), [(m, n) for m, n in NAMES if PAGES[m][n].members])
def test_the_enum_has_the_values(module: str, name: str) -> None:
    cls = named(module, name)
    assert issubclass(cls, str)
    members = PAGES[module][name].members
    assert {member: cls[member].value for member in members} == members


@pytest.mark.parametrize(("module", "name"), [(m, n) for m, n in NAMES if PAGES[m][n].keys])
def test_the_dictionary_has_the_keys(module: str, name: str) -> None:
    cls = named(module, name)
    assert set(PAGES[module][name].keys.split()) <= cls.__required_keys__


@pytest.mark.parametrize(("module", "name"), [(m, n) for m, n in NAMES if PAGES[m][n].is_protocol])
def test_protocols_can_be_checked_at_run_time(module: str, name: str) -> None:
    assert not isinstance(object(), named(module, name))  # TypeError where it may not be asked


def test_messages_take_the_roles_of_the_page() -> None:
    message = named("penstock.pipelines.core", "TokenGeneratorRequestMessage")
    assert {"system", "user", "assistant"} <= set(get_args(get_type_hints(message)["role"]))


def test_both_pages_mean_the_same_pipeline_model() -> None:
    assert named("penstock.pipelines", "PipelineModel") is named(
        "penstock.pipelines.pipeline", "PipelineModel"
    )


def test_a_context_meets_the_protocol_of_the_page() -> None:
    page, own = CORE["InputContext"], CORE["TextContext"]
    assert set(page.attributes.split()) <= set(own.attributes.split())
    assert page.methods == own.methods


@pytest.mark.parametrize(
    ("page", "ours", "fault"),
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
        ("(a)", lambda a, b=1: None, ["b is ours: it must be keyword-only with a default"]),
        ("(a)", lambda a, *, b: None, ["b is ours: it must be keyword-only with a default"]),
    ],
)
def test_a_wrong_signature_is_found(page: str, ours: Callable[..., Any], fault: list[str]) -> None:
    assert faults(parse(page), parameters_of(ours)) == fault


def faults(page: list[inspect.Parameter], ours: list[inspect.Parameter]) -> list[str]:
    """Return the parameters of a page that a signature of ours lacks."""
    found = []
    by_name = {parameter.name: parameter for parameter in ours}
    for expected in page:
        actual = by_name.get(expected.name)
        if actual is None:
            found.append(f"{expected.name} is missing")
            continue
        if actual.kind is not expected.kind:
            kinds = f"{actual.kind.description}, on the page {expected.kind.description}"
            found.append(f"{expected.name}: {kinds}")
        if not _same_default(actual.default, expected.default):
            found.append(f"{expected.name}: default {_shown(actual)}, on the page {_shown(expected)}")
    if found:
        return found
    if positional(page) != positional(p for p in ours if p.name in {q.name for q in page}):
        found.append(
            f"positional parameters are {', '.join(positional(ours))},"
            f" on the page {', '.join(positional(page))}"
        )
    for extra in ours:
        of_page = extra.name in {parameter.name for parameter in page}
        if not of_page and not extra.name.startswith("_") and not _keyword_with_default(extra):
            found.append(f"{extra.name} is ours: it must be keyword-only with a default")
    return found


def named(module: str, name: str) -> Any:
    return getattr(import_module(module), name)


def parameters_of(function: Callable[..., Any]) -> list[inspect.Parameter]:
    return list(inspect.signature(function).parameters.values())


def positional(parameters: Iterable[inspect.Parameter]) -> list[str]:
    return [parameter.name for parameter in parameters if parameter.kind is not KEYWORD_ONLY]


def _same_default(actual: Any, expected: Any) -> bool:
    if expected is OPTIONAL:
        return True
    if expected is FACTORY:
        return repr(actual) == repr(FACTORY) or actual == ()
    if expected is inspect.Parameter.empty:
        return actual is inspect.Parameter.empty
    return bool(actual == expected)


def _shown(parameter: inspect.Parameter) -> str:
    return "none" if parameter.default is inspect.Parameter.empty else repr(parameter.default)


def _keyword_with_default(parameter: inspect.Parameter) -> bool:
    return parameter.kind is KEYWORD_ONLY and parameter.default is not inspect.Parameter.empty
