"""Which routes of model servers the gateway's clients reach."""

from __future__ import annotations

import random
import re
from posixpath import normpath
from urllib.parse import unquote

import pytest

from penstock.gateway.requests.apis import VECTOR_APIS
from penstock.gateway.requests.relayed_routes import RelayedRoutes
from penstock.gateway.requests.request_body import GENERATION_PATHS
from penstock.http.access_keys import ADMINISTRATIVE
from penstock.http.errors import ApiError

RELAYED = [
    "POST /api/chat",
    "POST /api/generate",
    "POST /api/show",
    "POST /v1beta/models/org/m:8b:generateContent",
    "POST /v1/models/m:streamGenerateContent",
    "POST /v1beta/models/m:countTokens",
    "GET /v1beta/models",
    "GET /v1beta/models/m",
    "GET /api/tags",
    "GET /api/ps",
    "GET /api/version",
    *(f"POST {path}" for path in sorted(GENERATION_PATHS)),
    *(f"POST {path}" for path in sorted(VECTOR_APIS)),
    "POST /v1beta/models/m:embedContent",
    "POST /v1beta/models/org/m:batchEmbedContents",
    "POST /tokenize",
    "POST /detokenize",
    "POST /generate",
    "POST /v1/audio/transcriptions",
    "POST /v1/messages/count_tokens",
    "GET /v1/models",
    "GET /v1/models/org/name",
    "GET /v1/responses/resp_1",
    "POST /v1/responses/resp_1/cancel",
    "DELETE /v1/files/file-1",
    "POST /completion",
    "POST /infill",
]
ADMINISTERS = [
    "POST /api/pull",
    "POST /v1beta/models/m:tune",
    "POST /v1beta/models/../../sleep;x:generateContent",
    "POST /v1beta/models/a/../../../sleep/x:generateContent",
    "POST /v1beta/models/%2e:generateContent",
    "DELETE /v1beta/models/m",
    "DELETE /api/delete",
    *(f"POST {path}" for path in sorted(ADMINISTRATIVE)),
    # vLLM
    "POST /pause",
    "POST /resume",
    "POST /update_weights",
    "POST /init_weight_transfer_engine",
    "POST /abort_requests",
    "POST /reset_mm_cache",
    "POST /reset_encoder_cache",
    "POST /collective_rpc",
    "POST /scale_elastic_ep",
    "POST /v1/load_lora_adapter",
    "POST /v1/unload_lora_adapter",
    "GET /server_info",
    # SGLang
    "POST /flush_cache",
    "POST /update_weights_from_disk",
    "POST /release_memory_occupation",
    "POST /resume_memory_occupation",
    "POST /pause_generation",
    "POST /continue_generation",
    "POST /set_internal_state",
    "POST /configure_logging",
    "POST /abort_request",
    "POST /start_expert_distribution_record",
    "GET /get_server_info",
    # llama.cpp
    "POST /slots/0",
    "GET /slots",
    "POST /lora-adapters",
    "POST /props",
    "POST /models/load",
    "POST /v1/models/load",
    "DELETE /v1/models/m",
    # ways around a list of names
    "POST /llm/sleep",
    "GET /foo/admin/engines",
    "GET /admin",
    "POST /sleep/",
    "POST //sleep",
    "POST /%61dmin/engines",
    "POST /v1/../sleep",
    "POST /v1/files/../../sleep",
    "POST /v1/files/./x",
    "POST /v1/files/%2e%2e/%2e%2e/sleep",
    "POST /v1/files/..\\..\\sleep",
    "POST /v1",
    "POST /v1/",
    "POST sleep",
    "OPTIONS *",
]


# ways around a list of names, once more: they mean another route to some server
AMBIGUOUS = [
    "POST /v1/files/..;/sleep",
    "POST /v1/files/.;x/y",
    "POST /v1/files/x;/..",
    "POST /v1/files/\x00/x",
    "POST /v1/files/a\r\nb",
    "POST /v1/files//..//..//sleep",
    "POST /v1/chat/completions#x",
    "POST /v1/chat/completions?x",
    "POST /v1/chat/completions;x",
    "POST /v1//sleep",
    "POST ///sleep///",
]


WRITES = [
    f"{method} {path}"
    for method in ("PUT", "PATCH", "DELETE", "TRACE")
    for path in ("/v1/chat/completions", "/V1/Chat/Completions", "/v1/messages", "/tokenize", "/infill")
] + [f"{method} /v1/embeddings" for method in ("PUT", "PATCH", "TRACE")]
"""No inference server has these methods there."""


def check(routes: RelayedRoutes, method: str, path: str) -> None:
    routes.check_route(method, routes.route(path))


@pytest.mark.parametrize("route", RELAYED)
def test_inference_is_relayed(route: str) -> None:
    check(RelayedRoutes(), *route.split(" "))
    with_prefix = RelayedRoutes(root_path="/llm")
    check(with_prefix, *route.split(" "))
    check(with_prefix, *route.replace(" /", " /llm/").split(" "))


@pytest.mark.parametrize("route", [*ADMINISTERS, *AMBIGUOUS, *WRITES])
def test_everything_else_is_refused(route: str) -> None:
    for path in (route, route.replace(" /", " /llm/")):
        for routes in (RelayedRoutes(), RelayedRoutes(root_path="/llm"), RelayedRoutes(["/other", "/x/*"])):
            with pytest.raises(ApiError) as refusal:
                check(routes, *path.split(" ", 1))
            assert (refusal.value.status, refusal.value.code) == (403, "administrative")
            assert "--allow-route" in refusal.value.message


@pytest.mark.parametrize(
    ("path", "route"),
    [
        ("/v1/chat/completions", "/v1/chat/completions"),
        ("/v1/chat/completions/", "/v1/chat/completions"),
        ("//v1//chat///completions", "/v1/chat/completions"),
        ("/V1/Chat/Completions", "/v1/chat/completions"),
        ("/llm/v1/messages", "/v1/messages"),
        ("//llm//v1/messages/", "/v1/messages"),
        ("/llm/llm/v1/messages", "/llm/v1/messages"),
        ("/llmx/v1/messages", "/llmx/v1/messages"),
        ("/v1/files/Name", "/v1/files/Name"),
        ("/llm", "/"),
        ("/", "/"),
        ("//", "/"),
        ("*", "*"),
    ],
)
def test_the_route_that_servers_may_take_a_path_for(path: str, route: str) -> None:
    assert RelayedRoutes(root_path="/llm").route(path) == route


@pytest.mark.parametrize(
    ("method", "target", "relayed"),
    [
        ("POST", b"/v1/completions/?a=/", b"/v1/completions?a=/"),
        ("POST", b"/llm//v1/chat/completions//", b"/llm//v1/chat/completions"),
        ("GET", b"/v1/models/org%2Fm/", b"/v1/models/org%2Fm"),
        ("POST", b"/v1beta/models/m:generateContent/?alt=sse", b"/v1beta/models/m:generateContent?alt=sse"),
        ("POST", b"/v1/embeddings?q=/", b"/v1/embeddings?q=/"),
        ("GET", b"/files/", b"/files/"),
    ],
)
def test_endpoints_get_the_path_without_its_slash(method: str, target: bytes, relayed: bytes) -> None:
    """What --allow-route names besides may need it."""
    routes = RelayedRoutes(["/*"], root_path="/llm")
    route = routes.route(unquote(target.partition(b"?")[0].decode()))
    assert routes.target(method, route, target) == relayed


@pytest.mark.parametrize(
    "path", ["/chat/completions", "/v1/v1/chat/completions/", "/openai/chat/completions"]
)
def test_a_refusal_names_the_route_that_was_meant(path: str) -> None:
    with pytest.raises(ApiError, match=r"Did you mean /v1/chat/completions\?"):
        check(RelayedRoutes(), "POST", path)


@pytest.mark.parametrize(
    ("allowed", "relayed", "refused"),
    [
        ("/abort_request", ["POST /abort_request", "GET /abort_request/"], ["POST /abort_request/x"]),
        ("POST /abort_request", ["POST /abort_request"], ["GET /abort_request"]),
        (
            "GET /slots/*",
            ["GET /slots/0", "GET /slots/0/x"],
            ["POST /slots/0", "GET /slots", "GET /slots/../x"],
        ),
        ("/*", ["DELETE /anything"], ["POST /%61", "POST /a/../b"]),
    ],
)
def test_further_routes_are_allowed_by_name(allowed: str, relayed: list[str], refused: list[str]) -> None:
    routes = RelayedRoutes([allowed])
    for route in relayed:
        check(routes, *route.split(" "))
    for route in refused:
        with pytest.raises(ApiError):
            check(routes, *route.split(" "))


PIECES = (
    "/",
    "//",
    "/v1",
    "v1",
    "/V1",
    "files",
    "/chat",
    "/completions",
    "/c%6fmpletions",
    "/Messages",
    "/llm",
)
PIECES += (
    "..",
    ".",
    "%2e%2e",
    "%252e%252e",
    "%2f",
    "%252f",
    "\\",
    "%5c",
    ";x",
    "..;",
    "%00",
    "%0a",
    "#",
    "%23",
)
PIECES += ("%3f", "%20", "sleep", "/sleep", "/admin/engines", "/x")


def readings(target: str) -> set[str]:
    """The paths for which some server takes a target."""
    found = {target}
    for _ in range(3):
        found |= {unquote(each) for each in found}
    found |= {each.replace("\\", "/") for each in found}
    found |= {re.sub(";[^/]*", "", each) for each in found}
    found |= {re.split("[?#\0]", each)[0] for each in found}
    found |= {re.sub("/+", "/", each) for each in found}
    found |= {normpath(each) for each in found}
    found = {each.lower().rstrip("/") for each in found}
    return found | {each.removeprefix("/llm") for each in found}


def test_no_server_takes_what_is_relayed_for_another_route() -> None:
    rng, routes, passed = random.Random(1), RelayedRoutes(root_path="/llm"), 0
    while passed < 300:
        target = rng.choice(["/", "/v1", "/llm"]) + "".join(rng.choices(PIECES, k=rng.randint(1, 4)))
        route = routes.route(unquote(target))
        try:
            routes.check_route("POST", route)
        except ApiError:
            continue
        passed += 1
        paths = readings(target)
        assert not any(path.startswith(("/sleep", "/admin")) for path in paths), target
        assert route in GENERATION_PATHS or not paths & GENERATION_PATHS, target
