"""Tags around an answer are dropped where they wrap it; all others are text."""

from __future__ import annotations

from functools import partial

import pytest

from penstock.generation.parsers.calls import CallParser
from penstock.generation.parsers.formats import REASONING_FORMATS, TOOL_FORMATS
from penstock.generation.parsers.message import MessageFormat
from penstock.generation.parsers.reasoning import ReasoningParser
from tests.generation.parsers.test_split import Message, whole

LIST = '<tool_calls>[{"name": "f", "arguments": {"s": "use <answer> b </answer> tag"}}]</tool_calls>'
ARGUMENTS = '{"s": "use <answer> b </answer> tag"}'
KIMI_CALL = (
    '<|open|>tools<|sep|><|open|>call tool="f"<|sep|><|open|>argument key="s" type="string"<|sep|>x'
    "<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|>"
)


@pytest.mark.parametrize(
    ("format", "text", "content", "calls"),
    [
        ("hunyuan_a13b", f"<think>r</think>\n<answer>\n{LIST}\n</answer>", "", [ARGUMENTS]),
        ("hunyuan_a13b", f"<answer>\nSee:\n</answer>\n{LIST}\n</answer>", "See:", [ARGUMENTS]),
        ("hunyuan_a13b", f"<answer>See: {LIST}\n</answer>\nDone", "See:Done", [ARGUMENTS]),
        ("hunyuan_a13b", LIST.replace(" tag", ""), "", [ARGUMENTS.replace(" tag", "")]),
        ("hunyuan_a13b", "Write <answer>42</answer> in tags.", "Write <answer>42</answer> in tags.", []),
        ("hunyuan_a13b", "Write <answer>42</answer>", "Write <answer>42</answer>", []),
        ("hunyuan_a13b", "<answer>\na </answer> b\n</answer>\n", "a </answer> b", []),
        ("hunyuan_a13b", "<think>r</think>\n<answer>\n42 </ans", "42 </ans", []),
        ("ernie45", "<response>\nA <response> mid.\n</response>\n", "A <response> mid.", []),
        ("cohere_command3", "<|START_RESPONSE|>a<|END_RESPONSE|>", "a", []),
        ("cohere_command3", "<|START_TEXT|>a <|END_RESPONSE|><|END_TEXT|>", "a <|END_RESPONSE|>", []),
        (
            "kimi_k3",
            f"<|open|>response<|sep|>a<|close|>response<|sep|>{KIMI_CALL}<|close|>message<|sep|>",
            "a",
            ['{"s": "x"}'],
        ),
        ("kimi_k3", "<|open|>response<|sep|>a<|close|>response<|sep|><|close|>message<|sep|>", "a", []),
    ],
)
def test_tags_around_the_answer(format: str, text: str, content: str, calls: list[str]) -> None:
    reasoning = REASONING_FORMATS[format]
    tools = partial(CallParser, TOOL_FORMATS[format])
    make = partial(
        Message, MessageFormat(partial(ReasoningParser, "", reasoning), tools, tags=reasoning.tags)
    )
    for pieces in ([text], list(text), [text[: len(text) // 2], text[len(text) // 2 :]]):
        delta = whole(make(), pieces)
        assert (delta.content, [call.arguments for call in delta.calls]) == (content, calls)
    for place in range(len(text)):
        for cut in (False, True):
            ended = whole(make(), list(text[:place]), cut=cut)
            assert ended == whole(make(), [text[:place]], cut=cut)
