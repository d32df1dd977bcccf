"""The ``penstock`` command line. Only the module of the requested command is imported."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

from penstock import __version__
from penstock.cli import early_signals, parser
from penstock.cli.command import Command
from penstock.config.errors import ConfigError, NeedsVllm, Problems, did_you_mean
from penstock.config.introspect import Option, options_of
from penstock.config.origins import Origins
from penstock.config.sources import OtherServers, resolve
from penstock.config.watched_file import TextFiles
from penstock.exit_codes import EXIT_USAGE


class CommandEntry(NamedTuple):
    """A command whose module is not imported yet. One without ``help`` is not listed."""

    name: tuple[str, ...]
    module: str
    help: str
    attribute: str = "COMMAND"


CLIENT_KEYS = "penstock.cli.client_keys"
COMMANDS = (
    CommandEntry(("serve",), "penstock.cli.serve", "Serve a model over the OpenAI HTTP API."),
    CommandEntry(("gateway",), "penstock.cli.gateway", "Route requests to OpenAI-compatible model servers."),
    CommandEntry(("complete",), "penstock.cli.complete", "Continue a text with a served model."),
    CommandEntry(("chat",), "penstock.cli.chat", "Chat with a served model."),
    CommandEntry(("status",), "penstock.cli.status", "Show the load of a gateway or a Penstock server."),
    CommandEntry(("size",), "penstock.cli.size", "Say how many processes and how much memory a load needs."),
    CommandEntry(("route",), "penstock.cli.route", "Say where a gateway would send a request, and why."),
    CommandEntry(
        ("drain",), "penstock.cli.drain", "Keep new requests from an endpoint of a gateway.", "DRAIN"
    ),
    CommandEntry(
        ("undrain",), "penstock.cli.drain", "Let an endpoint of a gateway get requests again.", "UNDRAIN"
    ),
    CommandEntry(("keys", "list"), CLIENT_KEYS, "List the keys of the gateway's clients.", "LIST"),
    CommandEntry(("keys", "show"), CLIENT_KEYS, "Show what a client of the gateway may do.", "SHOW"),
    CommandEntry(("keys", "add"), CLIENT_KEYS, "Add a client of the gateway, and print its key.", "ADD"),
    CommandEntry(("keys", "rotate"), CLIENT_KEYS, "Replace the key of a client of the gateway.", "ROTATE"),
    CommandEntry(("keys", "expire"), CLIENT_KEYS, "Set when the keys of a client expire.", "EXPIRE"),
    CommandEntry(("keys", "revoke"), CLIENT_KEYS, "Refuse a client of the gateway.", "REVOKE"),
    CommandEntry(
        ("keys", "check"), CLIENT_KEYS, "Tell who a key or token is, or why it is refused.", "CHECK"
    ),
    CommandEntry(
        ("keys", "cluster"), CLIENT_KEYS, "Make the key file that the hosts of one server share.", "CLUSTER"
    ),
    CommandEntry(("bench", "host"), "penstock.cli.bench", "Measure the CPU time of API servers.", "HOST"),
    CommandEntry(
        ("bench", "engine"), "penstock.cli.bench", "Measure the CPU time of an engine's steps.", "ENGINE"
    ),
    CommandEntry(
        ("bench", "adapters"),
        "penstock.cli.bench",
        "Measure the time of an engine's steps with LoRA adapters.",
        "ADAPTERS",
    ),
    CommandEntry(
        ("bench", "speculation"),
        "penstock.cli.bench",
        "Measure the output of an engine with speculative decoding.",
        "SPECULATION",
    ),
    CommandEntry(
        ("bench", "session"),
        "penstock.cli.bench",
        "Measure the CPU time of a turn of a long conversation.",
        "SESSION",
    ),
    CommandEntry(
        ("bench", "columns"),
        "penstock.cli.bench",
        "Measure the CPU time of a reply as columns, and as JSON.",
        "COLUMNS",
    ),
    CommandEntry(
        ("bench", "embed"),
        "penstock.cli.bench",
        "Measure the CPU time of requests for vectors.",
        "EMBED",
    ),
    CommandEntry(
        ("bench", "images"),
        "penstock.cli.bench",
        "Measure what pictures cost, and whom they delay.",
        "IMAGES",
    ),
    CommandEntry(("bench", "start"), "penstock.cli.bench", "Measure what a server's start costs.", "START"),
    CommandEntry(
        ("bench", "gateway"), "penstock.cli.bench", "Measure the CPU time of the gateway.", "GATEWAY"
    ),
    CommandEntry(
        ("bench", "routing"),
        "penstock.cli.bench",
        "Simulate a fleet, to compare ways of choosing its servers.",
        "ROUTING",
    ),
    CommandEntry(("version",), "penstock.cli.version", "Print versions of Penstock and its libraries."),
    CommandEntry(("docs-options",), "penstock.cli.docs_options", ""),
)

EXIT_FAILURE = 1
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as a shell reports it


def main(argv: list[str] | None = None) -> int:
    """Run ``penstock`` with these arguments (default: those of the process) and return its exit code."""
    is_program = argv is None
    argv = sys.argv[1:] if argv is None else argv
    try:
        code = _run(argv)
        sys.stdout.flush()
        if is_program and argv[:1] in (["serve"], ["gateway"]):
            sys.stderr.flush()
            os._exit(code)  # to free the imports of a server takes the interpreter 0.05 s of CPU time
        return code
    except ConfigError as error:
        print(f"penstock: error: {error}", file=sys.stderr)
        return EXIT_USAGE
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of the output is gone. Standard output must not be flushed into the pipe again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILURE


def load(entry: CommandEntry) -> Command[Any]:
    """Import a command."""
    command = getattr(importlib.import_module(entry.module), entry.attribute)
    assert isinstance(command, Command)
    return command


def all_options() -> Iterator[Option]:
    """The options of all commands; imports all their modules."""
    for entry in COMMANDS:
        yield from options_of(load(entry).config)


def _run(argv: list[str]) -> int:
    if argv[:1] == ["--version"]:
        print(f"penstock {__version__}")
        return 0
    entry = _find(argv)
    if entry is None:
        return _help(argv)
    command = load(entry)
    words = " ".join(("penstock", *entry.name))
    try:
        line = parser.parse(command, argv[len(entry.name) :])
    except ConfigError as error:
        raise ConfigError(f"{error}\nSee {words} --help.") from None
    except SystemExit:  # --help
        return 0

    files = TextFiles()

    def read(problems: Problems | None = None) -> tuple[Any, Origins]:
        resolved = resolve(
            command.config,
            line.arguments,
            os.environ,
            file=line.file,
            files=files,
            other_options=all_options,
            other_servers=OtherServers(line.foreign, line.rest, words) if command.replaces_servers else None,
            problems=problems,
        )
        for remark in resolved.remarks:
            print(f"penstock: {remark}", file=sys.stderr)
        files.started = True
        return resolved.config, resolved.origins

    problems = None if command.check is None else Problems()
    config, origins = read(problems)
    if command.check is not None and problems is not None:
        if config.check != "off":
            early_signals.restore()
            return command.check(config, origins, problems.found)
        problems.raise_all()
    if not command.handles_signals:
        early_signals.restore()
    try:
        return command.run(config, origins, read) if command.rereads_options else command.run(config, origins)
    except NeedsVllm as error:
        from penstock.cli.vllm_line import advice

        raise ConfigError(
            f"{error}\n{advice(error, line.foreign, line.rest, words, command.config)}"
        ) from None


def _find(argv: list[str]) -> CommandEntry | None:
    return next((entry for entry in COMMANDS if tuple(argv[: len(entry.name)]) == entry.name), None)


def _help(argv: list[str]) -> int:
    """Print the list of commands: all, or those of a group such as ``bench``."""
    words = [word for word in argv if word not in ("-h", "--help")]
    group = tuple(words[:1]) if _is_group(tuple(words[:1])) else ()
    entries = [entry for entry in COMMANDS if entry.help and entry.name[: len(group)] == group]
    path = " ".join(("penstock", *group))
    for word in words[len(group) :]:
        kind = "option" if word.startswith("-") else "command"
        names = [entry.name[len(group)] for entry in entries]
        hint = did_you_mean(word, [*names, "--help", "--version"])
        raise ConfigError(f"unknown {kind} {word}{hint}\nSee {path} --help.")
    asked = len(words) < len(argv)
    print(_overview(group, entries), file=sys.stdout if asked else sys.stderr)
    return 0 if asked else EXIT_USAGE


def _is_group(words: tuple[str, ...]) -> bool:
    return any(len(entry.name) > len(words) > 0 and entry.name[: len(words)] == words for entry in COMMANDS)


def _overview(group: tuple[str, ...], entries: list[CommandEntry]) -> str:
    names = [" ".join(entry.name) for entry in entries]
    width = max(map(len, names))
    path = " ".join(("penstock", *group))
    lines = [f"usage: {path} COMMAND [options]", "", "Commands:"]
    lines += [f"  {name:{width}}  {entry.help}" for name, entry in zip(names, entries, strict=True)]
    lines += ["", f"{path} COMMAND --help shows the options of a command."]
    if not group:
        lines += ["penstock --version prints the version."]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
