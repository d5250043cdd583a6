# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Tensor parallel on two processes
#
# Two processes, each with half of every layer, answer like one. No GPU is needed: the ranks talk over gloo.
#
# After this lab you can
#
# - say which part of each matrix a rank holds, and compute its memory per token,
# - show what an all-reduce adds up,
# - compute how many bytes ranks send each other for a token,
# - say what must be equal on all ranks, and what need not be.
#
# Before it: [chapter 16](../docs/chapters/16-parallelism.md). What the ranks run stands in `labs/two_ranks.py`: spawned
# processes import their functions, so those cannot stand in a cell.
#
# ## A small model, on disk
#
# Both ranks read the same files; each reads only its part.

# %%
import json
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file

sys.path.insert(0, str(Path("labs").resolve() if Path("labs").is_dir() else Path.cwd()))
import two_ranks

globals().pop("__file__", None)  # as a script: the processes that it spawns must not run it again
LAYERS, HIDDEN, INNER, HEADS, KV_HEADS, DIM, VOCAB = 3, 64, 96, 8, 2, 8, 300
config = dict(
    architectures=["LlamaForCausalLM"],
    model_type="llama",
    vocab_size=VOCAB,
    hidden_size=HIDDEN,
    intermediate_size=INNER,
    num_hidden_layers=LAYERS,
    num_attention_heads=HEADS,
    num_key_value_heads=KV_HEADS,
    head_dim=DIM,
    max_position_embeddings=128,
    tie_word_embeddings=True,
    dtype="float32",
)
torch.manual_seed(0)
weights = {"model.embed_tokens.weight": torch.randn(VOCAB, HIDDEN) * 0.3, "model.norm.weight": torch.ones(HIDDEN)}
for i in range(LAYERS):
    shapes = {
        "self_attn.q_proj": (HEADS * DIM, HIDDEN),
        "self_attn.k_proj": (KV_HEADS * DIM, HIDDEN),
        "self_attn.v_proj": (KV_HEADS * DIM, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HEADS * DIM),
        "mlp.gate_proj": (INNER, HIDDEN),
        "mlp.up_proj": (INNER, HIDDEN),
        "mlp.down_proj": (HIDDEN, INNER),
    }
    weights |= {f"model.layers.{i}.{name}.weight": torch.randn(*shape) * 0.2 for name, shape in shapes.items()}
    weights |= {
        f"model.layers.{i}.{name}.weight": torch.ones(HIDDEN)
        for name in ("input_layernorm", "post_attention_layernorm")
    }
folder = Path(tempfile.mkdtemp())
save_file(weights, folder / "model.safetensors")
(folder / "config.json").write_text(json.dumps(config))
print(f"{sum(w.numel() for w in weights.values()):,} weights")

# %% [markdown]
# ## Who holds what
#
# **Predict:** eight query heads, two key/value heads, 96 hidden units, 300 rows of vocabulary. What has each of two
# ranks?

# %% tags=["predict"]
ranks = two_ranks.Ranks(str(folder), 2)
alone = two_ranks.make_rank(str(folder))
print("alone ", two_ranks.shapes(alone))
for number, held in enumerate(ranks.run(two_ranks.shapes)):
    print("rank", number, held)

# %% [markdown]
# 160 rows of vocabulary, not 150: the vocabulary is padded to a multiple of 64, 320, so that it divides evenly. Half of
# the KV bytes per token means twice as many tokens in the same memory.
#
# **Predict:** four ranks, and still two key/value heads. Which of them does each rank hold?

# %% tags=["predict"]
from tinysrt.distributed.parallel_state import ParallelState

for number in range(4):
    count, cut = ParallelState(tp_rank=number, tp_size=4).share_of_heads(KV_HEADS)
    print(f"rank {number}: {count} key/value head, part {cut.index} of {cut.count}; query heads from {number * 2}")

# %% [markdown]
# One head each, so each head is stored twice
# ([share_of_heads](../tinysrt/distributed/parallel_state.py#ParallelState.share_of_heads)). More ranks than KV heads
# save no more KV memory.
#
# ## What an all-reduce adds up
#
# `down_proj` has 96 columns; a rank has 48 of them, and multiplies them with its 48 hidden units. Each rank gets a
# number for every output, and neither is right.

# %%
(half_0, sum_0), (half_1, sum_1) = ranks.run(two_ranks.halves_of_a_sum)
_, whole = two_ranks.halves_of_a_sum(alone)
for name, numbers in (("rank 0", half_0), ("rank 1", half_1), ("sum", sum_0), ("alone", whole)):
    print(f"{name:7}", "  ".join(f"{number:8.4f}" for number in numbers))
print("the same bits on both ranks:", sum_0 == sum_1)

# %% [markdown]
# The ranks agree to the last bit, which they must: each samples for itself. With one process they agree only to
# rounding, because the products are added in another order. So a text can differ between `--tp 1` and `--tp 2` where
# the two best tokens are as good as equal, and never between two ranks.
#
# ## Whole schedulers
#
# Every rank runs a scheduler; both get the same two requests.

# %%
rank_0, rank_1 = ranks.run(two_ranks.generate)
single = two_ranks.generate(alone)
for name, answer in (("rank 0", rank_0), ("rank 1", rank_1), ("alone", single)):
    print(f"{name:7}", answer["tokens"], "in", answer["forwards"], "forwards")
print("equal:", rank_0["tokens"] == rank_1["tokens"] == single["tokens"])

# %% [markdown]
# **Predict:** how many bytes has a rank sent? A forward over T tokens makes one all-reduce after the embedding and two
# a layer, of T x 64 numbers each; and one gather of the logits, 160 numbers for each request. The prompts have 5 and 3
# tokens; the first forward computes both, seven more decode.

# %% tags=["predict"]
tokens = (5 + 3) + 7 * 2
sums = tokens * HIDDEN * (1 + 2 * LAYERS) * 4
logits = 8 * 2 * 160 * 4
print("predicted:", sums + logits, "bytes; counted:", rank_0["sent to each other rank"])

# %% [markdown]
# For an 8B model with 32 layers, a hidden size of 4,096 and bfloat16 that is half a megabyte a token, in 65 pieces that
# each wait for the one before. That is why `--tp` stays within a machine, and `--pp`, which sends one hidden state a
# stage, goes between machines.
#
# ## How long a sum takes
#
# The time of an all-reduce over one hidden state of SmolLM2 (576 numbers) between two processes of this machine. A
# decode step of that model makes 61 of them.

# %% tags=["varies"]
straight, gloo = ranks.run(two_ranks.time_of_a_sum)[0]
ranks.close()
print(f"straight to each other: {straight:.2f} ms; gloo's own all-reduce: {gloo:.2f} ms (median of 100)")

# %% [markdown]
# Gloo's own hands the work to a thread first, and goes round a ring of ranks: made for large tensors and many ranks. In
# both a process waits for another one; on busy cores that is most of it, so run this cell a few times.
#
# ## Exercise: the stages of a pipeline
#
# With `--pp 2` the three layers are dealt out to two stages. Write `layers_of(stage, stages, layers)` so that sizes
# differ by one at most and the first stages get the longer shares.


# %% tags=["solution"]
def layers_of(stage: int, stages: int, layers: int) -> range:
    each, more = divmod(layers, stages)
    start = stage * each + min(stage, more)
    return range(start, start + each + (stage < more))


# %%
for stages, layers in ((2, 3), (4, 30), (3, 3)):
    ours = [layers_of(stage, stages, layers) for stage in range(stages)]
    theirs = [ParallelState(pp_rank=stage, pp_size=stages).my_layers(layers) for stage in range(stages)]
    assert ours == theirs, (ours, theirs)
    print(stages, "stages,", layers, "layers:", [len(share) for share in ours])
