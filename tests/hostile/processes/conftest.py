from __future__ import annotations

from tests.supervisor.conftest import serve, short_dir

__all__ = ["serve", "short_dir"]
