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
# # Kernels
#
# You write paged attention yourself, in plain PyTorch, then with an online softmax, and hold both against the kernels
# that tinysrt serves with. Then you write a small Numba kernel and let two threads share it.
#
# After this lab you can
#
# - find a request's keys through the index table, wherever their slots lie,
# - compute a softmax over blocks without ever seeing all scores,
# - say what a ticket is, and why a kernel gets addresses instead of arrays.
#
# Before it: [chapter 14](../docs/chapters/14-attention-and-kernels.md). It needs no model and takes half a minute, the
# first time on a machine a minute: Numba compiles the kernels.

# %% [markdown]
# ## A pool, a table, a request
#
# Neighboring positions in neighboring slots would be neat; a pool after an hour of serving is not. So this request's
# slots are drawn at random.

# %%
import torch

torch.manual_seed(0)
KV_HEADS, GROUP, DIM, LENGTH = 2, 3, 64, 150
k_buffer = torch.randn(512, KV_HEADS, DIM)
v_buffer = torch.randn(512, KV_HEADS, DIM)
table = torch.zeros(4, 256, dtype=torch.int32)
table[2, :LENGTH] = torch.randperm(511)[:LENGTH].int() + 1  # slot 0 is nobody's
query = torch.randn(1, KV_HEADS * GROUP, DIM)
scale = DIM**-0.5
print("positions 0 to 5 of row 2 live in slots", table[2, :6].tolist())

# %% [markdown]
# ## Exercise 1: paged attention
#
# `query` has one token with six heads; three of them share a KV head. Fill in the three lines: gather the keys and
# values of row 2 through the table, give every query head its KV head, and take the weighted mean.

# %% tags=["solution"]
slots = table[2, :LENGTH].long()
keys = k_buffer[slots].repeat_interleave(GROUP, dim=1)  # (LENGTH, heads, DIM)
values = v_buffer[slots].repeat_interleave(GROUP, dim=1)
weights = (torch.einsum("hd,nhd->hn", query[0], keys) * scale).softmax(dim=-1)
mine = torch.einsum("hn,nhd->hd", weights, values)

# %% [markdown]
# The check: the reference kernel, and the one that serves on a CPU.

# %%
from tinysrt.kernels.kernel_set import load_kernels

rows, lens = torch.tensor([2]), torch.tensor([LENGTH])
for name in ("torch_native", "numba"):
    kernels = load_kernels(name)
    theirs = kernels.decode_attention(query, k_buffer, v_buffer, table, rows, lens, scale)
    torch.testing.assert_close(mine, theirs[0], rtol=1e-4, atol=1e-5)
    print(name, "agrees")

# %% [markdown]
# ## Exercise 2: without seeing all scores
#
# A kernel takes the keys in blocks. For each head it keeps the best score so far, the sum of weights, and the weighted
# sum of values; a better score shrinks what was summed before. Write the body of the loop.
#
# **Predict:** scores grow from block to block in the second call below. How often does `best` change there?


# %% tags=["solution"]
def online_attention(query, keys, values, block):
    """query (heads, dim); keys, values (n, heads, dim). Returns the mean, and how often the first head's best rose."""
    heads, dim = query.shape
    best, total, mixed = torch.full((heads,), -1e30), torch.zeros(heads), torch.zeros(heads, dim)
    rises = 0
    for begin in range(0, len(keys), block):
        scores = torch.einsum("hd,nhd->hn", query, keys[begin : begin + block]) * scale
        new_best = torch.maximum(best, scores.amax(dim=1))
        rises += int(new_best[0] > best[0])
        shrink = (best - new_best).exp()
        weights = (scores - new_best.unsqueeze(1)).exp()
        total = total * shrink + weights.sum(dim=1)
        mixed = mixed * shrink.unsqueeze(1) + torch.einsum("hn,nhd->hd", weights, values[begin : begin + block])
        best = new_best
    return mixed / total.unsqueeze(1), rises


# %%
for block in (1, 16, 64, 1000):
    out, rises = online_attention(query[0], keys, values, block)
    torch.testing.assert_close(out, mine, rtol=1e-4, atol=1e-5)
    print(f"blocks of {block:4}: the same result, best rose {rises} times")

# %% tags=["predict"]
growing = query[0].unsqueeze(0) * torch.linspace(-1, 1, LENGTH).view(-1, 1, 1)
print("best rose", online_attention(query[0], growing, values, 16)[1], "times, in", -(-LENGTH // 16), "blocks")

# %% [markdown]
# That is the worst case, and it costs nothing but multiplications: the result never needs a second pass.

# %% [markdown]
# ## A kernel of your own
#
# [numba_runtime](../tinysrt/kernels/numba_runtime.py) says how a kernel is written: one argument, a block of 64-bit
# numbers; threads draw tickets from it. This one adds up rows. Numba compiles it here, in the notebook.

# %%
import numba

from tinysrt.kernels.numba_runtime import ENTRY, OPTIONS, draw_ticket, f32_at, launch


@numba.cfunc(ENTRY, **OPTIONS)
def row_sums(args):
    x, sums, width = f32_at(args[2]), f32_at(args[3]), args[4]
    while True:
        row = draw_ticket(args)
        if row >= args[1]:
            break
        total = 0.0
        for i in range(row * width, (row + 1) * width):
            total += x[i]
        sums[row] = total


x = torch.randn(1000, 300)
sums = torch.empty(1000)
launch(row_sums.address, len(x), x.data_ptr(), sums.data_ptr(), x.shape[1])
torch.testing.assert_close(sums, x.sum(dim=1), rtol=1e-4, atol=1e-4)
print("1000 tickets, 1000 sums")

# %% [markdown]
# ## What a kernel saves
#
# RMSNorm with its residual addition, as PyTorch operations and as one kernel, for one token. The figures are of the
# machine that made this page.

# %% tags=["varies"]
import time


def microseconds(function, *args):
    best = float("inf")
    for _ in range(20):
        start = time.thread_time()
        for _ in range(200):
            function(*args)
        best = min(best, (time.thread_time() - start) / 200)
    return best * 1e6


torch.set_num_threads(1)
token, residual, weight = torch.randn(1, 576, dtype=torch.bfloat16), torch.randn(1, 576), torch.ones(576)
with torch.inference_mode():
    for name in ("torch_native", "numba"):
        cost = microseconds(load_kernels(name).add_rms_norm, token, residual, weight, 1e-5)
        print(f"{name:12} {cost:6.1f} us, sixty times a step")

# %% [markdown]
# ## Exercise 3: who may be drawn
#
# Top-k, top-p and min-p each keep a prefix of the tokens, best first. Write down which ids the filters keep, then draw
# a thousand times and compare.

# %% tags=["solution"]
logits = torch.tensor([[2.0, 0.0, 3.0, 2.0, -1.0, 1.0]])
TOP_K, TOP_P, MIN_P = 5, 0.85, 0.1
probs = logits[0].softmax(dim=0)
kept, mass = [], 0.0
for token_id in sorted(range(6), key=lambda i: (-float(logits[0, i]), i)):
    if len(kept) < TOP_K and mass <= TOP_P and probs[token_id] >= MIN_P * probs.max():
        kept.append(token_id)
    mass += float(probs[token_id])

# %%
many = lambda value, dtype=torch.float32: torch.full((1000,), value, dtype=dtype)  # noqa: E731
uniforms = torch.arange(1000, dtype=torch.float64) / 1000
drawn = load_kernels("numba").sample_tokens(
    logits.repeat(1000, 1), many(1.0), many(TOP_K, torch.int64), many(TOP_P), many(MIN_P), uniforms
)
assert sorted(kept) == drawn.unique().tolist()
print("kept, best first:", kept, " drawn:", drawn.bincount(minlength=6).tolist())

# %% [markdown]
# ## To take away
#
# - A page table costs one lookup per position and buys memory that need not be contiguous.
# - The online softmax is what lets attention read every key once.
# - Three implementations of one signature are not waste: the slow one says what the fast ones mean.
