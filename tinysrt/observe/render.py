"""A trace as text: one request's life, and the seats step by step.

    render_request(events, rid)   every event of one request, with the time since it arrived and since the line before
    render_seats(events)          one row per scheduler step: who sits where, and what the pool holds

Both return rich tables; `tinysrt trace --text` prints them and the labs show them. They read only what `trace.py`
documents, and show fields they do not know as `name=value`, so that a new field needs no change here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from tinysrt.observe.merge import Event, rids

_STYLES = {"tokenizer": "cyan", "scheduler": "green", "detokenizer": "magenta"}
_SEATS = ("waiting_queue", "new_batch", "running_batch", "cur_batch")


def render_request(events: Sequence[Event], rid: str) -> Table:
    """The life of `rid`, one line an event. Decode steps are shown as they are: one line a token."""
    mine = _life(events, rid)
    table = Table(title=f"request {rid}", title_justify="left", box=None, pad_edge=False)
    table.add_column("ms", justify="right")
    table.add_column("+ms", justify="right", style="dim")
    table.add_column("process")
    table.add_column("event", style="bold")
    table.add_column("what", overflow="fold")
    start = before = mine[0]["t"] if mine else 0
    for event in mine:
        table.add_row(
            f"{(event['t'] - start) / 1e6:.2f}",
            f"{(event['t'] - before) / 1e6:.2f}",
            Text(event["p"], style=_STYLES.get(event["p"], "")),
            event["e"],
            Text(describe(event)),
        )
        before = event["t"]
    return table


def render_seats(events: Sequence[Event]) -> Table:
    """The seats after each decision of the scheduler; requests are numbered 0, 1, … in order of arrival."""
    names = {rid: str(index) for index, rid in enumerate(rids(events))}
    steps = [event for event in events if event["e"] == "step"]
    table = Table(title="seats, step by step", title_justify="left", box=None, pad_edge=False)
    for column in ("step", "mode"):
        table.add_column(column, justify="right")
    for seat in (*_SEATS, "chunked_req"):
        # Names cut short, so that a row fits a terminal: waiting, new, running, cur, chunked.
        table.add_column(seat.rsplit("_", 1)[0], overflow="fold")
    for column in ("free", "evictable"):
        table.add_column(column, justify="right", style="dim")
    for event in steps:
        seats = [" ".join(names.get(rid, rid) for rid in event.get(seat) or ()) or "·" for seat in _SEATS]
        chunked = event.get("chunked_req")
        seats.append(names.get(chunked, str(chunked)) if chunked else "·")
        numbers = [str(event.get(key, "")) for key in ("free_tokens", "evictable_tokens")]
        table.add_row(str(event["step"]), str(event.get("mode", "")), *seats, *numbers)
    return table


def _life(events: Sequence[Event], rid: str) -> list[Event]:
    """What names the request, and what its steps did."""
    life: list[Event] = []
    steps: set[int] = set()
    for event in events:
        takes_part = rid in event.get("rids", ())
        if takes_part and "step" in event:
            steps.add(event["step"])
        if takes_part or event.get("rid") == rid or (event.get("step") in steps and event["e"] != "step"):
            life.append(event)
    return life


def describe(event: Event) -> str:
    """An event's fields in words: `cached=5 extend=12`."""
    skip = ("t", "p", "e", "rid", "rids")
    return " ".join(f"{key}={_short(value)}" for key, value in event.items() if key not in skip)


def _short(value: Any) -> str:
    if isinstance(value, str):
        return repr(value)
    if isinstance(value, list) and len(value) > 8:
        return f"[{', '.join(map(str, value[:6]))}, … {len(value)} in all]"
    return str(value)
