"""Damaged messages of an API server: valid ones that were mutated, as values and as bytes, from a seed."""

from __future__ import annotations

import math
import random
from typing import Any

import msgspec

from penstock.wire.messages import (
    ENGINE_PROTOCOL_VERSION,
    Abort,
    Disconnect,
    Hello,
    RpcCall,
    encode,
)
from tests.engine.support import submit

ODD_VALUES: tuple[Any, ...] = (
    *(None, True, -1, 0, 1, (1 << 15), (1 << 22) - 1, (1 << 31) - 1, 1 << 31, (1 << 63) - 1, 1 << 63),
    *((1 << 64) - 1, -(1 << 63), 0.5, -2.5, math.nan, math.inf, -math.inf, 1e300),
    *("", "a", "é" * 3000, b"", b"\xff" * 7, b"\0" * 4096),
    *([], [[]], [-1], [1 << 40], list(range(5000)), {}, {"a": [1]}, {1: 2}, {b"": None}),
)
HUGE_HEADERS = (
    b"\xdd\xff\xff\xff\xff",
    b"\xdf\xff\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff",
    b"\xdb\xff\xff\xff\xff",
)


class Fuzzer:
    """One hostile API server's messages. It has no operations that are meant to disturb others, such as
    ``sleep``."""

    def __init__(self, seed: int, server: int) -> None:
        self._rng = random.Random(seed)
        self._server = server
        self._handle = 0

    def hello(self) -> bytes:
        return encode(Hello(ENGINE_PROTOCOL_VERSION, self._server, 0))

    def parts(self) -> list[bytes]:
        """One ZMQ message. Most begin with a valid Hello: damage ends the connection."""
        rng = self._rng
        parts = [self._part() for _ in range(rng.choice((1, 1, 1, 2, 5, 30)))]
        return [self.hello(), *parts] if rng.random() < 0.7 else parts

    def _part(self) -> bytes:
        rng = self._rng
        valid = self._valid()
        match rng.randrange(6):
            case 0:
                return valid
            case 1 | 2:
                return self._with_odd_value(valid)
            case _:
                return self._with_odd_bytes(valid)

    def _valid(self) -> bytes:
        rng = self._rng
        self._handle += 1
        request = submit(self._handle, rng.choice((1, 20, 4000)), prompt=[40] * rng.choice((1, 10, 3000)))
        sampling = msgspec.structs.replace(
            request.sampling,
            stop_token_ids=tuple(range(rng.choice((0, 3, 20)))),
            logprobs=rng.choice((-1, 0, 5)),
            min_tokens=rng.choice((0, 1)),
        )
        call = RpcCall(self._handle, "reset_prefix_cache", {"a": [1, {"b": 2}]}, "key")
        return encode(
            rng.choice(
                (
                    *(msgspec.structs.replace(request, sampling=sampling),) * 4,
                    Abort([rng.randrange(self._handle + 1) for _ in range(rng.choice((1, 100)))]),
                    call,
                    Disconnect(),
                )
            )
        )

    def _with_odd_value(self, valid: bytes) -> bytes:
        rng = self._rng
        fields = msgspec.msgpack.decode(valid)
        target = fields
        while len(nested := [value for value in target if isinstance(value, list) and value]):
            if rng.random() < 0.5:
                break
            target = rng.choice(nested)
        match rng.randrange(8):
            case 0:
                del target[rng.randrange(len(target)) :]
            case 1:
                target += [rng.choice(ODD_VALUES)] * rng.choice((1, 30))
            case _:
                target[rng.randrange(len(target))] = rng.choice(ODD_VALUES)
        return encode(fields)

    def _with_odd_bytes(self, valid: bytes) -> bytes:
        rng = self._rng
        damaged = bytearray(valid)
        for _ in range(rng.choice((1, 1, 3))):
            place = rng.randrange(len(damaged) + 1)
            match rng.randrange(6):
                case 0:
                    del damaged[place:]
                case 1:
                    damaged[place:place] = rng.randbytes(rng.choice((1, 4, 100)))
                case 2:
                    damaged[place:place] = rng.choice(HUGE_HEADERS)
                case 3:
                    damaged[:0] = b"\x91" * 5000
                case _:
                    damaged[place : place + 1] = rng.randbytes(1)
        return bytes(damaged)
