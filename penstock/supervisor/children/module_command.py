"""How a module of ours is run in another process."""

from __future__ import annotations

import sys


def module_command(module: str) -> list[str]:
    """The command of ``python -m module`` in an interpreter that finds modules exactly where this one does.

    Neither an installed version in place of the one that runs, nor a module in the directory where the user
    happens to stand (-P) can get in.
    """
    code = (
        f"import runpy, sys; sys.path[:] = {sys.path!r}; "
        f"runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
    )
    return [sys.executable, "-P", "-c", code]
