"""Turns and functions of Gemini's API as chat completions have them."""

from __future__ import annotations

from base64 import b64encode, urlsafe_b64decode
from typing import Any, NamedTuple

import msgspec

from penstock.dialects.chat.request_schema import ChatTool
from penstock.dialects.gemini.request_schema import (
    GeminiContent,
    GeminiPart,
    GeminiResponse,
    GeminiTool,
    GeminiToolConfig,
)
from penstock.dialects.whole_calls import MissingCallIds
from penstock.generation.media.source import image_at, image_of
from penstock.generation.request.schemas import Function, FunctionCall, JsonObject, Message, Part, ToolCall
from penstock.generation.request.unsupported_content import UnsupportedContent, joined
from penstock.http.errors import ApiError, not_served, refused

_MARK = b"penstock-t:"
"""Begins a signature that has the reasoning before a call: clients send back signatures, but no thoughts."""
_DROPPED = ("propertyOrdering", "example", "nullable")
_COUNTS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")
_MODES = {"AUTO": "auto", "VALIDATED": "auto", "MODE_UNSPECIFIED": "auto", "ANY": "required", "NONE": "none"}


def signature(reasoning: str) -> str:
    return b64encode(_MARK + reasoning.encode()).decode()


def _signed(text: str | None) -> str:
    """The reasoning in a signature; empty: somebody else's."""
    try:
        raw = urlsafe_b64decode((text or "").replace("+", "-").replace("/", "_"))
        return raw.removeprefix(_MARK).decode() if raw.startswith(_MARK) else ""
    except ValueError:
        return ""


def convert_contents(
    system: GeminiContent | None, contents: list[GeminiContent], content: UnsupportedContent
) -> list[Message]:
    """The messages of a conversation. ``content`` notes its pictures. Raises ApiError."""
    ids = MissingCallIds()
    said = "\n".join(part.text for part in (system.parts or () if system else ()) if part.text)
    messages = [Message("system", said)] if said else []
    for number, turn in enumerate(contents):
        field = f"contents[{number}]"
        role = turn.role or "user"
        if role not in ("user", "model", "function"):
            raise refused(f"{field}.role must be user, model or function.", f"{field}.role", role)
        for at, part in enumerate(turn.parts or ()):
            if part.executableCode is not None or part.codeExecutionResult is not None:
                raise not_served(f"{field}.parts[{at}]", "code is run by clients alone, by functions")
        parts = turn.parts or []
        media = _Media(content, f"{field}.parts")
        messages += [_assistant(parts, ids)] if role == "model" else _user(parts, ids, media)
    return messages


def _assistant(parts: list[GeminiPart], ids: MissingCallIds) -> Message:
    thoughts = [part.text or "" for part in parts if part.thought]
    signed = [_signed(part.thoughtSignature) for part in parts]
    reasoning = "".join(thoughts) or next(filter(None, signed), "")
    calls = [
        ToolCall(FunctionCall(call.name, call.args or {}), ids.of_call(call.id, call.name))
        for part in parts
        if (call := part.functionCall) is not None
    ]
    text = "".join(part.text or "" for part in parts if not part.thought)
    return Message("assistant", text, tool_calls=calls or None, reasoning=reasoning or None)


class _Media(NamedTuple):
    """What there is in a turn besides text."""

    content: UnsupportedContent
    field: str
    """Path of its parts."""

    def seen(
        self, at: int, inline: JsonObject | None, file: JsonObject | None, below: str = ""
    ) -> Part | str:
        """What the model sees or reads of data. ``at``: number of the part; ``below``: the path there. Raises
        ApiError."""
        name, data = ("inlineData", inline) if inline is not None else ("fileData", file or {})
        field = f"{self.field}[{at}]{below}.{name}"
        key = next((each for each in ("mimeType", "mime_type") if data.get(each)), "mimeType")
        kind = str(data.get(key) or ("" if inline is None else "image")).partition("/")[0]
        if kind != "image" or not self.content.sees_images:
            names = {"image": "image", "audio": "recording", "video": "video"}
            return self.content.add(names.get(kind, "document"), field)
        if inline is not None:
            found = image_of(data.get("data"), f"{field}.data", data.get(key) or "", f"{field}.{key}")
            return self.content.see(found)
        url = data.get("fileUri") or data.get("file_uri")
        if not str(url).startswith(("https:", "http:")):
            raise refused(f"{field}.fileUri must be an https: or http: URL.", f"{field}.fileUri", url)
        return self.content.see(image_at(url, f"{field}.fileUri"))


def _user(parts: list[GeminiPart], ids: MissingCallIds, media: _Media) -> list[Message]:
    """Results of functions become messages of their own."""
    messages: list[Message] = []
    said: list[str | Part] = []
    for at, part in enumerate(parts):
        if part.functionResponse is not None:
            messages.append(_result(part.functionResponse, ids, media, at))
        elif part.inlineData is not None or part.fileData is not None:
            said.append(media.seen(at, part.inlineData, part.fileData))
        elif part.text:
            said.append(part.text)
    if said or not messages:
        messages.append(Message("user", joined(said)))
    return messages


def _result(given: GeminiResponse, ids: MissingCallIds, media: _Media, at: int) -> Message:
    value = given.response
    if isinstance(value, dict) and len(value) == 1:
        value = next((value[name] for name in ("output", "result") if name in value), value)
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    shown = [
        media.seen(at, part.get("inlineData"), part.get("fileData"), f".functionResponse.parts[{number}]")
        for number, part in enumerate(given.parts or ())
    ]
    id = ids.of_result(given.id, given.name)
    return Message("tool", joined([text, *shown]), name=given.name, tool_call_id=id)


def convert_tools(tools: list[GeminiTool] | None) -> list[ChatTool] | None:
    """Raises ApiError for tools that a server would have to run."""
    functions: list[ChatTool] = []
    for number, tool in enumerate(tools or ()):
        for name in tool.__struct_fields__[1:]:
            if getattr(tool, name) is not None:
                raise not_served(f"tools[{number}].{name}", "functionDeclarations are served alone")
        for each in tool.functionDeclarations or ():
            schema = each.parametersJsonSchema or json_schema(each.parameters)
            functions.append(
                ChatTool(function=Function(name=each.name, description=each.description, parameters=schema))
            )
    return functions or None


def convert_choice(config: GeminiToolConfig | None) -> str | dict[str, Any] | None:
    """The choice in the spelling of chat completions. Raises ApiError."""
    calling = None if config is None else config.functionCallingConfig
    if calling is None or calling.mode is None:
        return None
    mode, names = _MODES.get(calling.mode.upper()), calling.allowedFunctionNames
    if mode is None:
        field = "toolConfig.functionCallingConfig.mode"
        raise refused(f"{field} must be AUTO, ANY, VALIDATED or NONE.", field, calling.mode)
    if not names or mode == "none":
        return mode
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def json_schema(schema: Any, depth: int = 0) -> Any:
    """A schema in Google's spelling as JSON schema. Raises ApiError."""
    if depth > 100:
        raise ApiError(400, "A schema is nested too deeply: at most 100 levels are allowed.", param="tools")
    if not isinstance(schema, dict):
        return schema
    made = {name: value for name, value in schema.items() if name not in _DROPPED}
    if isinstance(kind := made.get("type"), str):
        made["type"] = [kind.lower(), "null"] if schema.get("nullable") else kind.lower()
    for name in _COUNTS:  # 64-bit numbers are texts in Google's JSON
        if isinstance(made.get(name), str) and made[name].isdigit():
            made[name] = int(made[name])
    if made.get("format") == "enum":
        del made["format"]
    for name in ("items", "additionalProperties"):
        if name in made:
            made[name] = json_schema(made[name], depth + 1)
    for name in ("anyOf", "oneOf", "allOf", "prefixItems"):
        if isinstance(made.get(name), list):
            made[name] = [json_schema(each, depth + 1) for each in made[name]]
    for name in ("properties", "$defs"):
        if isinstance(made.get(name), dict):
            made[name] = {key: json_schema(each, depth + 1) for key, each in made[name].items()}
    return made
