"""The chat templates of real models, read from the packages that carry them."""

from __future__ import annotations

import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

PACKAGES = Path(sys.prefix) / "packages"
"""Where "make test-templates" keeps the packages."""


def real_templates() -> dict[str, str]:
    """Texts by the name of package and file; empty without the packages. Equal texts are there once."""
    found: dict[str, str] = {}
    seen: set[str] = set()
    for archive in sorted(PACKAGES.glob("*")):
        package = archive.name.partition("-")[0]
        for name, text in _members(archive):
            if text not in seen:
                seen.add(text)
                found[f"{package}/{Path(name).stem}"] = text
    return found


def _members(archive: Path) -> Iterator[tuple[str, str]]:
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            for name in wheel.namelist():
                if name.endswith(".jinja"):
                    yield name, wheel.read(name).decode()
        return
    with tarfile.open(archive) as sources:
        for member in sources:
            if member.name.endswith(".jinja"):
                file = sources.extractfile(member)
                assert file is not None
                yield member.name, file.read().decode()
