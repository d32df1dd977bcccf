"""vLLM 0.32's recorded replies, replayed against the engines on the model they were recorded from."""

from __future__ import annotations

import httpx
import pytest

from tests.golden_replies import load_cases
from tests.integration.golden import Allowed, Difference, allowed_differences, differences
from tests.integration.server import Server

CASES = load_cases()
ALLOWED = allowed_differences()

pytestmark = pytest.mark.slow


@pytest.fixture(
    scope="module",
    params=["tiny_llama", "tiny_llama_in_vllm", "tiny_llama_attached"],
    ids=["torch", "vllm", "attached"],
)
def replayed(request: pytest.FixtureRequest) -> dict[str, list[Difference]]:
    """What differs, by name of the case."""
    server: Server = request.getfixturevalue(request.param)
    with httpx.Client(base_url=server.url, timeout=60) as client:
        return {
            case["name"]: differences(
                case,
                client.request(
                    case["method"],
                    case["path"],
                    content=case["request_body"],
                    headers=case["request_headers"],
                ),
            )
            for case in CASES
        }


@pytest.mark.parametrize("name", [case["name"] for case in CASES])
def test_replies_differ_only_where_it_is_written_down(
    replayed: dict[str, list[Difference]], name: str
) -> None:
    unexpected = [each for each in replayed[name] if not any(row.covers(each) for row in ALLOWED)]
    assert not unexpected, "\n".join(map(str, unexpected))


@pytest.mark.parametrize("row", ALLOWED, ids=lambda row: " ".join(row.cases + row.where))
def test_what_is_written_down_still_differs(
    request: pytest.FixtureRequest, replayed: dict[str, list[Difference]], row: Allowed
) -> None:
    if request.node.callspec.params["replayed"] != "tiny_llama":
        pytest.skip("the table is the torch engine's; vLLM's own engine differs in less")
    found = [each for listed in replayed.values() for each in listed]
    assert not [part for part in row.parts() if not any(map(part.covers, found))]
