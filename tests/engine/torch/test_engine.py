"""The torch engine against transformers' own generation, token by token."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import transformers

from penstock.engine.base import RequestRejected
from penstock.wire.frames import FinishReason
from tests.engine.torch.harness import (
    VOCAB,
    Driver,
    generate,
    make_engine,
    make_model,
    next_logprobs,
    run_all,
    submit,
)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, transformers.PreTrainedModel]:
    directory = tmp_path_factory.mktemp("llama")
    return directory, make_model("llama", directory)


def prompts(count: int, longest: int) -> list[list[int]]:
    random = np.random.default_rng(1)
    return [
        random.integers(3, VOCAB, size=length).tolist()
        for length in random.integers(1, longest + 1, size=count).tolist()
    ]


@pytest.fixture(scope="module")
def one_by_one(llama: tuple[Path, transformers.PreTrainedModel]) -> list[tuple[list[int], list[int]]]:
    """Prompts, and what transformers generates after each."""
    _, model = llama
    return [(prompt, generate(model, prompt, 24)) for prompt in prompts(32, 300)]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 32},
        # Room for about two of the longest streams; without a limit that depends on how long steps take.
        {"kv_cache_memory": 200 << 10, "block_size": 4, "max_prefill_delay": 0.0},
        {"max_num_seqs": 5, "block_size": 7},
    ],
    ids=["plain", "chunked", "preempted", "few-slots"],
)
def test_greedy_output_is_that_of_transformers_one_by_one(
    llama: tuple[Path, transformers.PreTrainedModel],
    one_by_one: list[tuple[list[int], list[int]]],
    options: dict[str, int],
) -> None:
    directory, _ = llama
    driver = Driver(make_engine(directory, **options))
    for stream, (prompt, _) in enumerate(one_by_one):
        driver.submit(submit(stream, prompt, max_tokens=24))
        if stream % 3:
            driver.step()  # arrivals are staggered
    outcomes = driver.run()
    assert {stream: outcome.tokens for stream, outcome in outcomes.items()} == {
        stream: tokens for stream, (_, tokens) in enumerate(one_by_one)
    }
    if "kv_cache_memory" in options:
        assert driver.engine.metrics()["preemptions_total"] > 0
    assert driver.engine.load().kv_used == 0
    assert driver.engine.load().running == 0


def test_a_stream_ends_by_eos_stop_id_and_length(llama: tuple[Path, transformers.PreTrainedModel]) -> None:
    directory, model = llama
    prompt = [5, 6, 7]
    continued = generate(model, prompt, 12)
    third = continued[2]
    first = continued.index(third)
    outcomes = run_all(
        make_engine(directory),
        [
            submit(0, prompt, max_tokens=12, stop_token_ids=(third,)),
            submit(1, prompt, max_tokens=5),
            submit(2, prompt, max_tokens=12, stop_token_ids=(third,), min_tokens=first + 2),
            submit(3, prompt, max_tokens=8, logit_bias={1: 100.0}),
            submit(4, prompt, max_tokens=8, logit_bias={1: 100.0}, ignore_eos=True),
            submit(5, prompt, max_tokens=8, logit_bias={1: 100.0}, min_tokens=3),
        ],
    )
    assert (outcomes[0].tokens, outcomes[0].finish) == (continued[: first + 1], FinishReason.STOP_TOKEN)
    assert (outcomes[1].tokens, outcomes[1].finish) == (continued[:5], FinishReason.LENGTH)
    assert len(outcomes[2].tokens) > first + 1
    assert third not in outcomes[2].tokens[: first + 2]
    assert (outcomes[3].tokens, outcomes[3].finish) == ([1], FinishReason.EOS)
    assert (outcomes[4].tokens, outcomes[4].finish) == ([1] * 8, FinishReason.LENGTH)
    assert outcomes[5].tokens.index(1) == 3


def test_an_interval_groups_tokens_but_for_the_first_and_the_last(
    llama: tuple[Path, transformers.PreTrainedModel],
) -> None:
    directory, _ = llama
    outcomes = run_all(
        make_engine(directory), [submit(0, [9, 8], interval=4, max_tokens=11, ignore_eos=True, logprobs=1)]
    )
    assert outcomes[0].rows == [1, 4, 4, 2]
    assert outcomes[0].positions == [0, 1, 5, 9]
    assert [ids[0] for ids, _, _ in outcomes[0].logprobs] == outcomes[0].tokens


@pytest.mark.gpu
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_resumed_stream_goes_on_as_it_would_have(
    llama: tuple[Path, transformers.PreTrainedModel], temperature: float
) -> None:
    directory, _ = llama
    settings = {"max_tokens": 20, "ignore_eos": True, "temperature": temperature, "seed": 77}
    whole = run_all(make_engine(directory), [submit(0, [4, 5, 6], **settings)])[0].tokens
    rest = run_all(make_engine(directory), [submit(0, [4, 5, 6, *whole[:8]], resumed=8, **settings)])[0]
    assert rest.tokens == whole[8:]
    assert rest.positions[0] == 8


def test_samples_do_not_depend_on_the_batch(llama: tuple[Path, transformers.PreTrainedModel]) -> None:
    directory, _ = llama
    settings = {"temperature": 1.0, "top_p": 0.9, "top_k": 40, "min_p": 0.01, "ignore_eos": True}
    requests = [submit(stream, [3 + stream, 7], **settings) for stream in range(12)]
    together = run_all(make_engine(directory), requests)
    alone = {
        request.stream: run_all(make_engine(directory), [request])[request.stream] for request in requests
    }
    assert {stream: outcome.tokens for stream, outcome in together.items()} == {
        stream: outcome.tokens for stream, outcome in alone.items()
    }
    assert len({tuple(outcome.tokens) for outcome in together.values()}) > 6


def test_aborts_end_streams_once_and_free_everything(
    llama: tuple[Path, transformers.PreTrainedModel],
) -> None:
    directory, _ = llama
    driver = Driver(make_engine(directory, max_num_seqs=4))
    for stream in range(8):
        driver.submit(submit(stream, [3, 4, 5], max_tokens=50, ignore_eos=True))
    driver.step()
    driver.engine.abort(0, [0, 6, 99])
    driver.step()
    assert driver.outcomes[0].finish is FinishReason.ABORT
    assert driver.outcomes[6].finish is FinishReason.ABORT
    assert driver.outcomes[6].tokens == []
    driver.engine.drop_server(0)
    assert not driver.engine.has_work()
    assert driver.engine.load().kv_used == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt": [VOCAB]}, f"token id {VOCAB}"),
        ({"prompt": [5] * 1024}, "leave no room"),
        ({"prompt": [5] * 900, "max_tokens": 100}, "do not fit the KV cache"),
        ({"logit_bias": {VOCAB: 1.0}}, "logit_bias"),
    ],
)
def test_what_can_never_run_is_refused(
    llama: tuple[Path, transformers.PreTrainedModel], changes: dict[str, object], message: str
) -> None:
    directory, _ = llama
    engine = make_engine(directory, kv_cache_memory=200 << 10)
    arguments = {"prompt": [5]} | changes
    with pytest.raises(RequestRejected, match=message):
        engine.submit(0, submit(0, **arguments))  # type: ignore[arg-type]
    assert not engine.has_work()


def test_aborted_streams_have_the_logprobs_of_tokens_that_were_held_back(
    llama: tuple[Path, transformers.PreTrainedModel],
) -> None:
    directory, _ = llama
    driver = Driver(make_engine(directory))
    wanted: list[int | None] = [0, None, 3, 0]
    for stream, logprobs in enumerate(wanted):
        options = {} if logprobs is None else {"logprobs": logprobs}
        driver.submit(
            submit(stream, [9, 8, 7 + stream], interval=64, max_tokens=40, ignore_eos=True, **options)
        )
    for _ in range(12):
        driver.step()
    driver.engine.abort(0, [0, 1, 2])
    outcomes = driver.run()
    assert [outcomes[stream].finish for stream in range(4)] == [FinishReason.ABORT] * 3 + [
        FinishReason.LENGTH
    ]
    for stream, logprobs in enumerate(wanted):
        outcome = outcomes[stream]
        assert len(outcome.tokens) > 4, "some were held back"
        scored = [ids[0] for ids, _, _ in outcome.logprobs]
        assert scored == ([] if logprobs is None else outcome.tokens)


@pytest.mark.gpu
def test_logprobs_are_those_of_the_model(llama: tuple[Path, transformers.PreTrainedModel]) -> None:
    directory, model = llama
    prompt = [11, 12, 13]
    outcome = run_all(
        make_engine(directory), [submit(0, prompt, max_tokens=4, logprobs=3, logit_bias={9: 50.0})]
    )[0]
    history = list(prompt)
    for token, (ids, values, rank) in zip(outcome.tokens, outcome.logprobs, strict=True):
        exact = next_logprobs(model, history)[-1]
        assert token == ids[0] == 9
        assert values == pytest.approx(exact[ids].tolist(), abs=1e-4)
        assert rank == int((exact > exact[token]).sum()) + 1
        assert ids[1:] == exact.topk(3).indices.tolist()
        history.append(token)
