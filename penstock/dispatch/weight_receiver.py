"""The receiver of weights that a trainer broadcasts, as API servers start and use it.

One per host, and one call about it at a time: a lock in the run directory, which the kernel releases with
its holder. Any API server may use it. It ends with the one that has started it, and whenever a call fails:
what the trainer has sent by then, or will send, would be taken for tensors of the next call.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import socket
from collections.abc import AsyncIterator, Iterator, Set
from pathlib import Path

import msgspec

from penstock.module_command import module_command
from penstock.wire.weights.transfer import (
    MAX_RESULT_BYTES,
    RECEIVER_LOCK,
    RECEIVER_SOCKET,
    Transfer,
    TransferGroup,
    TransferResult,
)

_MODULE = "penstock.engine.weights.receiver_main"
END_TIMEOUT_S = 5.0
"""A receiver ends within milliseconds, unless it is stopped."""


class ReceiverBusy(Exception):
    """Another call is about the receiver."""


class NoReceiver(Exception):
    """There is no receiver, or it has ended."""


class TransferFailed(Exception):
    """The group was not joined, or the tensors did not all come."""


class ReceiverLost(TransferFailed):
    """The receiver has ended in the middle."""


class WeightReceiver:
    """One API server's view. Methods are called with the lock unless they say otherwise."""

    def __init__(self, run_dir: str) -> None:
        self._lock_path = Path(run_dir) / RECEIVER_LOCK
        self._socket_path = str(Path(run_dir) / RECEIVER_SOCKET)
        self._process: asyncio.subprocess.Process | None = None
        """The receiver that this API server has started."""

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Raises ReceiverBusy."""
        fd = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ReceiverBusy from None
            yield
        finally:
            os.close(fd)

    async def join(self, master_address: str, master_port: int, rank: int, world_size: int) -> None:
        """Start a receiver in place of the one before, and wait until its group is complete. Raises
        TransferFailed."""
        await self.end()
        group = TransferGroup(self._socket_path, master_address, master_port, rank, world_size)
        process = await asyncio.create_subprocess_exec(
            *module_command(_MODULE),
            msgspec.json.encode(group).decode(),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=MAX_RESULT_BYTES,
        )
        try:
            assert process.stdout is not None
            result = _result(await process.stdout.readline())
            if result.error:
                raise TransferFailed(result.error)
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            raise
        self._process = process

    async def end(self) -> None:
        """End the receiver, if there is one. One that does not end in time is not found any more, and is
        killed if this API server has started it."""
        try:
            async with asyncio.timeout(END_TIMEOUT_S), self._connection() as (reader, writer):
                writer.write_eof()
                with contextlib.suppress(ConnectionError):
                    await reader.read()  # until it has ended
        except NoReceiver:
            pass
        except TimeoutError:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._socket_path)
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            self._process = None

    def end_after_transfer(self) -> None:
        """End the receiver, if there is one; after the transfer of a call that holds the lock. Called without
        the lock."""
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
            connection.setblocking(False)
            connection.connect(self._socket_path)

    async def receive(self, transfer: Transfer) -> None:
        """Wait until all tensors are in the file. Raises NoReceiver and TransferFailed, as ReceiverLost if it
        has ended."""
        async with self._connection() as (reader, writer):
            writer.write(msgspec.json.encode(transfer) + b"\n")
            line = b""
            with contextlib.suppress(ConnectionError):
                line = await reader.readline()
            result = _result(line)
            if result.error:
                raise TransferFailed(result.error)

    @contextlib.asynccontextmanager
    async def _connection(self) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        try:
            reader, writer = await asyncio.open_unix_connection(self._socket_path, limit=MAX_RESULT_BYTES)
        except OSError:
            raise NoReceiver from None
        try:
            yield reader, writer
        finally:
            writer.transport.abort()


def _result(line: bytes) -> TransferResult:
    """Raises ReceiverLost."""
    if not line.endswith(b"\n"):
        raise ReceiverLost("the receiver has ended (the server's log says more)")
    return msgspec.json.decode(line, type=TransferResult)


def remove_files_beside(directory: Path, kept: Set[str]) -> None:
    """Remove the weights that no value needs any more."""
    for path in directory.glob("*.safetensors"):
        if str(path) not in kept:
            path.unlink(missing_ok=True)
