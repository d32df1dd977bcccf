"""Which routes of model servers the gateway's clients reach."""

from __future__ import annotations

import pytest

from penstock.gateway.requests.relayed_routes import check_relayed
from penstock.gateway.requests.request_body import GENERATION_PATHS
from penstock.http.access_keys import ADMINISTRATIVE
from penstock.http.errors import ApiError

RELAYED = [
    *(f"POST {path}" for path in sorted(GENERATION_PATHS)),
    "POST /tokenize",
    "POST /detokenize",
    "POST /generate",
    "POST /rerank",
    "POST /v1/rerank",
    "POST /v2/rerank",
    "POST /score",
    "POST /v1/embeddings",
    "POST /pooling",
    "POST /classify",
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


@pytest.mark.parametrize("route", RELAYED)
def test_inference_is_relayed(route: str) -> None:
    check_relayed(*route.split(" "))


@pytest.mark.parametrize("route", ADMINISTERS)
def test_everything_else_is_refused(route: str) -> None:
    with pytest.raises(ApiError) as refusal:
        check_relayed(*route.split(" "))
    assert (refusal.value.status, refusal.value.code) == (403, "administrative")
    assert route[:200] in refusal.value.message
