"""How long a request's prompt is wanted in the prefix cache, by its marks ``cache_control``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from penstock.dialects.messages.request_schema import (
    ContentBlock,
    MessagesRequest,
    MessagesTool,
    SystemBlock,
)
from penstock.generation.request.cache_hints import lifetime_s

_DEFAULT = "5m"


def keep_seconds(request: MessagesRequest) -> int:
    """Seconds after its last use: the longest of its marks, 0 without any. The whole prompt is kept, wherever
    the marks are: the next turn begins with it. Raises ApiError."""
    return max((lifetime_s(_ttl(mark), f"{field}.ttl") for mark, field in _marks(request)), default=0)


def _ttl(mark: Any) -> str:
    ttl = mark.get("ttl") if isinstance(mark, dict) else None
    return ttl if isinstance(ttl, str) else _DEFAULT


def _marks(request: MessagesRequest) -> Iterator[tuple[Any, str]]:
    """The marks, each with its path."""
    if request.cache_control:
        yield request.cache_control, "cache_control"
    places: list[tuple[str, Sequence[MessagesTool | SystemBlock | ContentBlock]]] = [
        ("tools", request.tools or ())
    ]
    if isinstance(request.system, list):
        places.append(("system", request.system))
    for number, message in enumerate(request.messages):
        if isinstance(message.content, list):
            places.append((f"messages[{number}].content", message.content))
    for path, blocks in places:
        for number, block in enumerate(blocks):
            if block.cache_control:
                yield block.cache_control, f"{path}[{number}].cache_control"
