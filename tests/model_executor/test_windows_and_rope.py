"""Which layers have a window, and the angles of each kind of rope scaling, against transformers."""

from __future__ import annotations

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tests.model_executor.harness import (
    FAMILIES,
    VOCAB,
    LittleScheduler,
    assert_greedy,
    edit_config,
    make_runner,
    save_tiny_model,
)
from tinysrt.errors import StartupError
from tinysrt.model_executor.layers.rotary import rope_cache
from tinysrt.model_executor.model_config import ModelConfig

ROPES = {
    "llama 3.1": dict(
        rope_type="llama3",
        rope_theta=500000.0,
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    ),
    "qwen yarn": dict(rope_type="yarn", rope_theta=1e6, factor=4.0, original_max_position_embeddings=32768),
    "yarn, all keys": dict(
        rope_type="yarn",
        rope_theta=1e4,
        factor=3.0,
        original_max_position_embeddings=4096,
        beta_fast=20.0,
        beta_slow=2.0,
        mscale=0.7,
        mscale_all_dim=1.1,
        truncate=False,
    ),
    "yarn, own factor": dict(
        rope_type="yarn", rope_theta=1e4, factor=2.0, original_max_position_embeddings=512, attention_factor=0.8
    ),
    "linear": dict(rope_type="linear", rope_theta=1e4, factor=3.0),
}


@pytest.mark.parametrize("rope", ROPES.values(), ids=list(ROPES))
def test_angles_are_those_of_transformers_at_every_position(rope):
    config = transformers.Qwen3Config(head_dim=128, max_position_embeddings=4096, rope_parameters=dict(rope))
    frequencies, scale = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, "cpu")
    positions = torch.arange(0, 130_000, 1009)
    angles = positions.unsqueeze(1).float() * frequencies.float()
    expected = torch.cat((angles.cos(), angles.sin()), dim=-1) * scale
    # A frequency that is off by one unit in the last place turns position 100,000 by a hundredth.
    torch.testing.assert_close(rope_cache(128, rope, 130_000)[positions], expected, rtol=0, atol=2e-2)
    torch.testing.assert_close(
        rope_cache(128, rope, 64)[:, :64], (torch.arange(64.0)[:, None] * frequencies).cos() * scale
    )


@pytest.mark.parametrize("family", [name for name in FAMILIES if "rope" in name or "window" in name])
def test_a_sequence_up_to_the_last_position_equals_transformers(family, tmp_path):
    """Far beyond the trained length, and many windows long; the last tokens by decode steps."""
    model, runner = save_tiny_model(family, tmp_path), make_runner(tmp_path)
    scheduler = LittleScheduler(runner)
    generator = torch.Generator().manual_seed(5)
    length = min(runner.config.context_len, 700) - 8
    row = scheduler.add(torch.randint(3, VOCAB, (length,), generator=generator).tolist())
    scheduler.prefill([row], chunk=200)
    scheduler.decode([row], 7)
    assert_greedy(model, row, 8)


def test_yarn_and_linear_stretch_the_context(tmp_path):
    save_tiny_model("yarn-rope", tmp_path)
    assert ModelConfig.from_pretrained(str(tmp_path)).context_len == 256
    edit_config(tmp_path, max_position_embeddings=256)  # of published configs some state the stretched length
    assert ModelConfig.from_pretrained(str(tmp_path)).context_len == 256


def test_an_incomplete_rope_record_names_what_it_lacks():
    with pytest.raises(StartupError, match="'llama3' lacks 'low_freq_factor'"):
        rope_cache(16, {"rope_type": "llama3", "rope_theta": 1e4, "factor": 2.0}, 8)


# ---- windows -----------------------------------------------------------------------------------------


def windows(folder, family: str, context_length: int | None = None, **config) -> list[int | None]:
    save_tiny_model(family, folder)
    edit_config(folder, **config)
    return ModelConfig.from_pretrained(str(folder), context_length=context_length).windows


def test_mistral_and_the_moe_have_their_window_in_all_layers(tmp_path):
    assert windows(tmp_path, "mistral-window") == [24] * 3
    assert windows(tmp_path, "mistral") == [None] * 3
    assert windows(tmp_path, "qwen3_moe-mixed") == [40] * 4


def test_qwen_has_it_from_max_window_layers_on_or_where_layer_types_say(tmp_path):
    assert windows(tmp_path, "qwen2-window", layer_types=...) == [None, None, 13]
    assert windows(tmp_path, "qwen2-window", use_sliding_window=False, layer_types=...) == [None] * 3
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    assert windows(tmp_path, "qwen2-window", layer_types=kinds) == [13, None, 13]
    assert windows(
        tmp_path, "qwen3", use_sliding_window=True, sliding_window=9, max_window_layers=1, layer_types=...
    ) == [
        None,
        9,
        9,
    ]


def test_a_window_as_long_as_the_context_is_none(tmp_path):
    assert windows(tmp_path, "mistral-window", context_length=24) == [None] * 3
    assert windows(tmp_path, "mistral-window", context_length=25) == [24] * 3


def test_windowed_layers_without_a_length_are_refused(tmp_path):
    with pytest.raises(StartupError, match="sliding_attention, and sliding_window gives no length"):
        windows(
            tmp_path,
            "qwen2-window",
            layer_types=["sliding_attention"] * 3,
            use_sliding_window=False,
            sliding_window=None,
        )
    with pytest.raises(StartupError, match="num_hidden_layers.*layer_types"):
        windows(tmp_path, "mistral-window", layer_types=["sliding_attention"] * 2)
