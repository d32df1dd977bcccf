"""Weights of the synthetic engine, whose tokens tell by which they were made."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from penstock.engine.vocabulary import read_vocabulary
from penstock.supervisor.startup.model_resolution import DEMO_DIR
from tests.integration.clients import Completion
from tests.integration.control import call

TOLD = {"return_token_ids": True, "return_weight_versions": True}
"""Fields by which a reply tells which weights made which of its tokens."""
MARKS = 256
"""Versions that the tokens of the synthetic engine tell apart."""
ORDINARY = read_vocabulary(DEMO_DIR).ordinary


class WeightFiles:
    """Files of such weights."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._count = 0

    def make(self, mark: int, dtype: str = "U8") -> str:
        """The path of a file."""
        self._count += 1
        path = self._directory / f"{self._count}.safetensors"
        data = bytes([mark]) * (1 if dtype == "U8" else 4)
        header = json.dumps(
            {"version": {"dtype": dtype, "shape": [1], "data_offsets": [0, len(data)]}}
        ).encode()
        path.write_bytes(struct.pack("<Q", len(header)) + header + data)
        return str(path)


def update(
    client: httpx.Client, path: str, version: str, *, key: str | None = None, query: str = "", **fields: Any
) -> dict[str, Any]:
    body = {"path": path, "weight_version": version, **fields}
    return call(client, f"/update_weights{query}", body, key)


def marks_of(choice: dict[str, Any]) -> dict[str, set[int]]:
    """By version, what the tokens tell of it: the marks of their files."""
    ids = choice["token_ids"]
    marks = (np.searchsorted(ORDINARY, ids) % MARKS).tolist()
    spans = choice["weight_versions"]
    assert [span["start"] for span in spans] == [0, *(span["end"] for span in spans[:-1])]
    assert spans[-1]["end"] == len(ids)
    return {span["version"]: set(marks[span["start"] : span["end"]]) for span in spans}


def check_marks(completions: Sequence[Completion], marks: dict[str, int]) -> None:
    """Every token has the mark of its version."""
    found: dict[str, set[int]] = {}
    for completion in completions:
        choice = completion.last_choice | {"token_ids": completion.token_ids}
        for version, told in marks_of(choice).items():
            found.setdefault(version, set()).update(told)
    assert found == {version: {mark} for version, mark in marks.items()}
