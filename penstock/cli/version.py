"""``penstock version``: what runs here, for reports of defects."""

from __future__ import annotations

import msgspec

from penstock import __version__
from penstock.cli.command import Command
from penstock.config.origins import Origins


class VersionConfig(msgspec.Struct, frozen=True):
    """``penstock version`` has no options."""


def run(config: VersionConfig, origins: Origins) -> int:
    """Print one line for Penstock, Python and each library of the token path or the embedded engine."""
    import platform
    from importlib import metadata

    print(f"penstock {__version__}")
    print(f"python {platform.python_version()} ({platform.system()} {platform.machine()})")
    for name in (
        "uvicorn",
        "uvloop",
        "httptools",
        "msgspec",
        "pyzmq",
        "numpy",
        "tokenizers",
        "fastokens",
        "torch",
        "transformers",
    ):
        try:
            print(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            print(f"{name} not installed")
    return 0


COMMAND = Command(("version",), "Print the versions of Penstock and what it runs on.", VersionConfig, run)
