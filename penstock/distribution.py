"""The distribution that holds this package.

The command and the import package are called penstock; on PyPI that name is another project's. Every message
that tells to install something gets its command here.
"""

from __future__ import annotations

DISTRIBUTION = "penstock-llm"
"""The name in pyproject.toml; a test compares them. Metadata are no source for it: a package that was copied
instead of installed has none, and its error messages are as much in need of the right name."""


PUBLISHED = False
"""Whether PyPI has it. Until then a clone of the repository is what is installed, and no page or message says
otherwise; a test holds this."""


def pip_install(*extras: str) -> str:
    """The command that installs this distribution with ``extras``."""
    listed = ",".join(extras)
    if PUBLISHED:
        return f'pip install "{DISTRIBUTION}[{listed}]"'
    return f'.venv/bin/pip install ".[{listed}]" in a clone of Penstock'
