"""Weights: from safetensors files straight into the model's parameters.

    checkpoint                             model
    …self_attn.q_proj.weight  ─┐
    …self_attn.k_proj.weight  ─┼─ rows of ─▶ …self_attn.qkv_proj.weight
    …self_attn.v_proj.weight  ─┘
    …mlp.down_proj.weight     ─ whole ─────▶ …mlp.down_proj.weight

One tensor is in memory at a time, beside the model itself: files are mapped, a tensor is read, converted and copied.
Every parameter must be filled exactly once and every tensor must have a place; a name that does not fit stops the
start-up, because a model with one missing weight still talks, and talks nonsense.

`--load-format dummy` fills parameters with random numbers from a fixed seed instead: same shapes, same speed, no file.
Source: SGLang `model_loader/loader.py`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from tinysrt.distributed.parallel_state import SINGLE, ParallelState
from tinysrt.errors import StartupError
from tinysrt.kernels.kernel_set import REFERENCE, KernelSet
from tinysrt.model_executor.layers.linear import Linear
from tinysrt.model_executor.layers.moe import Experts, one_by_one
from tinysrt.model_executor.model_config import ModelConfig
from tinysrt.model_executor.models.llama import LlamaForCausalLM
from tinysrt.model_executor.models.registry import model_class

Progress = Callable[[int, int], None]  # (bytes read so far, bytes in all)
DUMMY_SEED = 0
DUMMY_STD = 0.02


def load_model(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    load_format: str,
    *,
    kernels: KernelSet = REFERENCE,
    parallel: ParallelState = SINGLE,
    on_progress: Progress | None = None,
) -> LlamaForCausalLM:
    build = model_class(config)
    with torch.device("meta"):  # shapes only; memory is taken once, in the right format, on the right device
        model = build(config, kernels=kernels, parallel=parallel)
    model = model.to(dtype).to_empty(device=device)
    if load_format == "dummy":
        fill_with_noise(model)
    else:
        load_safetensors(model, config.path, tied=config.tie_word_embeddings, on_progress=on_progress)
    model.finish_loading()
    return model.eval()


def fill_with_noise(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            parameter.fill_(1.0)
        else:
            generator = torch.Generator(parameter.device).manual_seed(DUMMY_SEED + parameter.numel())
            parameter.normal_(0.0, DUMMY_STD, generator=generator)


def load_safetensors(model: LlamaForCausalLM, path: Path, *, tied: bool, on_progress: Progress | None = None) -> None:
    places = _places(model)
    filled: dict[str, str] = {}  # place → checkpoint name
    files = safetensors_files(path)
    total = sum(file.stat().st_size for file in files)
    done = 0
    for file in files:
        for name, tensor in (part for stored in _read(file) for part in one_by_one(*stored)):
            done += tensor.numel() * tensor.element_size()
            if on_progress is not None:
                on_progress(min(done, total), total)
            if name.endswith("rotary_emb.inv_freq") or (tied and name == "lm_head.weight"):
                continue  # computed from config.json; a second copy of the embedding
            place = places.get(name)
            if place is None:
                raise StartupError(f"{file.name} has a weight that this model has no place for: {name}")
            if place.shape != tensor.shape:
                shapes = f"{tuple(tensor.shape)} instead of {tuple(place.shape)}"
                raise StartupError(f"weight {name} in {file.name} has shape {shapes}")
            place.copy_(tensor)
            filled[name] = file.name
    missing = [name for name in places if name not in filled]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise StartupError(f"the checkpoint lacks weight {missing[0]}{more}")
    if on_progress is not None:
        on_progress(total, total)


def _places(model: LlamaForCausalLM) -> dict[str, Tensor]:
    """Checkpoint name → the part of a parameter that it fills."""
    parts: dict[str, list[str]] = {}  # fused projection → its checkpoint names in order
    for source, (fused, part) in model.fused.items():
        parts.setdefault(fused, []).insert(part, source)
    places: dict[str, Tensor] = {}
    for prefix, module in model.named_modules():
        for kind, parameter in module.named_parameters(recurse=False):
            owner, _, last = prefix.rpartition(".")
            if isinstance(module, Experts):
                places |= module.places(prefix)
                break  # both its parameters
            if last in parts and isinstance(module, Linear):
                pieces = parameter.split(module.output_sizes)
                places |= {f"{owner}.{source}.{kind}": piece for source, piece in zip(parts[last], pieces, strict=True)}
            else:
                places[f"{prefix}.{kind}"] = parameter
    return places


def safetensors_files(path: Path) -> list[Path]:
    """The checkpoint's files: those its index names, or every one in the folder."""
    index = path / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        absent = [name for name in names if not (path / name).is_file()]
        if absent:
            raise StartupError(f"{index.name} names {absent[0]}, which is not in the model folder")
        return [path / name for name in names]
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise StartupError("the model folder has no safetensors file (other formats are not supported)")
    return files


def _read(file: Path) -> Iterator[tuple[str, Tensor]]:
    try:
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():
                yield name, tensors.get_tensor(name)
    except SafetensorError as error:
        raise StartupError(f"cannot read {file.name}: {error} (an incomplete download?)") from error
