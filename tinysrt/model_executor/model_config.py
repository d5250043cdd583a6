"""ModelConfig: what the checkpoint says about itself, in the names that tinysrt uses.

Read from config.json and generation_config.json through transformers, which knows each family's defaults. Both the
main process (context length, end ids, sampling defaults) and the scheduler process (everything else) build one; it
holds no weights. What is a matter of the machine, such as the number format that a CPU can multiply, is decided in
`sizing.py`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tinysrt.distributed.parallel_state import ParallelState
from tinysrt.errors import StartupError
from tinysrt.server_args import ServerArgs

DTYPES = {
    "half": torch.float16,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float": torch.float32,
    "float32": torch.float32,
}
# Families whose layers know a sliding window. Mistral and the MoE use it in all layers, the others from
# `max_window_layers` on, which newer config files spell out layer by layer (`layer_types`).
WINDOWED_FAMILIES = ("mistral", "qwen2", "qwen3", "qwen3_moe")
GENERATION_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True)
class ModelConfig:
    path: Path  # local folder
    architectures: list[str]
    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: dict[str, Any]  # rope_type, rope_theta and what the type needs
    # Per layer: how many of the last positions a token sees, itself included; None: all of them.
    windows: list[int | None]
    tie_word_embeddings: bool
    dtype: torch.dtype  # as typed, or the checkpoint's own
    context_len: int  # longest sequence, prompt and answer together
    # Every file that names end tokens is believed (FC-08: each is edited by other people, and a missed one runs on to
    # the limit). The tokenizer's own is added where the tokenizer is loaded.
    eos_token_ids: frozenset[int]
    generation_defaults: dict[str, Any]  # sampling parameters that generation_config.json recommends
    hf_config: Any

    @classmethod
    def of_server(cls, args: ServerArgs) -> ModelConfig:
        """As resolved flags say. StartupError if the model cannot be cut into so many ranks: said here, before any of
        them has loaded its part."""
        assert args.model_path is not None, "resolved"
        config = cls.from_pretrained(
            args.model_path,
            context_length=args.context_length,
            dtype=args.dtype,
            trust_remote_code=args.trust_remote_code,
            load_format=args.load_format,
        )
        ParallelState(tp_size=args.tensor_parallel_size, pp_size=args.pipeline_parallel_size).check(
            num_heads=config.num_heads, num_kv_heads=config.num_kv_heads, num_layers=config.num_layers
        )
        return config

    @classmethod
    def from_pretrained(
        cls,
        model_path: str,
        *,
        context_length: int | None = None,
        dtype: str = "auto",
        trust_remote_code: bool = False,
        load_format: str = "auto",
    ) -> ModelConfig:
        path = resolve_model_path(model_path, weights=load_format != "dummy")
        hf = _load_hf_config(path, model_path, trust_remote_code)
        generation = _read_json(path / "generation_config.json")
        num_heads = _required(hf, "num_attention_heads")
        hidden_size = _required(hf, "hidden_size")
        context_len = _context_len(hf, context_length)
        return cls(
            path=path,
            architectures=list(hf.architectures or []),
            model_type=hf.model_type,
            vocab_size=_required(hf, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=_required(hf, "intermediate_size"),
            num_layers=_required(hf, "num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=getattr(hf, "num_key_value_heads", None) or num_heads,
            head_dim=getattr(hf, "head_dim", None) or hidden_size // num_heads,
            rms_norm_eps=getattr(hf, "rms_norm_eps", 1e-6),
            rope=_rope(hf),
            windows=_windows(hf, context_len),
            tie_word_embeddings=bool(hf.tie_word_embeddings),
            dtype=DTYPES[dtype] if dtype != "auto" else _checkpoint_dtype(hf, path),
            context_len=context_len,
            eos_token_ids=_ids(getattr(hf, "eos_token_id", None)) | _ids(generation.get("eos_token_id")),
            generation_defaults={k: generation[k] for k in GENERATION_DEFAULTS if generation.get(k) is not None},
            hf_config=hf,
        )


def resolve_model_path(model_path: str, *, weights: bool = True) -> Path:
    """The local folder of a model: itself, or a hub id's snapshot (downloaded once, by huggingface_hub)."""
    path = Path(model_path).expanduser()
    if path.is_dir():
        return path
    if path.exists() or model_path.count("/") != 1 or model_path.startswith((".", "~", "/")):
        raise StartupError(f"no model folder at {model_path!r} (and it is no hub id such as owner/name)")
    from huggingface_hub import snapshot_download

    patterns = ["*.json", "*.txt", "*.model", "*.jinja", *(["*.safetensors"] if weights else [])]
    try:
        return Path(snapshot_download(model_path, allow_patterns=patterns))
    except (OSError, ValueError) as error:  # huggingface_hub's errors are kinds of these
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise StartupError(f"no folder {model_path!r} here, and the hub did not give it: {reason}") from error


def _load_hf_config(path: Path, model_path: str, trust_remote_code: bool) -> Any:
    from transformers import AutoConfig

    if not (path / "config.json").is_file():
        raise StartupError(f"{model_path!r} has no config.json: it is not a model folder")
    try:
        return AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    except Exception as error:  # unknown model type, broken JSON, impossible values: transformers raises many kinds
        reason = " ".join(str(error).split())[:300]  # where a validator speaks, the reason is on its second line
        raise StartupError(f"cannot read config.json of {model_path!r}: {reason}") from error


def _required(hf: Any, name: str) -> int:
    value = getattr(hf, name, None)
    if value is None:
        raise StartupError(f"config.json (model type {hf.model_type}) lacks {name}: not a decoder that tinysrt can run")
    return int(value)


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise StartupError(f"{path.name} is not valid JSON: {error}") from error


def _ids(value: int | list[int] | None) -> frozenset[int]:
    if value is None:
        return frozenset()
    return frozenset(value if isinstance(value, list) else [value])


def _rope(hf: Any) -> dict[str, Any]:
    """One record from both spellings: `rope_parameters`, or `rope_theta` beside `rope_scaling`."""
    rope = dict(getattr(hf, "rope_parameters", None) or getattr(hf, "rope_scaling", None) or {})
    rope.setdefault("rope_theta", getattr(hf, "rope_theta", None) or 10000.0)
    rope["rope_type"] = rope.pop("type", None) or rope.get("rope_type") or "default"
    rope.setdefault("original_max_position_embeddings", _required(hf, "max_position_embeddings"))
    return rope


def _windows(hf: Any, context_len: int) -> list[int | None]:
    """The attention window of each layer. KV outside of it is masked and kept: it takes room in the pool all the same.
    (SGLang gives windowed layers a smaller pool of their own and frees what has slid out.)"""
    num_layers = _required(hf, "num_hidden_layers")
    kinds = list(getattr(hf, "layer_types", None) or [])
    strange = sorted(set(kinds) - {"full_attention", "sliding_attention"})
    if strange:
        raise StartupError(f"layer_types {strange[0]!r} is not supported; supported: full_attention, sliding_attention")
    window = getattr(hf, "sliding_window", None)
    if not getattr(hf, "use_sliding_window", True):
        window = None
    if window is not None and window >= context_len:
        return [None] * num_layers  # within the window, sliding and full attention are the same thing
    if window is None:
        if "sliding_attention" in kinds:
            raise StartupError("layer_types in config.json names sliding_attention, and sliding_window gives no length")
        return [None] * num_layers
    if window < 1 or hf.model_type not in WINDOWED_FAMILIES:
        raise StartupError(
            f"sliding-window attention (sliding_window {window}) is not supported for model type {hf.model_type}"
            + (f"; --context-length {window} serves this model inside its window" if window > 0 else "")
        )
    if not kinds:  # config files from before `layer_types`
        first = getattr(hf, "max_window_layers", 0) if hf.model_type in ("qwen2", "qwen3") else 0
        kinds = ["full_attention"] * first + ["sliding_attention"] * (num_layers - first)
    return [window if kind == "sliding_attention" else None for kind in kinds[:num_layers]]


def _context_len(hf: Any, asked: int | None) -> int:
    derived = _required(hf, "max_position_embeddings")
    rope = _rope(hf)
    if rope["rope_type"] == "linear":  # llama3 checkpoints state the stretched length, linear ones the original
        derived = int(derived * rope["factor"])
    elif rope["rope_type"] == "yarn" and "factor" in rope:  # of Qwen's some state the one, some the other
        derived = max(derived, int(rope["original_max_position_embeddings"] * rope["factor"]))
    if asked is not None and asked > derived:
        raise StartupError(f"--context-length {asked} is longer than the model's own {derived}; use at most {derived}")
    return asked or derived


def _checkpoint_dtype(hf: Any, path: Path) -> torch.dtype:
    """What config.json says; else what the first weight is stored in."""
    said = getattr(hf, "dtype", None) or getattr(hf, "torch_dtype", None)
    if said is not None:
        return DTYPES[said] if isinstance(said, str) else said
    file = next(iter(sorted(path.glob("*.safetensors"))), None)
    if file is None:
        return torch.float32
    from safetensors import safe_open

    with safe_open(file, framework="pt") as weights:
        stored = weights.get_tensor(next(iter(weights.keys()))).dtype
    return stored if stored in DTYPES.values() else torch.float32
