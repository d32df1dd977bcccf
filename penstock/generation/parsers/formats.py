"""How models write tool calls and reasoning, by the names that vLLM has for the formats."""

from __future__ import annotations

import msgspec

from penstock.generation.parsers.call_syntax import (
    ElementCalls,
    JsonCalls,
    PythonCalls,
    Section,
    TaggedCalls,
    XmlCalls,
)
from penstock.generation.parsers.reasoning import THINK, Reasoning

_HERMES = JsonCalls(opens=("<tool_call>",), close="</tool_call>")
_LLAMA3 = JsonCalls(
    optional="<|python_tag|>", around="<|python_start|>", close="<|python_end|>", key="parameters"
)
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
_SEED = msgspec.structs.replace(_QWEN_XML, opens=("<seed:tool_call>",), close="</seed:tool_call>")
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
    opens=("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>"),
    close="<｜tool▁calls▁end｜>",
    call="<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
    fence=("```json", "```"),
    end="<｜tool▁call▁end｜>",
)
_DEEPSEEK_V31 = TaggedCalls(
    opens=("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"),
    close="<｜tool▁calls▁end｜>",
    call="<｜tool▁call▁begin｜>",
    before="<｜tool▁sep｜>",
    end="<｜tool▁call▁end｜>",
)


def _dsml(calls: str, *, others: tuple[str, ...] = (), space: str = "") -> XmlCalls:
    """DeepSeek's XML, in an element ``calls``; ``others``: what models at times call it."""
    mark = f"｜DSML｜{space}"
    return XmlCalls(
        opens=(*(f"<{mark}{each}>" for each in (calls, *others)), f"<{mark}invoke name="),
        close=f"</{mark}{calls}>",
        call=f"<{mark}invoke name=",
        call_end=">",
        quote='"',
        parameter=f"<{mark}parameter name=",
        parameter_end=">",
        string=' string="true"',
        other=' string="false"',
        value_end=f"</{mark}parameter>",
        end=f"</{mark}invoke>",
    )


_KIMI = TaggedCalls(
    opens=("<|tool_calls_section_begin|>", "<|tool_call_begin|>"),
    close="<|tool_calls_section_end|>",
    call="<|tool_call_begin|>",
    prefix="functions",
    before="<|tool_call_argument_begin|>",
    end="<|tool_call_end|>",
)
_MISTRAL = TaggedCalls(opens=("[TOOL_CALLS]",), id="[CALL_ID]", before="[ARGS]", or_json=True)
_KIMI_K3 = XmlCalls(
    opens=("<|open|>tools<|sep|>",),
    close="<|close|>tools<|sep|>",
    call="<|open|>call tool=",
    call_end="<|sep|>",
    quote='"',
    parameter="<|open|>argument key=",
    parameter_end="<|sep|>",
    string=' type="string"',
    value_end="<|close|>argument<|sep|>",
    end="<|close|>call<|sep|>",
)


def _hunyuan(suffix: str) -> XmlCalls:
    """Hunyuan 3's XML, whose tags end with ``suffix``."""
    return XmlCalls(
        opens=(f"<tool_calls{suffix}>",),
        close=f"</tool_calls{suffix}>",
        call=f"<tool_call{suffix}>",
        call_end=f"<tool_sep{suffix}>",
        parameter=f"<arg_key{suffix}>",
        parameter_end=f"</arg_key{suffix}>",
        value=f"<arg_value{suffix}>",
        value_end=f"</arg_value{suffix}>",
        end=f"</tool_call{suffix}>",
    )


_COHERE = JsonCalls(
    opens=("<|START_ACTION|>",),
    close="<|END_ACTION|>",
    name="tool_name",
    id="tool_call_id",
    key="parameters",
    listed=True,
)
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

TOOL_FORMATS: dict[str, Section] = {
    "apertus": TaggedCalls(
        opens=("<|tools_prefix|>[",),
        close="]<|tools_suffix|>",
        call='{"',
        before='":',
        end="}",
        separator=",",
    ),
    "cohere_command3": _COHERE,
    "cohere_command4": _COHERE,
    "command_r": JsonCalls(
        opens=("Action: ```json", "Action:```json", "Action:\n```json"),
        close="```",
        name="tool_name",
        key="parameters",
        listed=True,
    ),
    "deepseek_v3": _DEEPSEEK_V3,
    "deepseek_v31": _DEEPSEEK_V31,
    "deepseek_v32": _dsml("function_calls"),
    "deepseek_v4": _dsml("tool_calls", others=("toolcalls", "tool")),
    "deepseek_v41": _dsml("calls", space=" "),
    "dots": msgspec.structs.replace(_MINIMAX, opens=("<dots_function_call>",), close="</dots_function_call>"),
    "ernie45": _HERMES,
    "functiongemma": PythonCalls(
        opens=("<start_function_call>",),
        close="<end_function_call>",
        before=("call:", ":"),
        quote="<escape>",
    ),
    "functionary_v31": TaggedCalls(opens=("<function=",), call="<function=", before=">", end="</function>"),
    "functionary_v32": TaggedCalls(opens=(">>>",), begun=True, content="all"),
    "gemma4": PythonCalls(
        opens=("<|tool_call>",), close="<tool_call|>", before=("call:", ":"), quote='<|"|>'
    ),
    "gigachat3": JsonCalls(
        opens=(
            "<|function_call|>",
            "<|message_sep|>\n\nfunction call<|role_sep|>\n",
            "function call<|role_sep|>\n",
        )
    ),
    "glm4": TaggedCalls(opens=("<|assistant|>",), begun=True),
    "glm45": _GLM,
    "glm47": _GLM,
    "granite": JsonCalls(opens=("<|tool_call|>", "<tool_call>"), listed=True),
    "granite-20b-fc": JsonCalls(opens=("<function_call>",)),
    "granite4": _HERMES,
    "hermes": _HERMES,
    "hunyuan_a13b": JsonCalls(opens=("<tool_calls>",), listed=True, close="</tool_calls>"),
    "hy_v3": _hunyuan(""),
    "hy_v3_opensource": _hunyuan(":opensource"),
    "internlm": JsonCalls(opens=("<|action_start|><|plugin|>",), close="<|action_end|>", key="parameters"),
    "jamba": JsonCalls(opens=("<tool_calls>",), listed=True, close="</tool_calls>"),
    "kimi_k2": _KIMI,
    "kimi_k3": _KIMI_K3,
    "lfm2": PythonCalls(opens=("<|tool_call_start|>",), close="<|tool_call_end|>"),
    "llama3_json": _LLAMA3,
    "llama4_json": _LLAMA3,
    "llama4_pythonic": PythonCalls(optional="<|python_start|>", close="<|python_end|>"),
    "ling3": _GLM,
    "longcat": JsonCalls(opens=("<longcat_tool_call>",), close="</longcat_tool_call>"),
    "mimo": _QWEN_XML,
    "minicpm5": XmlCalls(
        opens=("<function name=",),
        call="<function name=",
        call_end=">",
        quote='"',
        parameter="<param name=",
        parameter_end=">",
        raw=("<![CDATA[", "]]>"),
        value_end="</param>",
        end="</function>",
    ),
    "minimax_m2": _MINIMAX,
    "minimax_m3": ElementCalls(
        opens=("]<]minimax[>[<tool_call>",),
        close="]<]minimax[>[</tool_call>",
        call="]<]minimax[>[<invoke name=",
        mark="]<]minimax[>[",
        item="item",
    ),
    "mistral": _MISTRAL,
    "muse_glimmer": msgspec.structs.replace(
        _MINIMAX,
        opens=("<atem:function_calls>",),
        close="</atem:function_calls>",
        call="<atem:invoke name=",
        parameter="<atem:parameter name=",
        value_end="</atem:parameter>",
        end="</atem:invoke>",
    ),
    "nemotron_json": JsonCalls(opens=("<TOOLCALL>",), listed=True, close="</TOOLCALL>"),
    "olmo3": PythonCalls(opens=("<function_calls>",), close="</function_calls>"),
    "phi4_mini_json": JsonCalls(opens=("functools", "<|tool_call|>"), close="<|/tool_call|>", listed=True),
    "plamo3": TaggedCalls(
        opens=("<|plamo:begin_tool_requests:plamo|>",),
        close="<|plamo:end_tool_requests:plamo|>",
        call="<|plamo:begin_tool_request:plamo|><|plamo:begin_tool_name:plamo|>",
        before="<|plamo:end_tool_name:plamo|><|plamo:begin_tool_arguments:plamo|>"
        "<|plamo:constrain|>json<|plamo:msg|>",
        end="<|plamo:end_tool_arguments:plamo|><|plamo:end_tool_request:plamo|>",
    ),
    "poolside_v1": _GLM,
    "pythonic": PythonCalls(),
    "qwen3_coder": _QWEN_XML,
    "qwen3_json": _HERMES,
    "qwen3_xml": _QWEN_XML,
    "seed_oss": _SEED,
    "step3": _STEP3,
    "step3p5": _QWEN_XML,
    "step5": _QWEN_XML,
}

REASONING_FORMATS: dict[str, Reasoning] = {
    **dict.fromkeys(
        (
            "deepseek_r1",
            "deepseek_v3",
            "deepseek_v4",
            "deepseek_v41",
            "glm45",
            "glm47",
            "granite_thinking_parser",
            "holo2",
            "ling3",
            "mimo",
            "minicpmv",
            "minimax_m2",
            "nemotron_v3",
            "olmo3",
            "poolside_v1",
            "qwen3",
            "step3",
            "step3p5",
            "step5",
            "think",
        ),
        THINK,
    ),
    "apertus": Reasoning(opens=("<|inner_prefix|>",), closes=("<|inner_suffix|>",)),
    **dict.fromkeys(
        ("cohere_command3", "cohere_command4"),
        Reasoning(
            opens=("<|START_THINKING|>",),
            closes=("<|END_THINKING|>",),
            ends=("<|START_ACTION|>",),
            tags=(("<|START_RESPONSE|>", "<|END_RESPONSE|>"), ("<|START_TEXT|>", "<|END_TEXT|>")),
        ),
    ),
    "ernie45": Reasoning(tags=(("<response>", "</response>"),)),
    "gemma4": Reasoning(
        opens=("<|channel>",), label="thought\n", closes=("<channel|>",), ends=("<|tool_call>",)
    ),
    "granite": Reasoning(
        opens=("Here is my thought process:", "Here's my thought process:"),
        closes=("Here is my response:", "Here's my response:"),
    ),
    "hunyuan_a13b": Reasoning(tags=(("<answer>", "</answer>"),)),
    "hy_v3": Reasoning(opens=("<think>", "<think:opensource>"), closes=("</think>", "</think:opensource>")),
    "kimi_k2": Reasoning(ends=_KIMI.opens[:1]),
    "kimi_k3": Reasoning(
        opens=("<|open|>think<|sep|>",),
        closes=("<|close|>think<|sep|>",),
        ends=("<|open|>response<|sep|>", *_KIMI_K3.opens),
        tags=(("<|open|>response<|sep|>", "<|close|>response<|sep|>"), ("", "<|close|>message<|sep|>")),
    ),
    "minimax_m3": Reasoning(opens=("<mm:think>",), closes=("</mm:think>",)),
    "mistral": Reasoning(opens=("[THINK]",), closes=("[/THINK]",)),
    "plamo3": Reasoning(opens=("<|plamo:begin_think:plamo|>",), closes=("<|plamo:end_think:plamo|>",)),
    "seed_oss": Reasoning(opens=("<seed:think>",), closes=("</seed:think>",)),
}

Marks = tuple[str, ...]
TOOL_MARKS: tuple[tuple[Marks, str], ...] = (
    (("｜DSML｜", "function_calls>"), "deepseek_v32"),
    (("｜DSML｜", "tool_calls>"), "deepseek_v4"),
    (("｜DSML｜", " calls>"), "deepseek_v41"),
    (("]<]minimax[>[",), "minimax_m3"),
    (("<|open|>", "<|sep|>"), "kimi_k3"),
    (("<|tool_call>", "<tool_call|>"), "gemma4"),
    (("<start_function_call>",), "functiongemma"),
    (("<|START_ACTION|>", "<|START_RESPONSE|>"), "cohere_command3"),
    (("<|START_ACTION|>",), "cohere_command4"),
    (("Action:", "directly-answer"), "command_r"),
    (("<|tools_prefix|>",), "apertus"),
    (("<|plamo:begin_tool_requests:plamo|>",), "plamo3"),
    (("<atem:function_calls>",), "muse_glimmer"),
    (("<{start_tag}={function_name}>",), "functionary_v31"),
    ((">>>${recipient}",), "functionary_v32"),
    (("<|function_call|>",), "gigachat3"),
    (("function call", "add_tokens.role_sep"), "gigachat3"),
    (('<function name="', '<param name="'), "minicpm5"),
    (("<|observation|>", "可用工具"), "glm4"),
    (("<tool_calls{}>", ":opensource"), "hy_v3_opensource"),
    (("<tool_calls{}>",), "hy_v3"),
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
    (("<|tool_list_start|>",), "lfm2"),
    (("List of tools: [", "keep_past_thinking"), "lfm2"),
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
    (("<mm:think>",), "minimax_m3"),
    (("<|open|>", "<|sep|>"), "kimi_k3"),
    (("<|channel>", "<channel|>"), "gemma4"),
    (("<|START_THINKING|>",), "cohere_command4"),
    (("<|inner_prefix|>",), "apertus"),
    (("<|plamo:begin_think:plamo|>",), "plamo3"),
    (("</think{}>",), "hy_v3"),
    (("<|extra_0|>", "</think>"), "hunyuan_a13b"),
    (("<|tool_calls_section_begin|>", "</think>"), "kimi_k2"),
    (("</think>",), "think"),
    (("Here is my thought process:",), "granite"),
)
HARMONY_MARKS = ("<|channel|>", "<|message|>")
MODEL_TYPES: dict[str, tuple[str, str]] = {
    "cohere2": ("cohere_command3", "cohere_command3"),
    "deepseek_v32": ("deepseek_v32", "think"),
    "deepseek_v4": ("deepseek_v4", "think"),
    "gemma4": ("gemma4", "gemma4"),
    "ernie4_5_moe": ("ernie45", "ernie45"),
    "glm4_moe": ("glm45", "think"),
    "glm4": ("glm4", ""),
    "gpt_oss": ("openai", "openai_gptoss"),
    "hunyuan_v1_dense": ("hunyuan_a13b", "hunyuan_a13b"),
    "hunyuan_v1_moe": ("hunyuan_a13b", "hunyuan_a13b"),
    "kimi_k2": ("kimi_k2", "kimi_k2"),
    "kimi_k3": ("kimi_k3", "kimi_k3"),
    "minimax_m2": ("minimax_m2", "think"),
    "minimax_m3": ("minimax_m3", "minimax_m3"),
    "mistral": ("mistral", "mistral"),
    "mistral3": ("mistral", "mistral"),
    "smollm3": ("hermes", "think"),
}
"""The formats of models by config.json's model_type, where the template does not tell."""
