"""Requests made up from /openapi.json: replies are what the document says, and never the server's fault."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from schemathesis import checks
from schemathesis.core.result import Ok
from schemathesis.schemas import APIOperation

from penstock.api.routes.openapi import openapi_document
from tests.integration.server import Server

SCHEMA = schemathesis.openapi.from_dict(openapi_document("0"))
# The first two leave the others without an engine, the last one waits for a trainer.
LEFT_OUT = ("POST /admin/engines/{rank}/drain", "POST /sleep", "POST /init_weight_transfer")
OPERATIONS = [
    result.ok()
    for result in SCHEMA.get_all_operations()
    if isinstance(result, Ok) and result.ok().label not in LEFT_OUT
]
GENERATING = [operation for operation in OPERATIONS if operation.label.endswith("completions")]
CHECKS = [
    checks.not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
]


@pytest.fixture(scope="module")
def fast(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Tokens as fast as they can be made: most requests ask for as many as the context holds."""
    options = (
        "--engine",
        "synthetic",
        "--synthetic-step-ms",
        "0",
        "--runner",
        "both",
        "--max-model-len",
        "64",
    )
    with Server(*options, directory=tmp_path_factory.mktemp("fast")) as running:
        yield running


def check(operation: APIOperation, server: Server, examples: int, **fields: Any) -> None:
    """Send made-up requests, with ``fields`` in their bodies."""

    @seed(1)
    @settings(
        max_examples=examples,
        derandomize=False,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
    )
    @given(case=operation.as_strategy())
    def run(case: schemathesis.Case) -> None:
        if fields and isinstance(case.body, dict):
            case.body |= fields
        if "timeout" in case.query:
            case.query["timeout"] = 60  # the machine may be slow
        response = case.call(base_url=server.url, timeout=60)
        case.validate_response(response, checks=CHECKS)

    run()


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.label)
def test_replies_are_those_of_the_document(fast: Server, operation: APIOperation) -> None:
    check(operation, fast, 5)


@pytest.mark.slow
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.label)
def test_replies_to_many_requests_are_those_of_the_document(fast: Server, operation: APIOperation) -> None:
    check(operation, fast, 300 if operation.body else 30)


@pytest.mark.parametrize("operation", GENERATING, ids=lambda operation: operation.label)
def test_events_are_those_of_the_document(fast: Server, operation: APIOperation) -> None:
    check(operation, fast, 10, stream=True)


@pytest.mark.slow
@pytest.mark.parametrize("operation", GENERATING, ids=lambda operation: operation.label)
def test_events_of_many_streams_are_those_of_the_document(fast: Server, operation: APIOperation) -> None:
    check(operation, fast, 300, stream=True)
