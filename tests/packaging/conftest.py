"""The source distribution, and the wheel that is built from it."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
NOT_SOURCE = (".git", ".venv*", "build", "dist", "*.egg-info", "__pycache__", ".*_cache", ".hypothesis")


@dataclass(frozen=True)
class Built:
    source: Path
    wheel: Path


def build(kind: str, tree: Path, into: Path) -> Path:
    """What setuptools builds of ``tree``, without the isolated environment that pip would fetch."""
    code = f"from setuptools import build_meta; build_meta.build_{kind}({str(into)!r})"
    subprocess.run([sys.executable, "-c", code], cwd=tree, check=True, capture_output=True)
    (file,) = into.iterdir()
    return file


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    directory = tmp_path_factory.mktemp("built")
    shutil.copytree(ROOT, directory / "tree", ignore=shutil.ignore_patterns(*NOT_SOURCE))
    source = build("sdist", directory / "tree", directory / "sdist")
    with tarfile.open(source) as archive:
        archive.extractall(directory / "unpacked", filter="data")
    (tree,) = (directory / "unpacked").iterdir()
    return Built(source, build("wheel", tree, directory / "wheel"))
