"""Greedy float32 output is Hugging Face's `generate`, token for token, whatever the switches: a covering set of them.

Every pair of values of two switches meets in some combination; `make soak` runs all combinations.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import fields, replace

import pytest

from tests.conftest import SOAK
from tests.equality.conftest import TINY_FAMILIES
from tests.equality.harness import Ask, Ledger, Model, RealEngine, Switches, all_switches, covering_set
from tests.equality.workloads import LENGTH, catalog, four_waves

COVERING = covering_set()
CHOSEN = all_switches() if SOAK else COVERING
FAMILIES = [pytest.param(name, marks=[pytest.mark.slow] if name != "llama" else []) for name in TINY_FAMILIES]
TIGHT_POOL = 320  # tokens; the four waves want 2,000


def test_every_pair_of_values_meets_in_the_covering_set() -> None:
    for a, b in itertools.combinations([f.name for f in fields(Switches)], 2):
        seen = {(getattr(s, a), getattr(s, b)) for s in COVERING}
        assert seen == {(getattr(s, a), getattr(s, b)) for s in all_switches()}
    assert len(COVERING) < 24


@pytest.mark.parametrize("switches", CHOSEN, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_32_requests_in_four_waves(
    models: Callable[[str], Model], ledger: Ledger, family: str, switches: Switches
) -> None:
    model = models(family)
    asks = four_waves(model)
    with RealEngine(model, switches, capacity=TIGHT_POOL if switches.tight else None) as engine:
        answers = engine.play(asks)
        for ask in asks:
            ledger.check(model, ask, answers[ask.rid])
        # Each switch did something; else this test compares less than it says.
        assert any(a.meta.num_retractions for a in answers.values()) == switches.tight
        assert (engine.chunks > 0) == (switches.chunk > 0)
        # (With decode rows riding along, a chunk of one page has no whole page left for the prompt.)
        assert (engine.modes["MIXED"] > 0) == (switches.mixed and switches.chunk > switches.page)
        assert any(answer.cached_tokens for answer in answers.values()) == switches.radix
        assert (engine.replayed > 0) == (switches.graph == "tape" and model.can_capture(switches.backend))


@pytest.mark.parametrize("switches", [Switches("normal", radix=False), Switches("overlap", chunk=16)], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_each_request_alone(models: Callable[[str], Model], ledger: Ledger, family: str, switches: Switches) -> None:
    model = models(family)
    with RealEngine(model, switches) as engine:
        for ask in four_waves(model):
            ledger.check(model, ask, engine.play([replace(ask, at=0)])[ask.rid])
        assert engine.widest == 1


@pytest.mark.parametrize("family", FAMILIES)
def test_32_requests_decode_together(models: Callable[[str], Model], ledger: Ledger, family: str) -> None:
    """All at once and all equally long: one prefill and decode batches of 32."""
    model = models(family)
    asks = [Ask(f"r{i}", prompt).having(max_new_tokens=LENGTH) for i, prompt in enumerate(catalog())]
    with RealEngine(model, Switches(policy="fcfs")) as engine:
        answers = engine.play(asks)
        assert engine.widest == 32 and engine.modes == {"EXTEND": 1, "DECODE": LENGTH - 1}
    for ask in asks:
        ledger.check(model, ask, answers[ask.rid])
