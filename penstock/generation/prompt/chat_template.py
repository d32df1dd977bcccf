"""Renders conversations to prompt text with the model's Jinja chat template.

Templates get the same variables, filters and functions as from transformers' ``apply_chat_template``.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Sequence
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import jinja2.utils
import msgspec

from penstock.generation.prompt.render_limit import join_within_limit
from penstock.generation.prompt.resumed_loop import Rendering, adopt, prepare
from penstock.generation.prompt.template_files import DEFAULT, read_template_files
from penstock.generation.prompt.template_rules import REASONING_NAMES
from penstock.http.errors import ApiError

WITH_TOOLS = "tool_use"
"""Name of the template for requests with tools, if a model has several templates."""
RESERVED = frozenset(
    ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template")
)
"""Variables that request fields set; chat_template_kwargs may not."""

THINKING = ("enable_thinking", "thinking", "reasoning_effort")
"""Variables by which templates switch thinking, or take how hard to think."""

_decode_object = msgspec.json.Decoder(dict[str, Any]).decode

# Appended, with a space, to a final message that the prompt must end with. If the space is still there after
# rendering, the template keeps whitespace; if not, it trims messages, so the text before the mark is trimmed.
_MARK = f"\ue000{secrets.token_hex(8)}\ue001"


def parse_variables(text: str) -> dict[str, Any]:
    """Variables for templates, of a JSON object. Raises ValueError."""
    try:
        variables = _decode_object(text)
    except msgspec.MsgspecError as error:
        raise ValueError(f"must be a JSON object: {error}") from None
    reserved = sorted(RESERVED & variables.keys())
    if reserved:
        raise ValueError(f"cannot set {', '.join(reserved)}: requests have fields of these names")
    return variables


class ChatTemplate:
    """The compiled chat templates of a model."""

    def __init__(self, sources: dict[str, str], special_tokens: dict[str, str]) -> None:
        """``sources``: Jinja text by name, at least one; ``special_tokens``: text by name, such as bos_token.

        Raises ValueError if a template does not compile.
        """
        self._sources = sources
        self._special_tokens = special_tokens
        self._resumed: dict[str, jinja2.Template] = {}
        """Those whose loops can be resumed, which take longer for short conversations; made when needed."""
        try:
            self._templates = {name: self._compiled(name) for name in sources}
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"line {error.lineno}: {error.message}") from None

    @classmethod
    def load(
        cls, directory: str | os.PathLike[str], override_file: str | os.PathLike[str] | None = None
    ) -> ChatTemplate | None:
        """The template in ``override_file``, or else of the model in ``directory``; None if it has none.

        Raises ValueError naming the file if the template cannot be read or compiled.
        """
        files = read_template_files(Path(directory), None if override_file is None else Path(override_file))
        if not files.sources:
            return None
        try:
            return cls(files.sources, files.special_tokens)
        except ValueError as error:
            raise ValueError(f"chat template in {files.origin}: {error}") from None

    @property
    def source(self) -> str:
        """The text of all templates."""
        return "\n".join(self._sources.values())

    def thinking_variables(self) -> list[str]:
        """Which of :data:`THINKING` the templates read."""
        environment = _environment()
        trees = map(environment.parse, self._sources.values())
        read = set().union(*map(jinja2.meta.find_undeclared_variables, trees))
        return [name for name in THINKING if name in read]

    @property
    def default_source(self) -> str:
        """The text of the template for requests without tools."""
        return self._sources[self._name(tools=False)]

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[dict[str, Any]] | None = None,
        documents: list[dict[str, Any]] | None = None,
        variables: dict[str, Any] | None = None,
        rendering: Rendering | None = None,
    ) -> str:
        """The prompt. ``variables``: chat_template_kwargs, none of RESERVED. ``rendering``: see
        :mod:`.resumed_loop`; not with ``continue_final_message``.

        ``continue_final_message`` ends the prompt with the last message's text and modifies that message.
        Raises ApiError (400) if the template fails or refuses the messages.
        """
        known: dict[str, Any] = dict(variables) if variables else {}
        known["messages"] = messages
        known["add_generation_prompt"] = add_generation_prompt
        known["tools"] = tools
        known["documents"] = documents
        name = self._name(bool(tools))
        if rendering is not None:
            return _rendered(self._resumable(name), known, rendering)
        template = self._templates[name]
        if not continue_final_message:
            return _rendered(template, known)
        _append_mark(messages[-1])
        text, mark, rest = _rendered(template, known).rpartition(_MARK)
        if not mark:
            raise ApiError(
                400,
                "continue_final_message: the chat template drops or changes the final message.",
                param="continue_final_message",
            )
        return text if rest.startswith(" ") else text.rstrip()

    def _compiled(self, name: str, *, resumable: bool = False) -> jinja2.Template:
        environment = _environment()
        tree = environment.parse(self._sources[name])
        if resumable:
            prepare(tree)
        template = environment.from_string(tree, globals=self._special_tokens)
        if resumable:
            adopt(template)
        template.globals = dict(template.globals)  # a ChainMap, which is copied for every rendering
        return template

    def _resumable(self, name: str) -> jinja2.Template:
        template = self._resumed.get(name)
        if template is None:  # two threads may make it at once: the first one's is taken
            template = self._resumed.setdefault(name, self._compiled(name, resumable=True))
        return template

    def _name(self, tools: bool) -> str:
        if tools and WITH_TOOLS in self._templates:
            return WITH_TOOLS
        return DEFAULT if DEFAULT in self._templates else next(iter(self._templates))


# -- rendering


def _rendered(
    template: jinja2.Template, variables: dict[str, Any], rendering: Rendering | None = None
) -> str:
    context = template.new_context(variables)
    if rendering is not None:
        rendering.template, rendering.messages = template, variables["messages"]
        context.rendering = rendering  # type: ignore[attr-defined] # for the template's loops
    try:
        pieces = template.root_render_func(context)
        joined = [] if rendering is None else rendering.pieces
        return join_within_limit(pieces, len(variables["messages"]), joined)
    except _RaisedByTemplate as error:
        raise ApiError(400, str(error), param="messages") from None
    except (
        jinja2.TemplateError,
        ArithmeticError,
        AttributeError,
        LookupError,
        RecursionError,
        TypeError,
        ValueError,
    ) as error:
        # Templates raise Python's errors for unexpected values.
        raise ApiError(
            400,
            f"The chat template failed on these messages: {type(error).__name__}: {error}",
            param="messages",
        ) from None
    finally:
        # Macros and the context refer to each other: without this the messages stay until a collection.
        if rendering is not None:
            del context.rendering  # type: ignore[attr-defined]
        context.vars.clear()
        context.parent.clear()


def _append_mark(message: dict[str, Any]) -> None:
    """Mark the end of a message: of its text, or of its reasoning if there is no text."""
    content = message.get("content")
    thoughts = [name for name in REASONING_NAMES if message.get(name)]
    if isinstance(content, list) and content:
        part = content[-1]
        if part["type"] == "image":
            reason = "continue_final_message: the final message ends with an image."
            raise ApiError(400, reason, param="continue_final_message")
        part[part["type"]] += f"{_MARK} "
    elif isinstance(content, str) and (content or not thoughts):
        message["content"] = f"{content}{_MARK} "
    elif thoughts:
        for name in thoughts:
            message[name] += f"{_MARK} "
    else:
        raise ApiError(
            400, "continue_final_message: the final message has no text.", param="continue_final_message"
        )


class _RaisedByTemplate(jinja2.TemplateError):
    """Raised by ``raise_exception`` in a template."""


def _raise_exception(message: str) -> NoReturn:
    raise _RaisedByTemplate(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


_encode_json = json.JSONEncoder(ensure_ascii=False).encode
"""``json.dumps`` makes an encoder for each call, which takes as long as to encode a tool call."""
_encode_fast = msgspec.json.Encoder().encode
_PLAIN = frozenset((str, int, bool, type(None)))
"""Types of values that ``json`` and msgspec spell alike; they differ in floats."""
MAX_REMEMBERED = 16 * 1024
"""Longest JSON in bytes that is remembered; of 256 texts, 16 MiB at most."""


def _on_one_line(value: Any) -> str:
    """``_encode_json``, in a quarter of its time for the arguments of a tool call, and for the schemas of
    tools, which every turn of a conversation sends again."""
    if type(value) is not dict:
        return _encode_json(value)
    try:
        encoded = _encode_fast(value)
        if {str}.issuperset(map(type, value)) and _PLAIN.issuperset(map(type, value.values())):
            return msgspec.json.format(encoded, indent=0).decode()
    except (TypeError, ValueError, OverflowError, RecursionError):  # of what is not JSON
        return _encode_json(value)
    return _remembered(encoded) if len(encoded) <= MAX_REMEMBERED else _encode_json(value)


@lru_cache(maxsize=256)
def _remembered(encoded: bytes) -> str:
    return _encode_json(msgspec.json.decode(encoded))


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As in transformers; Jinja's own filter escapes HTML and sorts keys."""
    if not ensure_ascii and indent is None and separators is None and not sort_keys:
        return _on_one_line(value)
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


class _Generation(jinja2.ext.Extension):
    """``{% generation %}`` marks the assistant's tokens for training; here it has no effect."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares it so

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


_DICT_ATTRIBUTES = frozenset(dir(dict))


_HARMLESS = frozenset((str, int, float, bool, list, dict))
"""Types of values that a sandbox lets through from wherever they come."""
_LIST_METHODS = frozenset({"append", "pop"})
"""Methods of lists that add at most one item."""


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Reads the fields of dictionaries, such as ``message.role``, without raising an exception for each, and
    those of namespaces without Jinja's checks, which take 5 µs. Lists may be appended to and taken from:
    Kimi K2's templates queue the ids of calls."""

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return (type(obj) is list and attr in _LIST_METHODS) or super().is_safe_attribute(obj, attr, value)

    def getattr(self, obj: Any, attribute: str) -> Any:
        if type(obj) is jinja2.utils.Namespace and attribute[0] != "_":
            value = getattr(obj, attribute, None)
            if type(value) in _HARMLESS:
                return value
        if type(obj) is not dict or attribute in _DICT_ATTRIBUTES:
            return super().getattr(obj, attribute)
        if attribute in obj:
            return obj[attribute]
        return self.undefined(obj=obj, name=attribute)


def _environment() -> jinja2.Environment:
    environment = _Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment
