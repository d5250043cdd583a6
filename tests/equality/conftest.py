"""Models and the ledger. A model, its runner and its reference texts are made once per session."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import transformers

from tests.equality.harness import Ledger, Model
from tests.equality.reference import Reference
from tests.model_executor.harness import save_tiny_model

TINY_FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe", "mistral-window")
# A near tie comes up once in thousands of tokens; more than this and something else is wrong.
EXCUSED_SHARE = 1 / 500


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Model]:
    """The random tiny model of a family."""
    made: dict[str, Model] = {}

    def get(family: str) -> Model:
        if family not in made:
            folder = tmp_path_factory.mktemp(family)
            made[family] = Model(folder, Reference(save_tiny_model(family, folder)))
        return made[family]

    return get


@pytest.fixture
def llama(models: Callable[[str], Model]) -> Model:
    return models("llama")


@pytest.fixture(scope="session")
def smollm2() -> Model:
    """The demo model in float32."""
    import torch

    from tinysrt.text.demo_model import ensure_demo_model

    folder = ensure_demo_model()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return Model(folder, Reference(model), pool_tokens=2048)


@pytest.fixture
def ledger(request: pytest.FixtureRequest) -> Iterator[Ledger]:
    ledger = Ledger()
    yield ledger
    request.node.user_properties.append(("tokens compared and excused", [ledger.compared, ledger.excused]))
    assert ledger.excused <= 1 + ledger.compared * EXCUSED_SHARE, f"{ledger.excused} of {ledger.compared} excused"
