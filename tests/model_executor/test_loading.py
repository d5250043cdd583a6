"""Checkpoints: what loads, what is refused and in which words, number formats, sizes."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.model_executor.harness import (
    LittleScheduler,
    assert_greedy,
    edit_config,
    make_runner,
    reference_logprobs,
    save_tiny_model,
)
from tinysrt.errors import StartupError
from tinysrt.model_executor import model_runner, sizing
from tinysrt.model_executor.forward_batch_info import ForwardMode
from tinysrt.model_executor.model_config import ModelConfig
from tinysrt.model_executor.models.registry import model_class
from tinysrt.model_executor.sizing import runtime_dtype, size_request_table
from tinysrt.model_executor.weights import load_model
from tinysrt.server_args import ServerArgs

CPU = torch.device("cpu")
PROMPT = list(range(20, 45))


def edit_weights(folder, edit):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def refusal(folder, **args) -> str:
    with pytest.raises(StartupError) as error:
        make_runner(folder, **args)
    message = str(error.value)
    assert "\n" not in message
    return message


# ---- what loads ------------------------------------------------------------------------------------


def test_sharded_files_with_an_index_load_and_report_progress(tmp_path):
    model = save_tiny_model("qwen2", tmp_path, max_shard_size="60KB", tie_word_embeddings=False)
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    reports: list[tuple[int, int]] = []
    config = ModelConfig.from_pretrained(str(tmp_path))
    load_model(config, torch.float32, CPU, "auto", on_progress=lambda done, total: reports.append((done, total)))
    done = [report[0] for report in reports]
    assert done == sorted(done) and reports[-1][0] == reports[-1][1] > 0
    scheduler = LittleScheduler(make_runner(tmp_path))
    row = scheduler.add(PROMPT)
    scheduler.prefill([row])
    scheduler.decode([row], 3)
    assert_greedy(model, row, 4)


def test_a_second_copy_of_the_tied_head_and_old_rope_buffers_are_passed_over(tmp_path):
    save_tiny_model("llama", tmp_path)

    def add(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)

    edit_weights(tmp_path, add)
    make_runner(tmp_path)


def test_dummy_weights_are_the_same_every_time_and_need_no_file(tmp_path):
    save_tiny_model("qwen3", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    logits = []
    for _ in range(2):
        runner = make_runner(tmp_path, load_format="dummy")
        scheduler = LittleScheduler(runner)
        batch = scheduler.batch(ForwardMode.EXTEND, [scheduler.add(PROMPT)], [len(PROMPT)])
        logits.append(runner.forward(batch).next_token_logits)
    assert torch.equal(*logits) and logits[0].std() > 0


def test_bfloat16_stays_near_float32(tmp_path):
    model = save_tiny_model("llama", tmp_path)
    runner = make_runner(tmp_path, dtype="bfloat16")
    assert runner.dtype == runner.kv_pool.dtype == torch.bfloat16
    scheduler = LittleScheduler(runner)
    row = scheduler.add(PROMPT)
    batch = scheduler.batch(ForwardMode.EXTEND, [row], [len(PROMPT)])
    logits = runner.forward(batch).next_token_logits
    assert logits.dtype == torch.float32
    error = (logits[0].log_softmax(-1) - reference_logprobs(model, PROMPT)[-1]).abs().mean()
    assert error < 0.2


# ---- what is refused -------------------------------------------------------------------------------


def test_unsupported_things_are_refused_by_name(tmp_path):
    save_tiny_model("mistral", tmp_path)
    original = (tmp_path / "config.json").read_text()

    def refused(**changes):
        (tmp_path / "config.json").write_text(original)
        edit_config(tmp_path, **changes)
        return refusal(tmp_path)

    assert "GPTBigCodeForCausalLM" in refused(architectures=["GPTBigCodeForCausalLM"])
    assert "gelu" in refused(hidden_act="gelu")
    assert "quantiz" in refused(quantization_config={"quant_method": "gptq", "bits": 4})
    assert "dynamic" in refused(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0})
    assert "longrope" in refused(
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "short_factor": [1.0] * 4,
            "long_factor": [2.0] * 4,
        }
    )
    assert "partial_rotary_factor" in refused(rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": 0.5})
    assert "factor" in refused(rope_parameters={"rope_type": "yarn", "rope_theta": 1e4})
    assert "chunked_attention" in refused(layer_types=["full_attention", "full_attention", "chunked_attention"])
    assert "no_such_type" in refused(model_type="no_such_type")


def test_a_window_of_a_family_that_knows_none_is_refused(tmp_path):
    save_tiny_model("llama", tmp_path)
    edit_config(tmp_path, sliding_window=64)
    message = refusal(tmp_path)
    assert "sliding" in message and "--context-length 64" in message
    assert make_runner(tmp_path, context_length=64).config.context_len == 64  # as the refusal says


def test_a_context_longer_than_the_models_is_refused(tmp_path):
    save_tiny_model("llama", tmp_path)
    assert "at most 512" in refusal(tmp_path, context_length=513)


def test_places_without_a_model_are_told_apart(tmp_path):
    for path in (str(tmp_path / "absent"), str(tmp_path)):
        with pytest.raises(StartupError, match="no model folder|no config.json"):
            ModelConfig.from_pretrained(path)


def test_missing_unexpected_misshapen_and_broken_weights_are_named(tmp_path):
    save_tiny_model("llama", tmp_path)
    original = (tmp_path / "model.safetensors").read_bytes()

    def refused(edit):
        (tmp_path / "model.safetensors").write_bytes(original)
        edit_weights(tmp_path, edit)
        return refusal(tmp_path)

    name = "model.layers.1.self_attn.k_proj.weight"
    assert f"lacks weight {name}" in refused(lambda t: t.pop(name))
    assert "model.layers.1.extra" in refused(lambda t: t.update({"model.layers.1.extra": torch.zeros(2)}))
    assert f"{name} in model.safetensors has shape (3, 3)" in refused(lambda t: t.update({name: torch.zeros(3, 3)}))
    (tmp_path / "model.safetensors").write_bytes(original[:5000])
    assert "incomplete" in refusal(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    assert "no safetensors" in refusal(tmp_path)


# ---- configuration ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [(0, 2, {0, 2}), ([2, 0], [0], {0, 2}), (None, [5, 6], {5, 6}), (3, None, {3}), (None, None, set())],
)
def test_fc_08_end_ids_are_the_union_of_both_files(tmp_path, config, generation, expected):
    save_tiny_model("llama", tmp_path)
    edit_config(tmp_path, eos_token_id=config)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": generation, "temperature": 0.6}))
    loaded = ModelConfig.from_pretrained(str(tmp_path))
    assert loaded.eos_token_ids == expected
    assert loaded.generation_defaults == {"temperature": 0.6}


def test_auto_dtype_is_the_checkpoints_own(tmp_path):
    save_tiny_model("llama", tmp_path, dtype=torch.bfloat16)
    assert ModelConfig.from_pretrained(str(tmp_path)).dtype == torch.bfloat16
    edit_config(tmp_path, dtype=..., torch_dtype=...)  # config.json silent: the stored weights decide
    assert ModelConfig.from_pretrained(str(tmp_path)).dtype == torch.bfloat16
    assert ModelConfig.from_pretrained(str(tmp_path), dtype="float").dtype == torch.float32


def test_a_cpu_without_bf16_instructions_runs_in_float32(monkeypatch):
    monkeypatch.setattr(sizing, "_has_bf16_instructions", lambda: False)
    assert runtime_dtype("auto", torch.bfloat16, CPU) == torch.float32
    assert runtime_dtype("bfloat16", torch.bfloat16, CPU) == torch.bfloat16  # what was typed is obeyed
    assert runtime_dtype("auto", torch.float16, CPU) == torch.float32
    assert runtime_dtype("auto", torch.float32, CPU) == torch.float32
    assert runtime_dtype("auto", torch.bfloat16, torch.device("cuda")) == torch.bfloat16


# ---- sizes -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("sizes")
    save_tiny_model("llama", path)
    return path


def sized(folder, **args) -> int:
    return make_runner(folder, **({"max_total_tokens": None} | args)).max_total_num_tokens


def test_the_pool_is_what_its_bytes_hold_in_whole_pages(folder):
    per_token = 3 * 2 * (8 + 8) * 4  # layers x kv heads x (K + V) x float32
    assert sized(folder, kv_pool_bytes=per_token * 1000) == 1000
    assert sized(folder, kv_pool_bytes=per_token * 1000, page_size=16) == 992
    assert sized(folder, kv_pool_bytes=per_token * 1000, max_total_tokens=100) == 100
    assert sized(folder, kv_pool_bytes=per_token * 1000, max_total_tokens=5000) == 1000  # only a lower limit


def test_too_little_memory_names_the_smallest_setting_that_works(folder, monkeypatch):
    message = refusal(folder, max_total_tokens=None, kv_pool_bytes=1000)
    smallest = int(message.rpartition("--kv-pool-bytes ")[2])
    assert sized(folder, kv_pool_bytes=smallest) == sizing.MIN_TOKENS
    for module in (sizing, model_runner):  # a machine with 10 MB, before loading and after
        monkeypatch.setattr(module, "free_memory", lambda device: 10_000_000)
    message = refusal(folder, max_total_tokens=None, mem_fraction_static=0.001)
    fraction = float(message.rpartition("--mem-fraction-static ")[2])
    assert sized(folder, mem_fraction_static=fraction) >= sizing.MIN_TOKENS
    assert "does not fit" in refusal(folder, max_total_tokens=None, kv_pool_bytes=20_000_000)


def test_max_total_tokens_below_two_pages_is_refused(folder):
    assert "too small" in refusal(folder, max_total_tokens=20, page_size=16)


def test_running_requests_follow_the_pool_unless_typed():
    assert size_request_table(None, 1_000_000, 8192) == 4096
    assert size_request_table(None, 10_000, 8192) == 2048
    assert size_request_table(None, 100, 8192) == 50
    assert size_request_table(64, 1_000_000, 8192) == 64
    assert size_request_table(64, 100, 8192) == 50


def test_supported_families_are_known_by_architecture(folder):
    config = ModelConfig.from_pretrained(str(folder))
    assert model_class(config).__name__ == "LlamaForCausalLM"
    assert ServerArgs(model_path=str(folder)).resolve().attention_backend == "numba"
