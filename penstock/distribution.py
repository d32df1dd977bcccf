"""The distribution that holds this package.

The command and the import package are called penstock; on PyPI that is another project. Every message that
tells to install something gets the name here.
"""

from __future__ import annotations

DISTRIBUTION = "penstock-llm"
"""The name in pyproject.toml; a test compares them. Metadata are no source for it: a package that was copied
instead of installed has none, and its error messages are as much in need of the right name."""


def pip_install(*extras: str) -> str:
    """The command that installs this distribution with ``extras``."""
    return f'pip install "{DISTRIBUTION}[{",".join(extras)}]"'
