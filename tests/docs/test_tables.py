"""The tables of the pages agree with the code."""

from __future__ import annotations

import re
import runpy
from collections.abc import Iterator
from typing import Any

import pytest
from support.documents import ROOT

from penstock.errors import UnsupportedSchemaError
from penstock.grammar.schema.shapes import REFUSED_KEYWORDS
from penstock.grammar.schema_keywords import check_json_schema
from penstock.pipelines.registry import PIPELINE_REGISTRY
from penstock.serve.api import schemas
from penstock.weights import gguf_names

TOOL = runpy.run_path(str(ROOT / "tools" / "write_tables.py"))
SERVE_FOLDER = ROOT / "penstock" / "serve"


@pytest.mark.parametrize("name", TOOL["PAGES"])
def test_a_page_is_current(name: str) -> None:
    assert (ROOT / "docs" / name).read_text() == TOOL["page"](name), "run: python tools/write_tables.py"


def test_every_table_is_on_a_page() -> None:
    text = "".join((ROOT / "docs" / name).read_text() for name in TOOL["PAGES"])
    assert sorted(re.findall(r"<!-- table: (\w+) -->", text)) == sorted(TOOL["TABLES"])


@pytest.mark.parametrize("keyword", TOOL["SUPPORTED_SCHEMAS"])
def test_a_supported_keyword_is_accepted(keyword: str) -> None:
    schema = TOOL["SUPPORTED_SCHEMAS"][keyword]
    assert keyword in str(schema)
    check_json_schema(schema)


@pytest.mark.parametrize("keyword", TOOL["KEYWORD_LIMITS"])
def test_a_keyword_beyond_its_limit_is_refused(keyword: str) -> None:
    with pytest.raises(UnsupportedSchemaError) as caught:
        check_json_schema(TOOL["KEYWORD_LIMITS"][keyword][1])
    assert caught.value.keyword == keyword


@pytest.mark.parametrize("keyword", REFUSED_KEYWORDS)
def test_an_unsupported_keyword_is_refused_by_name(keyword: str) -> None:
    assert keyword not in TOOL["SUPPORTED_SCHEMAS"]
    with pytest.raises(UnsupportedSchemaError) as caught:
        check_json_schema({"then": {}, keyword: {}} if keyword == "if" else {keyword: {}})
    assert caught.value.keyword == keyword


def test_every_family_of_gguf_files_is_documented() -> None:
    documented_families = {name for names in TOOL["GGUF_NAMES"].values() for name in names}
    assert documented_families == set(gguf_names._FAMILIES)
    assert set(TOOL["GGUF_NAMES"]) <= {candidate.name for candidate in PIPELINE_REGISTRY.architectures}


def test_every_error_code_is_documented() -> None:
    page = (ROOT / "docs" / "server.md").read_text()
    missing_codes = {code for code in _error_codes() if f"`{code}`" not in page}
    assert not missing_codes


def _error_codes() -> Iterator[str]:
    for file in SERVE_FOLDER.rglob("*.py"):
        yield from re.findall(r'\bcode="(\w+)"', file.read_text())
    problems = (SERVE_FOLDER / "http" / "problems.py").read_text()
    yield from re.findall(r'INVALID_REQUEST, "(\w+)"', problems)
    yield from re.findall(r'"(?:missing|server_error|\w+_error)", "(\w+)"', problems)
    yield from re.findall(r'\{"missing": "(\w+)"\}', problems)


def test_the_fields_marked_as_extensions_are_the_fields_that_openai_lacks() -> None:
    from openai.types import completion_create_params as of_completions
    from openai.types.chat import completion_create_params as of_chats

    openai_fields: set[str] = set()
    for module in (of_completions, of_chats):
        for name in ("Base", "NonStreaming", "Streaming"):
            openai_fields |= set(getattr(module, f"CompletionCreateParams{name}").__annotations__)
    body_types: tuple[Any, ...] = (schemas.ChatBody, schemas.CompletionBody)
    accepted_names = {
        field.alias or name for body_type in body_types for name, field in body_type.model_fields.items()
    }
    assert accepted_names - openai_fields == set(TOOL["PENSTOCK_FIELDS"])
