"""Some of these tests need vLLM: ``make test-vllm`` makes an environment that has it."""

from __future__ import annotations

from importlib.util import find_spec

collect_ignore_glob: list[str] = []

if not find_spec("vllm"):
    collect_ignore_glob += ["test_real_*.py", "test_wire_contract.py"]
