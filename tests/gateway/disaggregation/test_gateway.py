"""A gateway in front of servers that prefill and servers that decode, with a connector's fields as vLLM has
them."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tests.gateway.behaviours import good
from tests.gateway.processes import Call, Gateway, Upstream, eventually, gateway
from tests.gateway.test_models import listing

PROMPT = "word " * 600
SHORT = "word " * 10


class Prefiller(Upstream):
    """Keeps blocks until somebody fetches them, as vLLM's NIXL connector does."""

    def __init__(self, name: str = "p0") -> None:
        super().__init__(self._answer)
        self.name = name
        self.kept: dict[str, str] = {}
        """Prompts by the id of their request."""
        self.status = 200
        self.stores = False
        """The connector has a store, and hands nothing on."""

    def _answer(self, call: Call) -> None:
        if self.status != 200:
            call.reply(self.status, b'{"error":{"message":"no"}}')
            return
        body = call.json
        assert body["max_tokens"] == 1
        assert body["stream"] is False
        assert body["kv_transfer_params"]["do_remote_decode"] is True
        id = secrets.token_hex(4)
        self.kept[id] = json.dumps(body.get("prompt") or body["messages"])
        params = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [[1, 2, 3]],
            "remote_engine_id": self.name,
            "remote_request_id": id,
            "remote_host": "10.0.0.1",
            "remote_port": 5600,
            "tp_size": 1,
        }
        reply: dict[str, Any] = {"choices": [{"index": 0, "text": " a", "finish_reason": "length"}]}
        if not self.stores:
            reply["kv_transfer_params"] = params
        call.reply(200, json.dumps(reply).encode())


class Decoder(Upstream):
    """Fetches the blocks that a request names."""

    def __init__(self, prefillers: list[Prefiller]) -> None:
        super().__init__(self._answer)
        self.prefillers = {each.name: each for each in prefillers}
        self.fetched = 0
        self.computed = 0
        self.fails = False

    def _answer(self, call: Call) -> None:
        body = call.json
        params = body.get("kv_transfer_params")
        if params is None:
            self.computed += 1
        else:
            assert params["do_remote_prefill"] is True
            kept = self.prefillers[params["remote_engine_id"]].kept.pop(params["remote_request_id"])
            assert kept == json.dumps(body.get("prompt") or body["messages"])
            self.fetched += 1
        if self.fails:
            call.reply(503, b'{"error":{"message":"full"}}')
        elif body.get("stream"):
            chat = "messages" in body
            token = {"delta": {"content": " b"}} if chat else {"text": " b"}
            end = {
                "choices": [{"index": 0, "finish_reason": "stop"} | ({"delta": {}} if chat else {"text": ""})]
            }
            usage = {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 1}}
            events = ({"choices": [{"index": 0} | token]}, end, usage)
            call.stream(*map(json.dumps, events), "[DONE]")
        else:
            call.reply(200, b'{"choices":[{"index":0,"text":" b","finish_reason":"stop"}],"usage":{}}')


@contextmanager
def fleet(
    directory: Path, *, prefillers: int = 1, decoders: int = 1, options: tuple[str, ...] = ()
) -> Iterator[tuple[Gateway, list[Prefiller], list[Decoder]]]:
    with ExitStack() as stack:
        first = [stack.enter_context(Prefiller(f"p{index}")) for index in range(prefillers)]
        second = [stack.enter_context(Decoder(first)) for _ in range(decoders)]
        pools = [
            {"name": "prefill", "role": "prefill", "endpoints": [each.url for each in first]},
            {"name": "decode", "role": "decode", "endpoints": [each.url for each in second]},
        ]
        file = directory / "endpoints.yaml"
        file.write_text(json.dumps({"pools": pools}))
        options = ("--endpoints-file", str(file), *options)
        yield stack.enter_context(gateway(options=options)), first, second


def completions(upstream: Upstream) -> int:
    """Requests of clients; the gateway asks for listings of models as well."""
    return sum(call.method == "POST" for call in upstream.calls)


def test_one_endpoint_computes_a_long_prompt_and_another_decodes(tmp_path: Path) -> None:
    with fleet(tmp_path) as (front, (prefiller,), (decoder,)):
        for stream in (False, True):
            messages = [{"role": "user", "content": f"{stream} {PROMPT}"}]
            chat = {"model": "m", "messages": messages, "stream": stream}
            for reply in (
                front.complete(stream=stream, prompt=f"{stream} {PROMPT}", max_tokens=50),
                front.client.post("/v1/chat/completions", json=chat),
            ):
                assert reply.status_code == 200
                assert " b" in reply.text
                assert "kv_transfer_params" not in reply.text
        assert (completions(prefiller), decoder.fetched, decoder.computed) == (4, 4, 0)
        assert not prefiller.kept
        assert front.counts("prefill_total") == {"handed_on": 4.0, "shared": 0.0, "failed": 0.0}
        sent = next(call for call in prefiller.calls if call.method == "POST")
        got = next(call for call in decoder.calls if call.method == "POST")
        assert sent.headers["x-request-id"] == got.headers["x-request-id"]
        assert got.json["max_tokens"] == 50
        eventually(lambda: any(f'"prefilled_by": "{prefiller.url}"' in line for line in front.lines))


def test_short_and_cached_prompts_are_computed_where_they_are_decoded(tmp_path: Path) -> None:
    with fleet(tmp_path) as (front, (prefiller,), (decoder,)):
        for _ in range(4):
            assert front.complete(prompt=SHORT).status_code == 200
        assert (completions(prefiller), decoder.computed) == (0, 4)
        assert front.complete(prompt=PROMPT).status_code == 200
        assert (completions(prefiller), decoder.fetched) == (1, 1)
        assert front.complete(prompt=PROMPT + "and a little more").status_code == 200
        assert (completions(prefiller), decoder.computed) == (1, 5)


def test_if_nobody_prefills_the_decoder_does(tmp_path: Path) -> None:
    with fleet(tmp_path, prefillers=2) as (front, prefillers, (decoder,)):
        for number, status in enumerate((400, 500, 503), 1):
            for prefiller in prefillers:
                prefiller.status = status
            assert front.complete(prompt=f"{status} {PROMPT}").status_code == 200
            assert (decoder.fetched, decoder.computed) == (0, number)
            assert front.counts("prefill_total")["failed"] == number
        assert [completions(each) for each in prefillers] == [3, 3]


def test_another_endpoint_prefills_when_one_cannot(tmp_path: Path) -> None:
    with fleet(tmp_path, prefillers=2, options=("--scorers", "queue=1")) as (front, prefillers, (decoder,)):
        prefillers[0].status = 500
        for index in range(4):
            assert front.complete(prompt=f"{index} {PROMPT}").status_code == 200
        assert decoder.fetched == 4
        assert completions(prefillers[1]) == 4


def test_blocks_are_fetched_once_a_retry_computes_the_prompt(tmp_path: Path) -> None:
    with fleet(tmp_path, decoders=2) as (front, (prefiller,), decoders):
        decoders[0].fails = True
        for index in range(30):  # each goes to either, by chance
            front.complete(stream=False, prompt=f"{index} {PROMPT}")
        assert sum(each.fetched for each in decoders) == completions(prefiller)
        assert decoders[0].fetched > 0
        assert sum(each.computed for each in decoders) == decoders[0].fetched


def test_a_prompt_that_breaks_an_endpoint_breaks_no_second_one_that_prefills(tmp_path: Path) -> None:
    with fleet(tmp_path, prefillers=2) as (front, prefillers, (decoder,)):
        for prefiller in prefillers:
            prefiller.behaviour = Call.reset
        assert front.complete(prompt=PROMPT).status_code == 200
        assert sorted(completions(each) for each in prefillers) == [0, 1]
        assert decoder.computed == 1


def test_a_store_that_endpoints_share_needs_no_parameters(tmp_path: Path) -> None:
    with fleet(tmp_path) as (front, (prefiller,), (decoder,)):
        prefiller.stores = True
        assert front.complete(prompt=PROMPT).status_code == 200
        assert (completions(prefiller), decoder.computed) == (1, 1)
        assert front.counts("prefill_total")["shared"] == 1


def test_copies_go_to_no_endpoint_that_prefills(tmp_path: Path) -> None:
    with Upstream(good) as server:
        server.on_models = listing("live")
        options = ("--endpoints", server.url, "--model-shadow", "live=m:1")
        with fleet(tmp_path, prefillers=3, options=options) as (front, prefillers, (decoder,)):
            for _ in range(10):
                assert front.complete(model="live", prompt=PROMPT).status_code == 200
            eventually(lambda: sum(front.counts("shadow_request_total").values()) == 10)
            assert decoder.computed == 10
            assert [completions(each) for each in prefillers] == [0, 0, 0]


def test_a_client_that_leaves_during_the_prefill_ends_it(tmp_path: Path) -> None:
    with fleet(tmp_path) as (front, (prefiller,), (decoder,)):
        prefiller.behaviour = lambda call: call.wait_until_gone()
        with front.left(prompt=PROMPT):
            eventually(lambda: completions(prefiller) == 1)
        eventually(lambda: any(call.gone.is_set() for call in prefiller.calls if call.method == "POST"))
        eventually(lambda: front.counts().get("client_disconnect", 0) == 1)
        assert decoder.fetched == 0
