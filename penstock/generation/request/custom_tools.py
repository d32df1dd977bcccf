"""Custom tools: to the model they are functions with one parameter, a text that may be under a grammar."""

from __future__ import annotations

from typing import Any

from penstock.generation.grammars.call_grammar import InputGrammar
from penstock.generation.grammars.lark_in_json import MAX_GRAMMAR
from penstock.generation.parsers.custom_input import CUSTOM_INPUT
from penstock.generation.request.schemas import Function
from penstock.http.errors import ApiError, refused

SYNTAXES = {"lark": "Lark grammar", "regex": "regular expression"}


def custom_function(name: str, description: str | None, input: InputGrammar) -> Function:
    """The function as which the model sees a custom tool."""
    about = "The tool's input, as free text."
    if input.syntax in SYNTAXES:
        about = f"The tool's input. It must match this {SYNTAXES[input.syntax]}:\n{input.definition}"
    parameters = {
        "type": "object",
        "properties": {CUSTOM_INPUT: {"type": "string", "description": about}},
        "required": [CUSTOM_INPUT],
        "additionalProperties": False,
    }
    return Function(name=name, description=description, parameters=parameters)


def parse_input_format(format: Any, field: str) -> InputGrammar:
    """What a custom tool's ``format`` says, whose path in the request is ``field``: OpenAI's chat completions
    have the grammar in a field ``grammar``, responses do not. Raises ApiError."""
    if format is None:
        return InputGrammar("text")
    kind = format.get("type") if isinstance(format, dict) else None
    if kind == "text":
        return InputGrammar("text")
    if kind != "grammar":
        raise refused(f"{field}.type must be text or grammar.", f"{field}.type", kind)
    if "grammar" in format:
        field, format = f"{field}.grammar", format["grammar"]
    syntax = format.get("syntax") if isinstance(format, dict) else None
    if not isinstance(syntax, str) or syntax not in SYNTAXES:
        raise refused(f"{field}.syntax must be lark or regex.", f"{field}.syntax", syntax)
    definition, field = format.get("definition"), f"{field}.definition"
    if not isinstance(definition, str) or not definition.strip():
        raise ApiError(400, f"{field} is missing.", param=field)
    if len(definition) > MAX_GRAMMAR:
        message = f"{field} has {len(definition)} characters, at most {MAX_GRAMMAR} are allowed."
        raise ApiError(400, message, param=field)
    return InputGrammar(syntax, definition)
