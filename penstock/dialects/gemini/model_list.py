"""Listings of models in the shape of Gemini's API."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

_TEXT = ("generate",)
_METHODS = {"generate": ("generateContent", "countTokens"), "embed": ("embedContent", "batchEmbedContents")}
"""What Google calls the routes for each task."""


def model_entry(card: Mapping[str, Any]) -> dict[str, Any]:
    """A card of OpenAI's shape in Google's. Cards of other servers may lack all but the id."""
    tasks = card.get("tasks", _TEXT)
    methods = [each for task, its in _METHODS.items() if task in tasks for each in its]
    entry = {
        "name": f"models/{card['id']}",
        "version": "1",
        "displayName": card["id"],
        "supportedGenerationMethods": methods,
    }
    if (length := card.get("max_model_len")) is not None:
        entry |= {"inputTokenLimit": length, "outputTokenLimit": length}
    return entry


def model_list(cards: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """A whole listing."""
    return {"models": [model_entry(card) for card in cards]}
