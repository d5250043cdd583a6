"""Architecture name in config.json → the class that runs it. To add a model: one file, one line here.

What a checkpoint asks for and no class does (another architecture, quantized weights, another activation) is refused
here by name, before any weight is read: running it anyway would give wrong text. Attention windows and rope kinds are
refused where they are read (`model_config.py`, `layers/rotary.py`).
"""

from __future__ import annotations

from tinysrt.errors import StartupError
from tinysrt.model_executor.model_config import ModelConfig
from tinysrt.model_executor.models.llama import LlamaForCausalLM
from tinysrt.model_executor.models.qwen2 import Qwen2ForCausalLM
from tinysrt.model_executor.models.qwen3 import Qwen3ForCausalLM
from tinysrt.model_executor.models.qwen3_moe import Qwen3MoeForCausalLM

MODELS: dict[str, type[LlamaForCausalLM]] = {
    "LlamaForCausalLM": LlamaForCausalLM,
    "MistralForCausalLM": LlamaForCausalLM,
    "Qwen2ForCausalLM": Qwen2ForCausalLM,
    "Qwen3ForCausalLM": Qwen3ForCausalLM,
    "Qwen3MoeForCausalLM": Qwen3MoeForCausalLM,
}


def model_class(config: ModelConfig) -> type[LlamaForCausalLM]:
    """The class for a checkpoint, or StartupError naming what is in the way."""
    known = next((name for name in config.architectures if name in MODELS), None)
    if known is None:
        asked = ", ".join(config.architectures) or f"none named (model type {config.model_type})"
        raise StartupError(f"unsupported architecture: {asked}; supported: {', '.join(MODELS)}")
    hf = config.hf_config
    if getattr(hf, "quantization_config", None) is not None:
        raise StartupError("quantized checkpoints (quantization_config in config.json) are not supported")
    activation = getattr(hf, "hidden_act", "silu")
    if activation != "silu":
        raise StartupError(f"hidden_act {activation!r} is not supported; supported: silu")
    return MODELS[known]
