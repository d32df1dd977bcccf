"""What is asked of a request before an engine takes it in."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.engine.base import RequestRejected
from penstock.engine.schedule.submit_checks import check_request
from tests.engine.support import submit

MODEL_LEN, VOCABULARY = 64, 320


def test_a_request_within_the_limits_is_taken() -> None:
    check_request(submit(0, prompt=[319] * 63, logprobs=320), MODEL_LEN, VOCABULARY)
    check_request(submit(0, 3, resumed=2), MODEL_LEN, VOCABULARY)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt": []}, "prompt: at least one token"),
        ({"prompt": [1], "resumed": 2}, "prompt: at least one token, four bytes each, of which resumed are"),
        ({"prompt": [1] * 64}, "prompt: 64 tokens leave no room for output"),
        ({"max_tokens": 2, "resumed": 2}, "max_tokens: 2, but must be more than 2"),
        ({"logprobs": 321}, "logprobs: 321, but the vocabulary has 320 tokens"),
        ({"prompt_logprobs": 321}, "prompt_logprobs: 321, but the vocabulary has 320 tokens"),
        ({"prompt": [1, 320]}, "prompt: token id 320, but the vocabulary has 320"),
        ({"prompt": [1, -1]}, "prompt: token id -1, but the vocabulary has 320"),
    ],
)
def test_another_one_is_refused_by_field(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestRejected, match=message):
        check_request(submit(0, **fields), MODEL_LEN, VOCABULARY)
