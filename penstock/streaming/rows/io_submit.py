"""Writes one step's events to many client sockets with few system calls: the token path's last stop.

A step's events are small writes to up to a thousand sockets. After each single write the kernel may schedule
the client that it woke instead of this process: on a machine with busy cores a third of an API server's CPU
time went there. On Linux one io_submit(2) writes many events; unlike io_uring, container runtimes allow it.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import platform
import sys
from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import NDArray

log = logging.getLogger(__name__)

BurstWriter = Callable[[NDArray[np.int64], bytes, NDArray[np.int64]], list[tuple[int, int]]]
"""Writes a part of ``data`` to each of several non-blocking sockets, without blocking. Gets the descriptors,
int64[n] and distinct, the parts in the same order, joined, and the bytes of each part, int64[n].

Returns (index, bytes written) of every part that was not written completely. If the socket is not just full
but broken, the next write to it raises the error."""

_BATCH = 256
"""Writes per system call, which takes 1 to 2 ms. fs.aio-max-nr limits all processes together to 65,536."""
FEW = 64
"""Parts that are written one by one. A batch saves 0.7 microseconds per part, but preparing it
takes 13, and 100 in a process that has slept since the step before: nothing is in the caches then."""

_NUMBERS = {"x86_64": (206, 209, 208), "aarch64": (0, 2, 4)}
"""System call numbers of io_setup, io_submit and io_getevents, by machine (asm/unistd.h)."""
_PWRITE = 1  # IOCB_CMD_PWRITE; a socket has no position
_IOCB = np.dtype(  # linux/aio_abi.h
    [
        ("data", "<u8"),
        ("key", "<u4"),
        ("rw_flags", "<i4"),
        ("opcode", "<u2"),
        ("reqprio", "<i2"),
        ("fildes", "<u4"),
        ("buf", "<u8"),
        ("nbytes", "<u8"),
        ("offset", "<i8"),
        ("reserved2", "<u8"),
        ("flags", "<u4"),
        ("resfd", "<u4"),
    ]
)
_EVENT = np.dtype([("data", "<u8"), ("obj", "<u8"), ("res", "<i8"), ("res2", "<i8")])


def make_burst_writer() -> BurstWriter:
    """The fastest writer that this machine allows."""
    try:
        return IoSubmitWriter()
    except OSError as error:
        log.info("events are written one by one: %s", error)
        return write_each


def write_each(
    descriptors: NDArray[np.int64], data: bytes, sizes: NDArray[np.int64]
) -> list[tuple[int, int]]:
    """A :data:`BurstWriter` with one system call per part."""
    short = []
    start = 0
    for index, (descriptor, size) in enumerate(zip(descriptors.tolist(), sizes.tolist(), strict=True)):
        try:
            sent = os.write(descriptor, data[start : start + size])
        except OSError:
            sent = 0
        if sent != size:
            short.append((index, sent))
        start += size
    return short


class IoSubmitWriter:
    """A :data:`BurstWriter` with two system calls per 256 chunks: one to write, one for the results.

    A write to a non-blocking socket is complete when io_submit(2) returns, so nothing is in flight between
    two bursts. The kernel frees its context when the process exits.
    """

    def __init__(self, few: int = FEW) -> None:
        """Up to ``few`` parts are written one by one. Raises OSError if the system has no io_submit(2) or
        does not allow it."""
        self._few = few
        numbers = _NUMBERS.get(platform.machine()) if sys.platform == "linux" else None
        if numbers is None or sys.maxsize < 2**32:
            raise OSError(errno.ENOSYS, "no io_submit(2) is known here")
        long, pointer = ctypes.c_long, ctypes.c_void_p
        setup = _system_call(numbers[0], long, pointer)
        self._submit = _system_call(numbers[1], ctypes.c_ulong, long, pointer)
        self._get_events = _system_call(numbers[2], ctypes.c_ulong, long, long, pointer, pointer)
        context = ctypes.c_ulong(0)
        if setup(_BATCH, ctypes.byref(context)) < 0:
            raise OSError(ctypes.get_errno(), f"io_setup(2): {os.strerror(ctypes.get_errno())}")
        self._context = context.value
        self._blocks = np.zeros(_BATCH, _IOCB)
        self._blocks["opcode"] = _PWRITE
        self._blocks["data"] = np.arange(_BATCH)
        # Columns and addresses are looked up once: each look-up takes a microsecond.
        self._descriptors, self._sizes = self._blocks["fildes"], self._blocks["nbytes"]
        self._starts = self._blocks["buf"]
        self._pointers = _address(self._blocks) + np.arange(_BATCH, dtype=np.uint64) * _IOCB.itemsize
        self._first_pointer = _address(self._pointers)
        events = np.zeros(_BATCH, _EVENT)
        self._events_address = _address(events)
        self._ended, self._results = events["data"], events["res"]
        self._sent = np.zeros(_BATCH, np.int64)

    def __call__(
        self, descriptors: NDArray[np.int64], data: bytes, sizes: NDArray[np.int64]
    ) -> list[tuple[int, int]]:
        if len(sizes) <= self._few:
            return write_each(descriptors, data, sizes)
        starts = sizes.cumsum()
        starts -= sizes
        starts += _bytes_address(data)
        short: list[tuple[int, int]] = []
        for first in range(0, len(sizes), _BATCH):
            batch = slice(first, first + _BATCH)
            missed = self._write(descriptors[batch], starts[batch], sizes[batch])
            short += [(first + index, sent) for index, sent in missed]
        return short

    def _write(
        self, descriptors: NDArray[np.int64], starts: NDArray[np.int64], sizes: NDArray[np.int64]
    ) -> list[tuple[int, int]]:
        """``starts``: addresses of the parts in memory."""
        count = len(sizes)
        sent = self._sent[:count]
        self._descriptors[:count] = descriptors
        self._sizes[:count] = sizes
        self._starts[:count] = starts
        sent.fill(0)
        done = 0
        while done < count:
            first = self._first_pointer + done * self._pointers.itemsize
            taken = self._submit(self._context, count - done, first)
            if taken > 0:
                self._collect(taken)
            done += max(taken, 1)  # the kernel stops before a write that it refuses
        if sent.tobytes() == sizes.tobytes():
            return []
        missed = np.flatnonzero(sent != sizes)
        return list(zip(missed.tolist(), sent[missed].clip(0).tolist(), strict=True))

    def _collect(self, count: int) -> None:
        """Read the results of ``count`` writes."""
        left = count
        while left:
            got = self._get_events(self._context, left, left, self._events_address, None)
            if got > 0:
                self._sent[self._ended[:got]] = self._results[:got]
                left -= got
            elif got < 0 and ctypes.get_errno() != errno.EINTR:
                raise OSError(ctypes.get_errno(), "io_getevents(2)")


_bytes_address = ctypes.pythonapi["PyBytes_AsString"]  # a new function object, whose types are ours
_bytes_address.restype, _bytes_address.argtypes = ctypes.c_void_p, (ctypes.py_object,)


def _address(array: np.ndarray) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def _system_call(number: int, *types: type) -> Callable[..., int]:
    call = ctypes.CDLL(None, use_errno=True)["syscall"]  # a new function object per number
    call.restype = ctypes.c_long
    call.argtypes = (ctypes.c_long, *types)
    return partial(call, number)
