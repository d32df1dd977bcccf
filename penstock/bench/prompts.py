"""Requests of a measurement: prompts of a wanted length, and what a server says of them."""

import random
from typing import Any

import httpx
import msgspec

from penstock.bench.errors import BenchError
from penstock.config.bench import BenchHostConfig

PROMPTS = 64
"""Different prompts, taken in turn, so that no cache of whole prompts can answer."""
_SEED = 20261121
_WORDS = """
a about after again air all also always and another are around as ask at away back be because been before began
being below between big book both boy but by call came can carry change children city close come could country cut
day did different do does don't door down each earth eat end enough even every example eye face family far father
feet few find first follow food for form found four from get girl give go good got great group grow had hand hard
has have he head hear help her here high him his home house how idea if important in is it its just keep kind know
land large last late learn leave left letter life light like line list little live long look made make man many
""".split()


class Facts(msgspec.Struct, frozen=True):
    """What one request, not streamed, showed: the model asked and tokens as the server counts them."""

    model: str
    prompt_tokens: int
    completion_tokens: int


class Requests:
    """Makes the bodies of requests for one server."""

    def __init__(self, config: BenchHostConfig, http: httpx.Client) -> None:
        """Asks the server for its model. ``http`` has the server as its base URL. Raises BenchError."""
        self._config = config
        self._http = http
        self._random = random.Random(_SEED)
        models = self._ask("GET", "/v1/models", None)
        self.model = str(models["data"][0]["id"])
        self.path = "/v1/chat/completions" if config.endpoint == "chat" else "/v1/completions"

    def bodies(self) -> list[str]:
        """JSON texts of streamed requests. Raises BenchError when the server cannot tokenize."""
        return [self._body(prompt, stream=True) for prompt in self._prompts()]

    def probe(self) -> Facts:
        """Sends one request and checks what no later one is checked for: that all tokens come.

        Raises BenchError when the server refuses it or sends another number of tokens.
        """
        reply = self._ask("POST", self.path, self._body(self._prompts(1)[0], stream=False))
        usage = reply["usage"]
        facts = Facts(self.model, int(usage["prompt_tokens"]), int(usage["completion_tokens"]))
        if facts.completion_tokens != self._config.tokens:
            raise BenchError(
                f"the server sent {facts.completion_tokens} of the {self._config.tokens} tokens that a request "
                "asked for, so tokens cannot be counted by requests"
            )
        return facts

    def _body(self, prompt: str | list[int], *, stream: bool) -> str:
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": self._config.tokens,
            "ignore_eos": True,
            "stream": stream,
        }
        if self._config.endpoint == "chat":
            body["messages"] = [{"role": "user", "content": prompt}]
        else:
            body["prompt"] = prompt
        return msgspec.json.encode(body).decode()

    def _prompts(self, count: int = PROMPTS) -> list[str] | list[list[int]]:
        wanted = self._config.prompt_tokens
        sample = self._text(wanted + 64)
        ids = self._tokenize(sample)
        if self._config.prompt_kind == "ids":
            # An offset per prompt; the sample is repeated as often as needed.
            ids *= 1 + (wanted + count) // len(ids)
            return [ids[offset : offset + wanted] for offset in range(count)]
        tokens_per_word = len(ids) / (wanted + 64)
        return [self._text_of(wanted, tokens_per_word) for _ in range(count)]

    def _text_of(self, wanted: int, tokens_per_word: float) -> str:
        """A text of about so many tokens, special ones included: estimated, counted, corrected."""
        words = self._text(max(1, round(wanted / tokens_per_word))).split(" ")
        excess = round((len(self._tokenize(" ".join(words))) - wanted) / tokens_per_word)
        if excess > 0:
            words = words[: max(1, len(words) - excess)]
        elif excess < 0:
            words += self._text(-excess).split(" ")
        return " ".join(words)

    def _text(self, words: int) -> str:
        return " ".join(self._random.choices(_WORDS, k=words))

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
