"""These tests need the torch extra."""

from __future__ import annotations

import os
from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("torch") and find_spec("transformers") else ["test_*.py"]

os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is imported: kernels run on the CPU
