"""tinysrt: a complete, fast, readable SGLang Runtime in Python.

    import tinysrt

    with tinysrt.Engine(model_path="…") as engine:
        print(engine.generate("The capital of France is")["text"])

Where to read on: `server_args.py` is everything that can be set, `processes.py` is what runs where,
`managers/scheduler.py` is the heart. The import is cheap on purpose: PyTorch and the tokenizers are loaded by whoever
needs them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tinysrt.entrypoints import engine

__version__ = "0.1.0"
__all__ = ["Engine", "__version__"]


def Engine(**server_args: Any) -> engine.Engine:  # named as the class it returns
    """The offline engine: the same processes as the server, without HTTP. See `tinysrt.entrypoints.engine.Engine`."""
    from tinysrt.entrypoints.engine import Engine

    return Engine(**server_args)
