"""Some of these tests need vLLM: ``make test-vllm`` makes an environment that has it."""

from __future__ import annotations

import warnings
from importlib.util import find_spec

collect_ignore_glob: list[str] = []

if find_spec("vllm"):
    with warnings.catch_warnings():  # what vLLM and its dependencies warn of at import is not ours
        warnings.simplefilter("ignore")
        import vllm.v1.engine  # noqa: F401
else:
    collect_ignore_glob += ["test_real_*.py", "test_wire_contract.py"]
