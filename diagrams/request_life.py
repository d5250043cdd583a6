"""Draw the life of a request from the scheduler's own table.

    python diagrams/request_life.py > diagrams/request-life.mmd

The picture is committed beside this file; tests/docs/test_diagrams.py fails when it is not what this prints.
"""

from __future__ import annotations

from tinysrt.managers.request_life import ENDED, TRANSITIONS, Stage

_PLACES = {
    Stage.WAITING: "in waiting_queue",
    Stage.RETRACTED: "in waiting_queue again",
    Stage.CHUNKED: "is chunked_req",
    Stage.PREFILLING: "in new_batch, then last_batch",
    Stage.RUNNING: "in running_batch",
}


def request_life() -> str:
    live = [state for state in TRANSITIONS if state not in ENDED]
    lines = ["flowchart TD", '  subgraph live["holds a seat or waits for one"]', "    direction TB"]
    lines += [f"    {_node(state)}" for state in live]
    for state in live:
        lines += [f"    {state.name} --> {new.name}" for new in TRANSITIONS[state] if new not in ENDED]
    lines.append("  end")
    for end in ENDED:
        lines.append(f"  {_node(end)}")
        sources = [state for state in live if end in TRANSITIONS[state]]
        if sources == live:  # one arrow from the frame says it for everyone
            lines.append(f"  live --> {end.name}")
        else:
            lines += [f"  {state.name} --> {end.name}" for state in sources]
    return "\n".join(lines) + "\n"


def _node(state: Stage) -> str:
    if state in ENDED:
        return f'{state.name}(["{state.value}"])'
    place = f"<br><small>{_PLACES[state]}</small>" if state in _PLACES else ""
    return f'{state.name}["{state.value}{place}"]'


if __name__ == "__main__":
    print(request_life(), end="")
