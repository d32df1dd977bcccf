"""Heads of requests that came before: a client's requests differ in the length of their bodies, if at all.

A head that is known but for the number of its Content-Length is not parsed again, and what an application has
derived from it holds again.
"""

from __future__ import annotations

import re

from penstock.http.http1.request_head import RequestHead, parse_head

MAX_HEADS = 256
"""Heads that are remembered,"""
MAX_BYTES = 4096
"""and the longest of them."""
_LENGTH = b"content-length"
_find_length = re.compile(rb"\r\n(?i:content-length):[ \t]*([0-9]{1,18})[ \t]*\r\n").search
_HEADERS = RequestHead._fields.index("headers")
"""Where ``headers``, ``fields`` and ``length`` stand."""
_known: dict[bytes, RequestHead] = {}
"""By their bytes, with the number of the first Content-Length left out."""


def read_head(head: bytes) -> RequestHead:
    """See :func:`penstock.http.http1.request_head.parse_head`. Heads that are the same but for their length
    have the same ``derived``."""
    found = _find_length(head)
    if found is None or len(head) > MAX_BYTES:
        return parse_head(head)
    start, end = found.span(1)
    key = b"%b\0%b" % (head[:start], head[end:])  # no head that is remembered has a NUL of its own
    known = _known.get(key)
    if known is None:
        known = parse_head(head)._replace(derived={})
        if len(_known) >= MAX_HEADS:
            del _known[next(iter(_known))]  # the oldest
        _known[key] = known
        return known
    if known.fields[_LENGTH] == (length := found[1]):
        return known
    headers = [header if header[0] != _LENGTH else (_LENGTH, length) for header in known.headers]
    fields = {**known.fields, _LENGTH: length}
    return RequestHead._make((*known[:_HEADERS], headers, fields, int(length), *known[_HEADERS + 3 :]))
