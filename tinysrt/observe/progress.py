"""A progress bar for what takes long at start-up: fetching the demo model, loading weights.

Whatever works reports `(stage, done, total)` to a plain callback and knows no terminal. On a terminal the callback
draws one bar per stage with rich; elsewhere (a log file, CI) each stage is one line when it begins.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

# (what is being done, done so far, in all), in any unit; called often, from one thread.
OnProgress = Callable[[str, int, int], None]


@contextlib.contextmanager
def progress_bar() -> Iterator[OnProgress]:
    if not sys.stderr.isatty():
        yield _Lines()
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bars:
        tasks: dict[str, TaskID] = {}

        def draw(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage, total=total)
            bars.update(tasks[stage], completed=done, total=total)

        yield draw


class _Lines:
    def __init__(self) -> None:
        self.stage = ""

    def __call__(self, stage: str, done: int, total: int) -> None:
        if stage != self.stage:
            self.stage = stage
            print(f"{stage} ...", file=sys.stderr, flush=True)
