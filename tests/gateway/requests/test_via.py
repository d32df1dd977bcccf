"""Requests that come back."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.gateway.requests.via import MAX_HOPS, Via, gateway_id
from penstock.http.errors import ApiError
from tests.gateway.behaviours import good
from tests.gateway.processes import Upstream, eventually, gateway

OWN = Via("penstock-a")


@pytest.mark.parametrize(
    "values",
    [
        [b"1.1 penstock-a"],
        [b"1.0 fred, 1.1 penstock-a (of ours, by name)", b"2 penstock-b"],
        [b"HTTP/1.1 penstock-a,1.1 x"],
        [b"1.1 x", OWN.entry("2")[1]],
    ],
)
def test_what_comes_back_is_refused_with_the_names_of_its_way(values: list[bytes]) -> None:
    with pytest.raises(ApiError) as refusal:
        OWN.refuse_loops([(b"via", value) for value in values])
    assert (refusal.value.status, refusal.value.code) == (508, "loop_detected")
    assert "came back to penstock-a, by penstock-a" in refusal.value.message


def test_so_is_what_too_many_have_relayed() -> None:
    OWN.refuse_loops([(b"via", b"1.1 penstock-x")] * MAX_HOPS)
    with pytest.raises(ApiError, match=f"{MAX_HOPS + 1} proxies have relayed"):
        OWN.refuse_loops([(b"via", b"1.1 penstock-x")] * (MAX_HOPS + 1))


@pytest.mark.parametrize(
    "value", [b"", b",", b"1.1", b"1.1 penstock", b"1.1 b (penstock-a), 1.1 penstock-ab"]
)
def test_others_are_not(value: bytes) -> None:
    OWN.refuse_loops([(b"via", value), (b"x-via", b"1.1 penstock-a")])


def test_gateways_have_names_of_their_own() -> None:
    assert gateway_id("/run/a") == gateway_id("/run/a") != gateway_id("/run/b")


def test_two_gateways_that_name_each_other(tmp_path: Path) -> None:
    """A request makes one round; a chain of two gateways is none."""
    paths = [tmp_path / name for name in "ab"]
    options = ("--models-interval", "0", "--endpoints-file")
    with Upstream(good) as upstream:
        for path in paths:
            path.write_text(f"{upstream.url}\n")
        with (
            gateway(options=(*options, str(paths[0]))) as first,
            gateway(options=(*options, str(paths[1]))) as second,
        ):
            paths[0].write_text(f"{second.url}\n")
            eventually(lambda: second.url in first.counts("endpoint_up"))
            assert first.complete().status_code == 200
            paths[1].write_text(f"{first.url}\n")
            eventually(lambda: first.url in second.counts("endpoint_up"))
            reply = first.complete()
            assert (reply.status_code, reply.json()["error"]["code"]) == (508, "loop_detected")
            assert sum(first.counts().values()) == 3  # the good one, and the other one twice


def test_a_gateway_that_names_itself_beside_a_good_endpoint(tmp_path: Path) -> None:
    """What comes back is sent to the good one, and nothing is sent to itself after a few times."""
    path = tmp_path / "endpoints"
    options = ("--models-interval", "0", "--scorers", "queue=1", "--endpoints-file", str(path))
    with Upstream(good) as upstream:
        path.write_text(f"{upstream.url}\n")
        with gateway(options=options) as own:
            path.write_text(f"{upstream.url}\n{own.url}\n")
            eventually(lambda: own.url in own.counts("endpoint_up"))
            assert [own.complete().status_code for _ in range(30)] == [200] * 30
            assert 0 < sum(own.counts().values()) - 30 < 10
