"""``/openapi.json``: the OpenAPI document of all routes."""

from __future__ import annotations

from typing import Any

import msgspec

from penstock.api.routes import stored_response_schemas
from penstock.api.routes.adapter_schemas import (
    LoadAdapterRequest,
    LoadLoraAdapterRequest,
    UnloadLoraAdapterRequest,
)
from penstock.api.routes.operations import MODES, PAUSE_MODES, AbortRequest
from penstock.api.routes.response_schemas import REPLIES
from penstock.api.routes.tokenize import UNSUPPORTED, DetokenizeRequest, TokenizeRequest
from penstock.api.routes.weight_schemas import (
    InitWeightTransferEngineRequest,
    InitWeightTransferRequest,
    UpdateWeightsRequest,
)
from penstock.dialects.openapi_schema import (
    BODY_ERRORS,
    EVENTS,
    GENERATION_ERRORS,
    REQUEST_ID,
    SHARED,
    Route,
    ref,
)
from penstock.dialects.registry import DESCRIPTIONS
from penstock.generation.pooling.vector_text import OCTETS
from penstock.generation.replies.safetensors_writer import SAFETENSORS
from penstock.http.access_keys import is_administrative
from penstock.http.operation_options import DEFAULT_TIMEOUT_S, MAX_TIMEOUT_S, MIN_TIMEOUT_S
from penstock.wire.messages import MAX_IDEMPOTENCY_KEY_LENGTH

Json = dict[str, Any]

_REFERENCE = "#/components/schemas/{name}"
_UNSUPPORTED = {each.request: each.unsupported for each in DESCRIPTIONS} | {TokenizeRequest: UNSUPPORTED}
_SCHEMAS = SHARED | REPLIES | stored_response_schemas.SCHEMAS
_INVOKED = tuple(each for each in DESCRIPTIONS if each.invoked)
for _description in DESCRIPTIONS:
    _SCHEMAS |= _description.replies
_SCHEMAS |= {
    "Invocation": {
        "description": "A request of any of the generating routes.",
        "anyOf": [ref(str(each.route.body)) for each in _INVOKED],
    },
    "InvocationReply": {
        "description": "The reply of that route.",
        "anyOf": [ref(str(each.route.reply)) for each in _INVOKED],
    },
    "InvocationEvent": {
        "description": "An event of that route.",
        "anyOf": [ref(str(each.route.events)) for each in _INVOKED],
    },
}
_ERRORS = {
    400: "The body is not JSON, or a field has a value that is not allowed or not supported.",
    401: "No valid API key.",
    403: "Without API keys, this answers over a unix socket, or with --allow-loopback-admin; it may be off.",
    404: "No such model.",
    405: "Another method is needed.",
    409: "The key was used for something else, or another change is under way.",
    408: "The request did not arrive in time.",
    413: "The body is larger than --max-request-bytes.",
    415: "The body is compressed.",
    429: "Too many requests wait; the header Retry-After says when to try again.",
    500: "The server failed.",
    502: "Some engines failed; the receipts say which.",
    503: "No engine is ready, engines sleep, or the server is shutting down.",
    504: "Some engines did not answer in time; the receipts say which.",
}
_FAILED_OPERATION = (409, 502, 504)
_WITHOUT_RECEIPTS = {
    409: "Another request is under way, or came first.",
    502: "A process of the server has failed.",
    504: "A process of the server did not answer in time.",
}
"""Descriptions of errors on routes whose replies have no receipts."""
_EVENTS = (
    "With stream: server-sent events, of which this is one. Its data is JSON; that of the last one is "
    "`[DONE]`. A failure is an event with an Error, and nothing follows it."
)

_COLUMNS = (
    "For clients that accept it: tensors token_ids, logprobs, offsets and others, and __metadata__. With "
    "stream: frames, each a length of 8 bytes, little-endian, and such a file."
)
_MATRIX = {
    OCTETS: "For clients that accept it: the values of all inputs, one after the other; the header metadata "
    "says which are whose.",
    SAFETENSORS: "For clients that accept it: a tensor embeddings, with a row per input.",
}


def openapi_document(
    version: str, *, api_key: bool = False, admin_key: bool = False, root_path: str = "", page: bool = True
) -> Json:
    """OpenAPI 3.1 document of every route. ``api_key``: whether routes require a bearer token;
    ``admin_key``: whether administrative ones require one of their own; ``root_path``: prefix of their paths
    for clients; ``page``: whether the web page is served."""
    document: Json = {
        "openapi": "3.1.0",
        "info": {
            "title": "Penstock",
            "version": version,
            "summary": "Large language models over the OpenAI HTTP API.",
        },
        "paths": _paths(api_key, admin_key, page=page),
        "components": {"schemas": _request_schemas() | _SCHEMAS},
    }
    if root_path:
        document["servers"] = [{"url": root_path}]
    if api_key or admin_key:
        document["components"]["securitySchemes"] = {
            "apiKey": {"type": "http", "scheme": "bearer", "description": "One of the server's --api-key."}
        }
    return document


# -- routes


def _success(route: Route) -> Json:
    if not isinstance(route.reply, str):
        return route.reply
    content: Json = {"application/json": {"schema": ref(route.reply)}}
    if route.events is not None:
        schema = _events(route.events, route.error) if route.stream is EVENTS else _items(route)
        content[route.stream] = {"schema": schema}
    if route.columns:
        content[SAFETENSORS.decode()] = {
            "schema": {"type": "string", "format": "binary", "description": _COLUMNS}
        }
    if route.matrix:
        for kind, description in _MATRIX.items():
            content[kind.decode()] = {
                "schema": {"type": "string", "format": "binary", "description": description}
            }
    return {"description": _SCHEMAS[route.reply]["description"], "content": content}


def _events(name: str, error: str) -> Json:
    content = {"anyOf": [ref(name), ref(error)]}
    data = [
        {"type": "string", "contentMediaType": "application/json", "contentSchema": content},
        {"const": "[DONE]"},
    ]
    return {
        "type": "object",
        "description": _EVENTS,
        "required": ["data"],
        "properties": {"data": {"anyOf": data}},
    }


def _items(route: Route) -> Json:
    return {"description": route.stream_about, "anyOf": [ref(str(route.events)), ref(route.error)]}


def _plain(*kinds: str) -> Json:
    return {"description": "The document.", "content": {kind: {"schema": {}} for kind in kinds}}


_PAGE = "Page"
_OPEN_TAGS = ("Health", _PAGE)
"""Tags of routes that need no key."""


_YES: Json = {"description": "Yes.", "content": {"application/json": {"schema": {"type": "object"}}}}
_MODEL_NAME: Json = {
    "in": "path",
    "name": "model",
    "required": True,
    "description": "A served name.",
    "schema": {"type": "string", "minLength": 1},
}
_ADAPTER_NAME: Json = {
    "in": "path",
    "name": "name",
    "required": True,
    "description": "Name of a LoRA adapter.",
    "schema": {"type": "string", "minLength": 1},
}
_RANK: Json = {
    "in": "path",
    "name": "rank",
    "required": True,
    "description": "Number of an engine.",
    "schema": {"type": "integer", "minimum": 0},
}


def _parameter(name: str, description: str, schema: Json) -> Json:
    return {"in": "query", "name": name, "description": description, "schema": schema}


_KEY: Json = {
    "in": "header",
    "name": "Idempotency-Key",
    "description": "No engine does twice what has one key; another request with it gets the first receipts.",
    "schema": {"type": "string", "minLength": 1, "maxLength": MAX_IDEMPOTENCY_KEY_LENGTH},
}
_TIMEOUT = _parameter(
    "timeout",
    "Seconds to wait for engines.",
    {
        "type": "number",
        "minimum": MIN_TIMEOUT_S,
        "maximum": MAX_TIMEOUT_S,
        "default": DEFAULT_TIMEOUT_S,
    },
)
_LEVEL = _parameter(
    "level", "1 frees the KV cache and the device, 2 drops the weights.", {"enum": [1, 2], "default": 1}
)
_PAUSE_MODE = _parameter(
    "mode", "What becomes of streams that run.", {"enum": list(PAUSE_MODES), "default": PAUSE_MODES[0]}
)
_MODE = _parameter("mode", "What becomes of streams that run.", {"enum": list(MODES), "default": MODES[0]})


_ROUTES = (
    *(route for each in DESCRIPTIONS for route in (each.route, *each.more_routes)),
    *stored_response_schemas.ROUTES,
    Route(
        "post",
        "/invocations",
        "Generate",
        "invoke",
        "Answer a conversation or complete a prompt, by the field that the body has",
        "InvocationReply",
        errors=GENERATION_ERRORS,
        parameters=(REQUEST_ID,),
        body="Invocation",
        example=DESCRIPTIONS[0].route.example,
        events="InvocationEvent",
    ),
    Route("get", "/v1/models", "Models", "listModels", "List models", "ModelList"),
    Route(
        "get",
        "/v1/models/{model}",
        "Models",
        "getModel",
        "Describe a model",
        "Model",
        errors=(404,),
        parameters=(_MODEL_NAME,),
    ),
    Route(
        "post",
        "/tokenize",
        "Tokens",
        "tokenize",
        "Tokenize a prompt or a conversation",
        "Tokens",
        errors=BODY_ERRORS,
        body="TokenizeRequest",
        example={"prompt": "Hello, world"},
    ),
    Route(
        "post",
        "/detokenize",
        "Tokens",
        "detokenize",
        "The text of tokens",
        "Text",
        errors=BODY_ERRORS,
        body="DetokenizeRequest",
        example={"tokens": [1, 2, 3]},
    ),
    Route(
        "get",
        "/tokenizer_info",
        "Tokens",
        "tokenizerInfo",
        "The tokenizer's configuration, with --enable-tokenizer-info-endpoint",
        "TokenizerInfo",
        errors=(404,),
    ),
    Route("get", "/health", "Health", "health", "Whether the server lives", _YES),
    Route("get", "/ready", "Health", "ready", "Whether requests are taken", "Readiness", (503,)),
    Route("get", "/ping", "Health", "ping", "The same as /ready", "Readiness", (503,)),
    Route("post", "/ping", "Health", "pingPost", "The same as /ready", "Readiness", (503,)),
    Route("get", "/version", "Server", "version", "The server's version", "Version"),
    Route("get", "/load", "Server", "load", "Streams of the process that answers", "Load"),
    Route("get", "/admin/engines", "Server", "listEngines", "What the engines do", "Engines"),
    Route(
        "post",
        "/admin/engines/{rank}/drain",
        "Server",
        "drainEngine",
        "Give an engine no new streams; it finishes what it runs",
        "Engine",
        errors=(404, 503),
        parameters=(_RANK,),
    ),
    Route(
        "post",
        "/admin/engines/{rank}/resume",
        "Server",
        "resumeEngine",
        "Give a drained engine new streams again",
        "Engine",
        errors=(404, 503),
        parameters=(_RANK,),
    ),
    *(
        Route(
            "post",
            path,
            "Administration",
            operation,
            summary,
            "Operation",
            errors=(400, 409, 502, 503, 504),
            parameters=(*parameters, _TIMEOUT, _KEY),
        )
        for path, operation, summary, parameters in (
            ("/reset_prefix_cache", "resetPrefixCache", "Forget all prompts that were computed", ()),
            ("/sleep", "sleep", "Have all engines give their memory back", (_LEVEL, _MODE)),
            ("/wake_up", "wakeUp", "Have all engines take requests again", ()),
            ("/pause", "pause", "Have all engines compute no streams", (_PAUSE_MODE,)),
            ("/resume", "resume", "Have all engines compute streams again", ()),
            ("/flush_cache", "flushCache", "The same as /reset_prefix_cache, by SGLang's name", ()),
            ("/start_profile", "startProfile", "Record what engines do", ()),
            ("/stop_profile", "stopProfile", "Write the profiles to --profile-dir", ()),
        )
    ),
    *(
        Route(
            "post",
            path,
            "Administration",
            operation,
            summary,
            "Operation",
            errors=(*BODY_ERRORS, 403, 409, 502, 503, 504),
            parameters=(_TIMEOUT, _KEY),
            body=body,
            example=example,
        )
        for path, operation, summary, body, example in (
            (
                "/abort_requests",
                "abortRequests",
                "End requests with what they have",
                "AbortRequest",
                {"request_ids": ["cmpl-1"]},
            ),
            (
                "/init_weight_transfer_engine",
                "initWeightTransferEngine",
                "Have the workers of vLLM's engines join a trainer, which sends weights",
                "InitWeightTransferEngineRequest",
                {"init_info": {"packed": False}},
            ),
            (
                "/update_weights",
                "updateWeights",
                "Have all engines compute with other weights",
                "UpdateWeightsRequest",
                {"path": "/models/step-7", "weight_version": "step-7"},
            ),
        )
    ),
    *(
        Route(
            "post",
            path,
            "Adapters",
            operation,
            summary,
            "AdapterOperation",
            errors=(*BODY_ERRORS, 403, 404, 409, 502, 503, 504),
            parameters=(_TIMEOUT, _KEY),
            body=body,
            example=example,
        )
        for path, operation, summary, body, example in (
            (
                "/v1/load_lora_adapter",
                "loadLoraAdapter",
                "Have all engines load a LoRA adapter, as vLLM's server does",
                "LoadLoraAdapterRequest",
                {"lora_name": "sql", "lora_path": "sql-v2", "load_inplace": True},
            ),
            (
                "/v1/unload_lora_adapter",
                "unloadLoraAdapter",
                "Take no more requests for a LoRA adapter, as vLLM's server does; streams finish",
                "UnloadLoraAdapterRequest",
                {"lora_name": "sql"},
            ),
            (
                "/admin/adapters",
                "loadAdapter",
                "Have all engines load a LoRA adapter",
                "LoadAdapterRequest",
                {"name": "sql", "path": "sql-v2", "replace": True},
            ),
        )
    ),
    Route("get", "/admin/adapters", "Adapters", "listAdapters", "List the LoRA adapters", "Adapters"),
    Route(
        "delete",
        "/admin/adapters/{name}",
        "Adapters",
        "unloadAdapter",
        "Take no more requests for a LoRA adapter; streams finish",
        "AdapterOperation",
        errors=(400, 404, 409, 502, 503, 504),
        parameters=(_ADAPTER_NAME, _TIMEOUT, _KEY),
    ),
    Route("get", "/is_sleeping", "Administration", "isSleeping", "Whether engines sleep", "Sleeping"),
    Route("get", "/is_paused", "Administration", "isPaused", "Whether engines are paused", "Paused"),
    Route(
        "post",
        "/init_weight_transfer",
        "Administration",
        "initWeightTransfer",
        "Join a trainer's process group, which broadcasts weights",
        "WeightTransfer",
        errors=(*BODY_ERRORS, 403, 409, 502, 504),
        parameters=(_TIMEOUT,),
        body="InitWeightTransferRequest",
        example={"master_address": "127.0.0.1", "master_port": 29500, "rank": 1, "world_size": 2},
    ),
    Route("get", "/weight_version", "Administration", "weightVersion", "Versions of the weights", "Weights"),
    Route(
        "get",
        "/weights_checksum",
        "Administration",
        "weightsChecksum",
        "A checksum of each engine's weights",
        "Operation",
        errors=(400, 409, 502, 503, 504),
        parameters=(_TIMEOUT, _KEY),
    ),
    Route("get", "/metrics", "Server", "metrics", "Metrics for Prometheus", _plain("text/plain")),
    Route("get", "/openapi.json", "Server", "openapi", "This document", _plain("application/json")),
    Route("get", "/status", "Server", "status", "What the whole fleet does", "Status"),
    Route(
        "get",
        "/",
        _PAGE,
        "home",
        "A page with chat, API reference and live status for browsers; links for programs",
        _plain("text/html", "application/json"),
    ),
    Route("get", "/docs", _PAGE, "docs", "The same page", _plain("text/html")),
)


def _paths(api_key: bool, admin_key: bool, *, page: bool) -> Json:
    paths: Json = {}
    for route in _ROUTES:
        if route.tag == _PAGE and not page:
            continue
        administers = is_administrative(route.path)
        guarded = (api_key and route.tag not in _OPEN_TAGS) or (admin_key and administers)
        restricted = administers and (admin_key or not api_key)
        paths.setdefault(route.path, {})[route.method] = _operation(
            route, guarded=guarded, restricted=restricted
        )
    return paths


def _operation(route: Route, *, guarded: bool, restricted: bool) -> Json:
    statuses = sorted({*route.errors, 405, *([401] if guarded else []), *([403] if restricted else [])})
    errors = {str(status): _error(status, route) for status in statuses}
    operation: Json = {
        "summary": route.summary,
        "operationId": route.operation,
        "tags": [route.tag],
        "responses": {"200": _success(route)} | errors,
    }
    if route.parameters:
        operation["parameters"] = list(route.parameters)
    if route.body:
        content = {"application/json": {"schema": ref(route.body), "example": route.example}}
        operation["requestBody"] = {"required": True, "content": content}
    elif _TIMEOUT in route.parameters and route.method == "post":
        properties = {each["name"]: each["schema"] for each in route.parameters if each["in"] == "query"}
        schema = {"type": "object", "properties": properties, "additionalProperties": False}
        parameters = {
            "description": "The same parameters.",
            "content": {"application/json": {"schema": schema}},
        }
        operation["requestBody"] = {"required": False, **parameters}
    if guarded:
        operation["security"] = [{"apiKey": []}]
    return operation


def _error(status: int, route: Route) -> Json:
    schema, description = route.error, _ERRORS[status]
    if status in _FAILED_OPERATION:
        if str(route.reply).endswith("Operation"):
            schema = "FailedOperation"
        else:
            description = _WITHOUT_RECEIPTS[status]
    return {"description": description, "content": {"application/json": {"schema": ref(schema)}}}


# -- schemas of requests


def _request_schemas() -> Json:
    more = [type for each in DESCRIPTIONS for type in each.more_requests]
    types = (
        *_UNSUPPORTED,
        *more,
        DetokenizeRequest,
        LoadLoraAdapterRequest,
        UnloadLoraAdapterRequest,
        LoadAdapterRequest,
        AbortRequest,
        UpdateWeightsRequest,
        InitWeightTransferEngineRequest,
        InitWeightTransferRequest,
    )
    _, schemas = msgspec.json.schema_components(types, ref_template=_REFERENCE)
    for schema in schemas.values():
        for field in schema.get("properties", {}).values():
            if field.get("default", ...) is None:
                del field["default"]  # null means absent for every field
    for type, rows in _UNSUPPORTED.items():
        for row in rows:
            field = schemas[type.__name__]["properties"][row.field]
            field["description"] = f"Not supported: {row.allowed}."
    for each in DESCRIPTIONS:
        if each.required:
            schemas[each.request.__name__]["required"] = list(each.required)
    return schemas
