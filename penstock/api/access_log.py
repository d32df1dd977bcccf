"""One line per request, at the end of its reply."""

from __future__ import annotations

import json
import logging
import re
import time
from typing import Literal

from penstock.api.exchange import Exchange

log = logging.getLogger("penstock.access")

_BARE = re.compile(r"[!#-<>-~]+")
"""What stands in a line as it is: visible ASCII without quotes and equals signs."""
_BAD_ENDS = ("error", "abort", "cut")


class AccessLog:
    """Lines of ``key=value`` pairs (logfmt), whatever --log-level says.

    ``request_id``, ``method``, ``path``, ``status``, ``seconds`` (from the request's headers to the end of
    its reply); of requests that generate also ``prompt_tokens``, ``output_tokens`` and ``outcome`` (stop,
    length, error, abort: the client left, cut: it read too slowly). Of what was no whole request only
    ``status`` and ``refused``, why. Queries, bodies, keys are never logged.
    """

    def __init__(self, mode: Literal["none", "errors", "all"]) -> None:
        """``errors``: statuses of 400 and above, and streams that did not end well."""
        self._mode = mode
        if mode != "none":
            log.setLevel(logging.INFO)

    def write(self, exchange: Exchange) -> None:
        """Logs a request that has ended, if it is to be."""
        if self._mode == "none":
            return
        reply, status = exchange.reply, exchange.status
        outcome = None if reply is None else reply.outcome
        if self._mode == "errors" and status < 400 and outcome not in _BAD_ENDS:
            return
        fields: dict[str, object] = {
            "request_id": exchange.request_id if reply is None else reply.format.id,
            "method": exchange.method,
            "path": exchange.path.decode("latin-1"),
            "status": status,
            "seconds": f"{time.monotonic() - exchange.arrival:.3f}",
        }
        if reply is not None and outcome:
            usage = reply.usage()
            fields["prompt_tokens"] = usage.prompt_tokens
            fields["output_tokens"] = usage.completion_tokens
            fields["outcome"] = outcome
        _log(fields)

    def refused(self, status: int, message: str) -> None:
        """Logs an answer to what was no whole request: of that nothing else is known."""
        if self._mode != "none":
            _log({"status": status, "refused": message})


def _log(fields: dict[str, object]) -> None:
    log.info("%s", " ".join(f"{name}={_value(str(value))}" for name, value in fields.items()))


def _value(text: str) -> str:
    """``text``, in JSON's quotes and escapes where it could be taken for something else."""
    return text if _BARE.fullmatch(text) else json.dumps(text)
