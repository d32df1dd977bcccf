"""OpenAPI schemas of the replies of routes that do not generate."""

from __future__ import annotations

from penstock.dialects.openapi_schema import (
    COUNT,
    ERROR,
    FLAG,
    INTEGER,
    NUMBER,
    STRING,
    TOKENS,
    Schema,
    listed,
    or_null,
    ref,
    shape,
)

_OPERATION: dict[str, Schema] = {
    "operation": STRING,
    "key": STRING,
    "outcome": {"enum": ["done", "partial", "aborted", "conflict", "undecided"]},
    "failed": {"description": "Ranks of the engines that did not do it.", **listed(COUNT)},
    "engines": listed(ref("Receipt")),
}

_ADAPTER: dict[str, Schema] = {
    "name": STRING,
    "path": STRING,
    "parent": or_null(STRING),
    "rank": COUNT,
    "digest": {"description": "Digest of its files.", **STRING},
}

_COUNTS: Schema = {"type": "object", "additionalProperties": COUNT}
_PROCESS: dict[str, Schema] = {"restarts": COUNT, "started": or_null(NUMBER)}

REPLIES: dict[str, Schema] = {
    "Model": shape(
        "A served model.",
        {
            "id": STRING,
            "object": {"type": "string", "const": "model"},
            "created": INTEGER,
            "owned_by": STRING,
        },
        root=or_null(STRING),
        parent=or_null(STRING),
        max_model_len=COUNT,
        permission=listed({"type": "object", "description": "Of no meaning, for old clients."}),
    ),
    "ModelList": shape(
        "The served models.", {"object": {"type": "string", "const": "list"}, "data": listed(ref("Model"))}
    ),
    "Tokens": shape(
        "A tokenized text.",
        {"count": COUNT, "max_model_len": COUNT, "tokens": TOKENS},
        token_strs=or_null(listed(STRING)),
    ),
    "Text": shape("The text of tokens.", {"prompt": STRING}),
    "TokenizerInfo": shape(
        "The fields of tokenizer_config.json.", {"tokenizer_class": STRING}, chat_template=STRING
    ),
    "Version": shape("The server's version.", {"version": STRING}),
    "Engine": shape(
        "One engine, as of its latest step.",
        {
            "rank": COUNT,
            "up": FLAG,
            "draining": FLAG,
            "asleep": FLAG,
            "paused": FLAG,
            "weight_version": or_null(STRING),
            "state_errors": {
                "type": "object",
                "description": "Why the engine is not as desired, by name of the state.",
                "additionalProperties": STRING,
            },
            "running": COUNT,
            "waiting": COUNT,
        },
    ),
    "Engines": shape("Every engine.", {"engines": listed(ref("Engine"))}),
    "Status": shape(
        "What the whole fleet does. Counters run since the start; they begin again when all processes do.",
        {
            "kind": {"const": "server"},
            "version": STRING,
            "models": {"description": "The names of the served model.", **listed(STRING)},
            "chat": {"description": "Whether the model has a chat template.", **FLAG},
            "thinking": {
                "description": "Variables of the chat template that switch thinking, or take its effort.",
                **listed(STRING),
            },
            "adapters": listed(ref("LoadedAdapter")),
            "time": {"description": "The server's clock: seconds since 1970.", **NUMBER},
            "started": {"description": "Start of the server, by its clock.", **or_null(NUMBER)},
            "engines": listed(ref("EngineStatus")),
            "api_servers": listed(ref("ApiServerStatus")),
            "requests": {"description": "Ended requests by outcome.", **_COUNTS},
            "rejected": {"description": "Requests answered with an error, by status.", **_COUNTS},
            "interrupted": {"description": "Streams that lost their engine, by outcome.", **_COUNTS},
            "restarts": {"description": "Restarts of processes that died.", **COUNT},
            "images": ref("ImageStatus"),
        },
    ),
    "ImageStatus": shape(
        "Images of requests.",
        {
            "remembered": {"description": "An API server had prepared them before.", **COUNT},
            "found": {"description": "The media cache had them.", **COUNT},
            "decoded": COUNT,
            "refused": {"description": "Those that were not prepared.", **COUNT},
            "cache_bytes": {"description": "Size of the media cache.", **COUNT},
            "workers": {"description": "Processes that prepare images.", **COUNT},
        },
    ),
    "EngineStatus": shape(
        "One engine.",
        {
            "engine": STRING,
            "host": or_null(STRING),
            "state": {"enum": ["ready", "draining", "asleep", "paused", "behind", "down"]},
            "weight_version": or_null(STRING),
            "running": COUNT,
            "waiting": COUNT,
            "kv_used": {"description": "Share of the KV cache, 0 to 1.", **NUMBER},
            "prompt_tokens": COUNT,
            "tokens": COUNT,
            "prefix_cache_queries": COUNT,
            "prefix_cache_hits": COUNT,
            "preemptions": COUNT,
            "drafts": {"description": "Drafts of further tokens, by speculative decoding.", **COUNT},
            "draft_tokens": {"description": "Tokens in drafts.", **COUNT},
            "accepted_tokens": {"description": "Tokens of drafts that the model confirmed.", **COUNT},
            **_PROCESS,
        },
    ),
    "ApiServerStatus": shape(
        "One API server.",
        {
            "server": STRING,
            "connections": COUNT,
            "streams": COUNT,
            "bytes_queued": {"description": "Reply bytes that wait for clients to read.", **COUNT},
            "tokens": {"description": "Tokens given to replies.", **COUNT},
            **_PROCESS,
        },
    ),
    "Receipt": shape(
        "What one engine did.",
        {
            "rank": COUNT,
            "epoch": or_null(COUNT),
            "step": or_null(COUNT),
            "repeated": FLAG,
            "restarted": FLAG,
            "error": or_null(STRING),
            "code": STRING,
        },
        result={},
    ),
    "Adapter": shape("A LoRA adapter.", _ADAPTER),
    "Adapters": shape(
        "The LoRA adapters that requests may name.", {"adapters": listed(ref("LoadedAdapter"))}
    ),
    "LoadedAdapter": shape(
        "A LoRA adapter, and which engines have it.",
        _ADAPTER
        | {
            "engines": {"description": "Ranks of the engines that have it.", **listed(COUNT)},
            "missing": {
                "type": "object",
                "description": "Why other engines lack it, by rank.",
                "additionalProperties": STRING,
            },
        },
    ),
    "AdapterOperation": shape(
        "What all engines did about a LoRA adapter.", _OPERATION, adapter=ref("Adapter")
    ),
    "Operation": shape(
        "What all engines did.",
        _OPERATION,
        aborted={"description": "Streams that were aborted.", **COUNT},
        weight_version=STRING,
        digests={"description": "Those of the update's path or paths.", **listed(STRING)},
        equal={"description": "Whether the weights of all engines are the same.", **FLAG},
    ),
    "WeightTransfer": shape(
        "The receiver of broadcasts is a member of the group.",
        {"operation": STRING, "outcome": STRING, "rank": COUNT, "world_size": COUNT},
    ),
    "FailedOperation": shape(
        "What engines did, and which of them failed.",
        _OPERATION | {"error": ERROR},
    ),
    "Sleeping": shape("Whether engines sleep.", {"is_sleeping": FLAG}),
    "Paused": shape("Whether engines are paused.", {"is_paused": FLAG}),
    "Weights": shape(
        "The weights that engines compute with.",
        {
            "weight_version": STRING,
            "settled": FLAG,
            "engines": listed(
                shape(
                    "One engine.",
                    {
                        "rank": COUNT,
                        "weight_version": or_null(STRING),
                        "generation": or_null(COUNT),
                        "error": or_null(STRING),
                    },
                )
            ),
        },
    ),
    "Readiness": shape(
        "Whether requests are taken.",
        {"ready": FLAG, "phase": STRING, "engines_ready": or_null(COUNT), "engines": COUNT},
        progress=or_null({"type": "number"}),
        elapsed_s={"type": "number"},
        error=ERROR,
    ),
    "Load": shape("How busy the process is.", {"server_load": COUNT}),
}
"""Schemas by the names that references use."""
