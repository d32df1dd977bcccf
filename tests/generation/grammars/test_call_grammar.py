"""Grammars of calls in the models' formats: what is accepted is what the parsers read."""

from __future__ import annotations

import json
from functools import cache

import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from penstock.generation.grammars.call_grammar import (
    CalledTool,
    InputGrammar,
    TokenIds,
    call_grammar,
    channel_grammar,
    forced_grammar,
    preceded,
)
from penstock.generation.grammars.lark_in_json import NotEmbeddable
from penstock.generation.parsers import harmony
from penstock.generation.parsers.calls import CallParser
from penstock.generation.parsers.formats import TOOL_FORMATS
from penstock.generation.parsers.value_types import Parameters
from tests.generation.grammars.test_lark_in_json import GOOD, PATCH
from tests.generation.parsers.test_split import whole

END = "<|end|>"
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = [
    CalledTool("weather", SCHEMA),
    CalledTool("patch", None, InputGrammar("lark", PATCH)),
    CalledTool("sku", None, InputGrammar("regex", r"[A-Z]{2}\"\/\d+")),
    CalledTool("note", None, InputGrammar("text")),
    CalledTool("any", None),
]
INPUT = {"type": "object", "properties": {"input": {"type": "string"}}}
PARAMETERS = Parameters({"weather": SCHEMA, "patch": INPUT, "sku": INPUT, "note": INPUT, "any": None})
FORMATS = (
    "hermes",
    "qwen3_coder",
    "seed_oss",
    "glm45",
    "minimax_m2",
    "deepseek_v3",
    "deepseek_v31",
    "deepseek_v32",
    "kimi_k2",
    "mistral",
    "granite",
    "hunyuan_a13b",
    "step3",
    "deepseek_v4",
    "cohere_command3",
    "command_r",
    "hy_v3",
    "apertus",
    "functionary_v31",
    "minicpm5",
    "plamo3",
)


@cache
def tokenizer(*markers: str) -> tuple[Tokenizer, LLTokenizer]:
    """Bytes, and the markers as tokens."""
    letters = pre_tokenizers.ByteLevel.alphabet()
    raw = Tokenizer(models.BPE({letter: id for id, letter in enumerate(sorted(letters))}, []))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    tokens = (END, "</think>", *markers)
    raw.add_special_tokens([AddedToken(each, special=True, normalized=False) for each in tokens])
    end = raw.token_to_id(END)
    return raw, LLTokenizer(raw.to_str(), eos_token=end)


def ids_of(raw: Tokenizer, markers: tuple[str, ...]) -> TokenIds:
    end = raw.token_to_id(END)
    added = tuple(id for id in raw.get_added_tokens_decoder() if id != end)
    return TokenIds({each: raw.token_to_id(each) for each in markers}, added, (end,))


def accepts(grammar: str, text: str, markers: tuple[str, ...] = ()) -> bool:
    raw, ll = tokenizer(*markers)
    assert not LLMatcher.validate_grammar(grammar)
    matcher = LLMatcher(ll, grammar)
    assert not matcher.get_error(), matcher.get_error()
    ids = raw.encode(text, add_special_tokens=False).ids
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def spelled(format: str, name: str, arguments: dict[str, object]) -> str:
    """A call as the format's models write it."""
    text = json.dumps(arguments, ensure_ascii=False)
    key = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    values = {k: v if isinstance(v, str) else json.dumps(v) for k, v in arguments.items()}

    def xml(opening: str, middle: str, closing: str) -> str:
        return "\n".join(f"{opening}{k}{middle}{v}{closing}" for k, v in values.items())

    match format:
        case "hermes":
            return f"<tool_call>\n{key}\n</tool_call>"
        case "qwen3_coder":
            body = xml("<parameter=", ">\n", "\n</parameter>")
            return f"<tool_call>\n<function={name}>\n{body}\n</function>\n</tool_call>"
        case "seed_oss":
            body = xml("<parameter=", ">\n", "\n</parameter>")
            return f"<seed:tool_call>\n<function={name}>\n{body}\n</function>\n</seed:tool_call>"
        case "glm45":
            body = xml("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>")
            return f"<tool_call>{name}\n{body}\n</tool_call>"
        case "minimax_m2":
            body = xml('<parameter name="', '">', "</parameter>")
            return f'<minimax:tool_call>\n<invoke name="{name}">\n{body}\n</invoke>\n</minimax:tool_call>'
        case "deepseek_v3":
            return (
                f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{text}\n```"
                "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
            )
        case "deepseek_v31":
            return (
                f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{text}<｜tool▁call▁end｜>"
                "<｜tool▁calls▁end｜>"
            )
        case "deepseek_v32" | "deepseek_v4":
            calls = {"deepseek_v32": "function_calls", "deepseek_v4": "tool_calls"}[format]
            body = "\n".join(
                f'<｜DSML｜parameter name="{k}" string="{json.dumps(isinstance(v, str))}">{values[k]}'
                "</｜DSML｜parameter>"
                for k, v in arguments.items()
            )
            return (
                f'<｜DSML｜{calls}>\n<｜DSML｜invoke name="{name}">\n{body}\n</｜DSML｜invoke>\n'
                f"</｜DSML｜{calls}>"
            )
        case "kimi_k2":
            return (
                f"<|tool_calls_section_begin|><|tool_call_begin|>functions.{name}:0"
                f"<|tool_call_argument_begin|>{text}<|tool_call_end|><|tool_calls_section_end|>"
            )
        case "mistral":
            return f"[TOOL_CALLS]{name}[ARGS]{text}"
        case "granite":
            return f"<|tool_call|>[{key}]"
        case "hunyuan_a13b":
            return f"<tool_calls>[{key}]</tool_calls>"
        case "step3":
            body = xml('<steptml:parameter name="', '">', "</steptml:parameter>")
            return (
                "<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜>"
                f'<steptml:invoke name="{name}">{body}'
                "</steptml:invoke><｜tool_call_end｜><｜tool_calls_end｜>"
            )
        case "cohere_command3" | "command_r":
            fields = {"tool_call_id": "0", "tool_name": name, "parameters": arguments}
            if format == "command_r":
                del fields["tool_call_id"]
                return f"Action: ```json\n[{json.dumps(fields, ensure_ascii=False)}]\n```"
            return f"<|START_ACTION|>[{json.dumps(fields, ensure_ascii=False)}]<|END_ACTION|>"
        case "hy_v3":
            body = xml("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>")
            return f"<tool_calls>\n<tool_call>{name}<tool_sep>\n{body}\n</tool_call>\n</tool_calls>"
        case "apertus":
            return f'<|tools_prefix|>[{{"{name}": {text}}}]<|tools_suffix|>'
        case "functionary_v31":
            return f"<function={name}>{text}</function>"
        case "minicpm5":
            body = xml('<param name="', '">', "</param>")
            return f'<function name="{name}">{body}</function>'
        case "plamo3":
            return (
                "<|plamo:begin_tool_requests:plamo|><|plamo:begin_tool_request:plamo|>"
                f"<|plamo:begin_tool_name:plamo|>{name}<|plamo:end_tool_name:plamo|>"
                "<|plamo:begin_tool_arguments:plamo|><|plamo:constrain|>json<|plamo:msg|>"
                f"{text}<|plamo:end_tool_arguments:plamo|><|plamo:end_tool_request:plamo|>"
                "<|plamo:end_tool_requests:plamo|>"
            )
    raise AssertionError(format)


CASES: list[tuple[str, dict[str, object], bool]] = [
    ("weather", {"city": 'Bärn "x"', "days": 3}, True),
    ("weather", {"city": "Bern", "days": "many"}, False),
    ("weather", {"city": "Bern"}, False),
    ("other", {"city": "Bern"}, False),
    ("patch", {"input": GOOD}, True),
    ("patch", {"input": GOOD + "\n"}, True),
    ("patch", {"input": GOOD + "x"}, False),
    ("sku", {"input": 'AB"/12'}, True),
    ("sku", {"input": "AB12"}, False),
    ("note", {"input": "any\ntext"}, True),
    ("any", {"x": "y"}, True),
]


@pytest.mark.parametrize("tokens", [True, False], ids=["tokens", "text"])
@pytest.mark.parametrize("format", FORMATS)
def test_calls_match_their_tools(format: str, tokens: bool) -> None:
    section = TOOL_FORMATS[format]
    markers = tuple(dict.fromkeys(section.markers())) if tokens else ()
    raw, _ = tokenizer(*markers)
    grammar = call_grammar(section, TOOLS, ids_of(raw, markers))
    if tokens and format in ("deepseek_v32", "deepseek_v4", "apertus"):  # its opening is text with a token
        assert grammar is None
        return
    assert grammar is not None
    assert accepts(grammar, "No call: <x> {}", markers)
    for name, arguments, good in CASES:
        text = f"hm</think>I will.\n{spelled(format, name, arguments)}"
        assert accepts(grammar, text, markers) is good, text
        if good:
            [call] = whole(CallParser(section, PARAMETERS), [text]).calls
            assert (call.name, json.loads(call.arguments)) == (name, arguments)
    twice = spelled(format, "any", {"x": "y"}) + "\n" + spelled(format, "weather", {"city": "B", "days": 1})
    one = call_grammar(section, TOOLS, ids_of(raw, markers), one_call=True)
    assert one is not None
    assert accepts(grammar, twice, markers)
    if section.opens[0] in markers:
        assert not accepts(one, twice, markers)


def test_formats_without_an_opening_have_no_grammar() -> None:
    ids = TokenIds({}, (), ())
    assert call_grammar(TOOL_FORMATS["llama3_json"], TOOLS, ids) is None
    for format in ("olmo3", "gemma4", "minimax_m3", "kimi_k3", "glm4", "functionary_v32"):
        assert call_grammar(TOOL_FORMATS[format], TOOLS, ids) is None
    recursive = InputGrammar("lark", 'start: "(" start ")" | "\\n"')
    with pytest.raises(NotEmbeddable):
        call_grammar(TOOL_FORMATS["hermes"], [CalledTool("f", None, recursive)], ids)
    assert call_grammar(TOOL_FORMATS["qwen3_coder"], [CalledTool("f", None, recursive)], ids)


def test_forced_calls() -> None:
    grammar = forced_grammar(TOOLS, named=False, one_call=False)
    calls = [{"name": name, "parameters": arguments} for name, arguments, good in CASES if good]
    assert accepts(grammar, json.dumps(calls, ensure_ascii=False))
    assert not accepts(grammar, json.dumps([{"name": "patch", "parameters": {"input": "x"}}]))
    assert not accepts(
        forced_grammar(TOOLS, named=False, one_call=True), json.dumps(calls, ensure_ascii=False)
    )
    named = forced_grammar([TOOLS[1]], named=True, one_call=True)
    assert accepts(named, json.dumps({"input": GOOD}, ensure_ascii=False))
    assert not accepts(named, json.dumps({"input": "x"}))


@pytest.mark.parametrize("calls", [False, True])
def test_harmony_keeps_its_channels_under_a_constraint(calls: bool) -> None:
    markers = tuple(each for each in harmony.MARKERS if each != END)
    raw, _ = tokenizer(*markers)
    end = raw.token_to_id("</think>")  # that of a text, in this test
    known = LLTokenizer(raw.to_str(), eos_token=end)
    added = tuple(id for id in raw.get_added_tokens_decoder() if id != end)
    ids = TokenIds({each: raw.token_to_id(each) for each in harmony.MARKERS}, added, (end,))
    grammar = preceded('start: "{}"', channel_grammar("<|start|>assistant", ids, calls=calls))

    def takes(text: str) -> bool:
        matcher = LLMatcher(known, grammar)
        assert not matcher.is_error(), matcher.get_error()
        tokens = raw.encode(text, add_special_tokens=False).ids
        return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())

    channel = harmony.COMMENTARY if calls else harmony.FINAL
    for reasoning in ("", "I think of <b>."):
        assert takes(harmony.in_channel(channel, "{}", reasoning))
    assert takes(f"<|channel|>{channel} <|constrain|>json<|message|>{{}}")
    for wrong in ("{}", "<|channel|>analysis<|message|>{}", f"<|channel|>{channel}<|message|>x"):
        assert not takes(wrong)
    assert channel_grammar("<|channel|>final<|message|>", ids, calls=calls) == ""
