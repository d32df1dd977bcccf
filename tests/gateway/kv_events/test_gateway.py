"""A gateway that follows the KV caches of its endpoints, as processes of their own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from urllib.parse import urlsplit

import msgspec
import numpy as np

from penstock.config.kv_events import KVEventsConfig
from penstock.engine.kv_events.block_log import BlockLog
from penstock.engine.kv_events.publisher import KVEventPublisher
from penstock.engine.schedule.cache_scope import CacheScope
from penstock.http.access_keys import key_digest, tenant_of
from tests.gateway.processes import Call, Gateway, Upstream, eventually, gateway

BLOCK = 16
REPLY = msgspec.json.encode({"choices": [{"index": 0, "text": " a", "finish_reason": "stop"}], "usage": {}})


def tokenize(text: str) -> list[int]:
    return [*text.encode()]


class Server(Upstream):
    """A model server that says what it has cached."""

    def __init__(self) -> None:
        super().__init__(self._answer)
        self.tokenized: list[bytes] = []
        self.tokenizes = True
        self.publisher = KVEventPublisher(
            KVEventsConfig(
                enable_kv_cache_events=True,
                endpoint="tcp://127.0.0.1:0",
                replay_endpoint="tcp://127.0.0.1:0",
            ),
            0,
        )
        self.log = BlockLog(1000, BLOCK)
        self.next_block = 1

    def _answer(self, call: Call) -> None:
        if call.path == "/tokenize":
            self.tokenized.append(call.body)
            if self.tokenizes:
                call.reply(200, msgspec.json.encode({"tokens": tokenize(call.json["prompt"])}))
            else:
                call.reply(404, b"{}")
        else:
            call.reply(200, REPLY)

    def cache(self, text: str, salt: str | None = None, adapter: str | None = None) -> None:
        """The beginning of a prompt is in its KV cache."""
        tokens = np.array(tokenize(text), np.int32)
        count = len(tokens) // BLOCK
        blocks = np.arange(self.next_block, self.next_block + count, dtype=np.int32)
        self.next_block += count
        scope = CacheScope(salt, None if adapter is None else (adapter, "digest"))
        self.log.stored(blocks, tokens[: count * BLOCK].tobytes(), 0, scope)
        self.publisher.publish(self.log.take_events())

    def evict(self) -> None:
        self.log.cleared()
        self.publisher.publish(self.log.take_events())

    @property
    def option(self) -> str:
        assert self.publisher.replay_address is not None
        ports = [urlsplit(each).port for each in (self.publisher.address, self.publisher.replay_address)]
        return f"{self.url}={ports[0]}:{ports[1]}"

    @property
    def completions(self) -> int:
        return sum(call.path == "/v1/completions" for call in self.calls)


@contextmanager
def fleet() -> Iterator[tuple[Gateway, Server, Server]]:
    with ExitStack() as stack:
        servers = [stack.enter_context(Server()) for _ in range(2)]
        for server in servers:
            stack.callback(server.publisher.close)
        options = ("--scorers", "prefix=1", "--kv-events", *(server.option for server in servers))
        yield stack.enter_context(gateway(*servers, options=options)), servers[0], servers[1]


def blocks(front: Gateway) -> float:
    return front.counts("kv_event_blocks").get("", 0.0)


def test_caches_of_several_keys_are_told_apart() -> None:
    """Penstock's servers salt what they cache by the key, as their events say."""
    with fleet() as (front, first, second):
        tenant = tenant_of(key_digest("secret"))
        first.cache(prompt("story"), salt=tenant)
        second.cache(prompt("story"), salt="somebody else's")
        eventually(lambda: blocks(front) == 2 * (1998 // 16))
        for _ in range(3):
            front.client.post(
                "/v1/completions",
                json={"model": "m", "prompt": prompt("story")},
                headers={"authorization": "Bearer secret"},
            )
        assert (first.completions, second.completions) == (3, 0)
        assert front.counts("cached_prompts_total")["found"] == 3


def test_what_adapters_have_cached_is_found_while_they_are_idle() -> None:
    """Metrics name those that have requests."""
    with fleet() as (front, first, second):
        first.cache(prompt("story"))
        second.cache(prompt("story"), adapter="sql")
        eventually(lambda: blocks(front) == 2 * (1998 // 16))
        for model in ("sql", "m", "sql", "m"):
            assert front.complete(stream=False, model=model, prompt=prompt("story")).status_code == 200
        assert (first.completions, second.completions) == (2, 2)
        assert [call.json["model"] for call in second.calls if call.path == "/v1/completions"] == ["sql"] * 2


def prompt(name: str, length: int = 2000) -> str:
    return (name + " ") * (length // (len(name) + 1))


def test_requests_go_where_their_prompt_is_cached() -> None:
    with fleet() as (front, first, second):
        for index in range(4):
            (first, second)[index % 2].cache(prompt(f"story {index}"))
        eventually(lambda: blocks(front) == sum(2000 // len(f"story {i} ") * 8 // 16 for i in range(4)))
        for index in (0, 2, 0, 2):
            assert front.complete(stream=False, prompt=prompt(f"story {index}") + "go on").status_code == 200
        assert (first.completions, second.completions) == (4, 0)
        assert front.counts("cached_prompts_total") == {"found": 4.0, "absent": 0.0, "untokenized": 0.0}
        first.evict()
        second.cache(prompt("story 0"))
        eventually(lambda: blocks(front) == 3 * (2000 // 8 * 8 // 16))
        front.complete(stream=False, prompt=prompt("story 0") + "and on")
        assert (first.completions, second.completions) == (4, 1)


def test_without_tokens_requests_go_where_they_went_before() -> None:
    with fleet() as (front, first, second):
        first.tokenizes = second.tokenizes = False
        for server in (first, second):
            server.cache(prompt("else"))
        eventually(lambda: blocks(front) > 0)
        for _ in range(6):
            assert front.complete(stream=False, prompt=prompt("story")).status_code == 200
        assert sorted((first.completions, second.completions)) == [0, 6]
        assert len(first.tokenized) + len(second.tokenized) <= 2, "who cannot tell is left alone for a while"
        front.complete(stream=False, prompt="short")
        assert front.counts("cached_prompts_total")["untokenized"] == 6
