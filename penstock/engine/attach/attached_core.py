"""The engine process at the other end: requests and calls to it, and its outputs.

Calls are answered between the engine's steps. Outputs that arrive before an answer are kept for the next
step.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from penstock.adapters.errors import AdapterError
from penstock.engine.attach.connection import EngineConnection
from penstock.engine.attach.output_decoder import DecodedOutputs, OutputDecoder, UnreadableOutput
from penstock.engine.attach.request_ids import RequestIds
from penstock.engine.attach.versions import takes_hints, takes_type_ranges
from penstock.wire.vllm.messages import (
    ENGINE_DEAD,
    EngineLost,
    ReadyResponse,
    UtilityOutput,
    encode_abort,
    encode_call,
)

LARGEST = {"float16": 65504.0}
"""Largest value of the dtypes in which adapters may be kept; of others, float32's and bfloat16's."""
LARGEST_WIDE = 3.3e38
MAX_WAITING_BYTES = 256 << 20
"""Bytes of outputs that are kept while a call runs."""
MAX_REASON_CHARS = 600
"""Characters of vLLM's own words in a message."""
WAIT_S = 1.0
_REASON = re.compile(
    r"Worker failed with error ['\"](.*)['\"], please check the stack trace"
    r"|^Call to \w+ method failed: (?!Worker failed)(.*)"
)
"""What a worker of vLLM's says, in what its engine says of it; the worker may have a process of its own."""


class CallFailed(ValueError):
    """The engine has refused a call, or failed in it."""


class AttachedCore:
    """One engine. Used by one thread."""

    def __init__(
        self, connection: EngineConnection, ready: ReadyResponse, ids: RequestIds, call_timeout_s: float
    ) -> None:
        """``call_timeout_s``: how long an answer may take; 0: no limit."""
        self._connection = connection
        self._ready = ready
        self._call_timeout_s = call_timeout_s
        self.ids = ids
        self._decoder = OutputDecoder(ids)
        self._outgoing: list[Sequence[bytes]] = []
        self._waiting: deque[list[memoryview]] = deque()
        self._waiting_bytes = 0
        self._next_call = secrets.randbelow(1 << 30)
        """Numbers of an earlier attachment's calls, whose answers may still arrive, are other ones."""
        self._first_adapter = secrets.randbelow(1 << 20) << 10
        """Added to adapters' numbers: vLLM may have adapters of an earlier attachment."""
        self._names: dict[int, str] = {}
        """Names of loaded adapters in vLLM, by number."""
        self._lost: EngineLost | None = None
        """Why the engine is lost, as a call has found, of which the caller may have made a failed change."""
        self.is_asleep = False
        self.heard_at = time.monotonic()
        """When the engine has last sent something."""

    # -- outputs

    @property
    def has_output(self) -> bool:
        """Whether :meth:`receive` has something, which may be that the engine is lost."""
        if self._lost is not None:
            return True
        return bool(self._waiting) or self._connection.has_output or self._connection.has_news

    def receive(self) -> tuple[DecodedOutputs, list[memoryview]] | None:
        """The next outputs, and the frames of their message; None: there are none. Raises EngineLost."""
        if self._lost is not None:
            raise self._lost
        if self._waiting:
            frames = self._waiting.popleft()
            self._waiting_bytes -= sum(map(len, frames))
        else:
            received = self._receive()
            if received is None:
                return None
            frames = received
        return self._decode(frames), frames

    def wait(self, timeout_s: float) -> None:
        """Block until there is something to receive or to check, or for ``timeout_s`` seconds."""
        self._connection.wait(timeout_s)

    def check_time(self, began: float, missed: str) -> None:
        """Raises EngineLost when what began at that time has taken as long as a call may."""
        _check_time(began, self._call_timeout_s, missed)

    def _receive(self) -> list[memoryview] | None:
        frames = self._connection.receive()
        if frames is not None:
            self.heard_at = time.monotonic()
            if frames[0] == ENGINE_DEAD:
                raise EngineLost("vLLM's engine has failed; its own log says why")
        elif self._connection.has_news:
            self._connection.read_disconnects()
            if self._connection.receive_ready() is not None:
                raise EngineLost("another engine process has taken its place")
        return frames

    def _decode(self, frames: list[memoryview]) -> DecodedOutputs:
        try:
            return self._decoder.decode(frames[0])
        except UnreadableOutput as error:
            raise EngineLost(f"it sent what cannot be understood: {str(error)[:MAX_REASON_CHARS]}") from None

    # -- requests

    def send(self, frames: Sequence[bytes]) -> None:
        """Send a message with the next :meth:`flush`."""
        self._outgoing.append(frames)

    def abort(self, request_ids: Sequence[str]) -> None:
        """Abort requests with the next :meth:`flush`; unknown ones are ignored."""
        if request_ids:
            self._outgoing.append(encode_abort(list(request_ids)))

    def flush(self) -> None:
        """Send what waits. Messages that follow one another closely cost one wake-up of ZMQ's thread and one
        system call together. Raises EngineLost."""
        if self._outgoing:
            outgoing, self._outgoing = self._outgoing, []
            for frames in outgoing:
                self._connection.send(frames)

    # -- calls

    def call(
        self,
        method: str,
        *arguments: Any,
        on_wait: Callable[[], None] = lambda: None,
        timeout_s: float | None = None,
    ) -> Any:
        """The result of a method of the engine's. ``on_wait`` is called once a second. ``timeout_s``: other
        than that of all calls. Raises CallFailed, EngineLost."""
        try:
            return self._ask(
                method, arguments, on_wait, self._call_timeout_s if timeout_s is None else timeout_s
            )
        except EngineLost as error:
            self._lost = error
            raise

    def _ask(
        self, method: str, arguments: tuple[Any, ...], on_wait: Callable[[], None], timeout_s: float
    ) -> Any:
        """Raises CallFailed, EngineLost."""
        self.flush()
        self._next_call += 1
        self._connection.send(encode_call(self._next_call, method, arguments))
        began = time.monotonic()
        while True:
            frames = self._receive()
            if frames is not None:
                answer = self._decode(frames).rest.utility_output
                if answer is None:
                    self._keep(frames)
                elif answer.call_id == self._next_call:
                    self._connection.trust_source()
                    name = arguments[0] if method == "collective_rpc" else method
                    if f"has no attribute '{name}'" in (answer.failure_message or ""):
                        raise CallFailed(f"vLLM {self._ready.vllm_version} has no {name}")
                    return _result(answer)
                continue
            _check_time(began, timeout_s, f"answered {method}")
            on_wait()
            self._connection.wait(WAIT_S)

    def _keep(self, frames: list[memoryview]) -> None:
        self._waiting.append(frames)
        self._waiting_bytes += sum(map(len, frames))
        if self._waiting_bytes > MAX_WAITING_BYTES:
            raise EngineLost(f"it sent more than {MAX_WAITING_BYTES} bytes of outputs instead of an answer")

    @property
    def takes_hints(self) -> bool:
        """Whether the engine's version knows session_id and kv_hints of requests."""
        return takes_hints(self._ready.vllm_version)

    @property
    def takes_type_ranges(self) -> bool:
        """Whether the engine's version wants to know where the second text of a pair ends."""
        return takes_type_ranges(self._ready.vllm_version)

    # -- adapters, as :class:`penstock.engine.attach.adapter_loader.AttachedAdapterLoader` uses them

    @property
    def largest_weight(self) -> float:
        """Largest value of the dtype in which vLLM keeps adapters."""
        return LARGEST.get(self._ready.dtype, LARGEST_WIDE)

    def add_adapter(self, name: str, number: int, path: str) -> list[Any]:
        """Load the adapter in the directory ``path``, which the engine must be able to read. Returns vLLM's
        LoRARequest. Raises AdapterError with vLLM's reason.

        vLLM takes requests of the same name for the same adapter: a name gets another one while it is taken.
        """
        number += self._first_adapter
        if name in self._names.values():
            name = f"{name}#{number}"
        request = [name, number, path]
        try:
            self.call("add_lora", request)
        except CallFailed as error:
            self._remove(number)
            raise AdapterError(f"vLLM: {error}") from None
        self._names[number] = name
        return request

    def remove_adapter(self, number: int) -> None:
        """Have vLLM forget an adapter, also one that it does not have."""
        self._remove(number + self._first_adapter)

    def forget_adapters(self) -> None:
        """Have vLLM forget all adapters: those of an earlier attachment."""
        try:
            numbers = self.call("list_loras")
        except CallFailed:  # it runs none
            return
        for number in numbers or ():
            self._remove(number)

    def _remove(self, number: int) -> None:
        self._names.pop(number, None)
        try:
            self.call("remove_lora", number)
        except CallFailed:
            return

    def close(self) -> None:
        """Send what waits, and close the connection."""
        with contextlib.suppress(EngineLost):
            self.flush()
        self._connection.close()


def _check_time(began: float, timeout_s: float, missed: str) -> None:
    if timeout_s and time.monotonic() > began + timeout_s:
        raise EngineLost(f"it has not {missed} within {timeout_s:g} s")


def _result(answer: UtilityOutput) -> Any:
    """Raises CallFailed."""
    if answer.failure_message is not None:
        words = " ".join(answer.failure_message.split())
        found = _REASON.search(words)
        raise CallFailed((found[found.lastindex or 0] if found else words)[:MAX_REASON_CHARS])
    result = answer.result
    return result[1] if isinstance(result, list) and len(result) == 2 else None
