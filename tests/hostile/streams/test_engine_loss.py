"""Engines that break again and again under requests whose tokens they hold back for many steps."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.integration.clients import texts_of
from tests.integration.server import SYNTHETIC, Server

PACED = (*SYNTHETIC, "--synthetic-step-ms", "5")
BODY: dict[str, Any] = {"prompt": "x", "max_tokens": 300, "ignore_eos": True, "seed": 1, "logprobs": 1}


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["error", "exit"])
def test_a_request_that_is_not_streamed_outlives_engines_with_all_its_logprobs(
    fault: str, tmp_path: Path
) -> None:
    """Every engine breaks at its 100th step with work; rows of such requests have up to 256 tokens."""
    arguments = (*PACED, "--synthetic-fault", f"{fault}@100", "--data-parallel-size", "2")
    with Server(*PACED, directory=tmp_path) as undisturbed:
        (text,) = texts_of(undisturbed.url, [BODY])
    with Server(*arguments, directory=tmp_path) as pair, ThreadPoolExecutor(2) as pool:
        bodies = [BODY, BODY | {"stream_interval": 50}]
        replies = [pool.submit(pair.post, "/v1/completions", body, 60.0) for body in bodies]
        for reply in replies:
            (choice,) = reply.result().json()["choices"]
            assert choice["text"] == text
            assert len(choice["logprobs"]["token_logprobs"]) == BODY["max_tokens"]
            assert None not in choice["logprobs"]["token_logprobs"]
