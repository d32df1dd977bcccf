"""The distribution that holds this package.

The command and the import package are called penstock; on PyPI that name is another project's. Every message
that tells to install something gets its command here.
"""

from __future__ import annotations

from functools import cache
from hashlib import blake2b
from pathlib import Path

from penstock import __version__

DISTRIBUTION = "penstock-llm"
"""The name in pyproject.toml; a test compares them. Metadata are no source for it: a package that was copied
instead of installed has none, and its error messages are as much in need of the right name."""


PUBLISHED = False
"""Whether PyPI has it. Until then a clone of the repository is what is installed, and no page or message says
otherwise; a test holds this."""


@cache
def build_id() -> str:
    """The release with a digest of the package's files, such as ``0.1.0+3f2a91bc04d51e77``: processes of two
    builds may understand each other's messages and yet mean different things. Takes 50 ms."""
    package, digest = Path(__file__).parent, blake2b(digest_size=8)
    for path in sorted(package.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            data = path.read_bytes()
            digest.update(f"{path.relative_to(package).as_posix()} {len(data)}\n".encode() + data)
    return f"{__version__}+{digest.hexdigest()}"


def pip_install(*extras: str) -> str:
    """The command that installs this distribution with ``extras``."""
    listed = ",".join(extras)
    if PUBLISHED:
        return f'pip install "{DISTRIBUTION}[{listed}]"'
    return f'.venv/bin/pip install ".[{listed}]" in a clone of Penstock'
