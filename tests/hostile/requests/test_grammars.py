"""Grammars that crash their validator, take long or are large cost their own request only."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from penstock.generation.grammars import checker as limits
from penstock.generation.grammars.checker import GrammarChecker
from penstock.generation.request.structured_output import Constraint
from penstock.http.errors import ApiError
from tests.generation.planning import body, planners

GOOD = Constraint("good", 'start: "a"')


def of(**outputs: Any) -> Constraint:
    plan = planners().completion(body(structured_outputs=outputs))
    assert plan.constraint is not None
    return plan.constraint


@pytest.fixture
def checker() -> Iterator[GrammarChecker]:
    made = GrammarChecker()
    yield made
    made.close()


async def refusal(checked: Awaitable[Constraint]) -> ApiError | None:
    try:
        await checked
    except ApiError as error:
        return error
    return None


def lark_chain(rules: int) -> Constraint:
    chain = [f"r{number}: r{number + 1}" for number in range(rules)]
    return of(grammar="\n".join(["start: r0", *chain, f'r{rules}: "x"']))


def slow_grammar(number: int = 0) -> Constraint:
    """The translation of GBNF takes quadratic time: 20,000 rules, 0.25 MB, take more than 25 s."""
    rules = "\n".join(f"r{number} ::= r{number + 1}" for number in range(40_000))
    return of(grammar=f'root ::= r0\n{rules}\nr40000 ::= "x{number}"')


def schema_chain(count: int) -> Constraint:
    following: dict[str, Any] = {
        f"a{number}": {"type": "object", "properties": {"x": {"$ref": f"#/$defs/a{number + 1}"}}}
        for number in range(count)
    }
    return of(json={"$ref": "#/$defs/a0", "$defs": {**following, f"a{count}": {"type": "string"}}})


@pytest.mark.parametrize("made", [lark_chain, schema_chain])
def test_a_grammar_that_overflows_the_stack_costs_only_its_request(
    checker: GrammarChecker, made: Callable[[int], Constraint]
) -> None:
    """In the process itself these grammars, of 36 and 200 kB, are a segmentation fault."""

    async def attack() -> None:
        hostile, good = await asyncio.gather(
            refusal(checker.check_grammar(made(3000), "hostile")), checker.check_grammar(GOOD, "other")
        )
        assert good == GOOD
        assert hostile is not None
        assert (hostile.status, hostile.param) == (400, made(1).field)
        assert "too complex" in hostile.message
        assert await checker.check_grammar(made(20), "hostile"), "a new child validates the next one"

    asyncio.run(asyncio.wait_for(attack(), 60))


@pytest.mark.slow
def test_a_grammar_that_takes_long_is_given_up(
    checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = slow_grammar()

    async def attack() -> None:
        waiting = asyncio.ensure_future(refusal(checker.check_grammar(slow, "hostile")))
        again = asyncio.ensure_future(refusal(checker.check_grammar(slow, "hostile")))
        await asyncio.sleep(0)
        assert await checker.check_grammar(GOOD, "other") == GOOD
        assert not waiting.done(), "the other client's grammar waited"
        again.cancel()
        error = await waiting
        assert error is not None
        assert error.param == "structured_outputs.grammar"
        assert f"more than {limits.CPU_LIMIT_S:g} s" in error.message

    asyncio.run(asyncio.wait_for(attack(), 60))


def test_a_short_grammar_waits_a_moment_behind_slow_ones_of_the_same_client(checker: GrammarChecker) -> None:
    """Without keys, all people behind a gateway are one client."""

    async def attack() -> None:
        slow = [
            asyncio.ensure_future(refusal(checker.check_grammar(slow_grammar(count)))) for count in range(8)
        ]
        await asyncio.sleep(0)
        assert await checker.check_grammar(GOOD) == GOOD
        assert not any(each.done() for each in slow), "they take 3 s of CPU"
        for each in slow:
            each.cancel()
        await asyncio.gather(*slow, return_exceptions=True)

    asyncio.run(asyncio.wait_for(attack(), 60))


def test_clients_take_turns_and_a_cancelled_request_leaves_none(checker: GrammarChecker) -> None:
    async def attack() -> None:
        order: list[str] = []

        async def ask(client: str, text: str) -> None:
            await checker.check_grammar(of(regex=text), client)
            order.append(client + text)

        asked = [ask("a", "aaaa"), ask("a", "aaa"), ask("a", "aa"), ask("a", "a"), ask("b", "bbbbb")]
        tasks = [asyncio.ensure_future(each) for each in asked]
        await asyncio.sleep(0)
        tasks[3].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert order == ["aaaaa", "aaa", "bbbbbb", "aaaa"]
        assert len(checker._quick) == 0
        await ask("c", "c")

    asyncio.run(asyncio.wait_for(attack(), 60))


def test_size_and_sum_of_waiting_grammars_are_bounded(
    checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MAX_WAITING_BYTES", 2500)

    async def attack() -> None:
        too_large = await refusal(checker.check_grammar(of(regex="a" * limits.MAX_GRAMMAR_BYTES)))
        assert too_large is not None
        assert (too_large.status, too_large.param) == (400, "structured_outputs.regex")
        assert str(limits.MAX_GRAMMAR_BYTES) in too_large.message
        errors = await asyncio.gather(
            *(refusal(checker.check_grammar(of(regex=f"{n}{'a' * 900}"))) for n in range(5))
        )
        assert [None if error is None else error.status for error in errors] == [None, None, 429, 429, 429]
        assert await refusal(checker.check_grammar(of(regex="b" * 900))) is None
        assert not len(checker._quick)

    asyncio.run(asyncio.wait_for(attack(), 60))


def test_the_reason_does_not_repeat_the_grammar(checker: GrammarChecker) -> None:
    async def attack() -> None:
        for bad in (
            of(regex="(" * 5000),
            of(grammar="start: " + "(" * 3000),
            of(grammar="root ::= " + "(" * 3000),
        ):
            error = await refusal(checker.check_grammar(bad))
            assert error is not None
            assert len(error.message) < 500

    asyncio.run(asyncio.wait_for(attack(), 60))


def test_a_child_ends_with_its_parent(checker: GrammarChecker) -> None:
    asyncio.run(checker.check_grammar(GOOD))
    child = checker._quick.process._child
    assert child is not None
    assert child.stdin is not None
    child.stdin.close()
    assert child.wait(10) == 0
