"""Which version of the weights each token of a stream was computed with.

Nothing is done per token: a stream that asks for it has the position at which its engine's weights changed,
or at which it went on at another engine, with the version from there on.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec


class WeightSpan(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """Output tokens ``start`` to ``end``, the latter excluded, were computed with one version."""

    start: int
    end: int
    version: str
    adapter: str | None = None
    """Digest of the LoRA adapter that changed them; None: none did."""


def weight_spans(
    changes: Sequence[tuple[int, str]], tokens: int, adapter: str | None = None
) -> list[WeightSpan]:
    """The spans of an output of ``tokens`` tokens. ``changes``: positions in ascending order, each with the
    version from there on. ``adapter``: a stream has one from its beginning to its end."""
    spans: list[WeightSpan] = []
    ends = [position for position, _ in changes[1:]]
    for (start, version), end in zip(changes, [*ends, tokens], strict=False):
        end = min(end, tokens)
        if start >= end:
            continue
        if spans and spans[-1].version == version:
            start = spans.pop().start
        spans.append(WeightSpan(start, end, version, adapter))
    return spans
