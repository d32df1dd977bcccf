"""The turns of prompts as the templates of many models write them."""

from __future__ import annotations

import pytest

from penstock.engine.synthetic.turns import turns_of

PROMPTS = {
    "chatml": "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nA\nB<|im_end|>\n"
    "<|im_start|>assistant\nC<|im_end|>\n<|im_start|>tool\nD<|im_end|>\n"
    "<|im_start|>assistant\n",
    "qwen": "<|im_start|>user\nA\nB<|im_end|>\n<|im_start|>assistant\nC<|im_end|>\n"
    "<|im_start|>user\n<tool_response>\nD\n</tool_response><|im_end|>\n<|im_start|>assistant\n<think>\n",
    "kimi": "<|im_system|>system<|im_middle|>S<|im_end|><|im_user|>user<|im_middle|>A\nB<|im_end|>"
    "<|im_assistant|>assistant<|im_middle|>C<|im_end|><|im_system|>tool<|im_middle|>D<|im_end|>"
    "<|im_assistant|>assistant<|im_middle|>",
    "llama 3": "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nA\nB<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\nC<|eot_id|>"
    "<|start_header_id|>ipython<|end_header_id|>\n\nD<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
    "gpt-oss": "<|start|>system<|message|>S<|end|><|start|>user<|message|>A\nB<|end|>"
    "<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>C<|call|>"
    "<|start|>functions.f to=assistant<|channel|>commentary<|message|>D<|end|><|start|>assistant",
    "glm": "[gMASK]<sop><|system|>\nS<|user|>\nA\nB<|assistant|>\nC<|observation|>\n"
    "<tool_response>\nD\n</tool_response><|assistant|>",
    "deepseek": "<｜begin▁of▁sentence｜>S<｜User｜>A\nB<｜Assistant｜>C<｜end▁of▁sentence｜>"
    "<｜tool▁outputs▁begin｜>D<｜tool▁outputs▁end｜><｜Assistant｜>",
    "granite": "<|start_of_role|>user<|end_of_role|>A\nB<|end_of_text|>\n"
    "<|start_of_role|>assistant<|end_of_role|>C<|end_of_text|>\n"
    "<|start_of_role|>tool_response<|end_of_role|>D<|end_of_text|>\n<|start_of_role|>assistant<|end_of_role|>",
    "minimax": "]~!b[]~b]system\nS[e~[\n]~b]user\nA\nB[e~[\n]~b]ai\nC[e~[\n"
    "]~b]tool\n<response>D</response>[e~[\n]~b]ai\n",
    "gemma": "<bos><start_of_turn>user\nA\nB<end_of_turn>\n<start_of_turn>model\nC<end_of_turn>\n"
    "<start_of_turn>tool\nD<end_of_turn>\n<start_of_turn>model\n",
    "mistral": "<s>[AVAILABLE_TOOLS][][/AVAILABLE_TOOLS][INST]A\nB[/INST]C</s>[TOOL_RESULTS]D[/TOOL_RESULTS]",
}


@pytest.mark.parametrize("family", PROMPTS)
def test_every_family(family: str) -> None:
    prompt = PROMPTS[family]
    first, last = turns_of(prompt)
    assert (first.text, first.is_tool, first.reply_before) == ("A\nB", False, "")
    assert "D" in last.text
    assert "C" not in last.text
    assert (last.is_tool, last.reply_before) == (True, "C")
    assert "B" in prompt[: first.end]
    assert "C" not in prompt[: first.end]
    assert "D" in prompt[: last.end]


def test_messages_since_the_last_reply_are_one_turn() -> None:
    prompt = (
        "<|im_start|>user\nA<|im_end|>\n<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nB<|im_end|>\n"
        "<|im_start|>assistant\nC<|im_end|>\n<|im_start|>tool\nD<|im_end|>\n<|im_start|>tool\nE<|im_end|>\n"
        "<|im_start|>user\nF<|im_end|>\n<|im_start|>system\nT<|im_end|>\n<|im_start|>assistant\n"
    )
    assert [(turn.text, turn.is_tool) for turn in turns_of(prompt)] == [("A\nB", False), ("D\nE\nF", True)]


def test_marks_of_other_templates_are_text() -> None:
    (turn,) = turns_of("<|im_start|>user\nwhat is [INST] and <|user|>?<|im_end|>\n<|im_start|>assistant\n")
    assert turn.text == "what is [INST] and <|user|>?"


@pytest.mark.parametrize("prompt", ["", "Once upon a time", "<|im_start|>system\nS<|im_end|>\n"])
def test_a_prompt_without_turns_is_one(prompt: str) -> None:
    assert [turn.text for turn in turns_of(prompt)] == [prompt]
