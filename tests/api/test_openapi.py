from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from penstock.api.routes.openapi import openapi_document
from penstock.dialects.chat.request_schema import ChatCompletionRequest
from penstock.dialects.completions.request_schema import CompletionRequest

DOCUMENT = openapi_document("1.2.3")


def references(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        yield from (value for key, value in node.items() if key == "$ref")
        node = list(node.values())
    if isinstance(node, list):
        for item in node:
            yield from references(item)


def operations(document: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    return {
        (method, path): made
        for path, methods in document["paths"].items()
        for method, made in methods.items()
    }


def test_every_route_is_there() -> None:
    assert set(operations(DOCUMENT)) == {
        ("get", "/v1/models"),
        ("get", "/v1/models/{model}"),
        ("post", "/v1/completions"),
        ("post", "/v1/responses/compact"),
        ("post", "/v1/chat/completions"),
        ("post", "/v1/chat/completions/render"),
        ("post", "/v1/chat/completions/derender"),
        ("post", "/v1/completions/derender"),
        ("post", "/v1/completions/render"),
        ("post", "/v1/responses"),
        ("post", "/v1/responses/input_tokens"),
        ("get", "/v1/responses/{response_id}"),
        ("delete", "/v1/responses/{response_id}"),
        ("post", "/v1/responses/{response_id}/cancel"),
        ("get", "/v1/responses/{response_id}/input_items"),
        ("post", "/inference/v1/generate"),
        ("post", "/generate"),
        ("post", "/v1beta/models/{model}:generateContent"),
        ("post", "/v1beta/models/{model}:streamGenerateContent"),
        ("post", "/v1beta/models/{model}:countTokens"),
        ("get", "/v1beta/models"),
        ("get", "/v1beta/models/{model}"),
        ("post", "/v1beta/models/{model}:embedContent"),
        ("post", "/v1beta/models/{model}:batchEmbedContents"),
        ("post", "/v1/embeddings"),
        ("post", "/pooling"),
        ("post", "/classify"),
        ("post", "/score"),
        ("post", "/v1/score"),
        ("post", "/rerank"),
        ("post", "/v1/rerank"),
        ("post", "/v2/rerank"),
        ("post", "/v1/embed"),
        ("post", "/v2/embed"),
        ("post", "/embed"),
        ("post", "/embed_all"),
        ("post", "/predict"),
        ("post", "/similarity"),
        ("post", "/api/embed"),
        ("post", "/api/embeddings"),
        ("post", "/api/chat"),
        ("post", "/api/generate"),
        ("post", "/api/show"),
        ("get", "/api/tags"),
        ("get", "/api/ps"),
        ("get", "/api/version"),
        ("post", "/invocations"),
        ("post", "/tokenize"),
        ("get", "/tokenizer_info"),
        ("post", "/detokenize"),
        ("get", "/health"),
        ("post", "/v1/messages"),
        ("post", "/v1/messages/count_tokens"),
        ("get", "/ready"),
        ("get", "/ping"),
        ("post", "/ping"),
        ("get", "/version"),
        ("get", "/load"),
        ("get", "/admin/engines"),
        ("post", "/admin/engines/{rank}/drain"),
        ("post", "/admin/engines/{rank}/resume"),
        ("post", "/reset_prefix_cache"),
        ("post", "/sleep"),
        ("post", "/wake_up"),
        ("get", "/is_sleeping"),
        ("post", "/v1/load_lora_adapter"),
        ("post", "/v1/unload_lora_adapter"),
        ("get", "/admin/adapters"),
        ("post", "/admin/adapters"),
        ("delete", "/admin/adapters/{name}"),
        ("post", "/start_profile"),
        ("post", "/stop_profile"),
        ("post", "/pause"),
        ("post", "/resume"),
        ("get", "/is_paused"),
        ("post", "/abort_requests"),
        ("post", "/flush_cache"),
        ("post", "/init_weight_transfer"),
        ("post", "/init_weight_transfer_engine"),
        ("post", "/update_weights"),
        ("get", "/weight_version"),
        ("get", "/weights_checksum"),
        ("get", "/metrics"),
        ("get", "/status"),
        ("get", "/openapi.json"),
        ("get", "/"),
        ("get", "/docs"),
    }


def test_it_is_json_and_its_references_resolve() -> None:
    document = json.loads(json.dumps(DOCUMENT))
    schemas = document["components"]["schemas"]
    assert not [name for name in schemas if "." in name], "two types have one name"
    assert document["info"]["version"] == "1.2.3"
    assert {name.rpartition("/")[2] for name in references(document)} <= set(schemas)


def test_operations_have_names_of_their_own() -> None:
    names = [operation["operationId"] for operation in operations(DOCUMENT).values()]
    assert len(set(names)) == len(names)


def test_request_schemas_have_every_field() -> None:
    schemas = DOCUMENT["components"]["schemas"]
    for type in (CompletionRequest, ChatCompletionRequest):
        schema = schemas[type.__name__]
        assert set(schema["properties"]) == set(type.__struct_fields__)
        assert schema.get("additionalProperties") is not False
    assert schemas["ChatCompletionRequest"]["required"] == ["messages"]


def test_unsupported_fields_say_so() -> None:
    properties = DOCUMENT["components"]["schemas"]["CompletionRequest"]["properties"]
    assert properties["suffix"]["description"].startswith("Not supported: ")
    assert not properties["stop"]["description"].startswith("Not supported: ")


def test_generating_routes_declare_both_replies_and_every_error() -> None:
    kinds = {"application/json", "text/event-stream", "application/vnd.safetensors"}
    for path in ("/v1/completions", "/v1/chat/completions"):
        responses = operations(DOCUMENT)["post", path]["responses"]
        assert set(responses) == {"200", "400", "404", "405", "408", "413", "415", "429", "500", "503"}
        assert set(responses["200"]["content"]) == kinds
    assert kinds - set(operations(DOCUMENT)["post", "/v1/responses"]["responses"]["200"]["content"]) == {
        "application/vnd.safetensors"
    }


def test_without_the_page_its_routes_are_absent() -> None:
    paths = openapi_document("1", page=False)["paths"]
    assert not paths.keys() & {"/", "/docs"}


def test_a_key_guards_all_but_the_page_and_the_health_routes() -> None:
    administered = openapi_document("1", admin_key=True)["paths"]
    assert "security" in administered["/sleep"]["post"]
    assert {"401", "403"} <= administered["/sleep"]["post"]["responses"].keys()
    assert "security" not in administered["/v1/models"]["get"]
    guarded = openapi_document("1", api_key=True)
    open_routes = {path for (_, path), made in operations(guarded).items() if "security" not in made}
    assert open_routes == {"/health", "/ready", "/ping", "/", "/docs"}
    assert all("401" in made["responses"] for made in operations(guarded).values() if "security" in made)
    assert "securitySchemes" not in DOCUMENT["components"]
    assert not any("security" in made for made in operations(DOCUMENT).values())
