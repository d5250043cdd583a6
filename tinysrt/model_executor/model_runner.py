"""ModelRunner: the device side of one scheduler process. It owns the weights, the KV pool and three device tables.

    table    (rows + 1, width) int32   slot of each position of each request; a replayed copy of the scheduler's
    relay    (rows + 1,) int64         last sampled token of each request row
    counts   (grown when needed)       output tokens of penalized requests, inside the sampler

Nothing here decides anything: a forward is a function of its ForwardBatch and of these tables, and only `forward` and
`sample` change them, in the order in which batches are launched. That is why a forward can run in another thread, or
on another stream, while the scheduler prepares the next one.

    forward(batch)    1 replay table_update   2 fill input ids from the relay   3 plan attention   4 the model
                      5 logits of the rows that are read        a captured decode step is replayed instead of 3 to 5
    sample(...)       one token per request; the relay remembers it for the next step
    to_host(...)      device tensors → StepResult; the only place that waits for the device

Row 0 and slot 0 exist for padding and belong to nobody. Source: SGLang `model_executor/model_runner.py`.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from tinysrt.distributed.parallel_state import SINGLE, ParallelState
from tinysrt.kernels.kernel_set import load_kernels
from tinysrt.kernels.operators import as_operators, compilable
from tinysrt.mem_cache.memory_pool import KVPool
from tinysrt.model_executor.attention.registry import make_attention
from tinysrt.model_executor.cuda_graph_runner import CudaGraphRunner, decode_buckets
from tinysrt.model_executor.forward_batch_info import ForwardBatch
from tinysrt.model_executor.graph_capture import make_backend
from tinysrt.model_executor.layers.logits_processor import LogitsOutput, compute_logits, input_score_owners
from tinysrt.model_executor.layers.rotary import rope_cache
from tinysrt.model_executor.model_config import ModelConfig
from tinysrt.model_executor.openmp_team import in_own_thread
from tinysrt.model_executor.sampler import SampleOutput, Sampler
from tinysrt.model_executor.sizing import (
    device_memory,
    free_memory,
    runtime_dtype,
    size_kv_pool,
    size_request_table,
    usable_cores,
)
from tinysrt.model_executor.step_result import InputScores, StepResult
from tinysrt.model_executor.upload import to_device
from tinysrt.model_executor.weights import load_model
from tinysrt.observe.progress import OnProgress
from tinysrt.observe.trace import Recorder
from tinysrt.server_args import ATTENTION_FLAGS, ServerArgs

TABLE_SLACK = 4  # positions beyond the context length that a step may allocate


class ModelRunner:
    def __init__(
        self,
        server_args: ServerArgs,
        model_config: ModelConfig,
        *,
        trace: Recorder,
        parallel: ParallelState = SINGLE,
        on_progress: OnProgress | None = None,
    ):
        self.config = model_config
        self.trace = trace
        self.device = device_of_rank(server_args.device or "cpu", parallel)
        self.dtype = runtime_dtype(server_args.dtype, model_config.dtype, self.device)
        self.device_bytes = parallel.smallest(device_memory(self.device))  # all ranks capture the same sizes
        self.vocab_size = model_config.vocab_size
        self.num_threads = server_args.num_threads or max(1, usable_cores() // server_args.ranks_on_this_machine())
        self._prepared = threading.local()
        self._prepare_thread()

        compiling = server_args.graph_capture == "compile"
        sets = {
            name: load_kernels(name, on_progress and partial(on_progress, "Preparing the CPU kernels"))
            for name in dict.fromkeys(getattr(server_args, flag) or "torch_native" for flag in ATTENTION_FLAGS)
        }
        if "numba" in sets and server_args.graph_capture in ("tape", "compile"):
            sets["numba"] = compilable(sets["numba"]) if compiling else as_operators(sets["numba"])
        kernels, prefill, decode = (sets[getattr(server_args, flag) or "torch_native"] for flag in ATTENTION_FLAGS)
        free_before = free_memory(self.device)
        with torch.inference_mode():
            self.model = load_model(
                model_config,
                self.dtype,
                self.device,
                server_args.load_format,
                kernels=kernels,
                parallel=parallel,
                keep_weights=compiling,
                on_progress=on_progress and partial(on_progress, "Loading the weights"),
            )
        mine = config_of_rank(model_config, parallel)
        # All ranks schedule alike, so their pools are alike: as large as the one with the least memory bears.
        self.max_total_num_tokens = parallel.smallest(
            size_kv_pool(server_args, mine, self.dtype, self.device, free_before)
        )
        self.max_running_requests = size_request_table(
            server_args.max_running_requests, self.max_total_num_tokens, model_config.context_len
        )
        self.kv_pool = KVPool(
            self.max_total_num_tokens,
            server_args.page_size,
            mine.num_layers,
            mine.num_kv_heads,
            mine.head_dim,
            self.dtype,
            self.device,
        )
        rows, self.table_width = self.max_running_requests + 1, model_config.context_len + TABLE_SLACK
        self.table = torch.zeros(rows, self.table_width, dtype=torch.int32, device=self.device)
        self.relay = torch.zeros(rows, dtype=torch.int64, device=self.device)
        self.attention = make_attention(
            prefill,
            decode,
            self.kv_pool,
            self.table,
            rope_cache(model_config.head_dim, model_config.rope, self.table_width).to(self.device),
            mine.num_heads,
            mine.head_dim**-0.5,
            mine.windows,
        )
        self.sampler = Sampler(self.vocab_size, self.device, kernels)
        self.graphs: CudaGraphRunner | None = None

    def capture_graphs(self, server_args: ServerArgs, on_progress: OnProgress | None = None) -> None:
        """Capture the decode steps that `forward` will replay, if the flags say so. Once, before the first batch."""
        kind = server_args.graph_capture or "none"
        if kind == "none":
            return
        buckets = decode_buckets(server_args, self.max_running_requests, self.device_bytes)
        self.graphs = CudaGraphRunner(
            self.model,
            self.attention,
            make_backend(kind, self.device),
            buckets,
            vocab_size=self.vocab_size,
            device=self.device,
            exact=server_args.disable_cuda_graph_padding,
        )
        self.graphs.capture(on_progress)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> LogitsOutput | None:
        """None at a pipeline's stage that is not the last: it has sent its hidden states on."""
        self._prepare_thread()
        if batch.table_update is not None:
            self.table.view(-1)[batch.table_update.flat_index] = batch.table_update.slots
        input_ids = self._fill_from_relay(batch)
        bucket = self._bucket(batch)
        if self.graphs is not None and bucket is not None:
            if self.trace.on:
                self.trace.event("replayed", step=batch.step, bucket=bucket)
            return LogitsOutput(self.graphs.replay(input_ids, batch, bucket))
        attend = partial(self.attention.attend, plan=self.attention.plan(batch))
        hidden = self.model(input_ids, attend)
        if self.model.lm_head is None:
            return None
        return compute_logits(hidden, self.model.lm_head, batch)

    @torch.inference_mode()
    def sample(self, logits: LogitsOutput, batch: ForwardBatch) -> SampleOutput:
        output = self.sampler(logits, batch, self.relay)
        # A NaN row's -1 must not become an index: its next step runs on token 0, and its result is thrown away.
        self.relay[batch.req_pool_indices] = output.next_token_ids.clamp(min=0)
        return start_copy(output) if self.device.type == "cuda" else output

    def to_host(self, output: SampleOutput, batch: ForwardBatch) -> StepResult:
        if output.ready is not None:
            output.ready.synchronize()
        tokens = output.next_token_ids.tolist()
        if self.trace.on:
            self.trace.event("sampled", step=batch.step, rows=batch.rows_cpu, tokens=tokens)
        replayed = self._bucket(batch) is not None
        result = StepResult(next_token_ids=[[token] for token in tokens], cuda_graph=replayed)
        return result if batch.logprob is None else _with_scores(result, output, batch)

    def _bucket(self, batch: ForwardBatch) -> int | None:
        """Which captured step is replayed for this batch; None: none, it runs eagerly."""
        return None if self.graphs is None else self.graphs.bucket_for(batch)

    def remember(self, batch: ForwardBatch, tokens: list[int]) -> None:
        """Tokens that another stage has sampled, for the relay; as `sample` does with its own."""
        drawn = to_device(tokens, self.device)
        self.relay[batch.req_pool_indices] = drawn.clamp(min=0)

    def _fill_from_relay(self, batch: ForwardBatch) -> Tensor:
        """A decode step reads every input token from the relay; a mixed one those of its decode rows."""
        if batch.relay_lanes is not None:
            return batch.input_ids.index_copy(0, batch.relay_lanes, self.relay[batch.relay_rows])
        return self.relay[batch.req_pool_indices] if batch.forward_mode.is_decode() else batch.input_ids

    def _prepare_thread(self) -> None:
        """The one place that sets the thread count. PyTorch keeps it per thread, so whoever runs a forward sets it."""
        if not hasattr(self._prepared, "thread"):
            torch.set_num_threads(self.num_threads)
            if self.device.type == "cuda":
                torch.cuda.set_device(self.device)
            self._prepared.thread = True


def load_runner(
    server_args: ServerArgs,
    model_config: ModelConfig,
    *,
    trace: Recorder,
    parallel: ParallelState = SINGLE,
    on_progress: OnProgress | None = None,
) -> ModelRunner:
    """A ModelRunner that is ready for its first batch, for whichever thread runs the forwards (`openmp_team.py`)."""

    def load() -> ModelRunner:
        said = on_progress if parallel.rank == 0 else None
        runner = ModelRunner(server_args, model_config, trace=trace, parallel=parallel, on_progress=said)
        runner.capture_graphs(server_args, said)
        return runner

    return in_own_thread(load)


def device_of_rank(device: str, parallel: ParallelState) -> torch.device:
    return torch.device(device, parallel.local) if device == "cuda" else torch.device(device)


def config_of_rank(config: ModelConfig, parallel: ParallelState) -> ModelConfig:
    """The same model with the layers and heads that this rank holds."""
    layers = parallel.my_layers(config.num_layers)
    return replace(
        config,
        num_layers=len(layers),
        num_heads=parallel.share(config.num_heads, "the attention heads,"),
        num_kv_heads=parallel.share_of_heads(config.num_kv_heads)[0],
        windows=config.windows[layers.start : layers.stop],
    )


def start_copy(output: SampleOutput) -> SampleOutput:
    """Start moving a step's results to pinned host memory; `to_host` waits for this step's event and nothing else."""
    ready = torch.cuda.Event()
    moved = replace(
        output,
        next_token_ids=output.next_token_ids.to("cpu", non_blocking=True),
        output_scores=output.output_scores and output.output_scores.to("cpu", non_blocking=True),
        input_scores=output.input_scores and output.input_scores.to("cpu", non_blocking=True),
        ready=ready,
    )
    ready.record()  # after the copies, on the stream that makes them
    return moved


def _with_scores(result: StepResult, output: SampleOutput, batch: ForwardBatch) -> StepResult:
    """Deal the looked-up scores out to the requests they belong to."""
    spec, size = batch.logprob, batch.batch_size
    assert spec is not None
    logprobs: list[list[float]] = [[] for _ in range(size)]
    top: list[list[list[tuple[float, int]]] | None] = [None] * size
    chosen: list[list[list[tuple[float, int]]] | None] = [None] * size
    if output.output_scores is not None:
        owners = [i for i, wanted in enumerate(spec.return_logprob) if wanted]
        for i, (score, best, named) in zip(owners, output.output_scores.to_rows(spec, owners), strict=True):
            logprobs[i] = [score]
            top[i] = [best] if spec.top_logprobs_num[i] else None
            chosen[i] = [named] if spec.token_ids_logprob[i] is not None else None
    inputs: list[InputScores | None] = [None] * size
    if output.input_scores is not None:
        owners = input_score_owners(spec)
        for i, (score, best, named) in zip(owners, output.input_scores.to_rows(spec, owners), strict=True):
            mine = inputs[i] = inputs[i] or InputScores([], [], [])
            mine.logprobs.append(score)
            if spec.top_logprobs_num[i]:
                mine.top.append(best)
            if spec.token_ids_logprob[i] is not None:
                mine.token_ids.append(named)
    return replace(result, output_logprobs=logprobs, output_top=top, output_token_ids=chosen, input_scores=inputs)
