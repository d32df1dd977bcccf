"""What is asked of a request before an engine takes it in."""

from __future__ import annotations

import pytest

from penstock.engine.base import RequestRejected
from penstock.engine.schedule.submit_checks import check_request
from penstock.wire.messages import Adapter
from tests.engine.support import submit

ADAPTER = Adapter("a", "/a")


def test_an_adapter_of_the_engine_is_taken() -> None:
    check_request(submit(0, adapter="a"), 64, 320, (ADAPTER,))
    check_request(submit(0), 64, 320, (ADAPTER,))


@pytest.mark.parametrize("adapters", [(), (ADAPTER,)])
def test_another_one_is_refused_by_name(adapters: tuple[Adapter, ...]) -> None:
    with pytest.raises(RequestRejected, match="no adapter 'b'"):
        check_request(submit(0, adapter="b"), 64, 320, adapters)
