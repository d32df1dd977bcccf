"""Conversations that are too long for the context."""

from __future__ import annotations

from penstock.generation.compaction.compaction import KeptRoom, kept, summary_message
from penstock.generation.compaction.shortening import LEFT_OUT, shortened
from penstock.generation.request.schemas import Message, Part


def render(messages: list[Message]) -> str:
    return "|".join(f"{each.role}:{each.content}" for each in messages)


def count(text: str, *, most: int) -> int:
    return len(text.split())


def conversation(results: int, words: int) -> list[Message]:
    turns = [
        message
        for number in range(results)
        for message in (Message("assistant", f"call {number}"), Message("tool", f"r{number} " + "w " * words))
    ]
    return [Message("system", "rules"), Message("user", "task"), *turns, Message("user", "summarize")]


def test_what_fits_stays_as_it_is() -> None:
    messages = conversation(3, 10)
    assert shortened(messages, render, count, 200) == render(messages)


def test_the_oldest_results_are_left_out_first() -> None:
    text = shortened(conversation(10, 200), render, count, 1200)
    assert count(text, most=0) <= 1200
    assert LEFT_OUT in text
    assert text.index(LEFT_OUT) < text.index("r9 ")
    assert "system:rules|user:task|assistant:call 0|" in text  # nothing but results
    assert text.endswith("user:summarize")


def test_then_the_oldest_messages() -> None:
    messages = [
        Message("system", "rules"),
        *(Message("user" if number % 2 else "assistant", f"m{number} " + "w " * 50) for number in range(40)),
        Message("user", "summarize"),
    ]
    text = shortened(messages, render, count, 400)
    assert count(text, most=0) <= 400
    assert text.startswith("system:rules|")
    assert "m0 " not in text
    assert "m39 " in text
    assert text.endswith("user:summarize")


def test_instructions_and_the_latest_of_the_user_stay_beside_a_summary() -> None:
    messages = [
        Message("system", "rules"),
        Message("user", "x" * 60),
        Message("assistant", "an answer"),
        Message("tool", "a result"),
        Message("developer", "more rules"),
        Message("user", "y" * 60),
    ]
    assert [each.content for each in kept(messages, KeptRoom(100))] == ["rules", "more rules", "y" * 60]
    assert [each.role for each in kept(messages, KeptRoom(120))] == ["system", "user", "developer", "user"]


def test_pictures_take_room_beside_a_summary() -> None:
    messages = [Message("user", [Part("text", text=name), Part("image")]) for name in "abc"]
    assert kept(messages, KeptRoom(250, of_picture=100)) == messages[1:]


def test_a_summary_is_the_users_message() -> None:
    """It has no more weight than what a user may write."""
    message = summary_message("All done.")
    assert message.role == "user"
    assert str(message.content).endswith("All done.")
