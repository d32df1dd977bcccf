"""The torch engine ends reasoning exactly where its budget does."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken

from penstock.generation.grammars.call_grammar import TokenIds, preceded, reasoning_grammar
from penstock.generation.parsers.reasoning import THINK
from penstock.wire.frames import FinishReason
from penstock.wire.messages import ThinkingLimit
from tests.engine.support import byte_level_tokenizer
from tests.engine.torch.harness import Driver, Outcome, make_engine, make_model, run_all, submit

PROMPT = [5, 6, 7]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("thinker")
    make_model("llama", directory)
    return directory


def limited(
    prompt: list[int], output: list[int], thinking: ThinkingLimit, *, base: int | None = None
) -> tuple[bool, int, int, int]:
    """A plain model of the state after ``output``: inside, used, index of the forced token, times ended."""
    whole = [*prompt, *output]
    starts, ends = thinking.starts, thinking.ends
    inside, used, ahead, ended = bool(thinking.opened), 0, -1, 0
    if inside:
        opened = max(
            (
                at + len(s)
                for s in starts
                for at in range(len(prompt))
                if tuple(prompt[at : at + len(s)]) == s
            ),
            default=len(prompt),
        )
        used = len(prompt) - opened
    for length in range(len(prompt), len(whole) + 1):
        if length > len(prompt):
            token = whole[length - 1]
            text = tuple(whole[:length])
            sequence = thinking.again if ended else thinking.forced
            if ahead >= 0 and token == sequence[ahead]:
                ahead += 1
                if ahead == len(sequence):
                    ahead, inside, ended = -1, False, ended + 1
            else:
                ahead = -1
                closing = next((s for s in ends if inside and text[-len(s) :] == s), None)
                if closing:
                    inside, used = False, used + 1 - len(closing)
                elif inside:
                    used += 1
                inside = inside or any(text[-len(s) :] == s for s in starts)
        if inside and ahead < 0 and used >= thinking.budget:
            sequence = thinking.again if ended else thinking.forced
            text = tuple(whole[:length])
            ahead = max(
                (size for size in range(1, len(sequence)) if text[-size:] == sequence[:size]), default=0
            )
    return inside, used, ahead, ended


def check(prompt: list[int], tokens: list[int], thinking: ThinkingLimit) -> None:
    """Every forced token is there, and no stretch of reasoning exceeds the budget."""
    for count in range(len(tokens)):
        _, used, ahead, ended = limited(prompt, tokens[:count], thinking)
        assert used <= max(thinking.budget, limited(prompt, [], thinking)[1])
        if ahead >= 0:
            assert tokens[count] == (thinking.again if ended else thinking.forced)[ahead]


def run(directory: Path, requests: list[Any], **options: Any) -> dict[int, Outcome]:
    driver = Driver(make_engine(directory, **options))
    for request in requests:
        driver.submit(request)
    return driver.run()


def natural(directory: Path) -> list[int]:
    return run(directory, [submit(0, PROMPT, max_tokens=48, ignore_eos=True)])[0].tokens


def test_a_budget_that_is_not_reached_changes_nothing(model_dir: Path) -> None:
    tokens = natural(model_dir)
    end = tokens[20]
    length = tokens.index(end)
    for budget in (length, length + 1, 100):
        thinking = ThinkingLimit(budget, ((9,),), ((end,),), (end,), (end,), opened=True)
        request = submit(0, [9], max_tokens=48, ignore_eos=True, thinking=thinking)
        request = submit(0, PROMPT, max_tokens=48, ignore_eos=True, thinking=thinking)
        assert run(model_dir, [request])[0].tokens == tokens


@pytest.mark.parametrize("budget", [0, 1, 7])
def test_at_the_budget_the_end_follows(model_dir: Path, budget: int) -> None:
    tokens = natural(model_dir)
    end = next(token for token in range(10, 300) if token not in tokens)
    thinking = ThinkingLimit(budget, ((9,),), ((end, end + 1),), (end, end + 1, end), (end,), opened=True)
    request = submit(0, PROMPT, max_tokens=48, ignore_eos=True, thinking=thinking, logprobs=0)
    outcome = run(model_dir, [request])[0]
    assert outcome.tokens[: budget + 3] == [*tokens[:budget], end, end + 1, end]
    assert len(outcome.tokens) == 48
    assert [ids[0] for ids, _, _ in outcome.logprobs] == outcome.tokens


def test_tokens_of_the_prompt_count_after_a_start(model_dir: Path) -> None:
    thinking = ThinkingLimit(5, ((9, 8),), ((300,),), (300,), (300,))
    tokens = run(model_dir, [submit(0, [300, 9, 8, 4, 4], max_tokens=8, thinking=thinking)])[0].tokens
    assert tokens.index(300) == 3
    tokens = run(model_dir, [submit(0, [9, 8, 4, 300, 4], max_tokens=8, thinking=thinking)])[0].tokens
    assert 300 not in tokens
    tokens = run(model_dir, [submit(0, [9, 8, *[4] * 9], max_tokens=8, thinking=thinking)])[0].tokens
    assert tokens[0] == 300


def test_an_end_that_is_a_stop_token_ends_the_stream(model_dir: Path) -> None:
    thinking = ThinkingLimit(3, ((9,),), ((300,),), (300,), (300,), opened=True)
    request = submit(0, PROMPT, max_tokens=20, thinking=thinking, stop_token_ids=(300,))
    outcome = run(model_dir, [request])[0]
    assert (len(outcome.tokens), outcome.finish) == (4, FinishReason.STOP_TOKEN)
    outcome = run(model_dir, [submit(0, PROMPT, max_tokens=2, thinking=thinking)])[0]
    assert (len(outcome.tokens), outcome.finish) == (2, FinishReason.LENGTH)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"async_scheduling": "on"},
    {"speculative_method": "ngram", "speculative_tokens": 4},
    {"kv_cache_memory": 100 << 10, "block_size": 4, "max_prefill_delay": 0.0},
]


def some_requests(*, limits: bool) -> list[Any]:
    """Few tokens may follow, so that marks come up by themselves, and drafts are accepted."""
    draw = random.Random(5)
    requests = []
    for stream in range(24):
        prompt = [draw.randrange(10, 16) for _ in range(draw.randrange(1, 20))]
        thinking = ThinkingLimit(
            draw.randrange(6),
            ((10, 11), (12,)),
            ((13, 14), (15,)),
            draw.choice([(13, 14), (15,), (13, 14, 11, 10)]),
            (15, 15),
            opened=draw.choice([True, False]),
        )
        sampling: dict[str, Any] = {"temperature": 1.0} if stream % 3 else {}
        if limits and stream % 6 != 5:
            sampling["thinking"] = thinking
        requests.append(
            submit(
                stream,
                prompt,
                interval=draw.choice([1, 3, 8]),
                max_tokens=40,
                allowed_token_ids=tuple(range(10, 16)),
                **sampling,
            )
        )
    return requests


@pytest.fixture(scope="module")
def expected(model_dir: Path) -> dict[int, list[int]]:
    requests = some_requests(limits=True)
    engine = make_engine(model_dir)
    outcomes = {each.stream: run_all(engine, [each])[each.stream].tokens for each in requests}
    free = run(model_dir, some_requests(limits=False))
    changed = 0
    for each in requests:
        thinking, tokens = each.sampling.thinking, outcomes[each.stream]
        if thinking is None:
            assert tokens == free[each.stream].tokens
            continue
        prompt = [*memoryview(each.prompt).cast("i")]
        check(prompt, tokens, thinking)
        changed += tokens != free[each.stream].tokens
    assert changed > 8
    return outcomes


@pytest.mark.parametrize("options", OPTIONS, ids=["together", "ahead", "drafts", "preempted"])
def test_tokens_do_not_depend_on_how_they_are_computed(
    model_dir: Path, expected: dict[int, list[int]], options: dict[str, Any]
) -> None:
    outcomes = run(model_dir, some_requests(limits=True), **options)
    assert {stream: outcome.tokens for stream, outcome in outcomes.items()} == expected


def test_another_engine_goes_on_with_the_count(model_dir: Path, expected: dict[int, list[int]]) -> None:
    draw = random.Random(6)
    resumed = []
    for each in some_requests(limits=True):
        for number in range(3):
            done = expected[each.stream][: draw.randrange(1, 39)]
            prompt = [*memoryview(each.prompt).cast("i"), *done]
            sampling = {name: getattr(each.sampling, name) for name in each.sampling.__struct_fields__}
            resumed.append(submit(each.stream + 100 * number, prompt, resumed=len(done), **sampling))
    outcomes = run(model_dir, resumed)
    for request in resumed:
        tokens = outcomes[request.stream].tokens
        assert tokens == expected[request.stream % 100][request.resumed :]


ANSWER = "start: /[a-f]{3}-[0-9]{2,4}/"


def test_a_stream_whose_budget_is_used_up_is_in_every_step(model_dir: Path) -> None:
    """The device compares the token that the host has not read with those that open reasoning."""
    steps = []
    for budget in (1000, 1):
        limit = ThinkingLimit(budget, ((300,), (9, 8)), ((301,),), (301,), (301,), opened=True)
        engine = make_engine(model_dir, async_scheduling="on")
        driver = Driver(engine)
        driver.submit(submit(0, PROMPT, max_tokens=40, ignore_eos=True, thinking=limit))
        driver.submit(submit(1, PROMPT, max_tokens=200, ignore_eos=True))
        count = 0
        while driver.outcomes[0].finish is FinishReason.NONE:
            driver.step()
            count += 1
        steps.append(count)
    assert steps[1] - steps[0] <= 4


@pytest.mark.parametrize("method", [None, "ngram"])
def test_a_grammar_holds_for_what_follows(tmp_path: Path, method: str | None) -> None:
    """Its matcher takes the forced end; where it does not admit the end, none is forced."""
    make_model("llama", tmp_path)
    tokenizer = byte_level_tokenizer("ab", "abc")
    tokenizer.add_tokens([AddedToken(text, special=False) for text in ("<think>", "</think>")])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    added = {token.content: id for id, token in tokenizer.get_added_tokens_decoder().items()}
    opening, end = added["<think>"], added["</think>"]
    marks = TokenIds({"<think>": opening, "</think>": end}, (opening, end), (1,))
    grammar = preceded(ANSWER, reasoning_grammar(THINK, "<think>", marks))
    requests = []
    for budget in range(9):
        limit = ThinkingLimit(budget, ((opening,),), ((end,),), (end,), (end,), opened=budget != 8)
        whole: dict[str, Any] = {"grammar": grammar if budget < 7 else ANSWER, "thinking": limit}
        requests.append(submit(budget, [opening, 5, 9][: 1 + budget], max_tokens=60, **whole))
    options: dict[str, Any] = {} if method is None else {"speculative_method": method}
    outcomes = run(tmp_path, requests, **options)
    for budget, outcome in outcomes.items():
        prompt = len(requests[budget].prompt) // 4 - 1
        thought, answer = [], outcome.tokens
        if budget < 7:
            at = outcome.tokens.index(end)
            thought, answer = outcome.tokens[:at], outcome.tokens[at + 1 :]
            assert len(thought) == max(0, budget - prompt)
        assert outcome.finish in (FinishReason.GRAMMAR, FinishReason.EOS)
        assert re.fullmatch("[\\s]{0,2}[a-f]{3}-[0-9]{2,4}", tokenizer.decode(answer))
