"""Finds what a chat template takes, by rendering short conversations."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import msgspec
from msgspec import UNSET

from penstock.generation.parsers.formats import REASONING_FORMATS
from penstock.generation.prompt.template_rules import (
    CALLS,
    EMPTY_SCHEMA,
    FUNCTION_FIELDS,
    PARAMETER_DESCRIPTIONS,
    PLACES,
    PROPERTIES,
    REASONING_NAMES,
    START,
    SYSTEM_ROLES,
    THINKING_PART,
    BeforeCalls,
    CallIds,
    PlainMessage,
    TemplateRules,
)
from penstock.http.errors import ApiError

Render = Callable[[list[PlainMessage], list[dict[str, Any]] | None], str]
"""Messages and tools to a prompt without the start of the assistant's turn. Raises ApiError."""


def probe(render: Render, *, tools: bool, image_text: str = "") -> TemplateRules:
    """The rules of a template. ``tools``: whether the conversations have tools. ``image_text``: what stands
    for a picture, if the model takes any. Takes some 150 renderings."""
    unknown = TemplateRules(image_text=image_text)
    if tools:
        return _Probe(render, [_tool(description="x", parameters=_SCHEMA)]).rules(image_text) or unknown
    plain = _Probe(render, None).rules(image_text)
    if plain is None:
        plain = _Probe(render, []).rules(image_text)
        plain = None if plain is None else msgspec.structs.replace(plain, no_tools=())
    return plain or unknown


_TAILS: dict[str, tuple[tuple[str, ...], ...]] = {
    "user": ((), ("assistant", "user")),
    "tool": ((), ("assistant", "user")),
    "assistant": (("user",),),
    CALLS: (("user",),),
    "system": (("user",),),
    "developer": (("user",),),
    START: (("user",),),
}
"""Kinds of messages that come after one that follows the key."""
_FUNCTION, _OTHER, _KEY, _ID = "probef", "probeg", "probek", "probe0001"
_NAMED_ID = "functions.{}:{}"
_SCHEMA = {"type": "object", "properties": {_KEY: {"type": "string", "description": "x"}}}


class _Probe:
    """Renders conversations of one template, and remembers how messages of each kind are spelled."""

    def __init__(self, render: Render, tools: list[dict[str, Any]] | None) -> None:
        self._render = render
        self._tools = tools
        self._forms: dict[str, tuple[bool, bool, bool]] = {}
        """Forms by kind: whether content may be a text, may be parts, and must be one part."""
        self._call: PlainMessage = {}
        self._call_word = _FUNCTION
        """Word by which a call is found in a prompt."""
        self._named_before = 0
        """How often the function's name is in a prompt without calls."""
        self._ids = CallIds.ANY
        self._words = 0

    def rules(self, image_text: str = "") -> TemplateRules | None:
        """None: the template shows no user's message."""
        if not self._has_form("user", lambda content: [{"role": "user", "content": content}]):
            return None
        user, more = self._say("user"), self._say("user")
        self._has_form("assistant", lambda content: [user, {"role": "assistant", "content": content}, more])
        found: dict[str, Any] = {"function_fields": self._function_fields()}
        found["calls"] = self._find_call()
        found["results"] = found["calls"] and self._has_form(
            "tool", lambda content: [user, self._call, _result(content, self._id())]
        )
        found["stray_results"] = found["results"] and self._shows_stray_results()
        found["reasoning"] = self._reasoning()
        if found["calls"]:
            found |= self._call_rules(found["reasoning"])
        for role in sorted(SYSTEM_ROLES):
            self._has_form(role, partial(_said_first, role, user))
        found["head_always"] = self._head_always()
        head = self._say("system")
        found["head_alone"] = not self._takes("system") or self._shows([head], _word_of(head))
        empty = {"role": "assistant", "content": self._spelled("assistant", "")}
        found["empty_answers"] = self._shows([user, empty, more], _word_of(user), _word_of(more))
        if self._cuts(*itertools.chain(*_REASONING_MARKS)):
            found["cut_at"] = tuple(pair for pair in _REASONING_MARKS if self._cuts(*pair))
            marks = itertools.chain(*found["cut_at"])
            found["cut_beside_reasoning"] = self._cuts(*marks, reasoning=found["reasoning"])
        return TemplateRules(
            **found,
            image_text=image_text,
            pictures=frozenset(self._kinds_with_pictures(image_text)),
            as_text=frozenset(kind for kind, form in self._forms.items() if form[0] or not any(form)),
            as_parts=frozenset(kind for kind, form in self._forms.items() if form[1]),
            as_part=frozenset(kind for kind, form in self._forms.items() if form[2]),
            refused=frozenset(place for place in PLACES if not self._may_follow(*place)),
            stable=frozenset(
                ("system", before) for before in ("user", "assistant", "tool") if self._stays(before)
            ),
        )

    # -- renderings

    def _prompt(self, messages: Sequence[PlainMessage]) -> str:
        """Empty if the template refuses."""
        try:
            return self._render(list(messages), self._tools)
        except ApiError:
            return ""

    def _shows(self, messages: Sequence[PlainMessage], *words: str) -> bool:
        prompt = self._prompt(messages)
        return all(word in prompt for word in words)

    def _word(self) -> str:
        self._words += 1
        return f"probe{self._words:03}x"

    def _say(self, kind: str) -> PlainMessage:
        """A message with a word of its own."""
        if kind == CALLS:
            return self._call
        word = self._word()
        content = self._spelled(kind, word)
        return _result(content, self._id()) if kind == "tool" else {"role": kind, "content": content}

    def _takes(self, kind: str) -> bool:
        """Whether messages of a kind are shown."""
        return any(self._forms.get(kind, ()))

    # -- content

    def _spelled(self, kind: str, text: str) -> Any:
        as_text, *as_list = self._forms.get(kind, (True, False, False))
        return text if as_text or not any(as_list) else [_part(text)]

    def _has_form(self, kind: str, conversation: Callable[[Any], list[PlainMessage]]) -> bool:
        """Find how content of one kind of message is spelled; whether it is shown at all."""
        one, two = self._word(), self._word()
        text = self._shows(conversation(one), one)
        prompt = self._prompt(conversation([_part(one), _part(two)]))
        parts = one in prompt and two in prompt and not re.search(f"[\"']text[\"']: ?[\"']{one}", prompt)
        part = not text and not parts and self._shows(conversation([_part(one)]), one)
        self._forms[kind] = text, parts, part
        return text or parts or part

    def _kinds_with_pictures(self, image_text: str) -> Iterator[str]:
        """Kinds of messages that may have parts with pictures, and show their texts beside them."""
        one, two = self._word(), self._word()
        content = [_part(one), {"type": "image"}, _part(two), {"type": "image"}]
        starts: dict[str, list[PlainMessage]] = {"user": []}
        if self._call and self._takes("tool"):
            starts["tool"] = [self._say("user"), self._call]
        for kind, start in starts.items() if image_text else ():
            said = _result(content, self._id()) if kind == "tool" else {"role": kind, "content": content}
            prompt = self._prompt([*start, said])
            if one in prompt and two in prompt and prompt.count(image_text) == 2:
                yield kind

    # -- calls

    def _find_call(self) -> bool:
        """Find a message with a call that the template shows: with its arguments, or else its name or id."""
        user, word = self._say("user"), self._word()
        before = self._prompt([user])
        self._named_before = before.count(_FUNCTION)
        for self._call_word in (word, _FUNCTION, _ID):
            id = _ID if self._call_word != _ID else "probe0002"
            ends = [[_result("result", id)], [_result([_part("result")], id)], []]
            for end, arguments, absent in itertools.product(
                ends, ({_KEY: word}, json.dumps({_KEY: word})), _ABSENT
            ):
                message = _calling(absent, _tool_call(arguments, _ID))
                prompt = self._prompt([user, message, *end])
                odd = f"'{_KEY}'" if isinstance(arguments, dict) else f'\\"{_KEY}'
                odder = any(prompt.count(mark) > before.count(mark) for mark in (odd, ": None"))
                if self._calls_in(prompt) and not odder:
                    if self._is_named_by_id(user, arguments, absent, bool(end)):
                        self._ids = CallIds.NAMED
                        message = _calling(absent, _tool_call(arguments, self._id()))
                    self._call = message
                    return True
        return False

    def _is_named_by_id(self, user: PlainMessage, arguments: Any, absent: Any, ends: bool) -> bool:
        """Whether a call's name is shown if its id has it, and not otherwise."""

        def shows(id: str) -> bool:
            message = _calling(absent, _tool_call(arguments, id, _OTHER))
            return self._shows([user, message, *([_result("result", id)] if ends else [])], _OTHER)

        return not shows(_ID) and shows(_NAMED_ID.format(_OTHER, 0))

    def _id(self, name: str = _FUNCTION, number: int = 0) -> str:
        """The id of a call, as the template takes it."""
        return _NAMED_ID.format(name, number) if self._ids is CallIds.NAMED else f"probe{number + 1:04}"

    def _calls_in(self, prompt: str) -> int:
        """How many calls a prompt shows."""
        before = self._named_before if self._call_word == _FUNCTION else 0
        return prompt.count(self._call_word) - before if prompt else 0

    def _call_rules(self, reasoning: tuple[str, ...]) -> dict[str, Any]:
        user, word = self._say("user"), self._word()
        arguments = self._call["tool_calls"][0]["function"]["arguments"]
        as_object = isinstance(arguments, dict)

        first, second = self._id(), self._id(_OTHER, 1)
        call = _tool_call(arguments, first)

        def end(*ids: str) -> list[PlainMessage]:
            if not self._takes("tool"):
                return []
            return [self._say("tool") | {"tool_call_id": id} for id in ids or (first,)]

        prompts = [self._prompt([user, _calling(each, call), *end()]) for each in _ABSENT]
        least = min(prompt.count("None") for prompt in prompts if prompt)
        absent = [
            each
            for each, prompt in zip(_ABSENT, prompts, strict=True)
            if self._calls_in(prompt) and prompt.count("None") == least
        ]
        kept = self._has_form(CALLS, lambda content: [user, _calling(content, call), *end()])
        beside = kept and self._keeps_text(reasoning, end)
        nothing = absent[0] if absent else ""
        pair = _calling(nothing, call, _tool_call(arguments, second, _OTHER))
        long = _calling(nothing, _tool_call(arguments, _LONG_ID))
        results = end(first, second)
        odd = [user, _calling(nothing, _tool_call(f"{word} {{", first)), *end()]
        if self._ids is CallIds.ANY and not self._shows([user, long, *end(_LONG_ID)], _FUNCTION):
            self._ids = CallIds.SHORT
        named = self._ids is CallIds.NAMED
        return {
            "absent": tuple(absent) or ("",),
            "object_arguments": as_object,
            "text_arguments": self._shows(odd, word),
            "parallel": self._shows([user, pair, *results], _OTHER, *map(_word_of, results)),
            "beside": beside,
            "before_calls": None if beside or named else self._before_calls(end),
            "ids": self._ids,
        }

    def _keeps_text(self, reasoning: tuple[str, ...], end: Callable[[], list[PlainMessage]]) -> bool:
        """Whether text beside calls is shown: with reasoning, in a second round, and before an answer."""
        user, said, thought = self._say("user"), self._word(), self._word()
        message = self._call | {"content": self._spelled(CALLS, said)}
        answered = [user, message, *end()]
        conversations = (
            (answered, 1),
            ([*answered, self._say("assistant"), self._say("user")], 1),
            ([user, self._call, *end(), *answered[1:]], 2),
            ([user, _thinking(message, reasoning, thought), *end()], 1),
        )
        prompts = [(self._prompt(each), calls) for each, calls in conversations]
        return all(said in prompt and self._calls_in(prompt) == calls for prompt, calls in prompts)

    def _before_calls(self, end: Callable[[], list[PlainMessage]]) -> BeforeCalls | None:
        """What the template writes before a call, if text may stand before that as the model writes it."""
        user, answer = self._say("user"), self._say("assistant")
        called = [user, self._call, *end()]
        call, again = self._prompt(called), self._prompt([*called, *called[1:]])
        answered, text = self._prompt([user, answer]), _word_of(answer)
        pairs = enumerate(zip(call, answered, strict=False))
        at = next((at for at, pair in pairs if pair[0] != pair[1]), 0)
        lead, found, _ = answered[at:].partition(text)
        start = call[at:].partition(_FUNCTION)[0]
        if not found or lead.strip() or not start:
            return None
        twice = again.count(start + _FUNCTION) == 2
        return BeforeCalls(lead, start) if twice else None

    # -- reasoning

    def _reasoning(self) -> tuple[str, ...]:
        user, word = self._say("user"), self._word()
        answer = self._say("assistant")
        for name in (*REASONING_NAMES, THINKING_PART):
            endings = [[_thinking(answer, (name,), word)], [_thinking(answer, (name,), word), user]]
            if self._call:
                endings.append([_thinking(self._call, (name,), word), self._say("tool")])
            if any(self._is_thought([user, *ending], word) for ending in endings):
                return (name,)
        return REASONING_NAMES[:2]

    def _cuts(self, *marks: str, reasoning: tuple[str, ...] = ()) -> bool:
        """Whether text of the assistant is lost that has such marks. ``reasoning``: the fields of its
        reasoning."""
        words = [self._word() for _ in range(len(marks) + 1)]
        text = words[0] + "".join(f" {mark} {word}" for mark, word in zip(marks, words[1:], strict=True))
        user, answer = self._say("user"), {"role": "assistant", "content": self._spelled("assistant", text)}
        answer = _thinking(answer, reasoning, "r")
        conversations = [[user, answer], [user, answer, user], [user, answer, user, self._say("assistant")]]
        if self._takes(CALLS):
            called = self._call | {"content": self._spelled(CALLS, text)}
            conversations.append([user, _thinking(called, reasoning, "r")])
            if self._takes("tool"):
                conversations[-1].append(self._say("tool"))
        prompts = [prompt for prompt in map(self._prompt, conversations) if any(map(prompt.count, words))]
        return not all(word in prompt for prompt in prompts for word in words)

    def _is_thought(self, messages: list[PlainMessage], word: str) -> bool:
        prompt = self._prompt(messages)
        return word in prompt and not re.search(f"[\"']thinking[\"']: ?[\"']{word}", prompt)

    # -- tools

    def _function_fields(self) -> tuple[str, ...]:
        if not self._tools:
            return ()
        whole, user = self._prompt([self._say("user")]), self._say("user")
        if _FUNCTION not in whole:
            return ()

        def shows(**fields: Any) -> bool:
            try:
                prompt = self._render([user], [_tool(**fields)])
            except ApiError:
                return False
            return prompt.count("None") <= whole.count("None")

        choices: tuple[tuple[str, ...], ...] = ((), ("parameters",), ("description",), (*FUNCTION_FIELDS,))
        needed = next((each for each in choices if shows(**_filled(each))), ())
        parameters: tuple[tuple[dict[str, Any], str], ...] = (
            ({}, EMPTY_SCHEMA),
            ({"type": "object"}, PROPERTIES),
            ({"type": "object", "properties": {_KEY: {"type": "string"}}}, PARAMETER_DESCRIPTIONS),
        )
        odd = [name for schema, name in parameters if not shows(**_filled(needed) | {"parameters": schema})]
        return (*needed, *odd)

    # -- places

    def _context(self, before: str) -> list[PlainMessage] | None:
        """The conversation that a message follows; None: there is none."""
        if before == CALLS:
            return [self._say("user"), self._call] if self._call else None
        if before != START and not self._takes(before):
            return None
        kinds: dict[str, tuple[str, ...]] = {
            START: (),
            "assistant": ("user", "assistant"),
            "tool": ("user", CALLS, "tool"),
        }
        return [self._say(kind) for kind in kinds.get(before, (before,))]

    def _may_follow(self, kind: str, before: str) -> bool:
        context = self._context(before)
        if context is None or (kind == CALLS and not self._call):
            return False
        if not self._takes("tool" if kind == CALLS else kind):
            return False
        tails = _TAILS[before] if kind != CALLS else (("tool",), ("tool", "assistant", "user"))
        if kind == "tool":
            tails = _TAILS[kind]
            context = [self._say("user"), self._call, *context[-1:]]
        message = self._say(kind)
        words = [_word_of(each) for each in [*context[-1:], message] if each is not self._call]
        conversations = [[*context, message, *map(self._say, tail)] for tail in tails]
        if kind in SYSTEM_ROLES and before not in (START, "system") and self._takes("system"):
            head = self._say("system")
            if self._shows([head, *context, self._say("user")], _word_of(head)):
                words.append(_word_of(head))
                conversations = [[head, *each] for each in conversations]
        for each in conversations:
            prompt = self._prompt(each)
            if not all(word in prompt for word in words):
                return False
            counted = kind in (CALLS, "tool") or before == CALLS
            if counted and self._calls_in(prompt) != each.count(self._call):
                return False
        return True

    def _shows_stray_results(self) -> bool:
        user, answer, result = map(self._say, ("user", "assistant", "tool"))
        del result["name"]
        starts = [user, result], [user, answer, user, result]
        return all(self._shows(start, _word_of(result)) for start in starts)

    def _head_always(self) -> bool:
        head, user = self._say("system"), self._say("user")
        ends = [[user, self._say("assistant")]]
        if self._takes("tool"):
            ends.append([user, self._call, self._say("tool")])
        return all(self._shows([head, *end], _word_of(head)) for end in ends)

    def _stays(self, before: str) -> bool:
        """Whether a system message after such a message stays there, and leaves what precedes it as it is."""
        context = self._context(before)
        if context is None or not self._takes("system"):
            return False
        head, later = self._say("system"), self._say("system")
        tails = [[*map(self._say, tail)] for tail in _TAILS[before]]
        return all(
            self._in_order([*start, *context, later, *tail])
            and self._leaves([*start, *context], [*start, *context, later, *tail])
            for start in ([], [head])
            for tail in tails
        )

    def _in_order(self, messages: list[PlainMessage]) -> bool:
        prompt, end = self._prompt(messages), 0
        for message in messages:
            if message is not self._call:
                end = prompt.find(_word_of(message), end)
                if end < 0:
                    return False
        return True

    def _leaves(self, first: list[PlainMessage], whole: list[PlainMessage]) -> bool:
        before, after = self._prompt(first), self._prompt(whole)
        word = _word_of(first[-1])
        end = before.rfind(word) + len(word)
        return bool(before) and after[:end] == before[:end]


_REASONING_MARKS = sorted(
    {pair for each in REASONING_FORMATS.values() for pair in zip(each.opens, each.closes, strict=True)}
)
_ABSENT: tuple[Any, ...] = (None, UNSET, "", [], [{"type": "text", "text": ""}])
_LONG_ID = "call_" + "0123456789abcdef"


def _said_first(role: str, user: PlainMessage, content: Any) -> list[PlainMessage]:
    return [{"role": role, "content": content}, user]


def _filled(names: tuple[str, ...]) -> dict[str, Any]:
    return {name: FUNCTION_FIELDS[name] for name in names}


def _part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _word_of(message: PlainMessage) -> str:
    content = message["content"]
    return str(content if isinstance(content, str) else content[0]["text"])


def _result(content: Any, id: str) -> PlainMessage:
    return {"role": "tool", "name": _FUNCTION, "tool_call_id": id, "content": content}


def _calling(content: Any, *calls: dict[str, Any]) -> PlainMessage:
    message = {"role": "assistant", "content": content, "tool_calls": [*calls]}
    if content is UNSET:
        del message["content"]
    return message


def _tool_call(arguments: Any, id: str, name: str = _FUNCTION) -> dict[str, Any]:
    return {"type": "function", "id": id, "function": {"name": name, "arguments": arguments}}


def _tool(**fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": _FUNCTION, **fields}}


def _thinking(message: PlainMessage, names: tuple[str, ...], text: str) -> PlainMessage:
    """The message with reasoning."""
    if names != (THINKING_PART,):
        return message | dict.fromkeys(names, text)
    content = message.get("content") or []
    parts = [_part(content)] if isinstance(content, str) else content
    return message | {"content": [{"type": "thinking", "thinking": text}, *parts]}
