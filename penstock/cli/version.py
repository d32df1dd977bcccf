"""``penstock version``: the installed versions, for bug reports."""

from __future__ import annotations

from penstock import __version__
from penstock.cli.command import Command
from penstock.config.describe import option_group
from penstock.config.origins import Origins


@option_group
class VersionConfig:
    """No options."""


def run(config: VersionConfig, origins: Origins) -> int:
    """Print the versions of Penstock, Python and the main libraries, one per line."""
    import platform
    from importlib import metadata

    print(f"penstock {__version__}")
    print(f"python {platform.python_version()} ({platform.system()} {platform.machine()})")
    for name in (
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


COMMAND = Command(("version",), "Print versions of Penstock and its libraries.", VersionConfig, run)
