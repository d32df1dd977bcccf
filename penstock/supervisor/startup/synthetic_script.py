"""Reads --synthetic-script and spells its replies in the model's format."""

from __future__ import annotations

import msgspec

from penstock.config.errors import ConfigError
from penstock.config.script_rules import MAX_SCRIPT_BYTES, ScriptRule
from penstock.config.serve import ServeConfig
from penstock.supervisor.startup.model_resolution import ResolvedModel
from penstock.wire.scripted import ScriptedRule


def rendered_script(config: ServeConfig, model: ResolvedModel) -> list[ScriptedRule] | None:
    """The rules; None without a script. Raises ConfigError."""
    path = config.synthetic_script
    if path is None:
        return None
    from penstock.config.synthetic_script import read_script
    from penstock.generation.model_info import model_type
    from penstock.generation.parsers.registry import output_format
    from penstock.generation.prompt.chat_template import ChatTemplate
    from penstock.generation.prompt.rendered_reply import CannotRender, ReplyRenderer

    script = read_script(path)
    try:
        template = ChatTemplate.load(model.tokenizer_dir, config.chat_template)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    source = "" if template is None else template.source
    format = output_format(
        config.tool_call_parser, config.reasoning_parser, source, model_type(model.model_dir)
    )
    renderer = ReplyRenderer(template, format)

    def spell(rule: ScriptRule) -> tuple[list[str], list[str]]:
        reply = rule.reply
        if reply.output is not None:
            return [reply.output], []
        calls = [(call.name, call.arguments) for call in reply.calls]
        said = reply.text, reply.reasoning, calls
        return renderer.outputs(*said), renderer.forced_outputs(*said)

    rules = []
    for number, rule in enumerate(script.rules):
        try:
            outputs, forced = spell(rule)
        except CannotRender as error:
            raise ConfigError(f"--synthetic-script {path}: rules[{number}].reply: {error}") from None
        rules.append(
            ScriptedRule(
                match=rule.match,
                times=rule.times,
                outputs=outputs,
                forced=forced,
                verbatim=rule.reply.output is not None,
                pace=rule.pace,
                end=rule.end,
                after_tokens=rule.after_tokens,
                end_times=rule.end_times,
            )
        )
    if len(msgspec.json.encode(rules)) > MAX_SCRIPT_BYTES:
        raise ConfigError(f"--synthetic-script {path}: its replies are longer than {MAX_SCRIPT_BYTES} bytes")
    return rules
