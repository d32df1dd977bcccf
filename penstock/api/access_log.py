"""The access log: one line per request at the end of its reply."""

from __future__ import annotations

import json
import logging
import re
import time
from typing import Literal

from penstock.api.api_request import ApiRequest
from penstock.http.access_keys import OPEN_PATHS
from penstock.logging_setup import log_event

log = logging.getLogger("penstock.access")

_BARE = re.compile(r"[!#-<>-~]+")
"""Values that need no quotes: visible ASCII without quotes and equals signs."""
MAX_PATH = 256
"""Characters of a path in the log; one may be as long as a request's head."""
_ROUTINE = OPEN_PATHS | {"/metrics", "/status"}
"""Probes and scrapes, which come every few seconds: only those that fail are logged."""
_BAD_ENDS = ("error", "abort", "cut")


class AccessLog:
    """Writes lines of ``key=value`` pairs (logfmt), or the same fields as JSON, whatever --log-level is.

    Fields: ``request_id``, ``method``, ``path``, ``status``, ``seconds`` (from the request's headers to the
    end of its reply); for generating requests also ``prompt_tokens``, ``output_tokens`` and ``outcome``
    (stop, length, error, refused: by the engine, abort: the client disconnected or an administrator ended
    the request, cut: the client read too slowly).
    Requests without complete headers have only ``status`` and ``refused``, the reason. Queries, bodies and
    keys are never logged.
    """

    def __init__(self, mode: Literal["none", "errors", "all"]) -> None:
        """``errors``: only statuses from 400 on and streams that ended in error, abort or cut; ``all``: also
        others, except probes and scrapes."""
        self._mode = mode
        if mode != "none":
            log.setLevel(logging.INFO)

    def write(self, request: ApiRequest) -> None:
        """Log a request that has ended, if ``mode`` includes it."""
        if self._mode == "none":
            return
        reply, status = request.reply, request.status
        outcome = None if reply is None else reply.outcome
        succeeded = status < 400 and outcome not in _BAD_ENDS
        if succeeded and (self._mode == "errors" or request.http.path in _ROUTINE):
            return
        fields: dict[str, object] = {
            "request_id": request.request_id if reply is None else reply.format.id,
            "method": request.http.method,
            "path": _cut(request.http.raw_path.decode("latin-1")),
            "status": status,
            "seconds": round(time.monotonic() - request.arrival, 3),
        }
        if reply is not None and outcome:
            usage = reply.usage()
            fields["prompt_tokens"] = usage.prompt_tokens
            fields["output_tokens"] = usage.completion_tokens
            fields["outcome"] = outcome
        _log(fields)

    def refused(self, status: int, message: str) -> None:
        """Log the reply to a request without complete headers."""
        if self._mode != "none":
            _log({"status": status, "refused": message})


def _log(fields: dict[str, object]) -> None:
    text = " ".join(f"{name}={_value(value)}" for name, value in fields.items())
    log_event(log, "request", fields, text)


def _value(value: object) -> str:
    """The value as text, as a JSON string if it needs quotes."""
    text = f"{value:.3f}" if isinstance(value, float) else str(value)
    return text if _BARE.fullmatch(text) else json.dumps(text)


def _cut(text: str) -> str:
    return text if len(text) <= MAX_PATH else f"{text[: MAX_PATH - 1]}…"
