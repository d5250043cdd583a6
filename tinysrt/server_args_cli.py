"""The command line of the server, generated from the fields of ServerArgs.

    fields of ServerArgs ─▶ argparse ◀─ defaults ─ --config FILE
                               │
              argv ────────────┴──▶ ServerArgs, as typed

The values of a config file become the parser's defaults, so what is typed wins. They go through the same checks as
the Engine's keywords. A usage error ends with exit code 2 as argparse does it; what a file gets wrong, or what only
`ServerArgs.resolve` can see, is a StartupError.

Unset flags stay None ("auto"): nothing is resolved here. Unique prefixes of a flag are accepted, as in SGLang.
"""

from __future__ import annotations

import argparse
import json
import typing
from collections.abc import Callable, Sequence
from typing import Any

from tinysrt.errors import StartupError
from tinysrt.server_args import GROUPS, Flag, ServerArgs, flags, keyword_values, parse_human_int, value_types

DESCRIPTION = "Serve a model over HTTP. Every flag may also stand in a YAML file given with --config."


def parse(argv: Sequence[str], prog: str = "tinysrt serve") -> ServerArgs:
    """The record that `argv` asks for; exits with code 2 on a usage error and 0 after --help."""
    parser = argparse.ArgumentParser(prog=prog, description=DESCRIPTION, usage="%(prog)s [flags]")
    add_flags(parser)
    return parse_with(parser, argv)[0]


def parse_with(parser: argparse.ArgumentParser, argv: Sequence[str]) -> tuple[ServerArgs, argparse.Namespace]:
    """The same for a parser that has flags of its own beside those of `add_flags`."""
    namespace = parser.parse_args(argv)
    if namespace.config:
        parser.set_defaults(**config_file_values(namespace.config))
        namespace = parser.parse_args(argv)
    values = vars(namespace)
    return ServerArgs(**{name: values[name] for name in flags() if name in values}), namespace


def add_flags(parser: argparse.ArgumentParser, *, in_help: bool = True) -> None:
    """Give `parser` every flag of ServerArgs, under the titles of their groups. A command with flags of its own does
    not bury them under a hundred others: without `in_help` its help says in a line that these are taken too."""
    parser.usage = parser.usage or "%(prog)s [flags] ..."  # 120 flags in every usage error would hide the error
    if not in_help:
        parser.add_argument_group("flags of the server", "any flag of `tinysrt serve`; see `tinysrt serve --help`")
    hidden: dict[str, Any] = {} if in_help else {"help": argparse.SUPPRESS}
    config = {"metavar": "FILE", "help": "YAML file of flags; what is typed wins"}
    parser.add_argument("--config", **config | hidden)
    for group in GROUPS:
        section = parser.add_argument_group(group)
        for name, flag in flags().items():
            if flag.group == group:
                section.add_argument(*option_strings(name, flag), dest=name, **_argparse_options(name, flag) | hidden)


def option_strings(name: str, flag: Flag) -> list[str]:
    return [f"--{spelling}" for spelling in flag.spellings(name)]


def help_text(flag: Flag) -> str:
    """One line: what the flag does, its default, and whether it is here yet. The atlas says the same in columns."""
    default = f"auto: {flag.auto}" if flag.auto else "unset" if flag.default is None else f"default {flag.default}"
    text = flag.help if flag.default is False else f"{flag.help} ({default})"
    return f"{text} [{flag.state}]" if flag.state else text


def config_file_values(path: str) -> dict[str, Any]:
    """Field name → value, from the YAML mapping in `path`: `tp-size: 1` and `tensor_parallel_size: 1` both work."""
    import yaml

    try:
        with open(path, encoding="utf-8") as file:
            content = yaml.safe_load(file) or {}
    except OSError as error:
        raise StartupError(f"--config {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise StartupError(f"--config {path} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise StartupError(f"--config {path} must hold a mapping of flags to values")
    try:
        return keyword_values({str(key).replace("-", "_"): value for key, value in content.items()})
    except StartupError as error:
        raise StartupError(f"--config {path}: {error}") from None


def _argparse_options(name: str, flag: Flag) -> dict[str, Any]:
    wanted = value_types()[name]
    options: dict[str, Any] = {"default": flag.default, "help": help_text(flag).replace("%", "%%")}
    if wanted is bool:
        # An "auto" switch needs a way to say no: --no-disable-overlap-schedule.
        options["action"] = argparse.BooleanOptionalAction if flag.default is None else "store_true"
        return options
    if flag.choices:
        options["choices"] = flag.choices
    else:
        options["metavar"] = _metavar(wanted, flag)
    if typing.get_origin(wanted) is list:
        options |= {"nargs": "+", "type": typing.get_args(wanted)[0]}
    else:
        options["type"] = _converter(wanted, flag)
    return options


def _converter(wanted: type, flag: Flag) -> Callable[[str], Any]:
    if flag.human:
        return _human_int
    return _json_object if typing.get_origin(wanted) is dict else wanted


def _metavar(wanted: type, flag: Flag) -> str:
    if flag.human:
        return "N[k|M|Ki|Mi]"
    kind = typing.get_origin(wanted) or wanted
    return {int: "N", float: "X", list: "X", dict: "JSON"}.get(kind, "TEXT")


def _human_int(text: str) -> int:
    try:
        return parse_human_int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number such as 8000, 8k or 8Ki") from None


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"a JSON object is needed, not {text}")
    return value
