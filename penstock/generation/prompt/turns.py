"""Arranges the turns of a conversation so that its chat template shows all of them.

What a template takes stays as it is. Of the rest, system text that comes where the template has no place for
it goes into the turn before it, between ``<system>`` and ``</system>``; messages that must alternate are
joined; a message with several calls becomes one for each; and calls and results that a template does not know
become text.

Where a prompt's beginning is to stay the same from turn to turn, so that its cached prefix is used, system
text also moves where the template would put it at the head of the prompt.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence

from msgspec.structs import replace

from penstock.generation.parsers.call_syntax import Section
from penstock.generation.parsers.call_writing import write_calls
from penstock.generation.prompt.conversation import (
    arguments_of,
    contents_of,
    conversation,
    kind_of,
    message_text,
    reasoning_of,
)
from penstock.generation.prompt.template_rules import (
    CALLS,
    START,
    SYSTEM_ROLES,
    PlainMessage,
    TemplateRules,
)
from penstock.generation.request.schemas import Message, Part, ToolCall
from penstock.generation.request.unsupported_content import is_image, joined

NO_RESULT = "(no result)"
"""The result of a call that has none, where the template needs one."""


def arranged(
    messages: Sequence[Message],
    rules: TemplateRules,
    *,
    stable: bool = False,
    format: Section | None = None,
    known: Sequence[PlainMessage] = (),
) -> Sequence[Message]:
    """The turns as the template takes them. ``stable``: system text may not change what precedes it; at the
    start of a conversation it is one message. ``format``: how the model writes calls, if that is known.
    ``known``: the first messages as dictionaries, if they have been made before. Raises ApiError."""
    if not _needs_arrangement(messages, rules, stable):
        return messages
    conversation(messages, rules, known=known)  # errors name fields by their places in the request
    if not rules.empty_answers:
        messages = [*filter(_says, messages[:-1]), messages[-1]]
    turns = [*_calls_arranged(messages, rules, format)]
    if not rules.head_alone and not any(message.role not in SYSTEM_ROLES for message in turns):
        return _placed(turns, rules, stable, head=False)
    placed = _placed(turns, rules, stable, head=rules.head_always or not stable)
    if rules.head_always or placed[-1].role == "user":
        return placed
    return _placed(turns, rules, stable, head=False)


def _placed(messages: Iterable[Message], rules: TemplateRules, stable: bool, *, head: bool) -> list[Message]:
    """``head``: whether a system message may stand at the start."""
    turns = _Turns(rules, stable, head)
    for message in messages:
        turns.add(message)
    return turns.joined()


def _needs_arrangement(messages: Sequence[Message], rules: TemplateRules, stable: bool) -> bool:
    """False: the template takes the messages as they are."""
    before, refused = START, rules.refused
    called: set[str | None] = set()
    takes_calls = rules.calls and rules.results and rules.beside and rules.parallel
    for message in messages:
        kind = CALLS if message.tool_calls else message.role
        if (kind, before) in refused:
            return True
        if kind in SYSTEM_ROLES and (before != START or kind != "system" or stable or not rules.head_always):
            return True
        if (kind == CALLS and not takes_calls) or (kind == "tool" and not rules.results):
            return True
        if kind == "assistant" and not rules.empty_answers and not _says(message):
            return True
        called |= _ids(message)
        if kind == "tool" and _is_stray(message, called) and not rules.stray_results:
            return True
        before = kind
    return before in SYSTEM_ROLES and not rules.head_alone


def _ids(message: Message) -> set[str | None]:
    """Ids of a message's calls; None stands for any."""
    return {None, *(call.id for call in message.tool_calls)} if message.tool_calls else set()


def _is_stray(result: Message, called: Collection[str | None]) -> bool:
    """Whether a result has no call of that id; one with a name only needs any call."""
    return (None if result.name else result.tool_call_id) not in called


def _says(message: Message) -> bool:
    """Whether a message has anything, or is no assistant's."""
    return bool(
        message.role != "assistant" or message.tool_calls or message_text(message) or reasoning_of(message)
    )


class _Turns:
    """Messages that follow each other as the rules allow."""

    def __init__(self, rules: TemplateRules, stable: bool, head: bool) -> None:
        self._rules = rules
        self._head = head
        self._stable = stable
        self._placed: list[Message] = []
        self._added: list[list[str | Part]] = []
        """What belongs to each message besides its own; they are joined once: there may be thousands."""
        self._begun = False
        """Whether there is any but system messages."""
        self._waiting: list[str] = []
        """System text for the user's first message."""

    def add(self, message: Message) -> None:
        if message.role in SYSTEM_ROLES:
            self._add_system(message)
            return
        if message.role == "user":
            self._unite_users()
        elif message.role == "assistant":
            self._part_answers()
        last = self._placed[-1] if self._placed else None
        if last is not None and last.tool_calls and not self._rules.may_follow(kind_of(message), CALLS):
            last = self._leave_unanswered(last.tool_calls)
        if last is not None and self._is_beside(last, message):
            contents = [*_contents(self._placed.pop()), *self._added.pop(), *_contents(message)]
            message = replace(message, content=joined([each for each in contents if each]))
        if self._waiting:
            self._take_waiting(message)
        elif last is not None and self._joins(last, message):
            self._join(last, message)
        else:
            before = "system" if last else START
            if (
                message.role == "assistant"
                and not self._begun
                and not self._rules.may_follow(kind_of(message), before)
            ):
                self._place(Message("user", ""))  # before a greeting, in a template whose turns alternate
            self._place(message)

    def joined(self) -> list[Message]:
        if self._waiting:
            self._place(Message("user", "\n".join(self._waiting)))
        return [
            replace(message, content=joined([*_contents(message), *added])) if added else message
            for message, added in zip(self._placed, self._added, strict=True)
        ]

    def _place(self, message: Message) -> None:
        self._begun = self._begun or message.role not in SYSTEM_ROLES
        self._placed.append(message)
        self._added.append([])

    def _leave_unanswered(self, calls: list[ToolCall]) -> Message:
        """Results of calls that have none. Returns the last."""
        for call in calls:
            self._place(Message("tool", NO_RESULT, tool_call_id=call.id))
        return self._placed[-1]

    def _unite_users(self) -> None:
        """Mark a system message between two of the user's, where these must be one."""
        if len(self._placed) < 2 or self._rules.may_follow("user", "user"):
            return
        if self._placed[-1].role == "system" and self._placed[-2].role == "user":
            text = self._popped_system()
            self._added[-1].append(text)

    def _part_answers(self) -> None:
        """Make a system message between two of the assistant's the user's, where turns alternate."""
        if len(self._placed) < 2 or self._rules.may_follow("assistant", "assistant"):
            return
        if self._placed[-1].role == "system" and self._placed[-2].role == "assistant":
            self.add(Message("user", self._popped_system()))

    def _popped_system(self) -> str:
        """The marked text of the last message, the system's, which is taken away."""
        texts = [message_text(self._placed.pop()), *map(str, self._added.pop())]
        return marked("\n".join(texts))

    def _take_waiting(self, message: Message) -> None:
        said = _contents(message) if message.role == "user" else []
        self._place(Message("user", joined([*self._waiting, *said]), name=message.name))
        self._waiting = []
        if message.role != "user":
            self._place(message)

    def _is_beside(self, last: Message, message: Message) -> bool:
        """Whether the message before becomes text beside the calls of a message."""
        shown = self._rules.beside or self._rules.before_calls is not None
        refused = not self._rules.may_follow(CALLS, "assistant")
        return shown and refused and bool(message.tool_calls) and kind_of(last) == "assistant"

    def _joins(self, last: Message, message: Message) -> bool:
        """Whether a message becomes part of the one before it."""
        before, kind = kind_of(last), kind_of(message)
        if self._rules.may_follow(kind, before):
            return False
        return (kind == "user" and before in ("user", "tool")) or kind == before == "assistant"

    def _join(self, last: Message, message: Message) -> None:
        contents = _contents(message)
        if last.role == message.role == "user" and last.name != message.name:
            if last.name:
                self._placed[-1] = replace(last, content=joined(_named(last)), name=None)
            contents = _named(message)
        self._added[-1] += contents

    def _add_system(self, message: Message) -> None:
        last = self._placed[-1] if self._placed else None
        before = START if last is None else "system" if last.role in SYSTEM_ROLES else kind_of(last)
        for role in ("system",) if self._stable else (message.role, "system"):
            if self._takes(role, before):
                content = message_text(message) if self._stable else message.content
                self._place(replace(message, role=role, content=content))
                return
        text = message_text(message)
        if last is None:
            self._waiting.append(marked(text))
        elif last.role in ("system", "user", "tool"):
            self._added[-1].append(text if last.role == "system" else marked(text))
        else:
            self.add(Message("user", marked(text)))

    def _takes(self, role: str, before: str) -> bool:
        rules = self._rules
        if before == START and not self._head:
            return False
        if self._stable and before not in (START, "system"):
            return (role, before) in rules.stable
        if self._stable and before == "system":
            return False
        return rules.may_follow(role, before)


# -- calls


def _calls_arranged(
    messages: Sequence[Message], rules: TemplateRules, format: Section | None
) -> Iterable[Message]:
    """The messages, with calls and results as the template takes them."""
    if not any(message.tool_calls or message.role == "tool" for message in messages):
        return messages
    if not rules.calls or not rules.results:
        return _as_text(messages, rules, format)
    messages = list(_results_moved(messages, rules))
    if not rules.beside and rules.before_calls is None:
        messages = list(_text_apart(messages, rules))
    return messages if rules.parallel else _one_by_one(messages)


def _results_moved(messages: Iterable[Message], rules: TemplateRules) -> Iterator[Message]:
    """Results go up to their calls where what stands between would not be shown, or they would not. Those
    without a call become text of the user where the template does not show them."""
    groups: list[list[Message]] = []
    """Each message with calls has its results behind it."""
    called: dict[str | None, tuple[int, int]] = {}
    """Calls by id: the group, and how many places had been refused."""
    before, refused = START, 0
    for message in messages:
        kind = kind_of(message)
        refused += not rules.may_follow(kind, before)
        before = kind
        if kind == "tool":
            behind_calls = bool(groups and groups[-1][0].tool_calls)
            group, refused_then = called.get(message.tool_call_id, (-1, refused))
            stray = not rules.stray_results and _is_stray(message, called)
            if refused_then < refused or (behind_calls and group in (-1, len(groups) - 1) and not stray):
                groups[group].append(message)
                continue
            if stray or not rules.may_follow(kind, kind_of(groups[-1][-1]) if groups else START):
                message = Message("user", _result(message, message.name or ""))
        groups.append([message])
        if message.tool_calls:
            called |= dict.fromkeys(_ids(message), (len(groups) - 1, refused))
    for each in groups:
        yield from each


def _text_apart(messages: Iterable[Message], rules: TemplateRules) -> Iterator[Message]:
    """Text beside calls becomes a message of its own, before that of the calls."""
    for message in messages:
        if message.tool_calls and rules.may_follow(CALLS, "assistant"):
            text = message_text(message)
            if text:
                yield Message("assistant", text, name=message.name)
                message = replace(message, content=None, refusal=None, reasoning=reasoning_of(message))
        yield message


def _one_by_one(messages: Iterable[Message]) -> Iterator[Message]:
    """Several calls of a message become a message each, followed by its result."""
    waiting = list(messages)
    at = 0
    while at < len(waiting):
        message = waiting[at]
        at += 1
        calls = message.tool_calls or []
        if len(calls) < 2:
            yield message
            continue
        results: dict[str | None, list[Message]] = {}
        while at < len(waiting) and waiting[at].role == "tool":
            results.setdefault(waiting[at].tool_call_id, []).append(waiting[at])
            at += 1
        for call in calls:
            yield replace(message, tool_calls=[call])
            message = Message("assistant")
            yield from results.pop(call.id, ())
        for rest in results.values():
            yield from rest


def _as_text(messages: Iterable[Message], rules: TemplateRules, format: Section | None) -> Iterator[Message]:
    """Calls as the model writes them, by itself or else where it is made to; results as text of the user."""
    names: dict[str | None, str] = {}
    before = 0
    for number, message in enumerate(messages):
        if message.tool_calls:
            field = f"messages[{number}].tool_calls"
            calls = [arguments_of(call, f"{field}[{at}]") for at, call in enumerate(message.tool_calls)]
            for call, (name, _) in zip(message.tool_calls, calls, strict=True):
                names[call.id] = name
            if not rules.calls:
                text = "\n".join(filter(None, (message_text(message), write_calls(calls, format, before))))
                before += len(calls)
                message = Message("assistant", text, message.name, reasoning=reasoning_of(message))
        elif message.role == "tool":
            name = message.name or names.get(message.tool_call_id, "")
            message = Message("user", _result(message, name))
        yield message


def _contents(message: Message) -> list[str | Part]:
    """The text of a message as one; with pictures in it, all its parts."""
    contents = contents_of(message)
    return contents if any(map(is_image, contents)) else [message_text(message)]


def _result(message: Message, name: str) -> str | list[str | Part]:
    named = f' name="{name}"' if name else ""
    return joined([f"<tool_response{named}>", *_contents(message), "</tool_response>"])


def _named(message: Message) -> list[str | Part]:
    first, *more = _contents(message)
    if not message.name:
        return [first, *more]
    return (
        [f"{message.name}: {first}", *more] if isinstance(first, str) else [f"{message.name}:", first, *more]
    )


def marked(text: str) -> str:
    return f"<system>\n{text}\n</system>"
