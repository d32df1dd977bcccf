"""The argument parser of a command, built from its options."""

from __future__ import annotations

import argparse
import re
import shlex
import textwrap
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from penstock.cli.command import Command
from penstock.config.errors import ConfigError, did_you_mean
from penstock.config.introspect import Option, options_of
from penstock.config.sources import CONFIG_VARIABLE

if TYPE_CHECKING:  # imported when there is an unknown flag
    from penstock.config.other_servers.review import GivenFlag

HELP_WIDTH = 100
"""Maximum width of ``--help``, in columns."""

_SWALLOWING = ("served_model_name", "api_key")
"""Fields of options with several values none of which is a path."""


class Parser(argparse.ArgumentParser):
    """An argparse parser that raises ConfigError instead of exiting."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message.removeprefix("argument "))


class Formatter(argparse.HelpFormatter):
    """Limits the width of the text on wide terminals."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=32)
        self._width = min(self._width, HELP_WIDTH)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        """Wrap each line; those that begin with spaces stay as they are."""
        lines = text.splitlines()
        return "\n".join(line if line[:1] in ("", " ") else textwrap.fill(line, width) for line in lines)

    def _split_lines(self, text: str, width: int) -> list[str]:
        """Wraps without breaking names of options."""
        return textwrap.wrap(text, width, break_on_hyphens=False)


def build(command: Command[Any], program: str = "penstock") -> Parser:
    """The parser of one command of ``program``.

    Values stay text: :func:`penstock.config.values.convert` reads them.
    """
    options = options_of(command.config)
    words = " ".join((program, *command.name))
    positional = "".join(f" [{option.flag}]" for option in options if option.positional)
    parser = Parser(
        prog=words,
        usage=f"{words}{positional} [options]",
        description=_description(command),
        formatter_class=Formatter,
        allow_abbrev=False,
        add_help=False,
        argument_default=argparse.SUPPRESS,
    )
    groups: dict[str, argparse._ArgumentGroup] = {}
    for option in options:
        if option.group not in groups:
            groups[option.group] = parser.add_argument_group(option.group)
        _add(groups[option.group], option)
    general = parser.add_argument_group("General")
    if options:
        general.add_argument(
            "--config", metavar="FILE", action="append", help=f"YAML file with options. [{CONFIG_VARIABLE}]"
        )
    general.add_argument("-h", "--help", action="help", help="Show this help and exit.")
    return parser


class CommandLine(NamedTuple):
    """The arguments of a command.

    ``arguments``: the text of every flag, by field name; ``file``: the path given with ``--config``;
    ``foreign``: flags of other servers, with ``rest``, the arguments beside them.
    """

    arguments: dict[str, Any]
    file: str | None = None
    foreign: list[GivenFlag] = []  # noqa: RUF012
    rest: list[str] = []  # noqa: RUF012


def _description(command: Command[Any]) -> str:
    """The command's help and its examples, each over what it does."""
    examples = [f"  {line}\n      {text}" for line, text in command.examples]
    return "\n".join([command.help, *(["", "Examples:", *examples] if examples else [])])


def parse(command: Command[Any], argv: list[str], program: str = "penstock") -> CommandLine:
    """Read ``argv``. Flags of other servers are taken apart for commands that expect them.

    Raises ConfigError for an unknown flag and a missing or unexpected value. ``--help`` prints the help and
    raises SystemExit(0).
    """
    options = options_of(command.config)
    argv, foreign = _cut_foreign(argv, options) if command.replaces_servers else (argv, [])
    own, behind = _cut(argv, options)
    parser = build(command, program)
    namespace, rest = parser.parse_known_args(_with_dashes(own, options))
    if rest:
        raise _unknown(rest, options, command.replaces_servers)
    arguments = vars(namespace)
    if command.replaces_servers:
        _check_model(arguments, options, argv, program)
    files = arguments.pop("config", [None])
    if len(files) > 1:
        raise ConfigError("--config is given twice")
    switches = {name: str(value).lower() for name, value in arguments.items() if isinstance(value, bool)}
    return CommandLine(arguments | switches | behind, files[0], foreign, argv)


def _check_model(
    arguments: dict[str, Any], options: tuple[Option, ...], argv: list[str], program: str
) -> None:
    """Raises ConfigError where an option with several values has swallowed MODEL, as the last one looks."""
    if any(option.field in arguments for option in options if option.positional):
        return
    for option in options:
        values = arguments.get(option.field)
        if option.field not in _SWALLOWING or not values or len(values) < 2:
            continue
        model = values[-1]
        if re.fullmatch(r"\.{0,2}/.*|~/.*|[\w.-]+/[\w.-]+", model):
            from penstock.config.other_servers.review import without_secrets

            before = argv[: len(argv) - argv[::-1].index(model) - 1]
            line = [model, *without_secrets([*before, *argv[len(before) + 1 :]], options)]
            raise ConfigError(
                f"{option.flag} takes all values after it, {model} too; the model comes first\n"
                f"Write: {program} serve {shlex.join(line)}"
            )


def flags_of(options: tuple[Option, ...]) -> set[str]:
    """Every flag of these options, with those that all commands have."""
    flags = {"--config", "--help", "-h"}
    for option in options:
        flags |= {option.flag, option.short or option.flag}
        if option.is_switch or option.is_tristate:
            flags.add(f"--no-{option.name}")
    return flags


def _cut_foreign(argv: list[str], options: tuple[Option, ...]) -> tuple[list[str], list[GivenFlag]]:
    own = flags_of(options)
    names = {token.partition("=")[0].replace("_", "-") for token in argv if token.startswith("-")}
    if names <= own:
        from penstock.config.other_servers.vllm_values import OF_THE_ENGINE, OF_THE_SERVER

        if names.isdisjoint(OF_THE_ENGINE.keys() | OF_THE_SERVER.keys()):
            return argv, []
    from penstock.config.other_servers.review import cut

    return cut(argv, own, options)


def _add(group: argparse._ArgumentGroup, option: Option) -> None:
    text = help_text(option).replace("%", "%%")
    if option.positional:
        group.add_argument(option.field, nargs="?", metavar=option.metavar, help=text)
        return
    flags = [option.short, option.flag] if option.short else [option.flag]
    if option.is_switch:
        group.add_argument(*flags, action=argparse.BooleanOptionalAction, help=text)
        return
    if option.is_tristate:
        group.add_argument(*flags, nargs="?", const="on", metavar=option.metavar, help=text)
        group.add_argument(
            f"--no-{option.name}",
            dest=option.field,
            action="store_const",
            const="off",
            help=argparse.SUPPRESS,
        )
        return
    if option.many:
        group.add_argument(*flags, nargs="+", action="extend", metavar=option.metavar, help=text)
        return
    group.add_argument(*flags, metavar=option.metavar, help=text)


def help_text(option: Option) -> str:
    """The description, with choices that the placeholder does not show, default, bounds and variable in
    brackets."""
    facts = [f"default: {option.default_text}"] if option.default_text else []
    facts += [one.range for one in option.alternatives if one.range]
    choices = [choice for one in option.alternatives for choice in one.choices]
    if choices and choices[0] not in option.metavar:
        facts.insert(0, f"one of {', '.join(choices)}")
    return f"{option.description} [{'; '.join([*facts, option.variable])}]"


def _cut(argv: list[str], options: tuple[Option, ...]) -> tuple[list[str], dict[str, list[str]]]:
    """``argv`` up to ``--``, and the flags after it by the name of the field that takes them (``rest=True``).

    Without such a field, or when no flag follows ``--``, ``argv`` stays as it is.
    """
    takers = [option for option in options if option.rest]
    end = argv.index("--") if "--" in argv else len(argv)
    if not takers or not "".join(argv[end + 1 : end + 2]).startswith("-"):
        return argv, {}
    if any(token.partition("=")[0].replace("_", "-") == takers[0].flag for token in argv[:end]):
        raise ConfigError(f"{takers[0].flag} is given twice, once as what follows --")
    return argv[:end], {takers[0].field: argv[end + 1 :]}


def _with_dashes(argv: list[str], options: tuple[Option, ...]) -> list[str]:
    """``argv`` with dashes in the names of flags (``--max_num_seqs``); unchanged after ``--``."""
    switches = {option.flag for option in options if option.is_switch}
    end = argv.index("--") if "--" in argv else len(argv)
    result = []
    for token in argv[:end]:
        name, equals, value = token.partition("=")
        if name.startswith("--"):
            name = name.replace("_", "-")
            if equals and name.replace("--no-", "--", 1) in switches:
                plain = name.replace("--no-", "--", 1)
                raise ConfigError(
                    f"{plain} takes no value, write {plain} or {plain.replace('--', '--no-', 1)}"
                )
            token = name + equals + value
        result.append(token)
    return result + argv[end:]


def _unknown(rest: list[str], options: tuple[Option, ...], replaces_servers: bool) -> ConfigError:
    """The error for unparsed arguments: about the first flag, if there is one, as values may belong to it."""
    flags = [token for token in rest if token.startswith("-")]
    if not flags:
        return ConfigError(f"unexpected argument {rest[0]!r}")
    flag = flags[0].partition("=")[0]
    for option in options:
        if option.positional and flag == f"--{option.name}":
            return ConfigError(f"unknown option {flag}; write {option.flag} without a flag")
    names = sorted(name for name in flags_of(options) if name.startswith("--"))
    hint = did_you_mean(flag, names)
    if not hint and replaces_servers:
        from penstock.config.other_servers import lookup

        hint = did_you_mean(flag, lookup.names())
    return ConfigError(f"unknown option {flag}{hint}")
