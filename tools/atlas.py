"""Write docs/atlas.md, the parameter atlas, from the fields of ServerArgs: `make atlas`.

A test compares the committed page with `render()`, so a flag cannot change without its page.
"""

from __future__ import annotations

import typing
from pathlib import Path

from tinysrt.server_args import GROUPS, SGLANG_NAMES, Flag, flags, value_types

PAGE = Path(__file__).parents[1] / "docs" / "atlas.md"

INTRODUCTION = """\
# Parameter atlas

<!-- Written by tools/atlas.py (`make atlas`); do not edit. -->

Every flag of `tinysrt serve`, in the groups of the help text, generated from the fields of
{{ src:tinysrt.server_args.ServerArgs }}. Each may also be a keyword of `tinysrt.Engine` (with
underscores) or a line of the YAML file given with `--config`; what is typed wins over the file. Unique prefixes of a
flag are accepted. Numbers marked *human* may be typed `8k` (8,000), `1.5M` or `4Ki` (4,096); case matters.

*Auto* is a value that {{ src:tinysrt.server_args.ServerArgs.resolve }} computes once at start-up; `/server_info` shows
the result. A flag with a *state* is known but not here yet, or left out: a value that would ask for it is refused by
name at start-up.
"""

LAST = """\
!!! note "In SGLang 0.5.23"
    The names are SGLang's; its record calls three fields by short names ({short}), which are accepted here and shown by
    `/server_info` too. There `--schedule-policy` defaults to `fcfs`, and `--mem-fraction-static` and
    `--chunked-prefill-size` are computed from the device's memory; here they keep the defaults of the articles that
    tinysrt follows, and on a CPU resolve to what a laptop bears.
"""


def render() -> str:
    parts = [INTRODUCTION]
    for group in GROUPS:
        rows = [_row(name, flag) for name, flag in flags().items() if flag.group == group]
        parts.append(f"## {group}\n\n| Flag | Value | Default | What it does | State |\n|---|---|---|---|---|\n")
        parts[-1] += "\n".join(rows) + "\n"
    short = ", ".join(f"`{short}`" for short in SGLANG_NAMES)
    return "\n".join([*parts, LAST.format(short=short)])


def _row(name: str, flag: Flag) -> str:
    spellings = ", ".join(f"`--{spelling}`" for spelling in flag.spellings(name))
    default = f"auto: {flag.auto}" if flag.auto else _default(flag.default)
    return f"| {spellings} | {_value(name, flag)} | {default} | {flag.help} | {flag.state} |"


def _default(value: object) -> str:
    if value is None or value == "":
        return "unset"
    return "off" if value is False else f"`{value}`"


def _value(name: str, flag: Flag) -> str:
    wanted = value_types()[name]
    if wanted is bool:
        return "switch"
    if flag.choices:
        return ", ".join(f"`{choice}`" for choice in flag.choices)
    kind = typing.get_origin(wanted) or wanted
    words = {int: "integer", float: "number", str: "text", dict: "JSON object", list: "numbers"}
    return words[kind] + (", *human*" if flag.human else "")


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
