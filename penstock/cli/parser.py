"""The argument parser of a command, built from its options."""

from __future__ import annotations

import argparse
import textwrap
from typing import Any, NoReturn

from penstock.cli.command import Command
from penstock.config.errors import ConfigError, did_you_mean
from penstock.config.introspect import Option, options_of
from penstock.config.sources import CONFIG_VARIABLE

HELP_WIDTH = 100
"""Maximum width of ``--help``, in columns."""


class Parser(argparse.ArgumentParser):
    """An argparse parser that raises ConfigError instead of exiting."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message.removeprefix("argument "))


class Formatter(argparse.HelpFormatter):
    """Limits the width of the text on wide terminals."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=32)
        self._width = min(self._width, HELP_WIDTH)

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
        description=command.help,
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


def parse(
    command: Command[Any], argv: list[str], program: str = "penstock"
) -> tuple[dict[str, Any], str | None]:
    """The text of every flag in ``argv``, by field name, and the path given with ``--config``.

    Raises ConfigError for an unknown flag and a missing or unexpected value. ``--help`` prints the help and
    raises SystemExit(0).
    """
    options = options_of(command.config)
    argv, behind = _cut(argv, options)
    parser = build(command, program)
    namespace, rest = parser.parse_known_args(_with_dashes(argv, options))
    if rest:
        raise _unknown(rest, options)
    arguments = vars(namespace)
    files = arguments.pop("config", [None])
    if len(files) > 1:
        raise ConfigError("--config is given twice")
    switches = {name: str(value).lower() for name, value in arguments.items() if isinstance(value, bool)}
    return arguments | switches | behind, files[0]


def _add(group: argparse._ArgumentGroup, option: Option) -> None:
    text = help_text(option).replace("%", "%%")
    if option.positional:
        group.add_argument(option.field, nargs="?", metavar=option.metavar, help=text)
        return
    flags = [option.short, option.flag] if option.short else [option.flag]
    if option.is_switch:
        group.add_argument(*flags, action=argparse.BooleanOptionalAction, help=text)
        return
    if option.many:
        group.add_argument(*flags, nargs="+", action="extend", metavar=option.metavar, help=text)
        return
    group.add_argument(*flags, metavar=option.metavar, help=text)


def help_text(option: Option) -> str:
    """The description, with default, bounds and variable in brackets."""
    facts = [f"default: {option.default_text}"] if option.default_text else []
    facts += [one.range for one in option.alternatives if one.range]
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


def _unknown(rest: list[str], options: tuple[Option, ...]) -> ConfigError:
    """The error for unparsed arguments: about the first flag, if there is one, as values may belong to it."""
    flags = [token for token in rest if token.startswith("-")]
    if not flags:
        return ConfigError(f"unexpected argument {rest[0]!r}")
    flag = flags[0].partition("=")[0]
    for option in options:
        if option.positional and flag == f"--{option.name}":
            return ConfigError(f"unknown option {flag}; write {option.flag} without a flag")
    names = [option.flag for option in options if not option.positional]
    names += [f"--no-{option.name}" for option in options if option.is_switch]
    return ConfigError(f"unknown option {flag}{did_you_mean(flag, [*names, '--config', '--help'])}")
