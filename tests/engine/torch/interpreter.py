"""Triton's interpreter, with which kernels run on a CPU."""

from __future__ import annotations

import contextlib
from typing import Any


def multiply_bfloat16() -> None:
    """Have the interpreter multiply matrices of bfloat16, which it keeps as the bits of integers."""
    with contextlib.suppress(ImportError):
        import numpy as np
        import triton.language as tl
        from triton.runtime import interpreter

        dot = interpreter.InterpreterBuilder.create_dot

        def widened(factor: Any) -> Any:
            if factor.dtype.scalar != tl.bfloat16:
                return factor
            bits = factor.data.view(np.uint16).astype(np.uint32) << 16
            return interpreter.TensorHandle(bits.view(np.float32), tl.float32)

        def create_dot(builder: Any, a: Any, b: Any, *others: Any) -> Any:
            return dot(builder, widened(a), widened(b), *others)

        interpreter.InterpreterBuilder.create_dot = create_dot


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
