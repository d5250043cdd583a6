"""Where every name of the package stands: the index that binds the pages to the code.

`ast` reads the files, nothing is imported, so the site builds without torch. Indexed are modules, classes, functions,
methods, constants, dataclass fields, and attributes that `__init__` sets. A dotted name maps to a file and a range of
lines, decorators included.

Invariant: a name that a page uses and that is not here stops the build, with the names that come closest.
"""

from __future__ import annotations

import ast
import difflib
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


class UnknownName(Exception):
    """A page names something that the code does not have (any more)."""


@dataclass(frozen=True)
class Symbol:
    name: str  # tinysrt.managers.scheduler.Scheduler.run_batch
    module: str  # tinysrt.managers.scheduler
    path: str  # tinysrt/managers/scheduler.py, from the repository's root
    first: int  # 1-based, inclusive
    last: int

    @property
    def short(self) -> str:
        """What a reader sees: `Scheduler.run_batch`, or the file for a module."""
        return self.name.removeprefix(self.module).lstrip(".") or self.path


class SymbolIndex:
    def __init__(self, root: Path, package: str = "tinysrt"):
        self.root = root
        self.lines: dict[str, list[str]] = {}  # path -> source lines
        self.docstrings: dict[str, str] = {}  # path -> module docstring
        self.symbols: dict[str, Symbol] = {}
        for file in sorted((root / package).rglob("*.py")):
            path = file.relative_to(root).as_posix()
            text = file.read_text(encoding="utf-8")
            if text.strip():
                self._add_file(path, text)

    def find(self, name: str) -> Symbol:
        dotted = name.strip().removesuffix(".py").replace("/", ".").removesuffix(".__init__")
        if dotted in self.symbols:
            return self.symbols[dotted]
        close = difflib.get_close_matches(dotted, self.symbols, n=3, cutoff=0.6)
        last = dotted.rsplit(".", 1)[-1]
        moved = [known for known in self.symbols if known.rsplit(".", 1)[-1] == last]
        hints = list(dict.fromkeys(moved[:3] + close))
        raise UnknownName(f"no {name!r} in the code" + (f"; did you mean {', '.join(hints)}?" if hints else "."))

    def source(self, symbol: Symbol, start: str | None = None, stop: str | None = None) -> tuple[str, int]:
        """The text, dedented, and its first line number; cut from the line with `start` to that with `stop`."""
        lines = self.lines[symbol.path][symbol.first - 1 : symbol.last]
        begin, end = 0, len(lines)
        if start is not None:
            begin = _line_with(lines, start, 0, symbol)
        if stop is not None:
            end = _line_with(lines, stop, begin, symbol) + 1
        return textwrap.dedent("\n".join(lines[begin:end])), symbol.first + begin

    def _add_file(self, path: str, text: str) -> None:
        module = path.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
        tree = ast.parse(text, path)
        self.lines[path] = text.splitlines()
        self.docstrings[path] = ast.get_docstring(tree) or ""
        self.symbols[module] = Symbol(module, module, path, 1, len(self.lines[path]))
        for name, node in _definitions(tree, module):
            first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
            self.symbols.setdefault(name, Symbol(name, module, path, first, node.end_lineno or node.lineno))


def _definitions(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.stmt]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Definition):
            name = f"{prefix}.{child.name}"
            yield name, child
            if isinstance(child, ast.ClassDef):
                yield from _definitions(child, name)
            if child.name == "__init__":
                yield from _attributes(child, prefix)
        elif isinstance(child, ast.Assign | ast.AnnAssign):
            for target in child.targets if isinstance(child, ast.Assign) else [child.target]:
                if isinstance(target, ast.Name):
                    yield f"{prefix}.{target.id}", child
        elif isinstance(child, ast.If | ast.Try):  # names bound under a condition at module level
            yield from _definitions(child, prefix)


def _attributes(init: Definition, prefix: str) -> Iterator[tuple[str, ast.stmt]]:
    for child in ast.walk(init):
        if isinstance(child, ast.Assign | ast.AnnAssign):
            for target in child.targets if isinstance(child, ast.Assign) else [child.target]:
                if (
                    isinstance(target, ast.Attribute)
                    and isinstance(target.value, ast.Name)
                    and target.value.id == "self"
                ):
                    yield f"{prefix}.{target.attr}", child


def _line_with(lines: list[str], text: str, begin: int, symbol: Symbol) -> int:
    for number in range(begin, len(lines)):
        if text in lines[number]:
            return number
    raise UnknownName(f"no line with {text!r} in {symbol.name}.")
