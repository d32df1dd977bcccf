"""Counts and logs what engines send that cannot be right, such as rows of streams that they do not run."""

from __future__ import annotations

import logging
from collections import Counter

from penstock.logging_setup import RateLimitedLog

_warn = RateLimitedLog(logging.getLogger(__name__))

UNKNOWN_STREAM = "unknown_stream"
"""A row, a failure or a parameter of a stream that the engine does not run: dropped."""
OUT_OF_ORDER = "out_of_order"
"""A row that does not begin where its stream is: the stream ends."""
INVALID_TOKEN = "invalid_token"
"""A row with a token id that the model does not have: the stream ends."""
TOO_MANY_TOKENS = "too_many_tokens"
"""A row beyond the request's limit: the stream ends."""
INVALID_LOGPROBS = "invalid_logprobs"
"""Logprobs of a token that the model does not have, that are no numbers, or of prompt tokens that are not
due: the stream ends."""
INVALID_TRANSFER = "invalid_kv_transfer_params"
"""KV transfer parameters that are no JSON object on one line: the stream ends."""
INVALID_ROUTES = "invalid_routed_experts"
"""Experts of more tokens than the stream has, or that nobody asked for: the stream ends."""
INVALID_VECTORS = "invalid_vectors"
"""Vectors that are not those of the stream's next inputs, or that nobody asked for: the stream ends."""
INVALID_CODE = "invalid_code"
"""A failure with an unknown code: the stream ends as it would by ``engine_error``."""
INVALID_METRICS = "invalid_metrics"
"""Metrics that are too large or another process's: dropped."""
UNREADABLE = "unreadable"
"""A message that cannot be decoded, or is out of place: the connection is closed."""
FAULTS = (
    UNKNOWN_STREAM,
    OUT_OF_ORDER,
    INVALID_TOKEN,
    TOO_MANY_TOKENS,
    INVALID_LOGPROBS,
    INVALID_TRANSFER,
    INVALID_ROUTES,
    INVALID_VECTORS,
    INVALID_CODE,
    INVALID_METRICS,
    UNREADABLE,
)


class InvalidOutputError(ValueError):
    """A reply cannot use what the engine sent for its stream."""

    def __init__(self, reason: str, message: str) -> None:
        """``reason``: one of FAULTS."""
        super().__init__(message)
        self.reason = reason


class EngineFaults:
    """The faults of all engines of one API server; the log has a line per engine and minute."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[int, str]] = Counter()
        """Number of faults by rank and reason."""

    def record(
        self,
        rank: int,
        reason: str,
        message: str,
        *arguments: object,
        count: int = 1,
        exc_info: bool = False,
    ) -> None:
        """Count ``count`` faults of one engine, and log ``message % arguments``; with ``exc_info`` and the
        traceback of the exception at hand."""
        self.counts[rank, reason] += count
        _warn(f"engine {rank}", f"engine %d: {message}", rank, *arguments, exc_info=exc_info)
