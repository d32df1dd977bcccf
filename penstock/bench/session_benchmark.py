"""``penstock bench session``: CPU time of a turn of a long conversation, which resends all before it, or over
WebSocket only what is new."""

from __future__ import annotations

import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count
from pydoc_data.topics import topics
from typing import Any

import httpx
import msgspec
import numpy as np

from penstock.bench.deadline import Deadline, ProgressCallback
from penstock.bench.errors import BenchError
from penstock.bench.load.socket_client import SocketClient
from penstock.bench.machine import Machine, this_machine
from penstock.bench.noop_engine import NoOpEngine
from penstock.bench.process_usage import cpu_time, pids_of_supervisor
from penstock.bench.server_process import ServerProcess, serve_command
from penstock.config.bench import BenchSessionConfig
from penstock.dispatch.sent_prompts import SentPrompts
from penstock.engine.loop.kept_prompts import KeptPrompts
from penstock.wire.decoding import decode_from_server
from penstock.wire.messages import (
    SamplingParams,
    Submit,
    encode,
)

OUTPUT_TOKENS = 4
TURN_TOKENS = 128
"""Maximum tokens of a turn's roles, names and ids."""
STEP_MS = 2
CHARACTERS_PER_TOKEN = 4
"""About; the report has the tokens that the server counted."""
WARM_TURNS = 3
"""Turns before the measured ones; the first one sends the whole history."""


class SessionReport(msgspec.Struct, frozen=True, kw_only=True):
    """Milliseconds of CPU per turn."""

    api_server_ms: float
    """The API server's process, from the socket to the last event, with the JSON of the body."""
    body_json_ms: float
    """To decode the body's JSON, measured in this process."""
    engine_ms: float
    """The synthetic engine's process, which has no KV cache."""
    scheduler_ms: float
    """The engine's scheduler with KV blocks and prefix cache, which runs in this process: decoding the
    request, putting its prompt together, prefix lookup, admission and release."""
    turns: int
    prompt_tokens: int
    new_tokens: float
    body_bytes: int
    machine: Machine


def measure(config: BenchSessionConfig, say: ProgressCallback) -> SessionReport:
    """Run the measurement and end its processes. Raises BenchError."""
    deadline = Deadline(config.timeout)
    turns = WARM_TURNS + config.turns + config.history_turns
    room = config.history_tokens * 2 + turns * (config.new_tokens * 2 + TURN_TOKENS)
    options = {
        "--engine": "synthetic",
        "--port": 0,
        "--synthetic-step-ms": STEP_MS,
        "--max-model-len": room,
        "--max-num-seqs": config.sessions,
        "--drain-timeout": 1,
    }
    say("starting penstock serve --engine synthetic")
    arguments = serve_command(options, config.server_args)
    with ServerProcess(arguments, deadline.left("the start of the server")) as server:
        pids = pids_of_supervisor(server.pid)
        say(f"{config.sessions} sessions of {config.history_tokens:,} tokens, {config.turns} turns each")

        def run(turns: int) -> float:
            """Run turns of all sessions at the same time. Returns the seconds to decode their bodies."""
            with ThreadPoolExecutor(config.sessions) as pool:
                played = [pool.submit(each.play, turns, deadline) for each in conversations]
                return sum(each.result() for each in played)

        kind = _SocketConversation if config.websocket else _ChatConversation
        conversations = [kind(config, number, server.url) for number in range(config.sessions)]
        run(WARM_TURNS)
        first = conversations[0].prompt_tokens
        before = cpu_time(pids.api_servers), cpu_time(pids.engines)
        decoding_s = run(config.turns)
        after = cpu_time(pids.api_servers), cpu_time(pids.engines)
        for each in conversations:
            each.close()
    say("the scheduler alone")
    turns = config.sessions * config.turns
    last = conversations[0]
    return SessionReport(
        api_server_ms=(after[0] - before[0]).total / turns * 1000,
        body_json_ms=decoding_s / turns * 1000,
        engine_ms=(after[1] - before[1]).total / turns * 1000,
        scheduler_ms=scheduler_turn_s(first, config.new_tokens, config.turns) * 1000,
        turns=turns,
        prompt_tokens=last.prompt_tokens,
        new_tokens=(last.prompt_tokens - first) / config.turns,
        body_bytes=last.body_bytes,
        machine=this_machine(),
    )


def render(report: SessionReport) -> str:
    """The report as a table."""
    machine = report.machine
    return "\n".join(
        (
            f"a turn of {report.prompt_tokens:,} tokens, {report.new_tokens:,.0f} of them new, in a body of "
            f"{report.body_bytes:,} bytes; {report.turns} turns",
            f"API server              {report.api_server_ms:7.3f} ms of CPU, of which JSON "
            f"{report.body_json_ms:.3f} ms",
            f"synthetic engine        {report.engine_ms:7.3f} ms",
            f"scheduler, prefix cache {report.scheduler_ms:7.3f} ms",
            "",
            f"{machine.cpu}, {machine.cores} cores, {machine.system}, Python {machine.python}",
        )
    )


class _Conversation(ABC):
    """A coding agent's: calls of a tool, and results of a hundred lines."""

    sends_replies: bool
    """Whether a request repeats the reply before."""

    def __init__(self, config: BenchSessionConfig, number: int) -> None:
        """``number``: each has other words."""
        self.prompt_tokens = self.body_bytes = 0
        """Sizes of the last turn's prompt and body."""
        self._new = config.new_tokens * CHARACTERS_PER_TOKEN
        words = " ".join(topics.values()).split()
        self._words = (words[at * 7919 % len(words)] for at in count(number * 1_000_003))
        self._number = 0
        self._begin(
            self._text(config.history_tokens * CHARACTERS_PER_TOKEN // 8), "Repair the parser, please."
        )
        each = config.history_tokens * CHARACTERS_PER_TOKEN * 7 // 8 // config.history_turns
        for _ in range(config.history_turns):
            self._add_call(self._text(each // 10), self._text(each // 10), self._text(each * 8 // 10))

    def play(self, turns: int, deadline: Deadline) -> float:
        """Run turns. Returns the seconds of CPU to decode the JSON of their bodies. Raises BenchError."""
        decoding_s = 0.0
        for turn in range(turns):
            deadline.left(f"turn {turn}")
            body = self._body()
            try:
                text, self.prompt_tokens = self._reply(body)
            except (httpx.HTTPError, OSError, LookupError, TypeError, msgspec.MsgspecError) as error:
                raise BenchError(f"a turn failed: {error}") from None
            self.body_bytes = len(body)
            decoding_s += _cpu(partial(msgspec.json.decode, body))
            said = text if self.sends_replies else None
            self._add_call(said, self._text(self._new // 10), self._text(self._new * 9 // 10))
        return decoding_s

    @abstractmethod
    def _begin(self, instructions: str, question: str) -> None:
        """The conversation's first words."""

    @abstractmethod
    def _body(self) -> bytes:
        """The next request."""

    @abstractmethod
    def _reply(self, body: bytes) -> tuple[str, int]:
        """The text of the reply to a request, and its prompt tokens. Raises BenchError."""

    def _add_call(self, content: str | None, argument: str, result: str) -> None:
        """The model's text, unless the server has it, its call and the tool's result."""
        self._number += 1
        arguments = msgspec.json.encode({"path": "src/parser.py", "text": argument}).decode()
        self._add(content, f"call_{self._number}", arguments, result)

    @abstractmethod
    def _add(self, content: str | None, id: str, arguments: str, result: str) -> None:
        """The same, as the API has it."""

    @abstractmethod
    def close(self) -> None:
        """Close its connection."""

    def _text(self, length: int) -> str:
        words: list[str] = []
        while length > 0:
            words.append(next(self._words))
            length -= len(words[-1]) + 1
        return " ".join(words)


class _ChatConversation(_Conversation):
    """One that is sent whole with every turn, as a chat completion."""

    sends_replies = True

    def __init__(self, config: BenchSessionConfig, number: int, url: str) -> None:
        self._messages: list[dict[str, Any]] = []
        super().__init__(config, number)
        self._http = httpx.Client(base_url=url, timeout=60)

    def close(self) -> None:
        self._http.close()

    def _begin(self, instructions: str, question: str) -> None:
        self._messages += [
            {"role": "system", "content": instructions},
            {"role": "user", "content": question},
        ]

    def _add(self, content: str | None, id: str, arguments: str, result: str) -> None:
        call = {"id": id, "type": "function", "function": {"name": "edit", "arguments": arguments}}
        self._messages += [
            {"role": "assistant", "content": content, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": id, "content": result},
        ]

    def _body(self) -> bytes:
        request = {
            "messages": self._messages,
            "tools": [{"type": "function", "function": each} for each in _TOOLS],
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": OUTPUT_TOKENS,
        }
        return msgspec.json.encode(request)

    def _reply(self, body: bytes) -> tuple[str, int]:
        texts: list[str] = []
        tokens = 0
        reply = self._http.post(
            "/v1/chat/completions", content=body, headers={"content-type": "application/json"}
        )
        if reply.status_code != 200:
            raise BenchError(f"a turn failed with {reply.status_code}: {reply.text[:500]}")
        for event in _events(reply.text):
            texts += [choice["delta"].get("content") or "" for choice in event["choices"]]
            tokens = (event.get("usage") or {}).get("prompt_tokens", tokens)
        return "".join(texts), tokens


class _SocketConversation(_Conversation):
    """One whose turns send what is new, and continue the response before over the same WebSocket."""

    sends_replies = False

    def __init__(self, config: BenchSessionConfig, number: int, url: str) -> None:
        self._items: list[dict[str, Any]] = []
        self._previous: str | None = None
        super().__init__(config, number)
        self._socket = SocketClient(url)

    def close(self) -> None:
        self._socket.close()

    def _begin(self, instructions: str, question: str) -> None:
        self._items += [{"role": "developer", "content": instructions}, {"role": "user", "content": question}]

    def _add(self, content: str | None, id: str, arguments: str, result: str) -> None:
        if content is not None:
            self._items.append({"role": "assistant", "content": content})
        self._items += [
            {"type": "function_call", "call_id": id, "name": "edit", "arguments": arguments},
            {"type": "function_call_output", "call_id": id, "output": result},
        ]

    def _body(self) -> bytes:
        request = {
            "type": "response.create",
            "input": self._items,
            "previous_response_id": self._previous,
            "tools": [{"type": "function", **each} for each in _TOOLS],
            "store": False,
            "max_output_tokens": OUTPUT_TOKENS,
        }
        return msgspec.json.encode(request)

    def _reply(self, body: bytes) -> tuple[str, int]:
        response = self._socket.response(body)
        self._items.clear()
        self._previous = response["id"]
        return "", response["usage"]["input_tokens"]


def _tool(name: str) -> dict[str, Any]:
    properties = {field: {"type": "string", "description": f"The {field}."} for field in ("path", "text")}
    parameters = {"type": "object", "properties": properties, "required": ["path"]}
    return {"name": name, "description": f"The tool to {name} files.", "parameters": parameters}


_TOOLS = [_tool(name) for name in ("read", "write", "edit", "run", "search", "list")]


def _events(text: str) -> Iterator[dict[str, Any]]:
    for line in text.splitlines():
        if line.startswith("data: {"):
            yield msgspec.json.decode(line[6:])


def _cpu(work: Callable[[], object]) -> float:
    began = time.thread_time()
    work()
    return time.thread_time() - began


def scheduler_turn_s(history_tokens: int, new_tokens: int, turns: int) -> float:
    """CPU seconds of one turn in the engine's scheduler, without a model: the median of ``turns`` turns."""
    room = history_tokens + (turns + WARM_TURNS) * (new_tokens + OUTPUT_TOKENS) + 64
    engine = NoOpEngine(1, room, room)
    sent, kept = SentPrompts(8 * room), KeptPrompts(8 * room)
    history = (4 + np.arange(room) * 7919 % 50_000).astype("<i4")
    spent = []
    for turn in range(turns + WARM_TURNS):
        prompt = history[: history_tokens + turn * new_tokens].tobytes()
        submit = Submit(turn + 1, prompt, SamplingParams(max_tokens=OUTPUT_TOKENS, seed=1))
        spent.append(_cpu(partial(_run_turn, engine, kept, encode(sent.shorten(submit)))))
    return statistics.median(spent[WARM_TURNS:])


def _run_turn(engine: NoOpEngine, kept: KeptPrompts, submit: bytes) -> None:
    request = decode_from_server(submit)
    assert isinstance(request, Submit)
    engine.submit(0, kept.restore(b"", request))
    while engine.has_work():
        engine.step()
