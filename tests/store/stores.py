"""Stores and entries for tests."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from penstock.store.database import create
from penstock.store.response_store import ResponseStore
from penstock.store.stored_response import StoredResponse


@contextlib.contextmanager
def opened(directory: Path, most_bytes: int = 1 << 30, ttl_s: float = 3600.0) -> Iterator[ResponseStore]:
    """An API server's store, in an event loop."""
    create(directory)
    store = ResponseStore(directory, most_bytes=most_bytes, ttl_s=ttl_s)
    try:
        yield store
    finally:
        store.close()


def entry(
    store: ResponseStore, *, text: str = "hello", id: str | None = None, **fields: Any
) -> StoredResponse:
    """A completed response; ``fields`` replace its usual ones."""
    id = id or store.new_id()
    status = fields.get("status", "completed")
    body = {"id": id, "object": "response", "status": status, "output": [{"id": f"msg_{id}", "text": text}]}
    usual: dict[str, Any] = {
        "id": id,
        "tenant": "",
        "created_at": time.time(),
        "status": status,
        "body": json.dumps(body).encode(),
        "input": json.dumps([{"id": f"in_{id}", "content": text}]).encode(),
        "previous_id": None,
        "model": "m",
    }
    return StoredResponse(**(usual | fields))
