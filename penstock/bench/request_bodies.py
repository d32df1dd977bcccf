"""Request bodies of a measurement, with prompts of a given length."""

from __future__ import annotations

import random
from pydoc_data.topics import topics
from typing import Any

import httpx
import msgspec

from penstock.bench.errors import BenchError
from penstock.config.bench import BenchHostConfig

PATHS = {
    "completions": "/v1/completions",
    "chat": "/v1/chat/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
}
PROMPTS = 64
"""Different prompts, used in turn, so that caches of whole prompts have no effect."""
CORRECTIONS = 2
"""Corrections of an estimated text length; each calls /tokenize once."""
SLOW_TOKENS = 16384
_SEED = 20261121


class ProbeResult(msgspec.Struct, frozen=True):
    """Result of one request that is not streamed: the model, and the server's token counts."""

    model: str
    prompt_tokens: int
    completion_tokens: int


class BenchmarkBodies:
    """Builds the request bodies for one server."""

    def __init__(self, config: BenchHostConfig, http: httpx.Client) -> None:
        """Request the server's model. ``http`` has the server as its base URL. Raises BenchError."""
        self._config = config
        self._http = http
        self._random = random.Random(_SEED)
        # English text and some code: realistic input for the caches of a tokenizer.
        self._words = " ".join(topics.values()).split()
        models = self._ask("GET", "/v1/models", None)
        self.model = str(models["data"][0]["id"])
        self.path = PATHS[config.endpoint]

    def bodies(self) -> list[str]:
        """JSON texts of streamed requests. Raises BenchError when the server does not tokenize."""
        return [self._body(prompt, stream=True) for prompt in self._prompts()]

    def slow_reader_body(self) -> str:
        """JSON text of a slow reader's streamed request, for SLOW_TOKENS tokens."""
        return self._body(self._prompts(1)[0], stream=True, tokens=SLOW_TOKENS)

    def probe(self) -> ProbeResult:
        """Send one request and check its number of tokens, which later requests do not check.

        Raises BenchError when the server refuses it or sends another number of tokens.
        """
        reply = self._ask("POST", self.path, self._body(self._prompts(1)[0], stream=False))
        usage = reply["usage"]
        generated = usage["completion_tokens" if "completion_tokens" in usage else "output_tokens"]
        prompt_tokens = usage["prompt_tokens" if "prompt_tokens" in usage else "input_tokens"]
        facts = ProbeResult(self.model, int(prompt_tokens), int(generated))
        if facts.completion_tokens != self._config.tokens:
            raise BenchError(
                f"the server sent {facts.completion_tokens} of the {self._config.tokens} tokens that a "
                "request asked for, so tokens cannot be counted by requests"
            )
        return facts

    def _body(self, prompt: str | list[int], *, stream: bool, tokens: int | None = None) -> str:
        endpoint = self._config.endpoint
        limit = "max_output_tokens" if endpoint == "responses" else "max_tokens"
        body: dict[str, Any] = {
            "model": self.model,
            limit: self._config.tokens if tokens is None else tokens,
            "ignore_eos": True,
            "stream": stream,
        }
        if endpoint == "completions":
            body["prompt"] = prompt
        elif endpoint == "responses":
            body |= {"input": prompt, "store": False}
        else:
            body["messages"] = [{"role": "user", "content": prompt}]
        if self._config.logprobs is not None:
            body |= _logprob_fields(endpoint, self._config.logprobs)
        return msgspec.json.encode(body).decode()

    def _prompts(self, count: int = PROMPTS) -> list[str] | list[list[int]]:
        wanted = self._config.prompt_tokens
        words = wanted + 64
        ids = self._tokenize(self._text(0, words))
        if self._config.prompt_kind == "ids":
            # Every prompt starts at another offset of the same ids, repeated as needed.
            ids *= 1 + (wanted + count) // len(ids)
            return [ids[offset : offset + wanted] for offset in range(count)]
        tokens_per_word = len(ids) / words
        return [self._text_of(wanted, tokens_per_word) for _ in range(count)]

    def _text_of(self, wanted: int, tokens_per_word: float) -> str:
        """A text of about ``wanted`` tokens, including special ones: estimated, counted, corrected."""
        start = self._random.randrange(len(self._words))
        words = max(1, round(wanted / tokens_per_word))
        for _ in range(CORRECTIONS):
            found = len(self._tokenize(self._text(start, words)))
            words = max(1, round(words * wanted / found))
        return self._text(start, words)

    def _text(self, start: int, words: int) -> str:
        """``words`` consecutive words from index ``start`` on, which wrap around."""
        rounds = -(-(start + words) // len(self._words))
        return " ".join((self._words * rounds)[start : start + words])

    def _tokenize(self, text: str) -> list[int]:
        body = msgspec.json.encode({"model": self.model, "prompt": text}).decode()
        return [int(token) for token in self._ask("POST", "/tokenize", body)["tokens"]]

    def _ask(self, method: str, path: str, body: str | None) -> Any:
        headers = {"content-type": "application/json"} if body is not None else {}
        try:
            reply = self._http.request(method, path, content=body, headers=headers)
        except httpx.HTTPError as error:
            raise BenchError(f"{method} {path} failed: {error!r}") from None
        if reply.status_code != 200:
            raise BenchError(f"{method} {path} was answered with {reply.status_code}: {reply.text[:300]}")
        return reply.json()


def _logprob_fields(endpoint: str, alternatives: int) -> dict[str, Any]:
    """The fields by which each API is asked for logprobs."""
    if endpoint == "completions":
        return {"logprobs": alternatives}
    if endpoint == "responses":
        return {"include": ["message.output_text.logprobs"], "top_logprobs": alternatives}
    return {"logprobs": True, "top_logprobs": alternatives}
