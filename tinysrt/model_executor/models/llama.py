"""The decoder that Llama, Mistral, Qwen2 and Qwen3 share; here with Llama's switches.

    ids ─ embed ─┬─ norm ─ qkv_proj ─ (head norms) ─ attend ─ o_proj ─┐
                 └────────────────────── residual ────────────────────+
                 ┌────────────────────────────────────────────────────┘
                 ├─ norm ─ gate_up_proj ─ silu·mul ─ down_proj ─┐
                 └────────────────── residual ──────────────────+─▶ next layer … ─ norm ─▶ hidden states

The families differ in little: which projections have a bias, and norms on query and key heads. Those are constructor
arguments; `qwen2.py` and `qwen3.py` name theirs.

A model knows nothing of requests. It gets token ids and `attend(layer, qkv)`, which hides all that has to do with
positions: it rotates queries and keys, stores K and V where the request's live, and attends to what is there
(`attention/base.py`). The model returns hidden states; `logits_processor.py` decides which of them go through
`lm_head`. Parameter names are the checkpoint's, except for the projections that `FUSED` joins. Source: SGLang
`models/llama.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tinysrt.distributed.parallel_state import ParallelState
from tinysrt.kernels.kernel_set import KernelSet
from tinysrt.model_executor.layers.embedding import Embedding
from tinysrt.model_executor.layers.linear import Linear, RowParallelLinear
from tinysrt.model_executor.layers.lm_head import LMHead
from tinysrt.model_executor.layers.norm import RMSNorm
from tinysrt.model_executor.model_config import ModelConfig

# (layer, (T, heads + 2 * kv_heads, dim): query, key and value heads) → (T, heads * dim)
Attend = Callable[[int, Tensor], Tensor]

# Checkpoint projection → (fused parameter, its part). Parts are stacked as rows in this order.
FUSED = {
    "q_proj": ("qkv_proj", 0),
    "k_proj": ("qkv_proj", 1),
    "v_proj": ("qkv_proj", 2),
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
}


class Attention(nn.Module):
    def __init__(
        self,
        config: ModelConfig,
        kernels: KernelSet,
        parallel: ParallelState,
        layer: int,  # counted from this stage's first: the index into its KV pool
        *,
        qkv_bias: bool,
        o_bias: bool,
        head_norms: bool,
    ):
        super().__init__()
        self.kernels = kernels
        self.layer = layer
        self.dim = config.head_dim
        self.heads = parallel.share(config.num_heads, "the attention heads,")
        self.kv_heads, kv_cut = parallel.share_of_heads(config.num_kv_heads)
        q_size, kv_size = self.heads * self.dim, self.kv_heads * self.dim
        cuts = [parallel.my_cut(0), kv_cut, kv_cut]
        self.qkv_proj = Linear(config.hidden_size, [q_size, kv_size, kv_size], qkv_bias, cuts)
        self.o_proj = RowParallelLinear(config.num_heads * self.dim, config.hidden_size, o_bias, parallel)
        self.q_norm = RMSNorm(self.dim, config.rms_norm_eps, kernels) if head_norms else None
        self.k_norm = RMSNorm(self.dim, config.rms_norm_eps, kernels) if head_norms else None
        self.head_norm_weight: Tensor | None = None  # (heads + kv_heads, dim): both norms as one operation
        self.eps = config.rms_norm_eps

    def finish_loading(self) -> None:
        if self.q_norm is not None and self.k_norm is not None:
            rows = [self.q_norm.weight.expand(self.heads, -1), self.k_norm.weight.expand(self.kv_heads, -1)]
            self.head_norm_weight = torch.cat(rows).float()  # like every norm's

    def forward(self, x: Tensor, attend: Attend) -> Tensor:
        # One view of the fused output: query heads, key heads, value heads. The norm treats the first two alike.
        qkv = self.qkv_proj(x).view(len(x), -1, self.dim)
        if self.head_norm_weight is not None:
            qk = self.kernels.rms_norm(qkv[:, : -self.kv_heads], self.head_norm_weight, self.eps)
            qkv = torch.cat((qk, qkv[:, -self.kv_heads :]), dim=1)
        return self.o_proj(attend(self.layer, qkv))


class MLP(nn.Module):
    def __init__(self, config: ModelConfig, kernels: KernelSet, parallel: ParallelState, bias: bool):
        super().__init__()
        self.kernels = kernels
        mine = parallel.share(config.intermediate_size, "intermediate_size")
        self.gate_up_proj = Linear(config.hidden_size, [mine] * 2, bias, [parallel.my_cut(0)] * 2)
        self.down_proj = RowParallelLinear(config.intermediate_size, config.hidden_size, bias, parallel)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.kernels.silu_and_mul(self.gate_up_proj(x)))


class DecoderLayer(nn.Module):
    def __init__(self, config: ModelConfig, kernels: KernelSet, attention: Attention, mlp: nn.Module):
        super().__init__()
        self.self_attn = attention
        self.mlp = mlp
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, kernels)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, kernels)

    def forward(self, x: Tensor, residual: Tensor, attend: Attend) -> tuple[Tensor, Tensor]:
        """x is what the block before has to say and `residual` does not hold yet; both (T, hidden_size)."""
        x, residual = self.input_layernorm.add(x, residual)
        x = self.self_attn(x, attend)
        x, residual = self.post_attention_layernorm.add(x, residual)
        return self.mlp(x), residual


class Decoder(nn.Module):
    """What checkpoints call `model`: embedding, layers, final norm. Of a pipeline's stages the first has the embedding
    (a tied head needs it at the last one too), the last the norm; each has some layers, under their own numbers."""

    def __init__(
        self, config: ModelConfig, kernels: KernelSet, parallel: ParallelState, layers: dict[str, DecoderLayer]
    ):
        super().__init__()
        self.parallel = parallel
        self.hidden_size = config.hidden_size
        needs_embedding = parallel.is_first_stage or (parallel.is_last_stage and config.tie_word_embeddings)
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, parallel) if needs_embedding else None
        self.layers = nn.ModuleDict(layers)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, kernels) if parallel.is_last_stage else None

    def forward(self, token_ids: Tensor, attend: Attend) -> Tensor:
        x, residual = self._first_input(token_ids)
        for layer in self.layers.values():
            x, residual = layer(x, residual, attend)
        if self.norm is None:
            self.parallel.send_next(x, residual)
            return x
        return self.norm.add(x, residual)[0]

    def _first_input(self, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        if self.parallel.is_first_stage:
            assert self.embed_tokens is not None
            x = self.embed_tokens(token_ids)
            return x, torch.zeros_like(x, dtype=torch.float32)  # nothing came before the first layer
        first: Any = next(iter(self.layers.values()))
        dtype = first.self_attn.qkv_proj.weight.dtype
        x = torch.empty(len(token_ids), self.hidden_size, dtype=dtype, device=token_ids.device)
        residual = torch.empty_like(x, dtype=torch.float32)
        self.parallel.receive_previous(x, residual)
        return x, residual


class LlamaForCausalLM(nn.Module):
    """Also Mistral, which is the same decoder without biases."""

    fused = FUSED

    def __init__(
        self,
        config: ModelConfig,
        *,
        kernels: KernelSet,
        parallel: ParallelState,
        qkv_bias: bool | None = None,  # None: as config.json says
        o_bias: bool | None = None,
        head_norms: bool = False,
    ):
        super().__init__()
        self.kernels = kernels
        configured = bool(getattr(config.hf_config, "attention_bias", False))
        biases = {
            "qkv_bias": configured if qkv_bias is None else qkv_bias,
            "o_bias": configured if o_bias is None else o_bias,
        }
        layers = {
            str(i): DecoderLayer(
                config,
                kernels,
                Attention(config, kernels, parallel, local, head_norms=head_norms, **biases),
                self.build_mlp(config, i, kernels, parallel),
            )
            for local, i in enumerate(parallel.my_layers(config.num_layers))
        }
        self.model = Decoder(config, kernels, parallel, layers)
        self.lm_head = LMHead(config.hidden_size, config.vocab_size, parallel) if parallel.is_last_stage else None
        self.tied = config.tie_word_embeddings
        if self.tied and self.lm_head is not None:
            del self.lm_head.weight  # no parameter of its own: `finish_loading` lends it the embedding's

    def build_mlp(self, config: ModelConfig, layer: int, kernels: KernelSet, parallel: ParallelState) -> nn.Module:
        """What stands behind the attention of one layer; mixture-of-experts families have their own."""
        return MLP(config, kernels, parallel, bias=bool(getattr(config.hf_config, "mlp_bias", False)))

    def finish_loading(self, *, keep_weights: bool = False) -> None:
        """Once all weights are in: lay out and pack what the forward reads in another shape than the checkpoint's.
        `keep_weights`: beside what is packed, keep the plain weights too, for torch.compile."""
        if self.tied and self.lm_head is not None:
            assert self.model.embed_tokens is not None
            self.lm_head.weight = self.model.embed_tokens.weight
        for module in self.modules():
            if isinstance(module, Linear):
                module.pack(self.kernels, keep_weight=keep_weights or module is self.lm_head)
            elif isinstance(module, (Attention, RMSNorm)):  # an Attention before the head norms that it joins
                module.finish_loading()

    def forward(self, token_ids: Tensor, attend: Attend) -> Tensor:
        """(T, hidden_size), ready for `lm_head`; at a stage that has none, what it has sent on."""
        return self.model(token_ids, attend)
