"""A turn that goes on with the one before has the prompt, or the error, that it has without a memory."""

from __future__ import annotations

import contextlib
import gc
import json
import random
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from penstock.config.serve import ServeConfig
from penstock.dialects.chat.dialect import ChatCompletions
from penstock.dialects.messages.dialect import Messages
from penstock.dialects.responses.dialect import Responses
from penstock.dialects.responses.prompts import Found
from penstock.generation.dialect import Dialect, RequestInfo
from penstock.generation.input_processor import InputProcessor
from penstock.generation.prompt.chat_template import ChatTemplate
from penstock.generation.prompt.prompt_encoder import PromptEncoder, segment_marker
from penstock.generation.prompt.turn_memory import MIN_BODY, TurnMemory
from penstock.http.errors import ApiError
from penstock.store.stored_response import StoredResponse
from tests.generation.planning import tiny_input_processor, tiny_template, tiny_tokenizer
from tests.generation.prompt.played_sessions import CHAT, MESSAGES, RESPONSES, Session

DIALECTS = {CHAT: ChatCompletions, RESPONSES: Responses, MESSAGES: Messages}
FACTS = {"max_model_len": 1 << 20}


class Server:
    """What an API server does with bodies until they are token ids."""

    def __init__(self, template: ChatTemplate | None = None, max_bytes: int = 64 << 20) -> None:
        template = template or tiny_template()
        self.processor: InputProcessor = tiny_input_processor(ServeConfig(), template, **FACTS)
        self.dialects: dict[str, Dialect] = {
            name: dialect(ServeConfig(), self.processor) for name, dialect in DIALECTS.items()
        }
        self.memory = TurnMemory(max_bytes)
        self.known = 0
        """Bytes of token ids that the last prompt was known to have in common with the one before."""
        tokenizer = tiny_tokenizer()
        self.encoder = PromptEncoder(tokenizer, segment_marker(tokenizer, template))

    def prompt(
        self,
        dialect: str,
        body: bytes,
        tenant: str | None = None,
        *,
        keeps: bool = True,
        found: Found | None = None,
    ) -> Any:
        """Text, ids and warning of a body's prompt, or its error. ``found``: what it continues."""
        turn = self.memory.begin(tenant, max(len(body), MIN_BODY)) if keeps else None
        if found is not None:
            turn = self.memory.go_on(tenant, found.conversation, MIN_BODY) if keeps else None
        try:
            plan = self.dialects[dialect].plan(body, RequestInfo(tenant=tenant, turn=turn), found)
        except ApiError as error:
            return str(error), error.param, error.status
        [text] = plan.prompts
        assert isinstance(text, str)
        ids, length = self.encoder.encode(text, False, plan.cache_salt, turn)
        if turn is not None:
            if turn.prefix is not None:  # engines are told so
                before, size = turn.prefix
                assert ids[:size] == before[:size]
                self.known = size
            turn.salt = plan.cache_salt or ""
            turn.keep()
        return text, ids, length, plan.warning, plan.format is None


def called_with(number: int, values: str) -> dict[str, bytes]:
    """A conversation with a call that has these arguments, for the APIs of conversations."""
    asked = {"role": "user", "content": f"Hi {number}"}
    arguments = {"a": json.loads(values)}
    function = {"name": "f", "arguments": json.dumps(arguments, separators=(",", ":"))}
    call = {"id": "c", "type": "function", "function": function}
    block = {"type": "tool_use", "id": "c", "name": "f", "input": arguments}
    bodies: dict[str, Any] = {
        CHAT: {"messages": [asked, {"role": "assistant", "tool_calls": [call]}]},
        MESSAGES: {"messages": [asked, {"role": "assistant", "content": [block]}], "max_tokens": 1},
    }
    return {name: json.dumps(body, separators=(",", ":")).encode() for name, body in bodies.items()}


def chat(messages: list[dict[str, Any]], **fields: Any) -> bytes:
    return json.dumps({"messages": messages, **fields}).encode()


def said(number: int) -> list[dict[str, Any]]:
    roles = ("user", "assistant")
    return [{"role": roles[at % 2], "content": f"message {at} " * 50} for at in range(number)]


@pytest.fixture
def server() -> Server:
    return Server()


def compare(server: Server, sessions: int, turns: int, seed: int = 0) -> None:
    draw = random.Random(seed)
    playing = [
        (dialect, Session(dialect, seed * 1_000_003 + number).bodies(turns))
        for number in range(sessions)
        for dialect in DIALECTS
    ]
    while playing:
        at = draw.randrange(len(playing))
        dialect, bodies = playing[at]
        body = next(bodies, None)
        if body is None:
            del playing[at]
            continue
        assert server.prompt(dialect, body) == server.prompt(dialect, body, keeps=False)


def test_every_turn_has_the_prompt_of_a_server_without_a_memory(server: Server) -> None:
    compare(server, sessions=10, turns=6)
    assert server.memory.hits > server.memory.misses > 0
    assert server.known > 0


def test_the_next_turn_is_found_by_its_bytes(server: Server) -> None:
    for number in (3, 5, 9):
        server.prompt(CHAT, chat(said(number)))
    assert (server.memory.hits, server.memory.misses) == (2, 1)


def test_a_turn_whose_last_messages_have_changed_goes_on_with_the_others(server: Server) -> None:
    first = said(9)
    server.prompt(CHAT, chat(first))
    second = [*first[:-1], {**first[-1], "content": "changed"}, *said(3)]
    assert server.prompt(CHAT, chat(second)) == server.prompt(CHAT, chat(second), keeps=False)
    assert server.memory.hits == 1


def test_clients_and_salts_share_nothing(server: Server) -> None:
    for tenant in ("a", "b", None):
        server.prompt(CHAT, chat(said(5)), tenant)
    for salt in ("one", "two"):
        server.prompt(CHAT, chat(said(5), cache_salt=salt))
    server.prompt(RESPONSES, json.dumps({"input": said(5)}).encode())
    assert server.memory.hits == 0


def test_a_salt_that_is_spelled_in_another_way_keeps_nothing(server: Server) -> None:
    spelled = chat(said(5), cache_salt="one").replace(b"cache_salt", b"cache\\u005fsalt")
    server.prompt(CHAT, spelled)
    server.prompt(CHAT, chat(said(5)))
    assert server.memory.hits == 0


def test_the_last_of_two_conversations_counts(server: Server) -> None:
    server.prompt(CHAT, chat(said(5)))
    both = b'{"messages":' + json.dumps(said(5)).encode() + b',"messages":[{"role":"user","content":"x"}]}'
    assert server.prompt(CHAT, both) == server.prompt(CHAT, both, keeps=False)


def test_a_conversation_in_another_field_is_not_the_conversation(server: Server) -> None:
    server.prompt(CHAT, chat(said(5)))
    nested = json.dumps({"metadata": {"messages": said(5)}, "messages": said(1)}).encode()
    assert server.prompt(CHAT, nested) == server.prompt(CHAT, nested, keeps=False)


def test_messages_are_not_changed_by_what_is_made_of_them(server: Server) -> None:
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png,"}}]}
    server.prompt(CHAT, chat([image, *said(3)]))
    *_, warning, _ = server.prompt(CHAT, chat([image, *said(4)]))
    assert server.memory.hits == 1
    assert "cannot see images" in warning


def stored(number: int, previous: str | None, items: list[dict[str, Any]]) -> StoredResponse:
    reply = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "done"}]}
    body, given = json.dumps({"output": [reply]}).encode(), json.dumps(items).encode()
    return StoredResponse(f"resp_{number}", "", 0.0, "completed", body, given, previous, "m")


def test_a_response_goes_on_with_the_turn_that_it_continues(server: Server) -> None:
    for seed in range(10):
        chain: list[StoredResponse] = []
        for body in Session(RESPONSES, seed).bodies(5):
            with contextlib.suppress(json.JSONDecodeError):
                fields = json.loads(body)
                body = json.dumps(fields | {"input": fields["input"][-3:]}).encode()
                found = Found(chain, {}, 0)
                kept = server.prompt(RESPONSES, body, found=found)
                assert kept == server.prompt(RESPONSES, body, found=found, keeps=False)
                previous = chain[-1].id if chain else None
                chain = [*chain, stored(10 * seed + len(chain), previous, fields["input"][-3:])]
    assert server.memory.hits > server.memory.misses > 0


def test_what_a_response_adds_to_a_known_turn_is_told(server: Server) -> None:
    """By that an API server knows that it plans the turn in no time."""
    chain = [stored(0, None, said(30)), stored(1, "resp_0", said(2))]
    body = json.dumps({"input": "And then?"}).encode()
    server.prompt(RESPONSES, body, found=Found(chain, {}, 0))
    found = Found([*chain, stored(2, chain[1].id, said(2))], {}, 0)
    found = found._replace(size=sum(len(each.input) + len(each.body) for each in found.chain))
    turn = server.memory.go_on(None, found.conversation, MIN_BODY)
    assert turn is not None
    assert turn.resumes(100)
    assert not turn.resumes(3)
    last = found.chain[-1]
    assert found.unknown_bytes(turn) == len(last.input) + len(last.body) < found.size
    assert turn.before is not None
    text = f"{turn.before.text}more"
    unknown = len(text) - turn.before.cut
    assert server.encoder.unknown_characters(text, False, turn) == unknown < len(text)
    assert server.encoder.unknown_characters(text, True, turn) == len(text)
    assert server.encoder.unknown_characters(f"x{text}", False, turn) == len(text) + 1
    other = server.memory.go_on("other", found.conversation, MIN_BODY)
    assert other is not None
    assert found.unknown_bytes(other) == found.size
    assert not other.resumes(100)


def test_memory_is_bounded_and_the_longest_unused_turn_goes_first() -> None:
    server = Server(max_bytes=100_000)
    for number in range(50):
        server.prompt(CHAT, chat([{"role": "user", "content": f"{number} " * 1000}]))
        assert server.memory.bytes <= 100_000
    assert server.memory.bytes > 50_000
    server.prompt(CHAT, chat([{"role": "user", "content": "49 " * 1000}, *said(1)]))
    server.prompt(CHAT, chat([{"role": "user", "content": "0 " * 1000}, *said(1)]))
    assert server.memory.hits == 1


def test_short_bodies_and_servers_without_memory_keep_nothing() -> None:
    assert TurnMemory(1 << 20).begin(None, MIN_BODY - 1) is None
    assert TurnMemory(0).begin(None, MIN_BODY) is None


def test_threads_share_the_memory(server: Server) -> None:
    bodies = [(dialect, list(Session(dialect, seed).bodies(6))) for dialect in DIALECTS for seed in range(6)]
    expected = [[server.prompt(name, body, keeps=False) for body in turns] for name, turns in bodies]

    def play(number: int) -> list[Any]:
        name, turns = bodies[number % len(bodies)]
        return [server.prompt(name, body) for body in turns]

    with ThreadPoolExecutor(4) as pool:
        for number, prompts in enumerate(pool.map(play, range(2 * len(bodies)))):
            assert prompts == expected[number % len(bodies)]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 11))
def test_ten_thousand_turns(server: Server, seed: int) -> None:
    compare(server, sessions=60, turns=6, seed=seed)


@pytest.mark.parametrize("value", ["[]", "1.5", '{"b":{}}', '"x"'])
@pytest.mark.parametrize("dialect", [CHAT, MESSAGES])
def test_small_values_count_as_the_memory_that_they_take(dialect: str, value: str) -> None:
    server = Server()
    bodies = [called_with(number, f"[{number}{f',{value}' * 8_000}]")[dialect] for number in range(6)]
    server.prompt(dialect, bodies[0])
    before = server.memory.bytes
    tracemalloc.start()
    for body in bodies[1:]:
        server.prompt(dialect, body)
    gc.collect()
    taken = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert taken < 1.2 * (server.memory.bytes - before)
