"""Count code lines: what is left without comments, docstrings and blank lines. `python -m tests.repo.code_lines`"""

from __future__ import annotations

import ast
import functools
import io
import tokenize
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "tinysrt"

# The request path: from the parsed body to the streamed text, tokenizer manager → scheduler → caches → runner →
# detokenizer. Not in it: doors and their protocols, start-up, control requests, checks, the models' layers and weights.
REQUEST_PATH = (
    "messages.py",
    "ipc.py",
    "sampling_params.py",
    "managers/generate_request.py",
    "managers/tokenizer_manager.py",
    "managers/request_state.py",
    "managers/text_worker.py",
    "managers/request_life.py",
    "managers/schedule_batch.py",
    "managers/schedule_policy.py",
    "managers/seats.py",
    "managers/scheduler.py",
    "managers/request_intake.py",
    "managers/tp_worker.py",
    "managers/overlap_worker.py",
    "managers/batch_result_processor.py",
    "managers/detokenizer_manager.py",
    "mem_cache/memory_pool.py",
    "mem_cache/allocator.py",
    "mem_cache/prefix_cache.py",
    "mem_cache/radix_cache.py",
    "mem_cache/radix_tree.py",
    "mem_cache/chunk_cache.py",
    "model_executor/forward_batch_info.py",
    "model_executor/sampling_batch_info.py",
    "model_executor/model_runner.py",
    "model_executor/sampler.py",
    "model_executor/step_result.py",
    "text/incremental.py",
    "text/stop.py",
)


@functools.cache
def code_lines(source: str) -> int:
    """Lines that hold a token other than comments and docstrings."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT):
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(
            node
        ):
            docstring = node.body[0]
            assert docstring.end_lineno is not None
            lines -= set(range(docstring.lineno, docstring.end_lineno + 1))
    return len(lines - {source.count("\n") + 1})  # the end marker stands on a line of its own


def count(paths: list[Path]) -> int:
    return sum(code_lines(path.read_text(encoding="utf-8")) for path in paths)


def request_path() -> list[Path]:
    return [PACKAGE / name for name in REQUEST_PATH]


def everything() -> list[Path]:
    """All of tinysrt/ but the benchmarks."""
    paths = sorted(PACKAGE.glob("**/*.py"))
    return [path for path in paths if "bench" not in path.relative_to(PACKAGE).parts and code_lines(path.read_text())]


def fast_kernels() -> list[Path]:
    """The same functions for a second and a third time: `kernels/reference.py` is what they mean."""
    return [path for path in everything() if path.name.startswith(("numba_", "triton_"))]


if __name__ == "__main__":
    for path in everything():
        mark = "*" if path in request_path() else " "
        print(f"{code_lines(path.read_text()):6} {mark} {path.relative_to(PACKAGE)}")
    print(f"request path (*): {count(request_path())} code lines in {len(request_path())} files")
    print(f"everything but bench: {count(everything())} code lines in {len(everything())} files")
