"""Listings of models in the shape of Anthropic's API."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any


def model_entry(card: Mapping[str, Any]) -> dict[str, Any]:
    """A card of OpenAI's shape in Anthropic's. Cards of other servers may lack all but the id."""
    length = card.get("max_model_len")
    return {
        "type": "model",
        "id": card["id"],
        "display_name": card["id"],
        "created_at": _shown_time(card.get("created")),
        "max_input_tokens": length,
        "max_tokens": length,
        "lifecycle": "active",
    }


def model_list(cards: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A whole listing."""
    return {
        "data": [model_entry(card) for card in cards],
        "has_more": False,
        "first_id": cards[0]["id"] if cards else None,
        "last_id": cards[-1]["id"] if cards else None,
    }


def _shown_time(created: object) -> str:
    """Seconds of Unix time as text; what is none is the time that means unknown."""
    try:
        at = datetime.fromtimestamp(created, UTC)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError, OSError):
        at = datetime.fromtimestamp(0, UTC)
    return at.isoformat().replace("+00:00", "Z")
