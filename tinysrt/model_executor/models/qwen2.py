"""Qwen2 and Qwen2.5: Llama's decoder with a bias on the query, key and value projections."""

from __future__ import annotations

from tinysrt.distributed.parallel_state import ParallelState
from tinysrt.kernels.kernel_set import KernelSet
from tinysrt.model_executor.model_config import ModelConfig
from tinysrt.model_executor.models.llama import LlamaForCausalLM


class Qwen2ForCausalLM(LlamaForCausalLM):
    def __init__(self, config: ModelConfig, *, kernels: KernelSet, parallel: ParallelState):
        super().__init__(config, kernels=kernels, parallel=parallel, qkv_bias=True, o_bias=False)
