from __future__ import annotations

import pytest

from tests.text import tiny_tokenizers
from tinysrt.text.demo_model import ensure_demo_model
from tinysrt.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def demo_folder() -> str:
    return ensure_demo_model()


@pytest.fixture(scope="session")
def demo(demo_folder: str) -> Tokenizer:
    return Tokenizer.load(demo_folder)


@pytest.fixture(scope="session")
def byte_level() -> Tokenizer:
    return tiny_tokenizers.byte_level()


@pytest.fixture(scope="session")
def pieces() -> Tokenizer:
    return tiny_tokenizers.pieces()


@pytest.fixture(scope="session", params=["demo", "byte_level", "pieces", "metaspace"])
def any_tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    """Every kind whose tokens are byte strings."""
    if request.param == "metaspace":
        return tiny_tokenizers.pieces(metaspace_decoder=True)
    return request.getfixturevalue(request.param)
