"""How models write tool calls and reasoning, by the names that vLLM has for the formats."""

from __future__ import annotations

from penstock.generation.parsers.call_syntax import JsonCalls, PythonCalls, Section, TaggedCalls, XmlCalls
from penstock.generation.parsers.reasoning import THINK, Reasoning

_HERMES = JsonCalls(opens=("<tool_call>",), close="</tool_call>")
_LLAMA3 = JsonCalls(optional="<|python_tag|>", key="parameters")
_QWEN_XML = XmlCalls(
    opens=("<tool_call>", "<function="),
    close="</tool_call>",
    call="<function=",
    call_end=">",
    parameter="<parameter=",
    parameter_end=">",
    value_end="</parameter>",
    end="</function>",
    lines=True,
)
_SEED = XmlCalls(
    opens=("<seed:tool_call>",),
    close="</seed:tool_call>",
    call="<function=",
    call_end=">",
    parameter="<parameter=",
    parameter_end=">",
    value_end="</parameter>",
    end="</function>",
    lines=True,
)
_GLM = XmlCalls(
    opens=("<tool_call>",),
    parameter="<arg_key>",
    parameter_end="</arg_key>",
    value="<arg_value>",
    value_end="</arg_value>",
    end="</tool_call>",
)
_MINIMAX = XmlCalls(
    opens=("<minimax:tool_call>",),
    close="</minimax:tool_call>",
    call="<invoke name=",
    call_end=">",
    quote='"',
    parameter="<parameter name=",
    parameter_end=">",
    value_end="</parameter>",
    end="</invoke>",
)
_DEEPSEEK_V3 = TaggedCalls(
    opens=("<｜tool▁calls▁begin｜>",),
    close="<｜tool▁calls▁end｜>",
    call="<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
    fence=("```json", "```"),
    end="<｜tool▁call▁end｜>",
)
_DEEPSEEK_V31 = TaggedCalls(
    opens=("<｜tool▁calls▁begin｜>",),
    close="<｜tool▁calls▁end｜>",
    call="<｜tool▁call▁begin｜>",
    before="<｜tool▁sep｜>",
    end="<｜tool▁call▁end｜>",
)
_DEEPSEEK_V32 = XmlCalls(
    opens=("<｜DSML｜function_calls>",),
    close="</｜DSML｜function_calls>",
    call="<｜DSML｜invoke name=",
    call_end=">",
    quote='"',
    parameter="<｜DSML｜parameter name=",
    parameter_end=">",
    string=' string="true"',
    other=' string="false"',
    value_end="</｜DSML｜parameter>",
    end="</｜DSML｜invoke>",
)
_KIMI = TaggedCalls(
    opens=("<|tool_calls_section_begin|>",),
    close="<|tool_calls_section_end|>",
    call="<|tool_call_begin|>",
    prefix="functions",
    before="<|tool_call_argument_begin|>",
    end="<|tool_call_end|>",
)
_MISTRAL = TaggedCalls(opens=("[TOOL_CALLS]",), id="[CALL_ID]", before="[ARGS]", or_json=True)
_STEP3 = XmlCalls(
    opens=("<｜tool_calls_begin｜>",),
    close="<｜tool_calls_end｜>",
    call="<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name=",
    call_end=">",
    quote='"',
    parameter="<steptml:parameter name=",
    parameter_end=">",
    value_end="</steptml:parameter>",
    end="</steptml:invoke>",
    after="<｜tool_call_end｜>",
)
_BARE_LIST = PythonCalls()

TOOL_FORMATS: dict[str, Section] = {
    "deepseek_v3": _DEEPSEEK_V3,
    "deepseek_v31": _DEEPSEEK_V31,
    "deepseek_v32": _DEEPSEEK_V32,
    "ernie45": _HERMES,
    "glm45": _GLM,
    "glm47": _GLM,
    "granite": JsonCalls(opens=("<|tool_call|>", "<tool_call>"), listed=True),
    "granite-20b-fc": JsonCalls(opens=("<function_call>",)),
    "granite4": _HERMES,
    "hermes": _HERMES,
    "hunyuan_a13b": JsonCalls(opens=("<tool_calls>",), listed=True, close="</tool_calls>"),
    "internlm": JsonCalls(opens=("<|action_start|><|plugin|>",), close="<|action_end|>", key="parameters"),
    "jamba": JsonCalls(opens=("<tool_calls>",), listed=True, close="</tool_calls>"),
    "kimi_k2": _KIMI,
    "lfm2": PythonCalls(opens=("<|tool_call_start|>",), close="<|tool_call_end|>"),
    "llama3_json": _LLAMA3,
    "llama4_json": _LLAMA3,
    "llama4_pythonic": PythonCalls(optional="<|python_start|>", close="<|python_end|>"),
    "longcat": JsonCalls(opens=("<longcat_tool_call>",), close="</longcat_tool_call>"),
    "mimo": _QWEN_XML,
    "minimax_m2": _MINIMAX,
    "mistral": _MISTRAL,
    "nemotron_json": JsonCalls(opens=("<TOOLCALL>",), listed=True, close="</TOOLCALL>"),
    "olmo3": PythonCalls(opens=("<function_calls>",), close="</function_calls>"),
    "phi4_mini_json": JsonCalls(opens=("functools", "<|tool_call|>"), close="<|/tool_call|>", listed=True),
    "pythonic": _BARE_LIST,
    "qwen3_coder": _QWEN_XML,
    "qwen3_xml": _QWEN_XML,
    "seed_oss": _SEED,
    "step3": _STEP3,
    "step3p5": _QWEN_XML,
}

_GRANITE_REASONING = Reasoning(
    opens=("Here is my thought process:", "Here's my thought process:"),
    closes=("Here is my response:", "Here's my response:"),
)
_SEED_REASONING = Reasoning(opens=("<seed:think>",), closes=("</seed:think>",))
REASONING_FORMATS: dict[str, Reasoning] = {
    **dict.fromkeys(
        (
            "deepseek_r1",
            "deepseek_v3",
            "ernie45",
            "glm45",
            "glm47",
            "holo2",
            "hunyuan_a13b",
            "mimo",
            "minimax_m2",
            "nemotron_v3",
            "olmo3",
            "qwen3",
            "step3",
            "step3p5",
            "think",
        ),
        THINK,
    ),
    "granite": _GRANITE_REASONING,
    "kimi_k2": Reasoning(ends=_KIMI.opens),
    "mistral": Reasoning(opens=("[THINK]",), closes=("[/THINK]",)),
    "seed_oss": _SEED_REASONING,
}

Marks = tuple[str, ...]
TOOL_MARKS: tuple[tuple[Marks, str], ...] = (
    (("｜DSML｜function_calls",), "deepseek_v32"),
    (("<｜tool_calls_begin｜>",), "step3"),
    (("<｜tool▁calls▁begin｜>", "```json"), "deepseek_v3"),
    (("<｜tool▁calls▁begin｜>",), "deepseek_v31"),
    (("<|tool_calls_section_begin|>",), "kimi_k2"),
    (("<minimax:tool_call>",), "minimax_m2"),
    (("<seed:tool_call>",), "seed_oss"),
    (("<longcat_tool_call>",), "longcat"),
    (("[TOOL_CALLS]",), "mistral"),
    (("<TOOLCALL>",), "nemotron_json"),
    (("<|action_start|>",), "internlm"),
    (("<|tool_call_start|>",), "lfm2"),
    (("<tool_call>", "<arg_key>"), "glm45"),
    (("<tool_call>", "<function="), "qwen3_coder"),
    (("<|/tool_call|>",), "phi4_mini_json"),
    (("<|tool_call|>",), "granite"),
    (("<tool_calls>",), "hunyuan_a13b"),
    (("<function_calls>",), "olmo3"),
    (("functools[",), "phi4_mini_json"),
    (("<tool_call>",), "hermes"),
    (('"parameters": dictionary of argument name and its value',), "llama3_json"),
    (("<|python_start|>",), "llama4_pythonic"),
    (("[func_name1(",), "llama4_pythonic"),
    (("<|function_call_library|>",), "granite-20b-fc"),
    (("<|python_tag|>",), "llama3_json"),
)
"""Texts of a chat template that together tell the format of its tool calls; the first match counts."""
REASONING_MARKS: tuple[tuple[Marks, str], ...] = (
    (("</seed:think>",), "seed_oss"),
    (("[/THINK]",), "mistral"),
    (("<|tool_calls_section_begin|>", "</think>"), "kimi_k2"),
    (("</think>",), "think"),
    (("Here is my thought process:",), "granite"),
)
HARMONY_MARKS = ("<|channel|>", "<|message|>")
MODEL_TYPES: dict[str, tuple[str, str]] = {
    "deepseek_v32": ("deepseek_v32", "think"),
    "glm4_moe": ("glm45", "think"),
    "gpt_oss": ("openai", "openai_gptoss"),
    "kimi_k2": ("kimi_k2", "kimi_k2"),
    "minimax_m2": ("minimax_m2", "think"),
    "mistral": ("mistral", "mistral"),
    "mistral3": ("mistral", "mistral"),
}
"""The formats of models by config.json's model_type, where the template does not tell."""
