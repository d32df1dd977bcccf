"""The mix of requests: body, behaviour of the client, and expected output."""

from __future__ import annotations

import enum
import random
from dataclasses import dataclass, field
from typing import Any

import msgspec

from tests.soak.oracle import Oracle, Output

MAX_TOKENS = 600
STALLED_TOKENS = 3000
"""Enough for the server to disconnect a client that does not read, at SOAK_BACKLOG."""
STALL_S = 8.0
"""Time without reading, long enough for that many tokens."""
MAX_CHOICES = 3
MAX_LOGPROBS = 20
SLOW_TOKENS = 200

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
UNKNOWN_ROUTE = "/v1/no-such-route"

_TEXT = (
    "the water falls through a pipe and turns wheels below of which each makes light for some town "
    "when it rains gates open so that nothing spills over def return import class None 42 été 水"
)
_WORDS = _TEXT.split()


class ClientBehaviour(enum.Enum):
    """Behaviour of a client."""

    READ = "reads"
    SLOW = "reads slowly"
    LEAVE_EARLY = "leaves before the first token"
    LEAVE_LATE = "leaves in the middle"
    STALL = "does not read until it is cut"


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """One request."""

    path: str
    content: bytes | dict[str, Any]
    """Its body: bytes, or fields to encode as JSON."""
    behaviour: ClientBehaviour = ClientBehaviour.READ
    status: int = 200
    """Expected HTTP status."""
    outputs: list[Output] = field(default_factory=list)
    """Expected output of each choice."""
    events: int = 0
    """Events after which a client leaves in the middle."""
    wait_s: float = 0.0
    """Time after which a client leaves without reading."""

    @property
    def body(self) -> bytes:
        return self.content if isinstance(self.content, bytes) else msgspec.json.encode(self.content)

    @property
    def streamed(self) -> bool:
        return isinstance(self.content, dict) and bool(self.content.get("stream"))

    @property
    def chat(self) -> bool:
        return self.path == CHAT

    @property
    def asked_tokens(self) -> int:
        """Maximum tokens that engines generate for it."""
        if not isinstance(self.content, dict) or self.status != 200:
            return 0
        return int(self.content["max_tokens"]) * len(self.outputs)


class RequestMix:
    """Draws random requests, reproducible by seed."""

    def __init__(self, oracle: Oracle, rng: random.Random) -> None:
        self._oracle = oracle
        self._random = rng
        self._vocabulary = oracle.vocabulary

    def draw(self) -> RequestSpec:
        """The next request."""
        kind = self._random.random()
        if kind < 0.06:
            return self._bad()
        if kind < 0.08:
            return self._stalled()
        return self._good()

    # -- kinds

    def _good(self) -> RequestSpec:
        rng = self._random
        behaviour = rng.choices(
            (
                ClientBehaviour.READ,
                ClientBehaviour.SLOW,
                ClientBehaviour.LEAVE_EARLY,
                ClientBehaviour.LEAVE_LATE,
            ),
            weights=(80, 4, 6, 10),
        )[0]
        tokens = round(MAX_TOKENS ** rng.random())
        if behaviour is ClientBehaviour.SLOW:
            tokens = SLOW_TOKENS
        elif behaviour is ClientBehaviour.LEAVE_LATE:
            tokens = MAX_TOKENS
        choices = rng.randint(2, MAX_CHOICES) if rng.random() < 0.15 else 1
        path = rng.choice((COMPLETIONS, CHAT))
        seed = rng.getrandbits(31)
        body: dict[str, Any] = {"seed": seed, "max_tokens": tokens, "ignore_eos": True}
        if choices > 1:
            body["n"] = choices
        prompts = self._set_prompt(path, body)
        self._set_streaming(body, always=behaviour in (ClientBehaviour.SLOW, ClientBehaviour.LEAVE_LATE))
        self._set_extras(path, body, plain=behaviour is ClientBehaviour.SLOW)
        stop = self._set_stop(body, tokens)
        include = bool(body.get("include_stop_str_in_output"))
        outputs = [
            self._oracle.output(seed + index, tokens, stop, include_stop=include)
            for _ in range(prompts)
            for index in range(choices)
        ]
        return RequestSpec(
            path,
            body,
            behaviour,
            outputs=outputs,
            events=rng.randint(1, 40),
            wait_s=rng.uniform(0.0, 0.2),
        )

    def _stalled(self) -> RequestSpec:
        """Logprobs make events large."""
        seed = self._random.getrandbits(31)
        body = {"prompt": self._text(), "seed": seed, "max_tokens": STALLED_TOKENS, "n": MAX_CHOICES}
        body |= {"logprobs": MAX_LOGPROBS, "stream": True, "stream_interval": 1, "ignore_eos": True}
        outputs = [self._oracle.output(seed + index, STALLED_TOKENS, None) for index in range(MAX_CHOICES)]
        return RequestSpec(COMPLETIONS, body, ClientBehaviour.STALL, outputs=outputs, wait_s=STALL_S)

    def _bad(self) -> RequestSpec:
        outside = 1 << 30
        return self._random.choice(
            (
                RequestSpec(COMPLETIONS, b'{"prompt": "half a', status=400),
                RequestSpec(COMPLETIONS, {"prompt": "x", "max_tokens": -1}, status=400),
                RequestSpec(COMPLETIONS, {"prompt": "x", "temperature": "hot"}, status=400),
                RequestSpec(COMPLETIONS, {"prompt": [outside], "max_tokens": 1}, status=400),
                RequestSpec(COMPLETIONS, {"prompt": "x", "model": "no-such-model"}, status=404),
                RequestSpec(CHAT, {"messages": [], "max_tokens": 1}, status=400),
                RequestSpec(CHAT, {"messages": [{"role": "user"}], "stream": True, "n": 0}, status=400),
                RequestSpec(UNKNOWN_ROUTE, {"prompt": "x"}, status=404),
            )
        )

    # -- parts of a body

    def _set_prompt(self, path: str, body: dict[str, Any]) -> int:
        """Returns the number of prompts."""
        rng = self._random
        if path == CHAT:
            body["messages"] = [{"role": "user", "content": self._text()}]
            return 1
        kind = rng.random()
        if kind < 0.6:
            body["prompt"] = self._text()
        elif kind < 0.9:
            body["prompt"] = rng.choices(self._vocabulary, k=rng.randint(1, 400))
        else:
            body["prompt"] = [self._text(), self._text()]
            return 2
        return 1

    def _text(self) -> str:
        return " ".join(self._random.choices(_WORDS, k=self._random.randint(1, 60)))

    def _set_streaming(self, body: dict[str, Any], *, always: bool) -> None:
        rng = self._random
        if not always and rng.random() < 0.25:
            return
        body["stream"] = True
        if rng.random() < 0.6:
            body["stream_options"] = {"include_usage": True}
        pace = rng.random()
        if pace < 0.5:
            body["stream_interval"] = rng.choice((1, 2, 7, 10, 50))
        elif pace < 0.6:
            body["stream_interval_ms"] = rng.choice((50, 300))

    def _set_extras(self, path: str, body: dict[str, Any], *, plain: bool) -> None:
        """``plain``: nothing that makes events large."""
        rng = self._random
        if not plain and rng.random() < 0.2:
            body["return_token_ids"] = True
        if not plain and rng.random() < 0.1:
            body |= {"logprobs": True, "top_logprobs": 2} if path == CHAT else {"logprobs": 2}

    def _set_stop(self, body: dict[str, Any], tokens: int) -> str | None:
        """Sometimes sets a stop string: a random part of the first choice's text. Returns it."""
        rng = self._random
        if rng.random() >= 0.15:
            return None
        text = self._oracle.text(self._oracle.tokens(body["seed"], tokens))
        begin = rng.randrange(len(text))
        stop = text[begin : begin + rng.randint(2, 8)]
        body["stop"] = [stop]
        if rng.random() < 0.3:
            body["include_stop_str_in_output"] = True
        return stop
