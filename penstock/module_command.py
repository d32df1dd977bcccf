"""The command that runs one of our modules in another process."""

from __future__ import annotations

import sys


def module_command(module: str, *, first: str = "pass") -> list[str]:
    """The command of ``python -m module`` in an interpreter that finds modules exactly where this one does.

    It imports neither an installed Penstock in place of this one, nor modules of the working directory (-P).
    ``first``: statements that run before anything else is imported.
    """
    code = (
        f"import sys; sys.path[:] = {sys.path!r}; {first}; "
        f"import runpy; runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
    )
    return [sys.executable, "-P", "-c", code]
