from __future__ import annotations

from pathlib import Path

import pytest

from tests.model_executor.harness import save_tiny_model
from tests.text.tiny_tokenizers import byte_level


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama with a small byte-level tokenizer: loads at once, says nothing sensible, never ends by itself."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = byte_level().hf
    save_tiny_model(
        "llama", folder, vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, max_position_embeddings=8192
    )
    tokenizer.save_pretrained(folder)
    return folder
