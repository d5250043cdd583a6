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
# # Graph buckets, without a GPU
#
# A CUDA graph replays a decode step without Python: the same kernels on the same memory. On a laptop the *tape* does
# the same with PyTorch's operators ([Tape](../tinysrt/model_executor/graph_capture.py#Tape)). Everything around it
# is what runs on a GPU: buckets, static buffers, padding, and the rules for what is replayed.
#
# After this lab you can
#
# - say what a captured step consists of, and what it reads and writes,
# - predict what padding does to the KV pool, and what happens if it is forgotten,
# - explain why `.item()` must not stand in a captured step,
# - choose buckets for a load.
#
# Before it: [chapter 15](../docs/chapters/15-cuda-graphs.md).
#
# ## A small model
#
# Three layers with random weights; what it says is noise, but it does everything that a large one does.

# %%
import json
import tempfile
from pathlib import Path

import torch

from tinysrt.model_executor.model_config import ModelConfig
from tinysrt.model_executor.model_runner import ModelRunner
from tinysrt.observe.trace import Recorder
from tinysrt.server_args import ServerArgs

folder = Path(tempfile.mkdtemp())
config = dict(
    architectures=["LlamaForCausalLM"],
    model_type="llama",
    vocab_size=300,
    hidden_size=48,
    intermediate_size=80,
    num_hidden_layers=3,
    num_attention_heads=6,
    num_key_value_heads=2,
    max_position_embeddings=64,
    eos_token_id=7,
)
(folder / "config.json").write_text(json.dumps(config))
args = ServerArgs(
    model_path=str(folder),
    load_format="dummy",
    dtype="float32",
    device="cpu",
    attention_backend="torch_native",
    max_total_tokens=256,
    max_running_requests=12,
    num_threads=1,
    graph_capture="tape",
    cuda_graph_bs_decode=[1, 2, 4, 8],
).resolve()
runner = ModelRunner(args, ModelConfig.from_pretrained(str(folder), load_format="dummy"), trace=Recorder("lab"))
runner.capture_graphs(args)
graphs = runner.graphs
print("buckets:", graphs.buckets, "captured in this order:", list(graphs.replays))

# %% [markdown]
# ## What is on the tape
#
# A replay is the tape's method `replay`; the tape holds its calls. **Predict:** is the tape of the bucket of eight
# longer than that of the bucket of one?

# %% tags=["predict"]
for bucket, replay in graphs.replays.items():
    print(f"bucket {bucket}: {len(replay.__self__.calls)} operator calls")

# %% [markdown]
# All do the same: a bucket changes shapes, not what is done. (With one lane, a `contiguous` in each of the three layers
# has nothing to do: it returns its argument, as a view does, and is not recorded.) The first layer's part of the tape,
# up to its attention:

# %%
for call in graphs.replays[8].__self__.calls[:24]:
    made = [tuple(result.shape) for result in call.results if result is not None]
    print(f"{call.operator.name():42}", made or "writes into its arguments")

# %% [markdown]
# Look for `index_copy_`: K and V go into their slots. No call has a result that depends on a length: where positions
# end is in `masked_fill`, as numbers on the device.
#
# ## A batch comes in
#
# Three requests decode. We play scheduler: each gets a row, a few positions with KV, and a slot for the next token.

# %%
from tinysrt.model_executor.forward_batch_info import ForwardBatch, ForwardMode


def decode_batch(rows, lengths):
    """A decode step: request row r has its position p in slot 20 * r + p."""
    positions = torch.tensor(lengths) - 1
    for row in rows:
        runner.table[row] = 20 * row + torch.arange(runner.table.shape[1], dtype=torch.int32)
    rows = torch.tensor(rows)
    return ForwardBatch(
        forward_mode=ForwardMode.DECODE,
        step=1,
        input_ids=torch.zeros(len(rows), dtype=torch.int64),
        positions=positions,
        out_cache_loc=20 * rows + positions,
        req_pool_indices=rows,
        seq_lens=torch.tensor(lengths),
        seq_lens_cpu=lengths,
    )


torch.manual_seed(0)
for buffer in [*runner.kv_pool.k_buffer, *runner.kv_pool.v_buffer]:
    buffer.normal_()  # as if prompts had been computed
runner.relay[:] = torch.arange(len(runner.relay)) + 100  # the tokens sampled last

batch = decode_batch([1, 2, 3], [5, 9, 3])
bucket = graphs.bucket_for(batch)
logits = runner.forward(batch).next_token_logits
print("bucket:", bucket, "logits:", tuple(logits.shape))
print("            ", "  ".join(["real"] * 3 + ["padding"]))
for name, lane in zip(
    ["input ids", "rows", "positions", "lengths", "slots"], graphs.lanes.table[:, :bucket], strict=True
):
    print(f"{name:10}", lane.tolist())

# %% [markdown]
# ## Padding writes, too
#
# The padded lane runs through all layers like the others, and stores its K and V. **Predict:** which slots of the
# pool differ after the step?

# %% tags=["predict"]
before = runner.kv_pool.k_buffer[0].clone()
runner.forward(batch)
changed = (before != runner.kv_pool.k_buffer[0]).flatten(1).any(1).nonzero().flatten().tolist()
print("written by the batch:", batch.out_cache_loc.tolist(), "changed now:", changed)

batch = decode_batch([4, 5, 6], [5, 9, 3])
before = runner.kv_pool.k_buffer[0].clone()
runner.forward(batch)
changed = (before != runner.kv_pool.k_buffer[0]).flatten(1).any(1).nonzero().flatten().tolist()
print("written by the batch:", batch.out_cache_loc.tolist(), "changed now:", changed)

# %% [markdown]
# The first step had run before with the same inputs, so nothing changed: a replay is a function of its buffers. The
# second one wrote its own three slots and no other. Slot 0 was written as well, with what was there already: all
# padding is the same token at the same place.
#
# ## Forgetting to pad
#
# Eight requests decode, then one of them ends and its slots are given to somebody else. The next step has seven
# requests and uses the same bucket. What if the eighth lane were not reset? We copy in the seven real lanes only:

# %% tags=["predict"]
eight = decode_batch(list(range(1, 9)), [4] * 8)
runner.forward(eight)
slot_of_the_eighth = int(eight.out_cache_loc[7])
somebodys = runner.kv_pool.k_buffer[0]
somebodys[slot_of_the_eighth] = 42.0  # what the new owner has computed

seven = decode_batch(list(range(1, 8)), [5] * 7)
with torch.inference_mode():
    real = (runner.relay[1:8], seven.req_pool_indices, seven.positions, seven.seq_lens, seven.out_cache_loc)
    torch.stack(real, out=graphs.lanes.table[:, :7])  # and nothing for lane 7
    graphs.replays[8]()
print("the new owner's K is still there:", bool((somebodys[slot_of_the_eighth] == 42.0).all()))

somebodys[slot_of_the_eighth] = 42.0
runner.forward(seven)  # `Lanes.fill` resets it
print("with padding:", bool((somebodys[slot_of_the_eighth] == 42.0).all()))

# %% [markdown]
# Nothing crashed, and the seven answers were right both times. Only somebody else's KV was destroyed: the worst kind
# of bug, and the reason why `fill` writes the padding in every step.
#
# ## Replay is the step
#
# **Predict:** is the replayed result *equal* to that of the eager step, or only close? Compare with the same padded
# batch, and with the batch unpadded.

# %% tags=["predict"]
batch = decode_batch([1, 2, 3], [5, 9, 3])
replayed = runner.forward(batch).next_token_logits.clone()
with torch.inference_mode():
    graphs.step(4)()  # the lanes still hold this batch
print("same padded batch, bit for bit:", torch.equal(replayed, graphs.logits[:3]))

runner.graphs = None  # now everything runs eagerly, with the other attention
unpadded = runner.forward(batch).next_token_logits
runner.graphs = graphs
print("unpadded: close:", torch.allclose(replayed, unpadded, rtol=1e-4, atol=1e-4))

# %% [markdown]
# Bit for bit on the same batch: the same operators on the same numbers. The unpadded batch has another number of
# rows, so its matrix products may add up in another order; there only closeness can be asked for.
#
# ## What cannot be captured
#
# A step that asks for a value. **Predict** what happens here:

# %% tags=["predict"]
from tinysrt.model_executor.graph_capture import CaptureError, TapeCapture

x, y = torch.ones(4), torch.zeros(4)


def honest():
    y.copy_(x * 2)


def curious():
    if x.sum().item() > 3:  # taken at capture; and then?
        y.copy_(x * 2)


for step in (honest, curious):
    try:
        replay = TapeCapture().capture(step)
        x.fill_(5)
        replay()
        print(step.__name__, "→", y.tolist())
    except CaptureError as error:
        print(step.__name__, "→", error)

# %% [markdown]
# `honest` followed the new content of `x`. `curious` would have taken the branch of the day of its capture forever.
# A CUDA graph refuses for one more reason: to know the value, the host would have to wait for the device.
#
# ## Exercises
#
# **1.** A server sees these decode batches in a minute. Choose four buckets so that the fewest lanes of padding run.
# Every batch must fit.

# %%
load = [1] * 40 + [2] * 5 + [3] * 30 + [5] * 4 + [6] * 25 + [11] * 20 + [12] * 8
buckets = None  # your turn


def padding_of(buckets):
    return sum(min(b for b in buckets if b >= size) - size for size in load)


def check_buckets(buckets):
    if buckets is None:
        return "not answered yet"
    if len(set(buckets)) != 4 or max(buckets) < max(load):
        return "not yet: four different ones, and the largest batch must fit"
    wasted = padding_of(buckets)
    return "right" if wasted == 29 else f"not yet: {wasted} lanes of padding, and fewer are possible"


print(check_buckets(buckets))

# %% [markdown]
# **2.** Write `lanes_run(sizes, buckets, exact)`: how many lanes the model computes for decode batches of these sizes,
# padding included. `exact` is `--disable-cuda-graph-padding`: only batches of a bucket's own size are replayed. What is
# not replayed runs eagerly, without padding.


# %%
def lanes_run(sizes, buckets, exact):
    return None  # your turn


def check_lanes_run(lanes_run):
    from tinysrt.model_executor.cuda_graph_runner import CudaGraphRunner, Lanes
    from tinysrt.model_executor.graph_capture import EagerCapture

    lanes = Lanes(64, torch.device("cpu"))
    sizes = [1, 3, 8, 9, 17, 2, 5]
    for exact in (False, True):
        for buckets in ([1, 2, 4, 8], [16], list(range(1, 9))):
            real = CudaGraphRunner(
                None, None, EagerCapture(), buckets, vocab_size=1, device=torch.device("cpu"), exact=exact
            )
            right = sum(real.bucket_for(lanes.batch(size)) or size for size in sizes)
            answer = lanes_run(sizes, buckets, exact)
            if answer is None:
                return "not answered yet"
            if answer != right:
                return f"not yet: {sizes} in buckets {buckets}, exact={exact}: {right}, not {answer}"
    return "right"


print(check_lanes_run(lanes_run))

# %% [markdown]
# ## Solutions

# %% tags=["solution"]
from itertools import combinations

best = min((c for c in combinations(sorted(set(load)), 4) if c[-1] == max(load)), key=padding_of)
print(best, padding_of(best), check_buckets(list(best)))


# %% tags=["solution"]
def my_lanes_run(sizes, buckets, exact):
    lanes = 0
    for size in sizes:
        bucket = min((b for b in buckets if b >= size), default=size)
        lanes += size if exact else bucket
    return lanes


print(check_lanes_run(my_lanes_run))
