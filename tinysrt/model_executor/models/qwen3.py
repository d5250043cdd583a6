"""Qwen3 (dense): Llama's decoder with an RMSNorm on every query and key head before the rotation."""

from __future__ import annotations

from tinysrt.model_executor.model_config import ModelConfig
from tinysrt.model_executor.models.llama import LlamaForCausalLM


class Qwen3ForCausalLM(LlamaForCausalLM):
    def __init__(self, config: ModelConfig):
        super().__init__(config, head_norms=True)
