"""What is asked of a request before an engine takes it in."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.engine.base import RequestRejected
from penstock.engine.schedule.submit_checks import check_request
from tests.engine.support import submit

MODEL_LEN, VOCAB = 64, 320


def test_a_request_at_every_limit_is_taken() -> None:
    request = submit(0, 5, prompt=[VOCAB - 1] * (MODEL_LEN - 1), resumed=4, logprobs=VOCAB)
    check_request(request, MODEL_LEN, VOCAB)
    listed = (VOCAB - 1, 0) * 512  # more than the vocabulary has
    check_request(submit(0, logprobs=1024, logprob_token_ids=listed), MODEL_LEN, VOCAB)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt": []}, "prompt: at least one token"),
        ({"prompt": [5], "resumed": 2}, "prompt: at least one token"),
        ({"prompt": [5] * MODEL_LEN}, "prompt: 64 tokens leave no room"),
        ({"prompt": [5] * 12, "resumed": 10}, "max_tokens: 10, but must be more than 10"),
        ({"prompt": [5, VOCAB]}, "prompt: token id 320, but"),
        ({"prompt": [5, -1]}, "prompt: token id -1, but"),
        ({"logprobs": VOCAB + 1}, "logprobs: 321, but"),
        ({"logprobs": 2, "logprob_token_ids": (VOCAB, 1)}, "logprob_token_ids: token id 320, but"),
        ({"logprobs": 1, "logprob_token_ids": (1, 2)}, "logprob_token_ids: 2 token ids, but 1 logprobs"),
        ({"prompt_logprobs": VOCAB + 1}, "prompt_logprobs: 321, but"),
    ],
)
def test_a_request_beyond_a_limit_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestRejected, match=message):
        check_request(submit(0, **changes), MODEL_LEN, VOCAB)
