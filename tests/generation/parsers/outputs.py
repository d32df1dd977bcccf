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
        "llama4_json",
        f'<|python_start|>I will.<|python_end|>{{"name": "write", "parameters": {WRITE}}}'
        '{"name": "now", "parameters": {}}',
        "I will.",
        [("write", WRITE), ("now", "{}")],
    ),
    Output(
        "llama4_json",
        f'<|python_start|><|python_end|>{{"name": "write", "parameters": {WRITE}}}',
        "",
        [("write", WRITE)],
    ),
    Output(
        "llama4_json",
        f'<|python_start|>{{"name": "write", "parameters": {WRITE}}}<|python_end|> Done.',
        " Done.",
        [("write", WRITE)],
    ),
    Output("llama4_json", "<|python_start|>1 + 1<|python_end|> Done.", "1 + 1 Done.", []),
    Output("llama4_json", "<|python_start|>1 + 1", "1 + 1", []),
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
        "<|tool_call_start|>[write(path='it's 'so', text=\"a \"b\" : c\" , other={'it's': ['x' y', 'z'  ]}), "
        "now()]<|tool_call_end|>",
        "",
        [
            (
                "write",
                '{"path": "it\'s \'so", "text": "a \\"b\\" : c", "other": {"it\'s": ["x\' y", "z"]}}',
            ),
            ("now", "{}"),
        ],
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
    Output(
        "deepseek_v4",
        'I will.\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="write">\n<｜DSML｜parameter name="path" '
        'string="true">12</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>',
        "I will.",
        [("write", '{"path": "12"}')],
    ),
    Output(
        "deepseek_v41",
        '<｜DSML｜ calls>\n<｜DSML｜ invoke name="write">\n<｜DSML｜ parameter name="other" '
        'string="false">[1]</｜DSML｜ parameter>\n</｜DSML｜ invoke>\n</｜DSML｜ calls>',
        "",
        [("write", '{"other": [1]}')],
    ),
    Output(
        "gemma4",
        'I will.<|tool_call>call:write{path:<|"|>a, "b"\n{c}<|"|>,line:012,tags:[<|"|>x<|"|>,<|"|>]<|"|>],'
        'other:{<|"|>k<|"|>:true,l:[null,-1.5]},text:New York}<tool_call|><|tool_call>call:now{}'
        "<tool_call|> Done.",
        "I will. Done.",
        [
            (
                "write",
                '{"path": "a, \\"b\\"\\n{c}", "line": 12, "tags": ["x", "]"], "other": {"k": true, "l": '
                '[null, -1.5]}, "text": "New York"}',
            ),
            ("now", "{}"),
        ],
    ),
    Output(
        "functiongemma",
        "<start_function_call>call:write{path:<escape>a<escape>,line:3}<end_function_call>",
        "",
        [("write", '{"path": "a", "line": 3}')],
    ),
    Output(
        "kimi_k3",
        'I will.<|open|>tools<|sep|><|open|>call tool="write" index="1"<|sep|><|open|>argument key="path" '
        'type="string"<|sep|>12<|close|>argument<|sep|><|open|>argument key="a&quot;&amp;" type="array"'
        '<|sep|>[1]<|close|>argument<|sep|><|close|>call<|sep|><|open|>call tool="now" index="2"<|sep|>'
        "<|close|>call<|sep|><|close|>tools<|sep|>",
        "I will.",
        [("write", '{"path": "12", "a\\"&": [1]}'), ("now", "{}")],
    ),
    Output(
        "minimax_m3",
        'I will.\n]<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name="write">]<]minimax[>[<path>a <b>'
        "]<]minimax[>[</path>]<]minimax[>[<line>012]<]minimax[>[</line>]<]minimax[>[<tags>]<]minimax[>[<item>1"
        "]<]minimax[>[</item>]<]minimax[>[<item>y]<]minimax[>[</item>]<]minimax[>[</tags>]<]minimax[>[<other>"
        "]<]minimax[>[<k>true]<]minimax[>[</k>]<]minimax[>[<l>]<]minimax[>[<item>1]<]minimax[>[</item>"
        ']<]minimax[>[</l>]<]minimax[>[</other>]<]minimax[>[</invoke>\n]<]minimax[>[<invoke name="now">'
        "]<]minimax[>[</invoke>\n]<]minimax[>[</tool_call>",
        "I will.",
        [
            ("write", '{"path": "a <b>", "line": 12, "tags": ["1", "y"], "other": {"k": true, "l": [1]}}'),
            ("now", "{}"),
        ],
    ),
    Output(
        "minimax_m3",
        '\n]<]minimax[>[<tool_call>]<]minimax[>[<invoke name="write">]<]minimax[>[<tags>]<]minimax[>[</tags>'
        "]<]minimax[>[</invoke>]<]minimax[>[</tool_call>",
        "",
        [("write", '{"tags": []}')],
    ),
    Output(
        "cohere_command3",
        '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "write", "parameters": '
        f'{WRITE}}},\n    {{"tool_call_id": "1", "tool_name": "now", "parameters": {{}}}}\n]<|END_ACTION|>',
        "",
        [("write", WRITE), ("now", "{}")],
    ),
    Output(
        "command_r",
        f'Action: ```json\n[\n    {{\n        "tool_name": "write",\n        "parameters": {WRITE}\n    }}'
        "\n]```",
        "",
        [("write", WRITE)],
    ),
    Output(
        "functionary_v31",
        f"I will.\n<function=write>{WRITE}</function><function=now>{{}}</function>",
        "I will.",
        [("write", WRITE), ("now", "{}")],
    ),
    Output(
        "functionary_v32",
        f"all\n>>> x = 1>>>write\n{WRITE}>>>now\n{{}}",
        ">>> x = 1",
        [("write", WRITE), ("now", "{}")],
    ),
    Output("functionary_v32", f"write\n{WRITE}", "", [("write", WRITE)]),
    Output("functionary_v32", "all\nYes.", "Yes.", []),
    Output("glm4", f"write\n{WRITE}<|assistant|>now\n{{}}", "", [("write", WRITE), ("now", "{}")]),
    Output("glm4", '\nnews\n{"a": 1}', '\nnews\n{"a": 1}', []),
    Output(
        "gigachat3",
        f'I will.<|message_sep|>\n\nfunction call<|role_sep|>\n{{"name": "write", "arguments": {WRITE}}}',
        "I will.",
        [("write", WRITE)],
    ),
    Output(
        "hy_v3",
        "I will.<tool_calls>\n<tool_call>write<tool_sep>\n<arg_key>path</arg_key>\n<arg_value>a</arg_value>\n"
        "</tool_call>\n<tool_call>now<tool_sep>\n</tool_call>\n</tool_calls>",
        "I will.",
        [("write", '{"path": "a"}'), ("now", "{}")],
    ),
    Output(
        "hy_v3_opensource",
        "<tool_calls:opensource>\n<tool_call:opensource>write<tool_sep:opensource>\n<arg_key:opensource>path"
        "</arg_key:opensource>\n<arg_value:opensource>a</arg_value:opensource>\n</tool_call:opensource>\n"
        "</tool_calls:opensource>",
        "",
        [("write", '{"path": "a"}')],
    ),
    Output(
        "apertus",
        f'I will.<|tools_prefix|>[{{"write": {WRITE}}}, {{"now": {{}}}}]<|tools_suffix|>',
        "I will.",
        [("write", WRITE), ("now", "{}")],
    ),
    Output(
        "plamo3",
        "<|plamo:begin_tool_requests:plamo|><|plamo:begin_tool_request:plamo|><|plamo:begin_tool_name:plamo|>"
        "write<|plamo:end_tool_name:plamo|><|plamo:begin_tool_arguments:plamo|><|plamo:constrain|>json"
        f"<|plamo:msg|>{WRITE}<|plamo:end_tool_arguments:plamo|><|plamo:end_tool_request:plamo|>"
        "<|plamo:end_tool_requests:plamo|>",
        "",
        [("write", WRITE)],
    ),
    Output(
        "minicpm5",
        'I will.<function name="write"><param name="path">a</param><param name="line">1</param></function>'
        '<function name="now"></function>',
        "I will.",
        [("write", '{"path": "a", "line": 1}'), ("now", "{}")],
    ),
    Output(
        "muse_glimmer",
        '<atem:function_calls>\n<atem:invoke name="write">\n<atem:parameter name="path">a</atem:parameter>\n'
        "</atem:invoke>\n</atem:function_calls>",
        "",
        [("write", '{"path": "a"}')],
    ),
    Output(
        "dots",
        '<dots_function_call>\n<invoke name="write">\n<parameter name="path">a</parameter>\n</invoke>\n'
        "</dots_function_call>",
        "",
        [("write", '{"path": "a"}')],
    ),
    Output(  # Python's sets, keys that are no strings, words of other schemas
        "pythonic",
        'write(tags={"x", 1}, other={1: (2, {"a": None})}, line=007, path=5)',
        'write(tags={"x", 1}, other={1: (2, {"a": None})}, line=007, path=5)',
        [],
    ),
    Output(
        "pythonic",
        '[write(tags={"x", 1}, other={1: (2, {"a": None})}, line=007, path=5)]',
        "",
        [("write", '{"tags": ["x", 1], "other": {"1": [2, {"a": null}]}, "line": 7, "path": "5"}')],
    ),
    Output("pythonic", '[unknown(path="a")]', '[unknown(path="a")]', []),
    Output(
        "llama3_json",
        '{"name": "Ada", "parameters": {"born": 1815}}',
        '{"name": "Ada", "parameters": {"born": 1815}}',
        [],
    ),
    Output(  # without the element around the calls
        "deepseek_v4",
        '<｜DSML｜invoke name="write">\n<｜DSML｜parameter name="path" string="true">a</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>",
        "",
        [("write", '{"path": "a"}')],
    ),
    Output("gemma4", "<|tool_call>call:now<tool_call|>", "", [("now", "{}")]),
    Output(
        "minicpm5",
        '<function name="write"><param name="path"><![CDATA[</param> ]]></param></function>',
        "",
        [("write", '{"path": "</param> "}')],
    ),
)
