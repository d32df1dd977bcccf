"""Triton's interpreter, with which kernels run on a CPU."""

from __future__ import annotations

import contextlib
from typing import Any


def read_scalars() -> None:
    """Have the interpreter read the bounds of a loop, which it keeps in arrays of one element: numpy 2.4 and
    later make no Python number of such an array, as Triton before 3.8 asks for."""
    with contextlib.suppress(ImportError):
        from triton.runtime import interpreter

        patch = getattr(interpreter, "_patch_lang_tensor", None)
        if patch is None:
            return

        def patched(tensor: Any, scope: Any) -> None:
            patch(tensor, scope)
            scope.set_attr(tensor, "__index__", lambda scalar: int(scalar.handle.data.item()))

        interpreter._patch_lang_tensor = patched
