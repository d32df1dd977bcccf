"""Outputs as models of each family write them, and what they say."""

from __future__ import annotations

from typing import NamedTuple

from penstock.generation.parsers.value_types import Parameters

PARAMETERS = Parameters(
    {
        "write": {
            "type": "object",
            "properties": {
                "path": {"type": "string"},
                "text": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                "line": {"type": "integer"},
                "tags": {"$ref": "#/$defs/tags"},
            },
            "$defs": {"tags": {"type": "array", "items": {"type": "string"}}},
        },
        "now": {"type": "object", "properties": {}},
    }
)


class Output(NamedTuple):
    """An output in a format, and what it says."""

    format: str
    text: str
    content: str
    calls: list[tuple[str, str]]


WRITE = '{"path": "a/ü.py", "line": 12, "tags": ["x", "}"]}'
"""The arguments as the JSON formats below have them."""
OUTPUTS = (
    Output(
        "hermes",
        f'I will.\n<tool_call>\n{{"name": "write", "arguments": {WRITE}}}\n</tool_call>\n'
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
        "I will.",
        [("write", WRITE), ("now", "{}")],
    ),
    Output(
        "qwen3_coder",
        "I will.\n\n<tool_call>\n<function=write>\n<parameter=path>\n12\n</parameter>\n<parameter=text>\n"
        'if a < b:\n\tprint("</p>")\n\n</parameter>\n<parameter=line>\n12\n</parameter>\n<parameter=tags>\n'
        '["x", "y"]\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n'
        "</tool_call>",
        "I will.",
        [
            (
                "write",
                '{"path": "12", "text": "if a < b:\\n\\tprint(\\"</p>\\")\\n", "line": 12, '
                '"tags": ["x", "y"]}',
            ),
            ("now", "{}"),
        ],
    ),
    Output(
        "qwen3_coder",
        "<function=write>\n<parameter=text>\nnull\n</parameter>\n<parameter=line>\nmany\n</parameter>\n"
        "<parameter=other>\nTrue\n</parameter>\n</function>\n</tool_call> Done.",
        " Done.",
        [("write", '{"text": null, "line": "many", "other": true}')],
    ),
    Output(
        "seed_oss",
        "<seed:tool_call>\n<function=write>\n<parameter=path>a.py</parameter>\n<parameter=text>"
        "null!</parameter>\n</function>\n</seed:tool_call>",
        "",
        [("write", '{"path": "a.py", "text": "null!"}')],
    ),
    Output(
        "glm45",
        "\nI will.\n<tool_call>write\n<arg_key>path</arg_key>\n<arg_value>a.py</arg_value>\n"
        "<arg_key>line</arg_key>\n<arg_value>12</arg_value>\n</tool_call>\n<tool_call>now\n</tool_call>",
        "\nI will.",
        [("write", '{"path": "a.py", "line": 12}'), ("now", "{}")],
    ),
    Output(
        "glm47",
        "<tool_call>write<arg_key>path</arg_key><arg_value>a b\n</arg_value></tool_call>"
        "<tool_call>now</tool_call>",
        "",
        [("write", '{"path": "a b\\n"}'), ("now", "{}")],
    ),
    Output(
        "minimax_m2",
        '<minimax:tool_call>\n<invoke name="write">\n<parameter name="path">a.py</parameter>\n'
        '<parameter name="tags">["x"]</parameter>\n</invoke>\n<invoke name="now">\n</invoke>\n'
        "</minimax:tool_call>",
        "",
        [("write", '{"path": "a.py", "tags": ["x"]}'), ("now", "{}")],
    ),
    Output(
        "deepseek_v3",
        "I will.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>write\n```json\n"
        f"{WRITE}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{{}}\n"
        "```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "I will.",
        [("write", WRITE), ("now", "{}")],
    ),
    Output(
        "deepseek_v31",
        f"I will.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>write<｜tool▁sep｜>{WRITE}<｜tool▁call▁end｜>"
        "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "I will.",
        [("write", WRITE), ("now", "{}")],
    ),
    Output(
        "deepseek_v32",
        'I will.\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="write">\n<｜DSML｜parameter name="path" '
        'string="true">12</｜DSML｜parameter>\n<｜DSML｜parameter name="other" string="false">[1, 2]'
        '</｜DSML｜parameter>\n</｜DSML｜invoke>\n<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n'
        "</｜DSML｜function_calls>",
        "I will.",
        [("write", '{"path": "12", "other": [1, 2]}'), ("now", "{}")],
    ),
    Output(
        "kimi_k2",
        "I will.<|tool_calls_section_begin|><|tool_call_begin|>functions.write:0<|tool_call_argument_begin|>"
        f"{WRITE}<|tool_call_end|><|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{{}}"
        "<|tool_call_end|><|tool_calls_section_end|>",
        "I will.",
        [("write", WRITE), ("now", "{}")],
    ),
    Output(
        "mistral",
        f'[TOOL_CALLS][{{"name": "write", "arguments": {WRITE}}}, {{"name": "now", "arguments": {{}}}}]',
        "",
        [("write", WRITE), ("now", "{}")],
    ),
    Output(
        "mistral",
        f"I will.[TOOL_CALLS]write[ARGS]{WRITE}[TOOL_CALLS]now[CALL_ID]9a8b7c6d5[ARGS]{{}}",
        "I will.",
        [("write", WRITE), ("now", "{}")],
    ),
    Output(
        "llama3_json",
        f'<|python_tag|>{{"name": "write", "parameters": {WRITE}}}; {{"name": "now", "parameters": {{}}}}',
        "",
        [("write", WRITE), ("now", "{}")],
    ),
    Output(
        "llama4_pythonic",
        "<|python_start|>[write(path='it\\'s \\u00fc', line=-12, tags=[\"x\", (1, 2.5)], text=None), now()]"
        "<|python_end|>",
        "",
        [
            ("write", '{"path": "it\'s ü", "line": -12, "tags": ["x", [1, 2.5]], "text": null}'),
            ("now", "{}"),
        ],
    ),
    Output(
        "pythonic",
        '[write(path="a", other={"k": True, "l": []},), now()]',
        "",
        [("write", '{"path": "a", "other": {"k": true, "l": []}}'), ("now", "{}")],
    ),
    Output(
        "olmo3",
        'I will.\n<function_calls>\nwrite(path="a")\nnow()\n</function_calls>',
        "I will.",
        [("write", '{"path": "a"}'), ("now", "{}")],
    ),
    Output(
        "lfm2",
        "<|tool_call_start|>[write(path='a')]<|tool_call_end|>I look.",
        "I look.",
        [("write", '{"path": "a"}')],
    ),
    Output(
        "granite",
        f'<|tool_call|>[{{"name": "write", "arguments": {WRITE}}}, {{"name": "now", "arguments": {{}}}}]',
        "",
        [("write", WRITE), ("now", "{}")],
    ),
    Output(
        "granite-20b-fc",
        '<function_call> {"name": "write", "arguments": {"line": 1}} <function_call> '
        '{"name": "now", "arguments": {}}',
        "",
        [("write", '{"line": 1}'), ("now", "{}")],
    ),
    Output(
        "hunyuan_a13b",
        f'I will.\n<tool_calls>[{{"name": "write", "arguments": {WRITE}}}]</tool_calls>',
        "I will.",
        [("write", WRITE)],
    ),
    Output(
        "internlm",
        'I will.<|action_start|><|plugin|>\n{"name": "write", "parameters": {"line": 1}}<|action_end|>\n',
        "I will.",
        [("write", '{"line": 1}')],
    ),
    Output(
        "phi4_mini_json",
        'functools[{"name": "write", "arguments": {"line": 1}}]',
        "",
        [("write", '{"line": 1}')],
    ),
    Output(
        "nemotron_json",
        '<TOOLCALL>[{"name": "now", "arguments": {}}]</TOOLCALL>',
        "",
        [("now", "{}")],
    ),
    Output(
        "longcat",
        '<longcat_tool_call>{"name": "now", "arguments": {}}</longcat_tool_call>',
        "",
        [("now", "{}")],
    ),
    Output(
        "step3",
        "I will.<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜>"
        '<steptml:invoke name="write"><steptml:parameter name="path">a.py</steptml:parameter>'
        '<steptml:parameter name="line">12</steptml:parameter></steptml:invoke><｜tool_call_end｜>\n'
        '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="now"></steptml:invoke>'
        "<｜tool_call_end｜><｜tool_calls_end｜>",
        "I will.",
        [("write", '{"path": "a.py", "line": 12}'), ("now", "{}")],
    ),
    Output(  # without </parameter>, without </function>
        "qwen3_coder",
        "<tool_call>\n<function=write>\n<parameter=path>\na\n<parameter=line>\n12\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=write>\n<parameter=path>\nb\n</parameter>\n</tool_call>\n<tool_call>\n"
        "<function=write>\n<parameter=path>\nc\n</tool_call>",
        "",
        [("write", '{"path": "a", "line": 12}'), ("write", '{"path": "b"}'), ("write", '{"path": "c"}')],
    ),
    Output(
        "glm45",
        "<tool_call>write\n<arg_key>path</arg_key>\n<arg_value>a<arg_key>line</arg_key>\n<arg_value>12</tool_call>",
        "",
        [("write", '{"path": "a", "line": 12}')],
    ),
    Output(  # names in other quotes, a missing </invoke>
        "minimax_m2",
        "<minimax:tool_call><invoke name='write'><parameter name=path>a</parameter>"
        '<invoke name="now"></invoke></minimax:tool_call>',
        "",
        [("write", '{"path": "a"}'), ("now", "{}")],
    ),
    Output(  # an attribute that the schema knows better, and none
        "deepseek_v32",
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="write">\n<｜DSML｜parameter name="line" '
        'string="true">12</｜DSML｜parameter>\n<｜DSML｜parameter name="path" string="false">34'
        '</｜DSML｜parameter>\n<｜DSML｜parameter name="other">[5]</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n</｜DSML｜function_calls>",
        "",
        [("write", '{"line": 12, "path": "34", "other": [5]}')],
    ),
    Output(
        "kimi_k2",
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.write: 1 <|tool_call_argument_begin|>"
        f"{WRITE}<|tool_call_end|><|tool_call_begin|>functions_now_2<|tool_call_argument_begin|>"
        "<|tool_call_end|><|tool_call_begin|>functionsnow5<|tool_call_argument_begin|>null<|tool_call_end|>"
        "<|tool_calls_section_end|>",
        "",
        [("write", WRITE), ("now", "{}"), ("now", "{}")],
    ),
)
