"""Content negotiation: whether a client asks for a content type (RFC 9110 §12.5.1)."""

from __future__ import annotations

from penstock.http.sink import Headers

_NO_WEIGHT = 0.0


def asks_for(headers: Headers, kind: bytes, usual: bytes) -> bool:
    """Whether the headers ``Accept`` name the content type ``kind``, with a weight above 0 that is not less
    than that of ``usual``, the type that others get. A wildcard asks for ``usual`` alone.

    Both types are in lower case, without parameters. A range that is not well-formed is ignored.
    """
    ranges: dict[bytes, float] = {}
    for name, value in headers:
        if name == b"accept":
            for each in value.lower().split(b","):
                media, *parameters = (part.strip() for part in each.split(b";"))
                weight = _weight(parameters)
                if weight is not None:
                    ranges[media] = max(weight, ranges.get(media, _NO_WEIGHT))
    asked = ranges.get(kind, _NO_WEIGHT)
    whole_type = usual.partition(b"/")[0] + b"/*"
    other = next((ranges[each] for each in (usual, whole_type, b"*/*") if each in ranges), _NO_WEIGHT)
    return asked > 0 and asked >= other


def _weight(parameters: list[bytes]) -> float | None:
    """The weight among a range's parameters, by default 1; None: it is none."""
    for parameter in parameters:
        name, _, value = parameter.partition(b"=")
        if name.strip() == b"q":
            try:
                weight = float(value)
            except ValueError:
                return None
            return weight if 0 <= weight <= 1 else None
    return 1.0
