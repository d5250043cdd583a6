"""CudaGraphRunner: decode steps of a few fixed sizes, captured once, replayed for every batch that fits.

A decode step of a small model is hundreds of short kernels; launching them from Python takes longer than running them.
A captured graph launches all of them in one call. The price: it always runs with the same shapes on the same memory. So
there is a graph for each of a few *buckets* of batch size, and a batch is padded to the next one:

    batch of 5, bucket 8          lane   0    1    2    3    4  │ 5  6  7
                     input_ids           17   4    90   33   8  │ 0  0  0
                     rows                3    1    7    4    2  │ 0  0  0     row 0: a row that is no request's
                     positions           41   7    12   99   3  │ 0  0  0
                     seq_lens            42   8    13   100  4  │ 1  1  1     attend to one position, not to none
                     out_cache_loc       512  77   90   641  5  │ 0  0  0     slot 0: where padding writes its K and V
                                         └──── the batch ───────┘ └ padding

- *Static buffers.* These five rows (`Lanes`) and the logits. Each replay fills them anew, padding included: what a
  larger batch left there would send its K and V into a slot that somebody else owns by now.
- *Inside the graph:* embedding, all layers, the output head. *Outside:* the table update, the relay, `plan`, and the
  sampler. What the sampler does depends on who asks for what (filters, penalties, scores), which changes from batch to
  batch; a graph could not branch on it. It takes the logits of the real lanes and edits them in place, before the next
  replay overwrites them.
- *Replayed:* decode steps of at most the largest bucket. Prefills, mixed steps and larger batches run eagerly.
- *Largest first*, so that all graphs find room in the memory pool that the first one made.

How a step is captured is another file's business (`graph_capture.py`); nothing here knows CUDA, so all of this runs,
and is tested, on a CPU. Source: SGLang `model_executor/cuda_graph_runner.py`.
"""

from __future__ import annotations

import gc
import logging
import time
from bisect import bisect_left
from collections.abc import Callable
from functools import partial
from itertools import chain

import torch
from torch import Tensor

from tinysrt.errors import StartupError
from tinysrt.model_executor.attention.base import AttentionBackend
from tinysrt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from tinysrt.model_executor.graph_capture import CaptureBackend, CaptureError, Step
from tinysrt.model_executor.models.llama import LlamaForCausalLM
from tinysrt.model_executor.sizing import memory_in_use
from tinysrt.observe.progress import OnProgress
from tinysrt.server_args import ServerArgs

logger = logging.getLogger(__name__)

# Largest captured batch by GPU memory in GiB, alone and with four or more tensor-parallel ranks (SGLang's).
MAX_BS_BY_MEMORY = ((20, 8, 8), (35, 48, 160), (60, 32, 160), (90, 256, 512), (160, 256, 512))
MAX_BS_BEYOND = 512
CPU_BUCKETS = (1, 2, 4, 8, 16, 32)  # a compiled bucket takes up to a minute: few of them


def cuda_buckets(largest: int) -> list[int]:
    """SGLang's: no batch up to 16 has more than three idle lanes, up to 256 seven, up to 496 fifteen, then 31."""
    steps = chain((1, 2, 4, 8, 12), range(16, 257, 8), range(272, 497, 16), range(512, largest + 1, 32))
    return with_largest(steps, largest)


def with_largest(sizes: chain[int] | tuple[int, ...], largest: int) -> list[int]:
    return sorted({size for size in sizes if size < largest} | {largest})


def default_max_bs(memory_bytes: int, tp_size: int) -> int:
    gib = memory_bytes / 2**30
    for below, alone, in_company in MAX_BS_BY_MEMORY:
        if gib < below:
            return in_company if tp_size >= 4 else alone
    return MAX_BS_BEYOND


def decode_buckets(args: ServerArgs, max_running_requests: int, device_memory: int) -> list[int]:
    """The batch sizes to capture, ascending. A batch never has more lanes than there are rows."""
    on_cuda = args.graph_capture == "cuda"
    rows = max_running_requests
    if args.cuda_graph_bs_decode is not None:
        sizes = sorted(set(args.cuda_graph_bs_decode))
        return [size for size in sizes if size < rows] + [rows] if sizes[-1] > rows else sizes
    if args.cuda_graph_max_bs_decode is not None:
        largest = args.cuda_graph_max_bs_decode
    elif args.graph_capture == "compile":
        largest = args.torch_compile_max_bs
    else:
        largest = default_max_bs(device_memory, args.tensor_parallel_size) if on_cuda else CPU_BUCKETS[-1]
    largest = min(largest, rows)
    if args.disable_cuda_graph_padding:
        return list(range(1, largest + 1))
    return cuda_buckets(largest) if on_cuda else with_largest(CPU_BUCKETS, largest)


class Lanes:
    """The static buffers: one column per lane of the largest bucket, one row per input of a decode step.

    One tensor, so that a batch is copied in by one operation and its padding by another.
    """

    def __init__(self, size: int, device: torch.device):
        self.table = torch.zeros(5, size, dtype=torch.int64, device=device)
        # input id, row, position, seq_len, slot of a lane that belongs to nobody
        self.padding = torch.tensor([[0], [0], [0], [1], [0]], device=device)
        self.table[:] = self.padding

    def fill(self, input_ids: Tensor, batch: ForwardBatch, bucket: int) -> None:
        size = batch.batch_size
        real = (input_ids, batch.req_pool_indices, batch.positions, batch.seq_lens, batch.out_cache_loc)
        torch.stack(real, out=self.table[:, :size])
        self.table[:, size:bucket] = self.padding

    def batch(self, bucket: int) -> ForwardBatch:
        """A decode batch whose tensors are the first `bucket` columns, whatever they hold."""
        input_ids, rows, positions, seq_lens, slots = (row[:bucket] for row in self.table)
        return ForwardBatch(
            forward_mode=ForwardMode.DECODE,
            step=0,
            input_ids=input_ids,
            positions=positions,
            out_cache_loc=slots,
            req_pool_indices=rows,
            seq_lens=seq_lens,
            seq_lens_cpu=[1] * bucket,
        )


class CudaGraphRunner:
    """`capture()` once, after the pools are made; then `bucket_for(batch)`, and `replay` where it names one."""

    def __init__(
        self,
        model: LlamaForCausalLM,
        attention: AttentionBackend,
        backend: CaptureBackend,
        buckets: list[int],
        *,
        vocab_size: int,
        device: torch.device,
        exact: bool = False,  # --disable-cuda-graph-padding: replay only batches of a bucket's own size
    ):
        self.model = model
        self.attention = attention
        self.backend = backend
        self.buckets = buckets
        self.exact = exact
        self.device = device
        self.lanes = Lanes(buckets[-1], device)
        self.logits = torch.zeros(buckets[-1], vocab_size, device=device)  # float32
        self.replays: dict[int, Step] = {}
        self.replayed = 0  # steps so far

    @torch.inference_mode()
    def capture(self, on_progress: OnProgress | None = None) -> None:
        started, memory = time.monotonic(), memory_in_use(self.device)
        stage = f"Capturing decode steps ({self.backend.name})"
        gc.collect()
        gc.freeze()  # a collection in the middle of a capture would free tensors on the device
        try:
            for done, bucket in enumerate(reversed(self.buckets)):
                if on_progress is not None:
                    on_progress(stage, done, len(self.buckets))
                try:
                    self.replays[bucket] = self.backend.capture(self.step(bucket))
                except CaptureError as error:
                    raise StartupError(
                        f"a decode step of {bucket} requests cannot be captured: {error} (--disable-cuda-graph runs "
                        "without)"
                    ) from error
        finally:
            gc.unfreeze()
        if on_progress is not None:
            on_progress(stage, len(self.buckets), len(self.buckets))
        logger.info(
            "decode steps: captured %d sizes from %d to %d (%s) in %.1f s, %.0f MiB",
            len(self.buckets), self.buckets[0], self.buckets[-1], self.backend.name,
            time.monotonic() - started, max(0, memory_in_use(self.device) - memory) / 2**20,
        )  # fmt: skip

    def step(self, bucket: int) -> Step:
        """The decode step of so many lanes: from the static buffers to the static logits."""
        model, head = self.model, self.model.lm_head
        assert head is not None, "the stages of a pipeline capture nothing"
        batch, logits = self.lanes.batch(bucket), self.logits[:bucket]
        attend: Callable[[int, Tensor], Tensor] = partial(
            self.attention.attend, plan=self.attention.plan(batch, padded_size=bucket)
        )

        def step() -> None:
            logits.copy_(head(model(batch.input_ids, attend)))

        return step

    def bucket_for(self, batch: ForwardBatch) -> int | None:
        """The bucket that this forward is replayed in; None: it has to run eagerly."""
        if not batch.forward_mode.is_decode() or batch.batch_size > self.buckets[-1]:
            return None
        bucket = self.buckets[bisect_left(self.buckets, batch.batch_size)]
        return bucket if bucket == batch.batch_size or not self.exact else None

    @torch.inference_mode()
    def replay(self, input_ids: Tensor, batch: ForwardBatch, bucket: int) -> Tensor:
        """(B, vocab) float32 logits of the batch: a part of the static buffer, good until the next replay."""
        self.lanes.fill(input_ids, batch, bucket)
        self.replays[bucket]()
        self.replayed += 1
        return self.logits[: batch.batch_size]
