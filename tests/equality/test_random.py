"""Random requests, arrivals, aborts and switches: each answer is still the reference's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.conftest import SOAK
from tests.equality.conftest import TINY_FAMILIES
from tests.equality.harness import VALUES, Ask, Ledger, Model, RealEngine, Switches
from tests.equality.workloads import LENGTH, catalog, hot

PROMPTS = catalog()
switches = st.builds(Switches, **{name: st.sampled_from(values) for name, values in VALUES.items()})
requests = st.fixed_dictionaries(
    {
        "prompt": st.integers(0, len(PROMPTS) - 1),
        "at": st.integers(0, 50),
        "limit": st.integers(0, LENGTH),
        "stop": st.none() | st.integers(0, LENGTH - 1),  # stop at the token that the text has here
        "kind": st.sampled_from(["greedy", "greedy", "greedy", "hot", "penalized", "scored"]),
        "start": st.integers(-1, 40),
        "stream": st.booleans(),
        "abort": st.none() | st.none() | st.integers(0, 70),  # step
    }
)


def make_ask(model: Model, rid: str, drawn: dict[str, Any]) -> Ask:
    prompt = PROMPTS[drawn["prompt"]]
    ask = Ask(rid, prompt, at=drawn["at"], stream=drawn["stream"])
    if drawn["kind"] == "hot":
        ask = Ask(rid, prompt, hot(drawn["prompt"]), drawn["at"], drawn["stream"])
    if drawn["kind"] == "penalized":
        ask = ask.having(frequency_penalty=0.6, repetition_penalty=1.2, logit_bias={11: 2.0})
    if drawn["kind"] == "scored":
        start = min(drawn["start"], len(prompt))
        ask = Ask(
            rid, prompt, at=drawn["at"], stream=drawn["stream"], logprobs=True, start=start, top=3, named=[9, 250]
        )
    if drawn["stop"] is not None:
        text = model.reference.decode(prompt, LENGTH, ask.params, [], frozenset()).ids
        ask = ask.having(stop_token_ids=[text[drawn["stop"]]])
    return ask.having(max_new_tokens=drawn["limit"])


@pytest.mark.slow
@pytest.mark.parametrize("family", TINY_FAMILIES)
@settings(
    max_examples=1000 if SOAK else 30,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(
    switches=switches,
    drawn=st.lists(requests, min_size=1, max_size=4) | st.lists(requests, min_size=12, max_size=32),
    capacity=st.sampled_from([176, 224, 320]),
    max_running=st.sampled_from([3, 32]),
)
def test_random_requests_under_random_switches(
    models: Callable[[str], Model],
    ledger: Ledger,
    family: str,
    switches: Switches,
    drawn: list[dict[str, Any]],
    capacity: int,
    max_running: int,
) -> None:
    model = models(family)
    asks = [make_ask(model, f"r{i}", values) for i, values in enumerate(drawn)]
    aborts = [(values["abort"], f"r{i}") for i, values in enumerate(drawn) if values["abort"] is not None]
    pool = capacity if switches.tight else None
    with RealEngine(model, switches, capacity=pool, max_running=max_running) as engine:
        answers = engine.play(asks, aborts)
    aborted = {rid for _, rid in aborts}
    for ask in asks:
        ledger.check(model, ask, answers[ask.rid], whole=ask.rid not in aborted)
