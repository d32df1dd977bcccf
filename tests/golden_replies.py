"""Requests to vLLM 0.32 and its replies, recorded."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

DATA = Path(__file__).parent / "data" / "golden"
"""The recordings, and the configuration and tokenizer of the model they ran on."""

Case = dict[str, Any]
"""``name``, ``method``, ``path``, ``request_headers``, ``request_body``, ``status``,
``response_content_type``
and ``response_body``, the bodies as text."""


def load_cases() -> list[Case]:
    """All recorded cases."""
    text = gzip.decompress((DATA / "replies.jsonl.gz").read_bytes()).decode()
    return [json.loads(line) for line in text.splitlines()]
