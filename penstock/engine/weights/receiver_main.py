"""Receives weights that a trainer broadcasts by gloo: ``python -m <this module> GROUP``, a TransferGroup.

A process of its own, started by an API server, which never imports torch. It owns its membership of the
trainer's process group. It writes whether it has joined to standard output; from then on it takes transfers,
one after the other, on its socket. It ends when a transfer fails or is given up (nobody knows then what the
trainer will send next), when a connection brings no transfer, and when standard input is closed: with the API
server that started it.

The file is in memory that is shared, and gloo writes into it: there is no other copy of a tensor.
"""

from __future__ import annotations

import ipaddress
import json
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import msgspec
from setproctitle import setproctitle

from penstock.wire.weights.transfer import (
    STORED_TYPES,
    BroadcastTensor,
    Transfer,
    TransferGroup,
    TransferResult,
)

LONGEST_BROADCAST = timedelta(hours=2)
"""Longer than any call waits: the API server gives up before."""
TAIL_BYTES = 16
"""Bytes at the end of a tensor that are random until they are received: gloo takes a broadcast that is
shorter than its tensor as a whole one. Shorter tensors than eight bytes are not checked."""
MIN_CHECKED_BYTES = 8


def main(group: TransferGroup) -> None:
    setproctitle("penstock: weight receiver")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal; the API server decides
    _end_with(sys.stdin.fileno())
    error = _join(group)
    listener = None
    if not error:
        Path(group.socket).unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(group.socket)
        listener.listen(1)
    sys.stdout.buffer.write(msgspec.json.encode(TransferResult(error)) + b"\n")
    sys.stdout.buffer.flush()
    while listener is not None:
        connection, _ = listener.accept()
        result = _serve(connection)
        if result.error:
            _end()


def _join(group: TransferGroup) -> str:
    """Why the group cannot be joined; empty: it is."""
    try:
        import torch.distributed as dist
    except ImportError:
        return "PyTorch, which receives broadcasts, is not installed"
    if _is_loopback(group.master_address) and sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    host = f"[{group.master_address}]" if ":" in group.master_address else group.master_address
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"tcp://{host}:{group.master_port}",
            rank=group.rank,
            world_size=group.world_size,
            timeout=LONGEST_BROADCAST,
        )
    except Exception as error:  # noqa: BLE001 - whatever torch does not like is told
        return _line(error)
    return ""


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _serve(connection: socket.socket) -> TransferResult:
    with connection, connection.makefile("rb") as lines:
        line = lines.readline()
        if not line.endswith(b"\n"):
            _end()
        ended = threading.Event()
        _end_with(connection.fileno(), unless=ended)
        transfer = msgspec.json.decode(line, type=Transfer)
        try:
            receive(transfer)
            result = TransferResult()
        except Exception as error:  # noqa: BLE001 - whatever gloo or the file system does is told
            result = TransferResult(_line(error))
        ended.set()
        connection.sendall(msgspec.json.encode(result) + b"\n")
        lines.read()
    return result


def receive(transfer: Transfer) -> None:
    """Fill a new file with what rank 0 broadcasts."""
    import torch
    import torch.distributed as dist

    header, places = lay_out(transfer.tensors)
    size = len(header) + sum(tensor.size for tensor in transfer.tensors)
    fd = os.open(transfer.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(fd, 0, size)
        else:
            os.ftruncate(fd, size)
        os.pwrite(fd, header, 0)
    finally:
        os.close(fd)
    whole = torch.from_file(transfer.path, shared=True, size=size, dtype=torch.uint8)
    for tensor, start in zip(transfer.tensors, places, strict=True):
        view = whole[start : start + tensor.size]
        tail = view[-TAIL_BYTES:]
        unset = torch.frombuffer(bytearray(os.urandom(len(tail))), dtype=torch.uint8)
        tail.copy_(unset)
        try:
            dist.broadcast(view, src=0)
        except Exception as error:
            raise RuntimeError(f"{tensor.name}: {_line(error)}") from error
        if len(tail) >= MIN_CHECKED_BYTES and torch.equal(tail, unset):
            what = f"{tensor.dtype} {list(tensor.shape)}"
            raise RuntimeError(f"{tensor.name}: fewer than the {tensor.size} bytes of {what} came")


def lay_out(tensors: Sequence[BroadcastTensor]) -> tuple[bytes, list[int]]:
    """The header of a safetensors file, and where each tensor begins. Those of larger elements lie first, so
    that all begin at a multiple of their elements' size."""
    entries: dict[str, Any] = {}
    end = 0
    for tensor in sorted(tensors, key=lambda each: -STORED_TYPES[each.dtype][1]):
        start, end = end, end + tensor.size
        dtype = STORED_TYPES[tensor.dtype][0]
        entries[tensor.name] = {"dtype": dtype, "shape": tensor.shape, "data_offsets": (start, end)}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    return header, [len(header) + entries[tensor.name]["data_offsets"][0] for tensor in tensors]


def _line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:1000]


def _end_with(fd: int, unless: threading.Event | None = None) -> None:
    """End this process when the other end of ``fd`` is closed, unless the event is set by then."""
    threading.Thread(target=_watch, args=(os.dup(fd), unless), name="hang-up", daemon=True).start()


def _watch(fd: int, unless: threading.Event | None) -> None:
    poll = select.poll()
    poll.register(fd, 0)  # hang-ups are always reported
    poll.poll()
    os.close(fd)
    if unless is None or not unless.is_set():
        _end()


def _end() -> NoReturn:
    """At once: gloo's threads would wait for the trainer."""
    os._exit(1)


if __name__ == "__main__":
    main(msgspec.json.decode(sys.argv[1], type=TransferGroup))
