"""Qwen2 and Qwen2.5: Llama's decoder with a bias on the query, key and value projections."""

from __future__ import annotations

from tinysrt.model_executor.model_config import ModelConfig
from tinysrt.model_executor.models.llama import LlamaForCausalLM


class Qwen2ForCausalLM(LlamaForCausalLM):
    def __init__(self, config: ModelConfig):
        super().__init__(config, qkv_bias=True, o_bias=False)
