"""Qwen3 (dense): Llama's decoder with an RMSNorm on every query and key head before the rotation."""

from __future__ import annotations

from tinysrt.distributed.parallel_state import ParallelState
from tinysrt.kernels.kernel_set import KernelSet
from tinysrt.model_executor.model_config import ModelConfig
from tinysrt.model_executor.models.llama import LlamaForCausalLM


class Qwen3ForCausalLM(LlamaForCausalLM):
    def __init__(self, config: ModelConfig, *, kernels: KernelSet, parallel: ParallelState):
        super().__init__(config, kernels=kernels, parallel=parallel, head_norms=True)
