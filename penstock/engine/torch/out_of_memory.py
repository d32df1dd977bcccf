"""A lack of memory: how it is told from other errors, and what is said of it when an engine starts."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator

import psutil
import torch

from penstock.config.errors import ConfigError, one_line

_TEXTS = ("out of memory", "ALLOC_FAILED", "can't allocate memory", "not enough memory")
"""Texts of errors that have no type of their own: CUDA's and Triton's, cuBLAS's and cuDNN's, PyTorch's on
hosts."""
MAX_ERROR = 200
"""Characters of an exception's text that are shown."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the device or the host had no memory for something; later calls may have it.

    So it is when another error follows from that: a capture fails once more where it ends.
    """
    return any(_is_shortage(each) for each in _chain(error))


def _is_shortage(error: BaseException) -> bool:
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _TEXTS)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """The error and what was being handled when it was raised."""
    while error is not None:
        yield error
        error = error.__context__


def drop_frames(error: BaseException) -> None:
    """Free what failed calls hold, such as the tensors of half a step, while ``error`` lives.

    To be called where it is first caught: a generator among its callers that is to go on would be closed.
    """
    for each in _chain(error):
        traceback.clear_frames(each.__traceback__)


@contextlib.contextmanager
def stating_shortage(what: str, remedy: str, device: torch.device) -> Iterator[None]:
    """Turn a lack of memory into a ConfigError that says what was being done, what memory there is, and what
    helps. ``what`` follows "out of memory while"."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        drop_frames(error)
        reason = in_brief(error)
        state = describe_memory(device)
        raise ConfigError(f"out of memory while {what} ({reason}): {state}; {remedy}") from None


def describe_memory(device: torch.device) -> str:
    """What is free on the device, and who has the rest."""
    if device.type != "cuda":
        return f"{in_units(psutil.virtual_memory().available)} of the host's memory are available"
    try:
        free, total = torch.cuda.mem_get_info(device)
    except RuntimeError:  # no room for a CUDA context
        return f"{device} has not even room for a CUDA context"
    own = torch.cuda.memory_reserved(device)
    return (
        f"of {in_units(total)} on {device} {in_units(free)} are free, this engine has {in_units(own)}, CUDA "
        f"contexts and other processes {in_units(max(0, total - free - own))}"
    )


def in_units(size: int) -> str:
    """Bytes, as GiB from a tenth of one on."""
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 // 10 else f"{size} bytes"


def in_brief(error: BaseException) -> str:
    """An exception's type and the beginning of its text."""
    return f"{type(error).__name__}: {one_line(error)}"[:MAX_ERROR]
