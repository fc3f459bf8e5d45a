"""Valid and invalid requests that schemathesis generates from the server's OpenAPI document.

These tests run only if schemathesis is installed, because it has a dozen dependencies.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from support.live_server import live_server
from support.random_draws import num_examples
from support.server_process import server_process

schemathesis: Any = pytest.importorskip("schemathesis", reason="needs the package schemathesis")

FEW_EXAMPLES = settings(
    max_examples=num_examples(5),
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
MANY_EXAMPLES = settings(FEW_EXAMPLES, max_examples=num_examples(150))


@pytest.fixture(scope="module")
def server_url() -> Iterator[str]:
    with live_server(adapters=("one",)) as server:
        yield server.url


def test_generated_requests_get_documented_responses(server_url: str) -> None:
    call_all_operations(server_url, FEW_EXAMPLES)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_many_generated_requests_get_documented_responses(tmp_path: Path) -> None:
    with server_process(tmp_path / "log", "--max-length", "64", "--enable-lora", "true") as server:
        call_all_operations(f"{server.url}/", MANY_EXAMPLES)
        server.wait_until_idle()
        assert server.complete()["usage"]["completion_tokens"] == 5
        assert server.metrics()["penstock_worker_restarts_total"] == 0


def call_all_operations(url: str, hypothesis_settings: settings) -> None:
    """Call each operation with requests that the OpenAPI document allows.

    Call each operation that has a body also with requests that the document forbids.
    """
    schema = schemathesis.openapi.from_url(f"{url}openapi.json")
    operations = [result.ok() for result in schema.get_all_operations()]
    assert len(operations) >= 10
    for operation in operations:
        for mode in schemathesis.GenerationMode:
            if mode is schemathesis.GenerationMode.POSITIVE or "requestBody" in operation.definition.raw:
                call_operation(operation, mode, hypothesis_settings)


def call_operation(operation: Any, mode: Any, hypothesis_settings: settings) -> None:
    @hypothesis_settings
    @given(case=operation.as_strategy(generation_mode=mode))
    def check(case: Any) -> None:
        response = case.call()
        status = response.status_code
        details = (operation.label, case.body, response.text[:500])
        assert status < 500 or (status == 503 and "retry-after" in response.headers), details
        assert str(status) in operation.definition.raw["responses"] or status in (404, 405), details
        if status >= 400:
            error = json.loads(response.text)["error"]
            assert error.keys() == {"message", "type", "param", "code"}, details
        elif response.headers["content-type"][0].startswith("application/json"):
            case.validate_response(response, checks=[check_conformance])
        if mode is schemathesis.GenerationMode.NEGATIVE and operation.path not in ADAPTER_ROUTES:
            assert status >= 400, details

    check()


ADAPTER_ROUTES = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")


def check_conformance(context: Any, response: Any, case: Any) -> None:
    """Check that a response body conforms to the OpenAPI document."""
    schemathesis.specs.openapi.checks.response_schema_conformance(context, response, case)
