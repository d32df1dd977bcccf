"""The scripted server of the load client's tests serves here as well."""

from __future__ import annotations

from tests.bench.conftest import scripted

__all__ = ["scripted"]
