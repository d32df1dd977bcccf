"""Gemini's routes, whose path has the model: one route per verb, whatever the model."""

from __future__ import annotations

import re
from urllib.parse import quote, unquote

GENERATE, STREAM = "/v1beta/models:generateContent", "/v1beta/models:streamGenerateContent"
COUNT = "/v1beta/models:countTokens"
EMBED, BATCH_EMBED = "/v1beta/models:embedContent", "/v1beta/models:batchEmbedContents"
_ALL = (GENERATE, STREAM, COUNT, EMBED, BATCH_EMBED)
_ROUTES = {each.rpartition(":")[2].lower(): each for each in _ALL}
_named = re.compile(r"/v1(?:beta)?/models/(.+):([a-z]+)", re.IGNORECASE | re.DOTALL).fullmatch
_in_target = re.compile(rb"(.*/models/)(.+)((?::|%3a)[a-z]+(?:\?.*)?)", re.IGNORECASE | re.DOTALL).fullmatch


def verb_route(path: str) -> str | None:
    """The route of a decoded path; None: it is none of these."""
    found = _named(path)
    return None if found is None else _ROUTES.get(found[2].lower())


def names_its_model(route: str) -> bool:
    """Whether the model of a request for ``route`` is in its path."""
    return route in _ALL


def model_in(target: bytes) -> str:
    """The model that a request's target names; empty: none."""
    found = _in_target(target)
    return "" if found is None else unquote(found[2].decode("latin-1"))


def with_model(target: bytes, model: str) -> bytes:
    """The target for another model."""
    found = _in_target(target)
    return target if found is None else b"%b%b%b" % (found[1], quote(model).encode(), found[3])


def is_stream(route: str, target: bytes) -> bool:
    """Whether the reply is a stream of events; a stream without ``alt=sse`` is one JSON array."""
    return route == STREAM and b"alt=sse" in target.partition(b"?")[2]
