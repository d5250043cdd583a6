"""Qwen3 with experts: Qwen3's attention, and in most layers a mixture of experts (`layers/moe.py`) for the MLP.

`decoder_sparse_step` n makes every n-th layer sparse; `mlp_only_layers` names layers that stay dense whatever the step
says. A dense layer has the MLP of the other families, `intermediate_size` wide; an expert is `moe_intermediate_size`
wide. Source: SGLang `models/qwen3_moe.py`.
"""

from __future__ import annotations

from torch import nn

from tinysrt.distributed.parallel_state import ParallelState
from tinysrt.errors import StartupError
from tinysrt.kernels.kernel_set import KernelSet
from tinysrt.model_executor.layers.moe import SparseMoE
from tinysrt.model_executor.model_config import ModelConfig
from tinysrt.model_executor.models.llama import LlamaForCausalLM


class Qwen3MoeForCausalLM(LlamaForCausalLM):
    def __init__(self, config: ModelConfig, *, kernels: KernelSet, parallel: ParallelState):
        super().__init__(config, kernels=kernels, parallel=parallel, head_norms=True)

    def build_mlp(self, config: ModelConfig, layer: int, kernels: KernelSet, parallel: ParallelState) -> nn.Module:
        hf = config.hf_config
        dense = layer in (hf.mlp_only_layers or []) or (layer + 1) % hf.decoder_sparse_step != 0
        if dense or hf.num_experts == 0:
            return super().build_mlp(config, layer, kernels, parallel)
        if not 0 < hf.num_experts_per_tok <= hf.num_experts:
            raise StartupError(
                f"config.json: num_experts_per_tok {hf.num_experts_per_tok} of num_experts {hf.num_experts}"
            )
        return SparseMoE(
            num_experts=hf.num_experts,
            top_k=hf.num_experts_per_tok,
            renormalize=hf.norm_topk_prob,
            hidden_size=config.hidden_size,
            intermediate_size=hf.moe_intermediate_size,
            kernels=kernels,
            parallel=parallel,
        )
