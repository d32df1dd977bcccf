"""An engine process that speaks vLLM's wire and computes nothing: tokens on a clock, for measurements of
front ends.

It does what a headless engine of ``vllm serve`` does at its two sockets: the handshake, requests, aborts
and calls in; outputs and statistics out, as vLLM 0.32 encodes them. The token at a place of a stream is a
function of the prompt's first token and the place, so that a stream that is resumed elsewhere goes on as it
would have.
"""

from __future__ import annotations

import argparse
import math
import os
import struct
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import zmq

from penstock.wire.sockets import tcp_address

VERSION = "0.32.0"
OUTPUT_FIELDS = 18
"""Number of fields of EngineCoreOutput, in that version."""
FIRST_TOKEN = 1000
TOKENS = 20_000
"""Tokens are FIRST_TOKEN to FIRST_TOKEN + TOKENS - 1, as far as the vocabulary has them."""
LAST_TOKEN = FIRST_TOKEN + TOKENS
HANDSHAKE_TIMEOUT_MS = 60_000
LENGTH, ABORT = 1, 2
QUEUED, SCHEDULED = 1, 2
RAW_VIEW = 3
"""Extension type of an array's data."""
PARTS = 4
"""Byte strings of a record: head, header of the tokens, tokens, other fields."""
ASKED_EVERY_S = 1.0
_decode = msgspec.msgpack.decode
_encode = msgspec.msgpack.Encoder().encode


@dataclass(slots=True)
class ClockedStream:
    """A request that runs."""

    head: bytes
    """Encoded record up to its first token."""
    key: int
    """The prompt's first token."""
    place: int
    """Tokens so far, the prompt's included."""
    end: int
    """Place at which it ends."""
    prompt: int
    """Tokens of the prompt."""
    logprobs: int | None
    """Candidates wanted beside each token; None: no logprobs."""


class ClockEngine:
    """One engine; use :meth:`run`."""

    def __init__(
        self,
        address: tuple[str, int],
        *,
        rank: int = 0,
        ranks: int = 1,
        step_ms: float = 15.0,
        tokens_per_step: int = 1,
        max_num_seqs: int = 1024,
        max_model_len: int = 4096,
        vocab_size: int = FIRST_TOKEN + TOKENS,
    ) -> None:
        """``address``: host and port of the handshake. ``rank``: its own, of ``ranks``."""
        self._address = tcp_address(*address)
        self._rank, self._ranks = rank, ranks
        self._identity = rank.to_bytes(2, "little")
        self._step_s = step_ms / 1000
        self._tokens_per_step = tokens_per_step
        self._max_num_seqs = max_num_seqs
        self._max_model_len = max_model_len
        self._encoded = [_encode(token) for token in range(FIRST_TOKEN, min(vocab_size, LAST_TOKEN))]
        self._empty = b"\xc0" * 11 + b"\x00" + b"\xc0" * (OUTPUT_FIELDS - 14)
        self._waiting: dict[str, ClockedStream] = {}
        self._running: dict[str, ClockedStream] = {}
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._asleep = False

    # -- lifetime

    def connect(self) -> None:
        """The handshake. Raises TimeoutError."""
        handshake = self._context.socket(zmq.DEALER)
        handshake.setsockopt(zmq.IDENTITY, self._identity)
        handshake.setsockopt(zmq.IPV6, 1)
        handshake.connect(self._address)
        handshake.send(_encode({"status": "HELLO", "local": False, "headless": True}))
        if not handshake.poll(HANDSHAKE_TIMEOUT_MS):
            raise TimeoutError(f"no answer from {self._address}")
        addresses = _decode(handshake.recv())["addresses"]
        self._requests = self._context.socket(zmq.DEALER)
        self._requests.setsockopt(zmq.IDENTITY, self._identity)
        self._requests.setsockopt(zmq.RCVHWM, 0)
        self._outputs = self._context.socket(zmq.PUSH)
        self._outputs.setsockopt(zmq.SNDHWM, 0)
        self._outputs.setsockopt(zmq.LINGER, 1000)
        for socket in (self._requests, self._outputs):
            socket.setsockopt(zmq.IPV6, 1)
        self._requests.connect(addresses["inputs"][0])
        self._outputs.connect(addresses["outputs"][0])
        self._requests.send(_encode(self.ready_response()))
        handshake.send(_encode({"status": "READY", "local": False, "headless": True}))
        handshake.close(linger=1000)

    def ready_response(self) -> dict[str, Any]:
        """The engine's description of itself."""
        return {
            "max_model_len": self._max_model_len,
            "num_gpu_blocks": 1 << 16,
            "block_size": 16,
            "dp_stats_address": None,
            "dtype": "bfloat16",
            "vllm_version": VERSION,
            "world_size": 1,
            "data_parallel_size": self._ranks,
            "tensor_parallel_size": 1,
            "pipeline_parallel_size": 1,
            "decode_context_parallel_size": 1,
            "data_parallel_rank": self._rank,
            "max_num_seqs": self._max_num_seqs,
            "max_num_batched_tokens": 8192,
            "instance_id": f"clock-{self._rank}",
            "supports_lora": False,
            "max_loras": 0,
            "mamba_block_size": None,
            "kv_cache_size_tokens": 1 << 20,
            "kv_cache_max_concurrency": 256.0,
            "kv_events_config": None,
            "weight_transfer_backend": None,
            "enable_sleep_mode": True,
            "supports_draft_weight_updates": False,
            "effective_attention_block_size": 16,
        }

    def run(self, until: Callable[[], bool]) -> None:
        """Serve until ``until()``, which is asked at least once a second."""
        step_at = time.monotonic()
        while not until():
            now = time.monotonic()
            busy = bool(self._waiting or self._running) and not self._asleep
            wait_s = max(0.0, step_at - now) if busy else ASKED_EVERY_S
            if self._requests.poll(math.ceil(wait_s * 1000)):
                self._receive()
                continue
            if not busy:
                step_at = time.monotonic()
            elif time.monotonic() >= step_at:
                self.step()
                step_at = max(step_at + self._step_s, time.monotonic())

    # -- requests

    def _receive(self) -> None:
        while True:
            try:
                kind, *frames = self._requests.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if kind == b"\x00":
                self._add(_decode(frames[0]))
            elif kind == b"\x01":
                for request_id in _decode(frames[0]):
                    self._waiting.pop(request_id, None)
                    self._running.pop(request_id, None)
            elif kind == b"\x03":
                _, call_id, method, arguments = _decode(frames[0])
                self._answer(call_id, method, arguments)

    def _add(self, request: list[Any]) -> None:
        request_id, prompt, params = request[0], request[1], request[3]
        wanted = params.get("max_tokens", 16)
        head = b"\xdc" + OUTPUT_FIELDS.to_bytes(2, "big") + _encode(request_id)
        end = min(len(prompt) + wanted, self._max_model_len)
        self._waiting[request_id] = ClockedStream(
            head, prompt[0], len(prompt), end, len(prompt), params.get("logprobs")
        )

    def _answer(self, call_id: int, method: str, arguments: list[Any]) -> None:
        match method:
            case "is_sleeping":
                result: Any = self._asleep
            case "sleep" | "pause_scheduler":
                self._asleep, result = True, None
            case "wake_up" | "resume_scheduler":
                self._asleep, result = False, True
            case "reset_prefix_cache":
                result = not self._running
            case "get_supported_tasks":  # vLLM's server begins with these two
                result = ["generate"]
            case "reset_mm_cache":
                result = None
            case _:
                failure = f"Call to {method} method failed: this engine has none"
                self._send([], utility=[call_id, failure, None])
                return
        self._send([], utility=[call_id, None, [None, result]])

    # -- the step

    def step(self) -> None:
        """One step: every running stream gets its tokens, and waiting ones begin."""
        records: list[bytes] = []
        ended: list[str] = []
        encoded, number = self._encoded, self._tokens_per_step
        total = len(encoded)
        for request_id, stream in self._running.items():
            first = stream.key * 7919 + stream.place
            if number == 1 and stream.logprobs is None:
                token = encoded[first % total]
                stream.place += 1
                if stream.place < stream.end:
                    records += (stream.head, b"\x91", token, self._empty)
                    continue
                tokens, count = token, 1
            else:
                count = min(number, stream.end - stream.place)
                tokens = b"".join(encoded[(first + place) % total] for place in range(count))
                stream.place += count
            end = stream.place >= stream.end
            fields = self._empty
            if end or stream.logprobs is not None:
                scored = [FIRST_TOKEN + (first + place) % total for place in range(count)]
                fields = _fields(LENGTH if end else None, scored=scored, width=stream.logprobs)
            records += (stream.head, bytes([0x90 | count]), tokens, fields)
            if end:
                ended.append(request_id)
        for request_id in ended:
            del self._running[request_id]
        self._begin(records)
        self._send(records, stats=self._stats(), finished=ended)

    def _begin(self, records: list[bytes]) -> None:
        """Waiting streams for which there is room: they have their first token in this step."""
        room = self._max_num_seqs - len(self._running)
        now = time.monotonic()
        for request_id in list(self._waiting)[: max(0, room)]:
            stream = self._waiting.pop(request_id)
            token = self._encoded[(stream.key * 7919 + stream.place) % len(self._encoded)]
            stream.place += 1
            reason = LENGTH if stream.place >= stream.end else None
            fields = _fields(
                reason, now=now, prompt=stream.prompt, scored=[_decode(token)], width=stream.logprobs
            )
            records += (stream.head, b"\x91", token, fields)
            if reason is None:
                self._running[request_id] = stream

    def _stats(self) -> dict[str, Any]:
        return {
            "num_running_reqs": len(self._running),
            "num_waiting_reqs": len(self._waiting),
            "num_skipped_waiting_reqs": 0,
            "step_counter": 0,
            "current_wave": 0,
            "kv_cache_usage": len(self._running) / self._max_num_seqs,
            "prefix_cache_stats": {
                "reset": False,
                "requests": 0,
                "queries": 0,
                "hits": 0,
                "hits_by_source": {},
                "preempted_requests": 0,
                "preempted_queries": 0,
                "preempted_hits": 0,
            },
            "connector_prefix_cache_stats": None,
            "kv_cache_eviction_events": [],
            "spec_decoding_stats": None,
            "kv_connector_stats": None,
            "ec_connector_stats": None,
            "iteration_details": None,
            "num_kv_fetch_reqs_by_stage": {"waiting_to_start": 0, "in_progress": 0, "completed_waiting": 0},
            "waiting_lora_adapters": {},
            "running_lora_adapters": {},
            "cudagraph_stats": None,
            "perf_stats": None,
        }

    def _send(
        self,
        records: list[bytes],
        *,
        stats: dict[str, Any] | None = None,
        utility: list[Any] | None = None,
        finished: list[str] | None = None,
    ) -> None:
        number = len(records) // PARTS
        head = b"\x99" + _encode(self._rank) + b"\xdc" + number.to_bytes(2, "big")
        rest = (stats, time.monotonic(), utility, finished or None, None, None, None)
        self._outputs.send(b"".join([head, *records, *map(_encode, rest)]))

    def close(self) -> None:
        for socket in (self._requests, self._outputs):
            socket.close(linger=0)
        self._context.term()


def _fields(
    reason: int | None,
    *,
    now: float | None = None,
    prompt: int = 0,
    scored: Sequence[int] = (),
    width: int | None = None,
) -> bytes:
    """The fields behind the tokens of a record. ``now``: of a stream's first output. ``scored``: its tokens,
    which have logprobs with ``width`` candidates each, unless that is None."""
    events = None if now is None else [{"type": kind, "timestamp": now} for kind in (QUEUED, SCHEDULED)]
    prefill = None
    if now is not None:
        prefill = {
            "num_prompt_tokens": prompt,
            "num_computed_tokens": prompt,
            "num_cached_tokens": 0,
            "num_local_cached_tokens": 0,
            "num_external_cached_tokens": 0,
            "num_cache_creation_tokens": prompt,
        }
    logprobs = None if width is None else _logprobs(scored, width)
    values = [logprobs, None, None, reason, None, events, None, None, None, prefill, None, 0]
    return b"".join(map(_encode, values)) + b"\xc0" * (OUTPUT_FIELDS - 14)


def _logprobs(tokens: Sequence[int], width: int) -> list[Any]:
    """Logprobs of each token and the ``width`` ids behind it, the token being the most likely one."""
    places = range(width + 1)
    ids = struct.pack(
        f"<{len(tokens) * (width + 1)}i", *(token + place for token in tokens for place in places)
    )
    values = struct.pack(f"<{width + 1}f", *(-0.5 - place for place in places)) * len(tokens)
    ranks = struct.pack("<i", 1) * len(tokens)
    shape = (len(tokens), width + 1)
    ext = msgspec.msgpack.Ext
    return [
        ("<i4", shape, ext(RAW_VIEW, ids)),
        ("<f4", shape, ext(RAW_VIEW, values)),
        ("<i4", shape[:1], ext(RAW_VIEW, ranks)),
        None,
    ]


def main(arguments: list[str]) -> None:
    """``python -m penstock.bench.clock.engine HOST PORT``; ends with its parent process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("host")
    parser.add_argument("port", type=int)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--step-ms", type=float, default=15.0)
    parser.add_argument("--tokens-per-step", type=int, default=1)
    parser.add_argument("--max-num-seqs", type=int, default=1024)
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--vocab-size", type=int, default=FIRST_TOKEN + TOKENS)
    given = vars(parser.parse_args(arguments))
    engine = ClockEngine((given.pop("host"), given.pop("port")), **given)
    engine.connect()
    parent = os.getppid()
    engine.run(lambda: os.getppid() != parent)


if __name__ == "__main__":
    main(sys.argv[1:])
