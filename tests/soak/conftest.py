"""The scripted servers of the load client's tests serve here as well."""

from __future__ import annotations

from tests.bench.conftest import scripted
from tests.bench.load.conftest import scripted2

__all__ = ["scripted", "scripted2"]
