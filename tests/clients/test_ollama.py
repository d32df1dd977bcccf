"""The ollama package: a round of tools, streamed and not."""

from __future__ import annotations

import ollama
import pytest

from tests.clients.scripted import MODEL, QUESTION, REPORT, RESULT, SAYS, THOUGHT, TOOL


def get_speed(name: str) -> str:
    """Say how fast something is.

    Args:
        name: what it is
    """
    return RESULT


def turn(client: ollama.Client, messages: list[ollama.Message], *, stream: bool) -> ollama.Message:
    if not stream:
        return client.chat(MODEL, messages, tools=[get_speed], think=True).message
    whole = ollama.Message(role="assistant", content="", thinking="", tool_calls=[])
    for part in client.chat(MODEL, messages, tools=[get_speed], think=True, stream=True):
        whole.content = (whole.content or "") + (part.message.content or "")
        whole.thinking = (whole.thinking or "") + (part.message.thinking or "")
        whole.tool_calls = [*(whole.tool_calls or ()), *(part.message.tool_calls or ())]
    assert part.done
    assert (part.done_reason, bool(part.eval_count), bool(part.prompt_eval_count)) == ("stop", True, True)
    return whole


@pytest.mark.parametrize("stream", [False, True])
def test_a_round_of_tools(scripted: str, stream: bool) -> None:
    client = ollama.Client(scripted)
    messages = [ollama.Message(role="user", content=QUESTION)]
    said = turn(client, messages, stream=stream)
    assert (said.content, said.thinking) == (SAYS, THOUGHT)
    [call] = said.tool_calls or ()
    assert (call.function.name, call.function.arguments) == (TOOL, {"name": "pump ä"})
    messages += [said, ollama.Message(role="tool", content=get_speed("pump ä"), tool_name=TOOL)]
    assert turn(client, messages, stream=stream).content == REPORT


def test_models_and_errors(scripted: str) -> None:
    client = ollama.Client(scripted)
    assert client.list().models[0].model == MODEL
    assert {"completion", "tools", "thinking"} <= set(client.show(MODEL).capabilities or ())
    assert client.generate(MODEL).done_reason == "load"
    with pytest.raises(ollama.ResponseError, match="does not exist") as caught:
        client.chat("nobody", [ollama.Message(role="user", content="Hi")])
    assert caught.value.status_code == 404
