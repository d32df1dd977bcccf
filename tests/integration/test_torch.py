"""The bundled demo model through the torch engine, as a user first meets it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from tokenizers import Tokenizer

from penstock.supervisor.startup.model_resolution import DEMO_DIR
from tests.integration.server import Server, wait_until

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

OPTIONS = ("--dtype", "float32", "--threads", "1", "--max-num-batched-tokens", "256")


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(*OPTIONS, directory=tmp_path_factory.mktemp("demo")) as running:
        yield running


def expected(prompt: str, tokens: int) -> str:
    """transformers' own greedy continuation."""
    tokenizer = Tokenizer.from_file(str(DEMO_DIR / "tokenizer.json"))
    model = transformers.AutoModelForCausalLM.from_pretrained(DEMO_DIR, dtype=torch.float32)
    ids = torch.tensor([tokenizer.encode(prompt).ids])
    with torch.inference_mode():
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False, use_cache=True
        )
    text: str = tokenizer.decode(output[0, ids.shape[1] :].tolist())
    return text


def test_a_completion_is_what_transformers_generates(demo: Server) -> None:
    for prompt in ("The with statement", "Return the", "def main():\n"):
        text = demo.complete(prompt, max_tokens=40, temperature=0)["choices"][0]["text"]
        assert text == expected(prompt, 40)


def test_a_chat_answers_in_words(demo: Server) -> None:
    body = {"messages": [{"role": "user", "content": "Who are you?"}], "temperature": 0, "max_tokens": 80}
    choice = demo.post("/v1/chat/completions", body).json()["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert len(re.findall(r"[A-Za-z]{2,}", choice["message"]["content"])) >= 5


def test_streamed_equals_whole_for_mixed_requests_at_once(demo: Server) -> None:
    def both(seed: int) -> tuple[str, str]:
        options = {"max_tokens": 10 + seed, "seed": seed, "temperature": seed % 3 / 2, "top_p": 0.9}
        prompt = "The list " * (1 + seed * 7)
        whole = demo.complete(prompt, **options)["choices"][0]["text"]
        events = demo.stream(prompt, **options)
        return whole, "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1])

    with ThreadPoolExecutor(16) as pool:
        for whole, streamed in pool.map(both, range(16)):
            assert whole == streamed
    assert demo.metric("vllm:kv_cache_usage_perc") <= 1
    assert demo.metric("vllm:cache_config_info", block_size="16") == 1
    wait_until(
        lambda: (
            0 < demo.metric("vllm:prefix_cache_hits_total") < demo.metric("vllm:prefix_cache_queries_total")
        ),
        30,
        "hearing of what was found in the cache",
    )


def test_a_request_that_cannot_fit_is_refused_with_figures(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    arguments = (*OPTIONS, "--kv-cache-memory", "2Mi")
    with Server(*arguments, directory=tmp_path_factory.mktemp("small")) as server:
        reply = server.post("/v1/completions", {"prompt": "x", "max_tokens": 2000})
        assert reply.status_code == 400
        assert "KV cache" in reply.json()["error"]["message"]
        with ThreadPoolExecutor(12) as pool:
            texts = list(
                pool.map(
                    lambda _: server.complete("The", max_tokens=60, temperature=0, ignore_eos=True)[
                        "choices"
                    ][0]["text"],
                    range(12),
                )
            )
        assert len(set(texts)) == 1  # streams that were preempted end as the others do


def test_usage_says_how_much_of_a_prompt_was_cached(demo: Server) -> None:
    prompt = "The with statement is used to wrap the execution of a block. " * 4

    def cached(**options: object) -> int:
        usage = demo.complete(prompt, max_tokens=4, **options)["usage"]
        count: int = usage["prompt_tokens_details"]["cached_tokens"]
        assert count <= usage["prompt_tokens"]
        return count

    assert cached(cache_salt="one", n=3) == 0
    assert cached(cache_salt="one", n=3) >= 16
    assert cached(cache_salt="two") == 0
