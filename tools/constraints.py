"""Print the exact versions of everything installed beside tinysrt: `python tools/constraints.py > constraints.txt`.

CI and `make` install with these pins, so that a new release of somebody else breaks nothing here by surprise. PyTorch
is pinned without its build (`+cpu`), and what is bound to one Python version keeps that condition.
"""

from __future__ import annotations

from importlib.metadata import distributions

ONLY_BEFORE_3_12 = {"mkdocs-jupyter"}  # pyproject.toml asks for another release from 3.12 on
NOT_OURS = {"tinysrt", "pip", "setuptools", "wheel"}

HEADER = """\
# What `make` and CI install with: exact versions, written by tools/constraints.py. The ranges tinysrt works with are in
# pyproject.toml."""


def pins() -> list[str]:
    found = {dist.metadata["Name"].lower().replace("_", "-"): dist.version for dist in distributions()}
    lines = []
    for name in sorted(found.keys() - NOT_OURS):
        condition = ' ; python_version < "3.12"' if name in ONLY_BEFORE_3_12 else ""
        lines.append(f"{name}=={found[name].split('+')[0]}{condition}")
    return lines


if __name__ == "__main__":
    print("\n".join([HEADER, *pins()]))
