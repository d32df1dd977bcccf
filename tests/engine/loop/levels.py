"""A state for tests: a level."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class Level:
    """Notes what becomes of it; 13 cannot be prepared, 14 turns out to be impossible, 15 fails at the end."""

    name = "level"
    default: Mapping[str, Any] = {"level": 0}

    def __init__(self) -> None:
        self.level = 0
        self.ready = True
        self.prepared_level: int | None = None
        self.log: list[str] = []

    def prepare(self, value: dict[str, Any]) -> None:
        assert self.prepared_level is None, "one change at a time"
        if value["level"] == 13:
            raise MemoryError("no room")
        self.prepared_level = value["level"]
        self.log.append(f"prepare {self.prepared_level}")

    def prepared(self, *, firm: bool) -> bool:
        if self.ready and self.prepared_level == 14 and not firm:
            raise ValueError("14 is impossible")
        return self.ready

    def commit(self, generation: int) -> None:
        assert self.prepared_level is not None
        level, self.prepared_level = self.prepared_level, None
        if level == 15:
            raise MemoryError("too late")
        self.level = level
        self.log.append(f"commit {self.level}")

    def settle(self) -> None:
        self.log.append("settle")

    def result(self) -> dict[str, Any]:
        return {"level": self.level}

    def abort(self) -> None:
        self.log.append(f"abort {self.prepared_level}")
        self.prepared_level = None
