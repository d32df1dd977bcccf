"""Reads the reply to ``GET /v1/models``, as the many kinds of servers send it."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import Any

import msgspec

MAX_LISTING_BYTES = 1 << 20
"""Maximum size of a listing; those of the largest public routers have about 400 KB."""
MAX_MODELS = 1024
"""Models of one endpoint that are remembered."""
MAX_NAME = 256
"""Characters of a model's name; a longer one, or one with control characters, is none."""
MAX_FIELDS = 32
"""Fields of a card that are remembered."""

ModelCard = Mapping[str, Any]
"""Scalar fields of an entry: ``id``, ``owned_by``, ``parent`` of an adapter, ``max_model_len`` and others."""


def read_listing(body: bytes) -> dict[str, ModelCard]:
    """The models in a listing by name, with their ``aliases``; empty: it is no listing, or has none.

    OpenAI's and Anthropic's listings have their entries in ``data``, some servers' are the list itself. What
    an entry has beyond scalars is left out: licences, permissions and prompts may be long.
    """
    try:
        said = msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return {}
    entries = said.get("data") if isinstance(said, dict) else said
    found: dict[str, ModelCard] = {}
    for entry in entries if isinstance(entries, list) else ():
        if not isinstance(entry, dict) or not is_model_name(entry.get("id")):
            continue
        card = {"id": entry["id"], **_scalars(entry)}
        found.setdefault(card["id"], card)
        aliases = entry.get("aliases")
        for alias in aliases if isinstance(aliases, list) else ():
            if is_model_name(alias):
                found.setdefault(alias, {**card, "id": alias, "parent": card["id"]})
        if len(found) >= MAX_MODELS:
            break
    return dict(islice(found.items(), MAX_MODELS))


def has_several_models(cards: Mapping[str, ModelCard]) -> bool:
    """Whether they are of more than one model: adapters, and names of the same ``root``, are of one."""
    return len({card.get("root") or name for name, card in cards.items() if not card.get("parent")}) > 1


def is_model_name(value: object) -> bool:
    return isinstance(value, str) and 0 < len(value) <= MAX_NAME and value.isprintable()


def _scalars(entry: dict[str, Any]) -> dict[str, Any]:
    scalars = {
        name: value
        for name, value in entry.items()
        if value is None or isinstance(value, bool | int | float) or is_model_name(value)
    }
    return dict(list(scalars.items())[:MAX_FIELDS])
