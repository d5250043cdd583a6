"""Weights: from safetensors files straight into the model's parameters.

    checkpoint                             model
    …self_attn.q_proj.weight  ─┐
    …self_attn.k_proj.weight  ─┼─ rows of ─▶ …self_attn.qkv_proj.weight
    …self_attn.v_proj.weight  ─┘
    …mlp.down_proj.weight     ─ whole ─────▶ …mlp.down_proj.weight

One tensor is in memory at a time, beside the model itself: files are mapped, a tensor is read, converted and copied.
With tensor parallel each rank reads from the same files the rows and columns that are its own (`Cut`); with pipeline
parallel, the tensors of its stage.
Every parameter must be filled exactly once and every tensor must have a place; a name that does not fit stops the
start-up, because a model with one missing weight still talks, and talks nonsense.

`--load-format dummy` fills parameters with random numbers from a fixed seed instead: same shapes, same speed, no file.
Source: SGLang `model_loader/loader.py`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from tinysrt.distributed.parallel_state import SINGLE, Cut, ParallelState
from tinysrt.errors import StartupError
from tinysrt.kernels.kernel_set import REFERENCE, KernelSet
from tinysrt.model_executor.layers.embedding import Embedding
from tinysrt.model_executor.layers.linear import Linear
from tinysrt.model_executor.layers.moe import Experts, is_of_all_experts, one_by_one
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
    keep_weights: bool = False,  # beside those that are packed; see `LlamaForCausalLM.finish_loading`
    on_progress: Progress | None = None,
) -> LlamaForCausalLM:
    build = model_class(config)
    with torch.device("meta"):  # shapes only; memory is taken once, in the right format, on the right device
        model = build(config, kernels=kernels, parallel=parallel)
    model = model.to(dtype).to_empty(device=device)
    if load_format == "dummy":
        fill_with_noise(model)
    else:
        elsewhere: set[str] = set()
        if parallel.world_size > 1:
            with torch.device("meta"):
                elsewhere = set(_places(build(config, kernels=kernels, parallel=SINGLE)))
        load_safetensors(
            model, config.path, tied=config.tie_word_embeddings, elsewhere=elsewhere, on_progress=on_progress
        )
    model.finish_loading(keep_weights=keep_weights)
    return model.eval()


def fill_with_noise(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            parameter.fill_(1.0)
        else:
            generator = torch.Generator(parameter.device).manual_seed(DUMMY_SEED + parameter.numel())
            parameter.normal_(0.0, DUMMY_STD, generator=generator)


def load_safetensors(
    model: LlamaForCausalLM,
    path: Path,
    *,
    tied: bool,
    elsewhere: Set[str] = frozenset(),
    on_progress: Progress | None = None,
) -> None:
    """`elsewhere`: weights that may have no place here, because another rank holds them."""
    places = _places(model)
    filled: dict[str, str] = {}  # place → checkpoint name
    files = safetensors_files(path)
    total = sum(file.stat().st_size for file in files)
    done = 0
    for file in files:
        for name, stored in _read(file):
            if name.endswith("rotary_emb.inv_freq") or (tied and name == "lm_head.weight"):
                continue  # computed from config.json; a second copy of the embedding
            place = places.get(name)
            if place is None and name in elsewhere:
                continue
            if place is None:
                raise StartupError(f"{file.name} has a weight that this model has no place for: {name}")
            if stored.shape != place.whole_shape():
                shapes = f"{stored.shape} instead of {place.whole_shape()}"
                raise StartupError(f"weight {name} in {file.name} has shape {shapes}")
            piece = stored.read(place.wanted())
            place.fill(piece)
            filled[name] = file.name
            done += math.prod(stored.shape) * piece.element_size()
            if on_progress is not None:
                on_progress(min(done, total), total)
    missing = [name for name in places if name not in filled]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise StartupError(f"the checkpoint lacks weight {missing[0]}{more}")
    if on_progress is not None:
        on_progress(total, total)


@dataclass(frozen=True)
class Place:
    """The part of a parameter that a checkpoint tensor fills, and which part of that tensor it takes."""

    tensor: Tensor
    cut: Cut | None = None

    def whole_shape(self) -> tuple[int, ...]:
        shape = list(self.tensor.shape)
        if self.cut is not None:
            shape[self.cut.dim] = self.cut.padded_from or shape[self.cut.dim] * self.cut.count
        return tuple(shape)

    def wanted(self) -> tuple[slice, ...]:
        slices = [slice(0, size) for size in self.tensor.shape]
        if self.cut is not None:
            size, whole = self.tensor.shape[self.cut.dim], self.whole_shape()[self.cut.dim]
            start = min(self.cut.index * size, whole)
            slices[self.cut.dim] = slice(start, min(start + size, whole))
        return tuple(slices)

    def fill(self, piece: Tensor) -> None:
        self.tensor[len(piece) :].zero_()  # beyond a padded vocabulary; else nothing
        self.tensor[: len(piece)].copy_(piece)


def _places(model: LlamaForCausalLM) -> dict[str, Place]:
    """Checkpoint name → the part of a parameter that it fills."""
    parts: dict[str, list[str]] = {}  # fused projection → its checkpoint names in order
    for source, (fused, part) in model.fused.items():
        parts.setdefault(fused, []).insert(part, source)
    places: dict[str, Place] = {}
    for prefix, module in model.named_modules():
        for kind, parameter in module.named_parameters(recurse=False):
            owner, _, last = prefix.rpartition(".")
            if isinstance(module, Experts):
                places |= {name: Place(*rest) for name, rest in module.places(prefix).items()}
                break  # both its parameters
            if last in parts and isinstance(module, Linear):
                pieces = zip(parts[last], parameter.split(module.output_sizes), module.cuts, strict=True)
                places |= {f"{owner}.{source}.{kind}": Place(piece, cut) for source, piece, cut in pieces}
            else:
                cut = module.cuts[0] if isinstance(module, (Linear, Embedding)) else None
                # A bias is as long as the output: cut where that is, whole where the input is.
                places[f"{prefix}.{kind}"] = Place(parameter, cut if cut and cut.dim < parameter.dim() else None)
    return places


class Stored:
    """A tensor in a file (or, of a tensor of all experts, one expert's part): only what is asked for is read."""

    def __init__(self, source: Any):
        self.source = source  # a slice of a safetensors file, or a Tensor
        self.shape = tuple(source.shape if isinstance(source, Tensor) else source.get_shape())

    def read(self, wanted: tuple[slice, ...]) -> Tensor:
        return self.source[wanted] if self.shape else self.source[...]


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


def _read(file: Path) -> Iterator[tuple[str, Stored]]:
    try:
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():
                if is_of_all_experts(name):
                    for part, tensor in one_by_one(name, tensors.get_tensor(name)):
                        yield part, Stored(tensor)
                else:
                    yield name, Stored(tensors.get_slice(name))
    except SafetensorError as error:
        raise StartupError(f"cannot read {file.name}: {error} (an incomplete download?)") from error
