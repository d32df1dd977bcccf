"""Renders the next turn of a conversation from where the turn before has ended, where that is exact.

Most chat templates have one loop over the messages. Jinja's scopes end with an iteration, so what one leaves
for the next is the namespaces and lists that were made before the loop. When a template is loaded, its
loop's body is read for the names that it depends on. When it is rendered, these names' values and the
messages are compared with those of the turn before: if they are the same, the text of all iterations but the
last one would be the same too. It is taken as it is, the namespaces and lists are set to what they were at
that point, and the loop goes on from there. Everything before and after the loop is rendered as always.

Templates whose older turns change, such as those that leave out reasoning before the user's last message,
compute that from values that differ then, and are rendered from the start.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from operator import is_
from typing import Any, TypeAlias

import jinja2
import msgspec
from jinja2 import nodes
from jinja2.runtime import Context, LoopContext, Macro, Undefined
from jinja2.utils import Namespace, missing

_LOOP = frozenset(("index", "index0", "first", "last", "previtem", "nextitem"))
"""What a loop's body may ask of it: nothing that depends on more than one message further on."""
_REFUSED = frozenset(("strftime_now", "lipsum", "cycler", "joiner", "caller", "varargs", "kwargs"))
"""Names whose values differ from one call to the next, or that are not values of the template."""
_CHANGING = frozenset(("append", "pop"))
"""Methods of lists that the sandbox lets templates call."""
_SIMPLE = frozenset((str, int, float, bool, type(None)))

Frozen: TypeAlias = Any
_encode = msgspec.msgpack.Encoder().encode


class _CannotCompare(Exception):
    """A value is of a kind whose equality says too little."""


@dataclass(slots=True)
class LoopState:
    """Where a rendering's loop was before its last iteration."""

    template: jinja2.Template | None
    loop: int
    messages: list[Any]
    names: dict[str, Frozen]
    """Values when the loop began."""
    indexed: dict[str, list[Any]]
    """Lists whose items the body takes by its index."""
    items: list[Any]
    state: dict[str, Any]
    """Copies of namespaces and lists."""
    begin: int
    end: int
    """Of the text of the iterations before the last one, in ``text``."""
    text: str = ""


@dataclass(slots=True)
class Rendering:
    """One rendering of a template: what it takes from the one before, and what it leaves."""

    before: LoopState | None = None
    template: jinja2.Template | None = None
    messages: list[Any] = field(default_factory=list)
    after: LoopState | None = None
    pieces: list[str] = field(default_factory=list)
    resumed: bool = False
    """Whether text was taken from the rendering before."""
    exact: bool = True
    """Whether no item was taken from the end of a list."""

    def finish(self, text: str) -> LoopState | None:
        """Where the next rendering of the conversation may begin. ``text``: the prompt."""
        if self.after is None or not self.exact:
            return None
        self.after.text = text
        return self.after


# -- at load


@dataclass(slots=True, frozen=True)
class _Body:
    """What a loop's body depends on."""

    names: tuple[str, ...]
    indexed: tuple[str, ...]
    indexes: list[nodes.Getitem]


def prepare(tree: nodes.Template) -> None:
    """Have the loops of a template that can be resumed say so; others stay as they are."""
    macros = list(tree.find_all(nodes.Macro))
    others = (nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends, nodes.Block)
    if len({macro.name for macro in macros}) < len(macros) or any(map(tree.find, others)):
        return
    for number, loop in enumerate(list(_top_loops(tree.body))):
        body = _read(loop, macros)
        if body is None:
            continue
        arguments = [nodes.ContextReference(), nodes.Const(number), loop.iter]
        names = [nodes.Const(body.names), nodes.Const(body.indexed)]
        entry = nodes.ImportedName(f"{__name__}.resumed")
        loop.iter = nodes.Call(entry, arguments + names, [], None, None)
        # Has Jinja make a LoopContext, which counts the iterations.
        loop.body.insert(0, nodes.ExprStmt(nodes.Name("loop", "load")))
        for index in body.indexes:
            check = nodes.ImportedName(f"{__name__}.checked")
            index.arg = nodes.Call(check, [nodes.ContextReference(), index.arg], [], None, None)
        if tree.environment is not None:
            loop.set_environment(tree.environment)
        loop.set_lineno(loop.lineno)


def adopt(template: jinja2.Template) -> None:
    """Have a template that was made from a prepared tree use this module's loops."""
    template.root_render_func.__globals__["LoopContext"] = _Loop


def _top_loops(body: Sequence[nodes.Node]) -> Iterator[nodes.For]:
    for node in body:
        if isinstance(node, nodes.For):
            if not (node.recursive or node.test or node.else_) and isinstance(node.target, nodes.Name):
                yield node
        elif isinstance(node, nodes.If):
            yield from _top_loops(node.body)
            yield from _top_loops(node.elif_)
            yield from _top_loops(node.else_)


def _read(loop: nodes.For, macros: list[nodes.Macro]) -> _Body | None:
    """The names that the body depends on; None: it cannot be resumed, or writes nothing."""
    reader = _Reader()
    reader.read_all(loop.body, inner=False)
    waiting = list(macros)
    while called := [macro for macro in waiting if macro.name in reader.names]:
        waiting = [macro for macro in waiting if macro not in called]
        for macro in called:
            reader.read_all([*macro.body, *macro.defaults], inner=True)
    if not (reader.exact and reader.writes) or _REFUSED & reader.names:
        return None
    names = sorted(reader.names - {"loop"})
    return _Body(tuple(names), tuple(sorted(reader.indexed)), reader.indexes)


class _Reader:
    """Reads the body of a loop."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.indexed: set[str] = set()
        self.indexes: list[nodes.Getitem] = []
        """Expressions that take items by the loop's index."""
        self.exact = True
        self.writes = False

    def read_all(self, body: Sequence[nodes.Node], *, inner: bool) -> None:
        for node in body:
            self._read(node, inner)

    def _read(self, node: nodes.Node, inner: bool) -> None:
        """``inner``: whether ``loop`` is another loop's."""
        match node:
            case nodes.Getattr(node=nodes.Name(name="loop"), attr=attr) if not inner:
                self.exact &= attr in _LOOP
                return
            case nodes.Name(name="loop") if not inner:
                self.exact = False
            case nodes.Name(ctx="load", name=name):
                self.names.add(name)
            case nodes.NSRef(name=name):
                self.names.add(name)
            case nodes.Getitem(node=nodes.Name(name=name), arg=arg) if not inner and _is_near(arg):
                self.indexed.add(name)
                self.indexes.append(node)
                return
            case nodes.For():
                self._read(node.iter, inner)
                self.exact &= not node.recursive
                rest = [node.target, *node.body, *node.else_, *([node.test] if node.test else [])]
                self.read_all(rest, inner=True)
                return
            case nodes.Call(node=nodes.Getattr(node=owner, attr=attr)) if attr in _CHANGING:
                of_namespace = isinstance(owner, nodes.Getattr) and isinstance(owner.node, nodes.Name)
                self.exact &= isinstance(owner, nodes.Name) or of_namespace
            case nodes.Filter(name="random"):
                self.exact = False
            case nodes.Output(nodes=parts):
                self.writes |= any(not isinstance(part, nodes.TemplateData) for part in parts)
        self.read_all(list(node.iter_child_nodes()), inner=inner)


def _is_near(index: nodes.Node) -> bool:
    """Whether an index is at most that of the next message."""
    match index:
        case nodes.Getattr(node=nodes.Name(name="loop"), attr="index0" | "index"):
            return True
        case nodes.Sub(
            left=nodes.Getattr(node=nodes.Name(name="loop"), attr="index0" | "index"),
            right=nodes.Const(value=n),
        ):
            return type(n) is int and n >= 0
        case nodes.Add(
            left=nodes.Getattr(node=nodes.Name(name="loop"), attr="index0"), right=nodes.Const(value=n)
        ):
            return type(n) is int and 0 <= n <= 1
    return False


# -- when a template is rendered


class _Items:
    """The items of a loop that is watched."""

    def __init__(
        self, rendering: Rendering, context: Context, items: list[Any], skipped: int, state: LoopState
    ) -> None:
        self.items, self.skipped = items, skipped
        self._rendering, self._context, self._state = rendering, context, state

    def note(self) -> None:
        """The last iteration begins."""
        state = self._state
        try:
            state.state = {
                name: _copied(value)
                for name in state.names
                if type(value := self._context.resolve_or_missing(name)) in (Namespace, list)
            }
        except _CannotCompare:
            return
        state.end = sum(map(len, self._rendering.pieces))
        after = self._rendering.after
        if after is None or after.end - after.begin <= state.end - state.begin:
            self._rendering.after = state


class _Loop(LoopContext):
    """Jinja's loop; one that is resumed begins with a later item."""

    _watched: _Items | None = None

    def __init__(self, iterable: Any, undefined: Any, recurse: Any = None, depth0: int = 0) -> None:
        if type(iterable) is not _Items:
            super().__init__(iterable, undefined, recurse, depth0)
            return
        skipped = iterable.skipped
        super().__init__(iterable.items[skipped:], undefined, recurse, depth0)
        self._watched, self._last = iterable, len(iterable.items) - 1
        self._length = len(iterable.items)
        self.index0 = skipped - 1
        if skipped:
            self._current = iterable.items[skipped - 1]

    def __next__(self) -> Any:
        if self._watched is not None and self.index0 + 1 == self._last:
            self._watched.note()
        return super().__next__()


def resumed(context: Context, loop: int, items: Any, names: tuple[str, ...], indexed: tuple[str, ...]) -> Any:
    """The items of a loop, as templates call it when it begins; ``names``: what its body depends on."""
    rendering: Rendering | None = getattr(context, "rendering", None)
    if rendering is None or type(items) is not list or not items or not _ends(rendering.messages, items):
        return items
    try:
        values = {name: context.resolve_or_missing(name) for name in names}
        known = set(map(id, rendering.messages))
        frozen = {name: _frozen(value, known) for name, value in values.items()}
        lists = {name: context.resolve_or_missing(name) for name in indexed}
        shared = [id(each) for value in values.values() for each in _lists(value)]
    except _CannotCompare:
        return items
    if len(set(shared)) < len(shared) or any(type(each) is not list for each in lists.values()):
        return items
    if any(len(each) < len(items) for each in lists.values()):
        return items
    begin = sum(map(len, rendering.pieces))
    state = LoopState(rendering.template, loop, rendering.messages, frozen, lists, items, {}, begin, begin)
    before, skipped = rendering.before, 0
    if before is not None and _goes_on(before, state):
        for name, kept in before.state.items():
            _restore(values[name], kept)
        rendering.pieces.append(before.text[before.begin : before.end])
        rendering.resumed = True
        skipped = len(before.items) - 1
    return _Items(rendering, context, items, skipped, state)


def checked(context: Context, index: int) -> int:
    """The index of an item that a loop's body takes. Below 0 it counts from the end, where lists grow."""
    rendering: Rendering | None = getattr(context, "rendering", None)
    if rendering is not None and index < 0:
        rendering.exact = False
    return index


def _goes_on(before: LoopState, now: LoopState) -> bool:
    """Whether all iterations but the last one of the loop before would be the same now."""
    return (
        before.template is now.template
        and before.loop == now.loop
        and before.names == now.names
        and _begins(now.items, before.items)
        and _begins(now.messages, before.messages)
        and all(_begins(now.indexed[name], before.indexed[name]) for name in now.indexed)
    )


def _begins(items: list[Any], start: list[Any]) -> bool:
    return len(items) >= len(start) and all(map(is_, items, start))


def _ends(messages: list[Any], items: list[Any]) -> bool:
    at = len(messages) - len(items)
    return at >= 0 and all(map(is_, items, messages[at:]))


def _frozen(value: Any, messages: set[int]) -> Frozen:
    """What two values have in common only if a template cannot tell them apart. ``messages``: their ids, as
    they are told apart by identity."""
    kind = type(value)
    if kind in _SIMPLE:
        return kind, value
    if kind is Namespace:
        return Namespace, tuple((name, _frozen(each, messages)) for name, each in _attributes(value).items())
    if kind is list:
        return list, tuple(_frozen_item(each, messages) for each in value)
    if kind is dict:
        return dict, _encoded(value)
    if kind is Macro:
        return Macro, value.name
    if callable(value) and not isinstance(value, Undefined):
        return "function", value
    if value is missing:
        return "missing", None
    raise _CannotCompare


def _frozen_item(value: Any, messages: set[int]) -> Frozen:
    if id(value) in messages:
        return id(value)
    if type(value) is dict:
        return _encoded(value)
    if type(value) in _SIMPLE:
        return type(value), value
    raise _CannotCompare


def _encoded(value: Any) -> bytes:
    try:
        return _encode(value)
    except (TypeError, ValueError, OverflowError, RecursionError):
        raise _CannotCompare from None


def _attributes(namespace: Namespace) -> dict[str, Any]:
    attributes: dict[str, Any] = namespace._Namespace__attrs
    return attributes


def _lists(value: Any) -> list[Any]:
    """The lists and namespaces that a loop may change."""
    if type(value) is Namespace:
        return [value, *(each for each in _attributes(value).values() if type(each) is list)]
    return [value] if type(value) is list else []


def _copied(value: Any) -> Any:
    """A copy of a namespace's attributes, or of a list."""
    if type(value) is list:
        return list(value)
    attributes = _attributes(value)
    if any(type(each) not in _SIMPLE and type(each) not in (list, dict) for each in attributes.values()):
        raise _CannotCompare
    return {name: list(each) if type(each) is list else each for name, each in attributes.items()}


def _restore(value: Any, kept: Any) -> None:
    if type(value) is list:
        value[:] = kept
        return
    attributes = _attributes(value)
    attributes.clear()
    attributes.update({name: list(each) if type(each) is list else each for name, each in kept.items()})
