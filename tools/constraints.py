"""Print the exact versions of everything installed beside tinysrt: `python tools/constraints.py > constraints.txt`.

CI and `make` install with these pins, so that a new release of somebody else breaks nothing here by surprise. PyTorch
is pinned without its build (`+cpu`).
"""

from __future__ import annotations

from importlib.metadata import distributions

NOT_OURS = {"tinysrt", "pip", "setuptools", "wheel"}

HEADER = """\
# What `make` and CI install with: exact versions, written by tools/constraints.py. The ranges tinysrt works with are in
# pyproject.toml."""


def pins() -> list[str]:
    found = {dist.metadata["Name"].lower().replace("_", "-"): dist.version for dist in distributions()}
    return [f"{name}=={found[name].split('+')[0]}" for name in sorted(found.keys() - NOT_OURS)]


if __name__ == "__main__":
    print("\n".join([HEADER, *pins()]))
