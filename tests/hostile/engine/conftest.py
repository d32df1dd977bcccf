"""Fixtures of the engine's tests: a model directory, engine loops in threads, their API servers."""

from __future__ import annotations

from tests.engine.conftest import connect, host, model_dir

__all__ = ["connect", "host", "model_dir"]
