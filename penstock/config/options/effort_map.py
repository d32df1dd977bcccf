"""``--reasoning-effort-map``: what the efforts of requests stand for. Texts are as vLLM has them."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

REASONING_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_Budget = Annotated[int, Meta(ge=0, lt=1 << 31)]


def read_effort_map(text: str | None) -> dict[str, str | int]:
    """By effort: another one, which the chat template gets, or a budget of reasoning in tokens. Raises
    ValueError."""
    if text is None:
        return {}
    try:
        efforts = msgspec.json.decode(text, type=dict[str, str | _Budget])
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ValueError(f"--reasoning-effort-map {text[:200]}: {error}; {_takes()}") from None
    for effort in efforts:
        if effort not in REASONING_EFFORTS:
            raise ValueError(f"--reasoning-effort-map: {effort[:64]!r} is no effort; {_takes()}")
    return efforts


def _takes() -> str:
    return (
        f"it takes a JSON object with {', '.join(REASONING_EFFORTS)}, each a text for the chat template or a "
        'number of tokens, such as {"minimal": "low", "low": 1024}'
    )
