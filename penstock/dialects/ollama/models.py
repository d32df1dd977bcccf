"""Ollama's routes that describe the served models and the server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from penstock.dialects.ollama.reply import shown_time
from penstock.dialects.ollama.request_schema import OllamaShowRequest
from penstock.generation.dialect import AskedModels, DescribingRoute
from penstock.generation.input_processor import InputProcessor
from penstock.http.errors import ApiError, encode_json

API_VERSION = "0.13.0"
"""The version of Ollama whose API is served: clients refuse servers that are older than they know."""
OLLAMA_ROUTES = ("/api/tags", "/api/ps", "/api/version", "/api/show")
_LATEST = ":latest"
_NEVER = 1 << 32
"""Seconds of Unix time at which models are unloaded."""
_decode = msgspec.json.Decoder(OllamaShowRequest, strict=False).decode


def untagged(name: str | None, processor: InputProcessor) -> str | None:
    """The served name that ``name``, which may have Ollama's default tag, stands for."""
    if name is None or not name.endswith(_LATEST):
        return name or None
    try:
        processor.check_model(name)
    except ApiError:
        return name.removesuffix(_LATEST)
    return name


class OllamaModels(DescribingRoute):
    """The route ``path``."""

    def __init__(self, path: str, processor: InputProcessor) -> None:
        self.path, self._processor = path, processor
        self.method = "POST" if path == "/api/show" else "GET"

    def reply(self, asked: AskedModels) -> bytes:
        if self.path == "/api/version":
            return encode_json({"version": API_VERSION})
        if self.path == "/api/show":
            return encode_json(self._described(asked))
        return encode_json({"models": [self._entry(card) for card in asked.cards.values()]})

    def error_body(self, error: ApiError, request_id: str) -> bytes:
        return encode_json({"error": error.message})

    def _entry(self, card: Mapping[str, Any]) -> dict[str, Any]:
        entry = {"name": card["id"], "model": card["id"], "size": 0, "digest": "", "details": self._details()}
        if self.path == "/api/tags":
            return {**entry, "modified_at": shown_time(card["created"])}
        length = card["max_model_len"]
        return {**entry, "expires_at": shown_time(_NEVER), "size_vram": 0, "context_length": length}

    def _described(self, asked: AskedModels) -> dict[str, Any]:
        """Raises ApiError."""
        try:
            request = _decode(asked.body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise ApiError(400, f"The body is not a JSON object with a model: {error}") from None
        name = untagged(request.model or request.name, self._processor)
        if name is None:
            raise ApiError(400, "model is missing.", param="model")
        card = asked.card(name)
        format, family = self._processor.output_format, self._processor.model_info.model_type or "unknown"
        generates = self._processor.model_info.generates
        able = {
            "completion": generates,
            "vision": self._processor.model_info.takes_images,
            "tools": generates and format.calls_tools,
            "thinking": generates and format.reasoning is not None,
            "embedding": "embed" in card.get("tasks", ()),
        }
        return {
            "license": "",
            "modelfile": "",
            "parameters": "",
            "template": "",
            "details": self._details(),
            "model_info": {
                "general.architecture": family,
                "general.basename": card["id"],
                f"{family}.context_length": card["max_model_len"],
            },
            "capabilities": [name for name, can in able.items() if can],
            "modified_at": shown_time(card["created"]),
        }

    def _details(self) -> dict[str, Any]:
        family = self._processor.model_info.model_type or "unknown"
        return {
            "parent_model": "",
            "format": "safetensors",
            "family": family,
            "families": [family],
            "parameter_size": "",
            "quantization_level": "",
        }
