"""The command that runs one of our modules in another process."""

from __future__ import annotations

import sys
from pathlib import Path

OWN_PATH = str(Path(__file__).parents[1])


def module_command(module: str, *, first: str = "pass", python: str | None = None) -> list[str]:
    """The command of ``python -m module`` in an interpreter that finds modules exactly where this one does.

    It imports neither an installed Penstock in place of this one, nor modules of the working directory (-P).
    ``first``: statements that run before anything else is imported. ``python``: another interpreter, which
    finds its own modules first.
    """
    path = f"sys.path[:] = {sys.path!r}" if python is None else f"sys.path.append({OWN_PATH!r})"
    code = (
        f"import sys; {path}; {first}; "
        f"import runpy; runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
    )
    return [python or sys.executable, "-P", "-c", code]
