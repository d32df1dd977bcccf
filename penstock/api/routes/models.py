"""``/v1/models``: the served model names and adapters."""

from __future__ import annotations

import secrets
import time
from typing import Any

from penstock.generation.model_info import ModelInfo


def model_list(model_info: ModelInfo, root: str) -> dict[str, Any]:
    """The reply's body; ``root``: directory or name of the model."""
    cards = [_model_card(name, root, None, model_info.max_model_len) for name in model_info.names]
    for adapter in model_info.adapters:
        parent = adapter.parent or model_info.names[0]
        cards.append(_model_card(adapter.name, adapter.path, parent, model_info.max_model_len))
    return {"object": "list", "data": cards}


def _model_card(name: str, root: str, parent: str | None, max_model_len: int) -> dict[str, Any]:
    created = int(time.time())
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "penstock",
        "root": root,
        "parent": parent,
        "max_model_len": max_model_len,
        "permission": [_permission(created)],
    }


def _permission(created: int) -> dict[str, Any]:
    """The fields that OpenAI's API has dropped and vLLM keeps for old clients."""
    return {
        "id": f"modelperm-{secrets.token_hex(8)}",
        "object": "model_permission",
        "created": created,
        "allow_create_engine": False,
        "allow_sampling": True,
        "allow_logprobs": True,
        "allow_search_indices": False,
        "allow_view": True,
        "allow_fine_tuning": False,
        "organization": "*",
        "group": None,
        "is_blocking": False,
    }
