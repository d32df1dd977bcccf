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


TWO_RESULTS = {
    "deepseek, marks of each": "<｜User｜>Q<｜Assistant｜>call look<｜end▁of▁sentence｜>"
    "<｜tool▁output▁begin｜>R1<｜tool▁output▁end｜><｜tool▁output▁begin｜>R2<｜tool▁output▁end｜>"
    "A<｜end▁of▁sentence｜><｜User｜>N<｜Assistant｜>",
    "deepseek, a list": "<｜User｜>Q<｜Assistant｜>call look<｜end▁of▁sentence｜><｜tool▁outputs▁begin｜>"
    "<｜tool▁output▁begin｜>R1<｜tool▁output▁end｜>\n<｜tool▁output▁begin｜>R2<｜tool▁output▁end｜>"
    "<｜tool▁outputs▁end｜>A<｜end▁of▁sentence｜><｜User｜>N<｜Assistant｜>",
    "gemma 4": "<bos><|turn>user\nQ<turn|>\n<|turn>model\n"
    "call look<|tool_response>response:look{R1}<tool_response|>"
    "<|tool_response>response:look{R2}<tool_response|>A<turn|>\n<|turn>user\nN<turn|>\n<|turn>model\n",
    "mistral": "<s>[INST]Q[/INST]call look</s>[TOOL_RESULTS]R1[/TOOL_RESULTS][TOOL_RESULTS]R2[/TOOL_RESULTS]"
    "A</s>[INST]N[/INST]",
    "mistral, results as text": "[INST]Q[/INST]call look</s>[INST]<tool_response>R1</tool_response>[/INST]"
    "[INST]<tool_response>R2</tool_response>[/INST]A</s>[INST]N[/INST]",
    "deepseek, tags": "<｜User｜>Q<｜Assistant｜>call look<｜end▁of▁sentence｜>\n\n"
    "<function_results>\n<result>R1</result>\n"
    "<result>R2</result>\n</function_results>\n\nA<｜end▁of▁sentence｜><｜User｜>N<｜Assistant｜>",
    "deepseek, turns of the user": "<｜User｜>Q<｜Assistant｜>call look<｜end▁of▁sentence｜>"
    "<｜User｜><tool_result>R1</tool_result>\n\n<tool_result>R2</tool_result><｜Assistant｜>"
    "A<｜end▁of▁sentence｜><｜User｜>N<｜Assistant｜>",
    "kimi": "<|im_system|>tool_declare<|im_middle|>[T]<|im_end|><|im_user|>user<|im_middle|>Q<|im_end|>"
    "<|im_assistant|>assistant<|im_middle|>call look<|im_end|><|im_system|>look<|im_middle|>R1<|im_end|>"
    "<|im_system|>look<|im_middle|>R2<|im_end|><|im_assistant|>assistant<|im_middle|>A<|im_end|>"
    "<|im_user|>user<|im_middle|>N<|im_end|><|im_assistant|>assistant<|im_middle|>",
    "phi 4, results as text": "<|im_start|>system<|im_sep|>S<|im_end|><|im_start|>user<|im_sep|>Q<|im_end|>"
    "<|im_start|>assistant<|im_sep|>call look<|im_end|>"
    '<|im_start|>user<|im_sep|><tool_response name="look">\nR1\n</tool_response><|im_end|>'
    '<|im_start|>user<|im_sep|><tool_response name="look">\nR2\n</tool_response><|im_end|>'
    "<|im_start|>assistant<|im_sep|>A<|im_end|><|im_start|>user<|im_sep|>N<|im_end|><|im_start|>assistant<|im_sep|>",
}


@pytest.mark.parametrize("family", TWO_RESULTS)
def test_results_are_one_turn_and_the_next_question_another(family: str) -> None:
    prompt = TWO_RESULTS[family]
    first, results, last = turns_of(prompt)
    assert (first.text, first.is_tool) == ("Q", False)
    assert (results.is_tool, results.reply_before) == (True, "call look")
    assert "R1" in results.text
    assert "R2" in results.text
    assert "A" not in results.text
    assert (last.text, last.is_tool, last.reply_before.strip()) == ("N", False, "A")


@pytest.mark.parametrize("family", TWO_RESULTS)
def test_a_reply_that_begins_with_the_last_result_is_to_be_written(family: str) -> None:
    """Some templates open no turn of the model after results."""
    prompt = TWO_RESULTS[family]
    _, results = turns_of(prompt[: prompt.index("A", prompt.index("R2"))])
    assert "R1" in results.text
    assert "R2" in results.text


def test_a_second_call_after_results_is_a_reply() -> None:
    called = (
        "call look<｜end▁of▁sentence｜><｜tool▁outputs▁begin｜>"
        "<｜tool▁output▁begin｜>{}<｜tool▁output▁end｜><｜tool▁outputs▁end｜>"
    )
    _, _, last = turns_of(f"<｜User｜>Q<｜Assistant｜>{called.format('R1')}{called.format('R2')}")
    assert "R1" not in last.text
    assert "R2" in last.text
    assert last.reply_before == "call look"


@pytest.mark.parametrize("family", PROMPTS)
def test_every_family(family: str) -> None:
    prompt = PROMPTS[family]
    first, last = turns_of(prompt)
    assert (first.text, first.is_tool, first.reply_before) == ("A\nB", False, "")
    assert "D" in last.text
    assert "C" not in last.text
    assert (last.is_tool, last.reply_before) == (True, "functions.f C" if family == "gpt-oss" else "C")
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
