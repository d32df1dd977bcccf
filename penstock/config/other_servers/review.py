"""Flags of other servers among the operator's options: notes on those without effect, an error for others."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Collection, Iterable, Sequence

import msgspec

from penstock.config.errors import ConfigError
from penstock.config.hidden import HIDDEN
from penstock.config.introspect import Option
from penstock.config.origins import Origin
from penstock.config.other_servers.known_flag import (
    Advice,
    EngineFlag,
    IgnoredFlag,
    KnownFlag,
    MappedFlag,
    Unsupported,
)
from penstock.config.other_servers.lookup import Spelling, find, find_abbreviated
from penstock.config.other_servers.vllm_values import OF_THE_SERVER, is_vllms, translated
from penstock.config.rules.serve_rules import NOT_OF_VLLM
from penstock.config.values import LONGEST_SHOWN, MULTIPLIERS, convert, parse_number

SECRET = frozenset({"--hf-api-token", "--hf-token"})
"""Flags of other servers whose values no message shows."""


_NUMBER = re.compile(r"-[0-9.]+")
"""A value that begins as a flag does."""

_COORDINATOR = {"--data-parallel-address": "127.0.0.1", "--data-parallel-rpc-port": "29550"}
"""The two flags that make up --coordinator, with vLLM's defaults."""
_PLUGINS = {
    "--tool-parser-plugin": "--tool-call-parser",
    "--tool-call-parser-plugin": "--tool-call-parser",
    "--reasoning-parser-plugin": "--reasoning-parser",
}
"""Flags of vLLM's that bring values of other options."""
_EXPERTS = "--enable-expert-parallel"
_OWN_ENGINES = {"engine", "draft_model", "speculative_method", "speculative_tokens", *NOT_OF_VLLM}
"""Fields of options that a line for vLLM's engine does not keep."""
_NOT_ATTACHED = {
    "enable_expert_parallel",
    "headless",
    "coordinator",
    "cluster_key_file",
    "data_parallel_start_rank",
    "data_parallel_backend",
    "vllm_command",
}
"""Fields that a line for attached engines does not keep either."""


class GivenFlag(msgspec.Struct, frozen=True):
    """A flag of another server with its values. ``written``: its first token, without a value. ``shared``: a
    flag of Penstock's as well, with a value that is vLLM's alone."""

    origin: Origin
    written: str
    flag: KnownFlag
    negated: bool = False
    values: tuple[str, ...] = ()
    shared: bool = False

    def __str__(self) -> str:
        """As messages show it: ``--dtype half``, ``serve.yaml:3: dtype half``."""
        values = " ".join(self.values)
        shown = HIDDEN if values and self.flag.name in SECRET else values
        shown = shown if len(shown) <= LONGEST_SHOWN else shown[:LONGEST_SHOWN] + "…"
        return f"{self.origin} {shown}".rstrip()

    @property
    def tokens(self) -> list[str]:
        """As on a command line."""
        return [self.written, *([HIDDEN] if self.values and self.flag.name in SECRET else self.values)]

    @property
    def is_default(self) -> bool:
        """Whether the flag asks for the other server's default."""
        default = self.flag.default
        if default is None:
            return False
        if self.flag.values == "0":
            return self.negated != default
        return len(self.values) == 1 and self.values[0] == str(default)


def cut(
    argv: Sequence[str], own: Collection[str], options: Iterable[Option]
) -> tuple[list[str], list[GivenFlag]]:
    """``argv`` without flags of other servers, and these; ``own`` are Penstock's flags, of ``options``. A
    flag takes the tokens after it that are no flags, as many as it has values; nothing after ``--`` is
    touched. Raises ConfigError for a missing value."""
    by_flag = {option.flag: option for option in options}
    kept: list[str] = []
    given: list[GivenFlag] = []
    end = argv.index("--") if "--" in argv else len(argv)
    names = {token.partition("=")[0].replace("_", "-") for token in argv[:end]}
    if "--omni" in names:
        raise ConfigError(
            "--omni: models that make images, sound or video are for vLLM-Omni's own server; Penstock serves "
            "text, and vectors of text"
        )
    plugins = {flag for plugin, flag in _PLUGINS.items() if plugin in names}
    at = 0
    while at < end:
        token, at = argv[at], at + 1
        name = token.partition("=")[0].replace("_", "-")
        shared = token.startswith("-") and name in own
        spelling = find(token) if token.startswith("-") else None
        if spelling is None and (spelling := find_abbreviated(token, own)) is not None:
            token = spelling.flag.name
        if spelling is None or (shared and name not in by_flag):
            kept.append(token)
            continue
        first = at
        most = {"0": 0, "1": 1, "?": 1}.get(spelling.flag.values, end)
        if spelling.value is None and not spelling.negated:
            while at < end and at - first < most and (argv[at][:1] != "-" or _NUMBER.fullmatch(argv[at])):
                at += 1
        values = argv[first:at] if spelling.value is None else [spelling.value]
        if shared and not _is_vllms_alone(by_flag[name], values, any_value=name in plugins):
            kept.append(token)
            at = first
            continue
        given.append(_given(token, spelling, argv[first:at], shared=shared))
    return _move_experts(kept, given) + list(argv[end:]), given


def _is_vllms_alone(option: Option, values: Sequence[str], *, any_value: bool = False) -> bool:
    """Whether the value of an option is one of vLLM's that Penstock does not have; with ``any_value``, any
    that it does not take."""
    if (
        len(values) != 1
        or not (any_value or is_vllms(option.flag, values[0]))
        or translated(option.flag, values[0])
    ):
        return False
    try:
        convert(option, Origin("command line", option.flag), values[0])
    except ConfigError:
        return True
    return False


def _move_experts(kept: list[str], given: list[GivenFlag]) -> list[str]:
    """``kept`` without --enable-expert-parallel where it is vLLM's: beside its flags, for one engine, which
    splits the experts over its devices."""
    names = [token.partition("=")[0].replace("_", "-") for token in kept]
    alone = not {"--data-parallel-size", "--config"}.intersection(names) and all(
        each.flag.name != "--data-parallel-size" for each in given
    )
    given[:] = [
        msgspec.structs.replace(each, shared=alone) if each.flag.name == _EXPERTS else each for each in given
    ]
    if not (alone and given and _EXPERTS in names):
        return kept
    token = kept[names.index(_EXPERTS)]
    spelling = find(token)
    assert spelling is not None
    given.append(_given(token, spelling, (), shared=True))
    return [each for each, name in zip(kept, names, strict=True) if name != _EXPERTS]


def _given(token: str, spelling: Spelling, values: Sequence[str], *, shared: bool) -> GivenFlag:
    written = token.partition("=")[0]
    if spelling.value is not None:
        values = [spelling.value]
        written = "-O" if written.startswith("-O") and "." not in written else written
    origin = Origin("command line", written)
    if spelling.flag.values == "1" and not values:
        raise ConfigError(f"{written}: expected one argument")
    return GivenFlag(origin, written, spelling.flag, spelling.negated, tuple(values), shared)


def from_file(
    key: str, origin: Origin, value: str | list[str] | None, option: Option | None = None
) -> GivenFlag | None:
    """The flag of another server that a key of an option file names; None if there is none. ``option``:
    Penstock's of that name."""
    spelling = find(f"--{key}")
    if spelling is None or (option and not (isinstance(value, str) and _is_vllms_alone(option, [value]))):
        return None
    negated = spelling.negated
    values = tuple(value) if isinstance(value, list) else () if value is None else (value,)
    if spelling.flag.values == "0":
        if value in ("false", "False", "FALSE", "no", "off"):
            negated = not negated
        values = ()
    name = key.removeprefix("no-") if spelling.negated else key
    written = f"--no-{name}" if negated else f"--{name}"
    return GivenFlag(origin, written, spelling.flag, negated, values, option is not None)


class Review:
    """What becomes of the flags of other servers that are ``given``, with this ``engine``."""

    def __init__(
        self, given: Iterable[GivenFlag], engine: str, own: Collection[str], *, attached: bool = False
    ) -> None:
        """``own``: Penstock's flags; ``attached``: --attach is among the options."""
        self._attached = attached
        self.notes: list[str] = []
        self.problems: list[str] = []
        self._engine = engine
        self._own = own
        self._renamed: list[str] = []
        self._model: list[str] = []
        self._coordinator: dict[str, str] = {}
        self._moves = False
        self._leaves_out = False
        self._of_nodes = False
        """Whether one engine is spread over hosts."""
        # What vLLM's engine takes, on the command line and in files; of use if one of them must move there.
        self._behind: list[str] = []
        self._keys: list[str] = []
        for each in given:
            self._judge(each)

    def error(self, program: str, argv: Sequence[str], options: Sequence[Option]) -> ConfigError:
        """The error for all problems, with the command line that avoids them. ``argv`` are the other
        arguments, ``options`` Penstock's; secrets are hidden."""
        names = {_name(token) for token in argv}
        nodes = "--headless" in names and self._of_nodes
        if nodes:
            self.problems = [
                "--headless with --node-rank: vllm serve runs the further nodes of an engine, as it is here"
            ]
        elif self._shares_experts(names):
            self.problems.append(
                f"{_EXPERTS}: engines of vLLM's that share experts are those of --attach: vllm serve "
                "--headless runs them, with the command that --print-engine-command prints"
            )
        text = self.problems[0]
        if len(self.problems) > 1:
            text = f"{len(self.problems)} flags of other servers:\n" + "\n".join(
                f"  {each}" for each in self.problems
            )
        if self._moves and self._keys:
            text += "\nIn the file:" + ("\n  engine: vllm" if self._engine != "vllm" else "")
            text += f"\n  engine-args: {json.dumps(self._keys)}"
        moves = self._moves and bool(self._behind)
        if (self._renamed or self._coordinator or self._model or moves or self._leaves_out) and not nodes:
            text += f"\nWrite: {self._corrected(program, argv, options)}"
        return ConfigError(text)

    def line_for_vllm(
        self, program: str, argv: Sequence[str], options: Sequence[Option], behind: Iterable[str]
    ) -> str:
        """The command line ``argv`` for vLLM's engine, with its flags that were given, and ``behind``."""
        self._moves = True
        self._behind += behind
        return self._corrected(program, argv, options)

    def _shares_experts(self, names: Collection[str]) -> bool:
        """Whether engines of vLLM's are to share experts, which those that are started here do not."""
        return _EXPERTS in names and not self._attached and (self._moves or bool(self._coordinator))

    def _corrected(self, program: str, argv: Sequence[str], options: Sequence[Option]) -> str:
        argv = without_secrets(argv, options)
        end = argv.index("--") if "--" in argv else len(argv)
        before, behind = argv[:end], argv[end + 1 :]
        host, port = (self._coordinator.get(name, default) for name, default in _COORDINATOR.items())
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        attaches = self._shares_experts({_name(token) for token in before})
        if attaches:
            before = [*_without(before, options, _OWN_ENGINES | _NOT_ATTACHED), "--attach", address]
            behind = [*behind, *self._behind, _EXPERTS]
        elif self._moves:
            behind = [*behind, *self._behind]
            if self._engine != "vllm":
                before = [*_without(before, options, _OWN_ENGINES), "--engine", "vllm"]
        line = [*program.split(), *self._model, *before, *self._renamed]
        if self._coordinator and not attaches:
            line += ["--coordinator", f"tcp://{address}"]
            if not any(_name(token) == "--cluster-key-file" for token in before):
                line += ["--cluster-key-file", "FILE"]
        return shlex.join([*line, *(["--", *behind] if behind else [])])

    def _judge(self, each: GivenFlag) -> None:
        flag = each.flag
        self._of_nodes = self._of_nodes or flag.name == "--node-rank"
        advice = MappedFlag(flag.name) if flag.name in self._own and not each.shared else flag.advice
        granted = advice.granted if isinstance(advice, (MappedFlag, Unsupported)) else ()
        unneeded = isinstance(advice, IgnoredFlag) and not (each.negated and flag.default is None)
        if granted and {*each.values} <= {*granted}:
            self.notes.append(f"note: {each} has no effect: it asks for what is done without it")
        elif isinstance(advice, MappedFlag):
            self._rename(each, advice)
        elif each.shared and flag.name in OF_THE_SERVER:
            self._leave_out(each, f": {OF_THE_SERVER[flag.name][1]}")
        elif isinstance(advice, EngineFlag) and not each.is_default:
            self._move(each, advice)
        elif each.is_default:
            self.notes.append(f"note: {each} has no effect: it is {flag.server}'s default")
        elif isinstance(advice, Unsupported) and advice.with_any_engine:
            self._leave_out(each, _reason(advice))
        elif flag.engine:
            (self._keys if each.origin.source == "file" else self._behind).extend(each.tokens)
            self._judge_engine_flag(each, advice, unneeded)
        elif unneeded:
            self.notes.append(f"note: {each} has no effect: {_why(advice)}")
        else:
            self._leave_out(each, _reason(advice))

    def _leave_out(self, each: GivenFlag, reason: str) -> None:
        self._leaves_out = self._leaves_out or each.origin.source != "file"
        self.problems.append(f"{each}: {each.flag.server}'s, not supported{reason}")

    def _rename(self, each: GivenFlag, here: MappedFlag) -> None:
        if self._attached and each.flag.name in _COORDINATOR:
            self.problems.append(f"{each}: it is part of --attach HOST:PORT here, leave it out")
            return
        self.problems.append(f"{each}: it is {here.flag} here" + (f", {here.note}" if here.note else ""))
        if each.origin.source == "file":
            return
        if here.flag == "MODEL":
            self._model = list(each.values)
        elif each.flag.name in _COORDINATOR:
            self._coordinator[each.flag.name] = each.values[0]
        elif here.unit:
            size = _in_bytes(each.values[0], here.unit)
            self._renamed += [] if size == "0" else [here.flag, size]
        else:
            self._renamed += [*here.flag.split(), *(() if here.alone else each.values)]

    def _move(self, each: GivenFlag, there: EngineFlag) -> None:
        tokens = [there.flag] if there.alone else [there.flag, *each.values]
        (self._keys if each.origin.source == "file" else self._behind).extend(tokens)
        self._moves = True
        with_engine = "" if self._engine == "vllm" else " with --engine vllm"
        self.problems.append(f"{each}: it is {there.flag} of vLLM's engine, behind --{with_engine}")

    def _judge_engine_flag(self, each: GivenFlag, advice: Advice | None, unneeded: bool) -> None:
        if unneeded and self._engine != "vllm":
            self.notes.append(f"note: {each} has no effect: {_why(advice)}")
            return
        self._moves = True
        problem = f"{each}: an option of vLLM's engine, it goes behind --"
        if self._engine != "vllm":
            lacks = "does not take this value" if each.shared and each.values else "has none like it"
            problem += f" with --engine vllm; the {self._engine} engine {lacks}{_reason(advice)}"
        self.problems.append(problem)


def _in_bytes(number: str, unit: str) -> str:
    """``4`` and ``Gi`` are ``4Gi``; bytes if that is no whole number of them. What is no number stays."""
    try:
        size = round(parse_number(number) * MULTIPLIERS[unit])
    except ValueError:
        return number
    return number + unit if size and number.isdigit() else str(size)


def _name(token: str) -> str:
    """The flag of a token, with dashes."""
    return token.partition("=")[0].replace("_", "-")


def _without(argv: Sequence[str], options: Iterable[Option], fields: Collection[str]) -> list[str]:
    """``argv`` without the options of these fields."""
    values = {option.flag: 0 if option.is_switch else 1 for option in options if option.field in fields}
    kept: list[str] = []
    left = 0
    for token in argv:
        if token.startswith("-"):
            name = _name(token).replace("--no-", "--", 1)
            left = 0 if "=" in token else values.get(name, 0)
            if name in values:
                continue
        elif left:
            left -= 1
            continue
        kept.append(token)
    return kept


def _why(advice: Advice | None) -> str:
    return "" if advice is None or isinstance(advice, (EngineFlag, MappedFlag)) else advice.why


def _reason(advice: Advice | None) -> str:
    return f": {advice.why}" if isinstance(advice, Unsupported) else ""


def without_secrets(argv: Sequence[str], options: Iterable[Option]) -> list[str]:
    """``argv`` with ``***`` in the place of secrets."""
    secret = {option.flag for option in options if option.secret}
    shown: list[str] = []
    hiding = False
    for token in argv:
        name, equals, _ = token.partition("=")
        if token.startswith("-"):
            hiding = name.replace("_", "-") in secret
            shown.append(f"{name}={HIDDEN}" if hiding and equals else token)
        else:
            shown.append(HIDDEN if hiding else token)
    return shown
