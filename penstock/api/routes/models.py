"""``/v1/models``: the served model names, aliases and adapters, in OpenAI's shape or in Anthropic's."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable
from functools import partial
from typing import Any

from penstock.api.api_request import ApiRequest, Handler
from penstock.dialects.gemini import model_list as gemini
from penstock.dialects.messages.errors import VERSION_HEADER
from penstock.dialects.messages.model_list import model_entry
from penstock.dialects.messages.model_list import model_list as anthropic_list
from penstock.dialects.registry import make_describing_routes
from penstock.generation.dialect import AskedModels, DescribingRoute
from penstock.generation.input_processor import InputProcessor
from penstock.generation.model_info import ModelInfo
from penstock.http.access_keys import GOOGLE_KEY
from penstock.http.errors import encode_json
from penstock.wire.messages import Adapter

MODEL_PREFIX = "/v1/models/"
MAX_BODY = 1 << 16
"""Bytes of a body that asks for a model."""


class ModelRoutes:
    """The handlers. Clients of Anthropic's and Google's APIs, told by their headers, get their shapes."""

    def __init__(self, processor: InputProcessor, root: str) -> None:
        """``root``: directory or name of the model."""
        self._processor = processor
        self.info = processor.model_info
        self._root = root
        self._created = int(time.time())
        self.others = make_describing_routes(processor)
        """Those of other APIs."""
        self._make()

    def _make(self) -> None:
        """Make the replies of the present adapters."""
        processor = self._processor
        self._changes = processor.adapters.changes
        listed = model_list(
            processor.model_info,
            self._root,
            processor.adapters.served(),
            processor.aliases.exact,
            self._created,
        )
        self._cards = {card["id"]: card for card in listed["data"]}
        self._list = encode_json(listed)
        self._anthropic_list = encode_json(anthropic_list(listed["data"]))

    def _refresh(self) -> None:
        if self._changes != self._processor.adapters.changes:
            self._make()

    async def list(self, request: ApiRequest) -> None:
        """All models."""
        self._refresh()
        fields = request.http.fields
        if GOOGLE_KEY in fields:
            await request.http.reply_json(encode_json(gemini.model_list(self._cards.values())))
            return
        await request.http.reply_json(self._anthropic_list if VERSION_HEADER in fields else self._list)

    async def model(self, request: ApiRequest) -> None:
        """One model, by any of its names. Raises ApiError."""
        self._refresh()
        name = request.http.path[len(MODEL_PREFIX) :]
        card = self._card(name)
        if GOOGLE_KEY in request.http.fields:
            shown = gemini.model_entry(card)
        else:
            shown = model_entry(card) if VERSION_HEADER in request.http.fields else card
        await request.http.reply_json(encode_json(shown))

    def has_path(self, path: str) -> bool:
        """Whether the path is that of a model whose name ends with a slash, as a directory's may."""
        return path.startswith(MODEL_PREFIX) and path[len(MODEL_PREFIX) :] in self._cards

    def _card(self, name: str) -> dict[str, Any]:
        """The card of a model by any of its names. Raises ApiError."""
        return {**self._cards[self._processor.served_name(name)], "id": name}

    def handler(self, route: DescribingRoute) -> Handler:
        """The handler of another API's route."""
        return partial(self._answer, route)

    async def _answer(self, route: DescribingRoute, request: ApiRequest) -> None:
        body = await request.http.read_json(MAX_BODY) if route.method == "POST" else b""
        self._refresh()
        await request.http.reply_json(
            route.reply(AskedModels(self._cards, self._card, body, request.http.path))
        )


def model_list(
    model_info: ModelInfo, root: str, adapters: Iterable[Adapter], aliases: dict[str, str], created: int
) -> dict[str, Any]:
    """The reply's body in OpenAI's shape; ``root``: directory or name of the model; ``created``: seconds
    since 1970. Aliases with wildcards are no names, so they are not listed."""
    length = model_info.max_model_len
    cards = [_model_card(name, root, None, length, created) for name in model_info.names]
    for adapter in adapters:
        parent = adapter.parent or model_info.names[0]
        cards.append(_model_card(adapter.name, adapter.path, parent, length, created))
    by_name = {card["id"]: card for card in cards}
    cards += [
        by_name[name] | {"id": alias, "parent": name} for alias, name in aliases.items() if name in by_name
    ]
    for card in cards:
        if model_info.tasks:
            card["tasks"] = model_info.tasks
        if model_info.takes_images:
            card["input_modalities"] = ["text", "image"]
    return {"object": "list", "data": cards}


def _model_card(name: str, root: str, parent: str | None, max_model_len: int, created: int) -> dict[str, Any]:
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
