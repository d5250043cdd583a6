"""ServerArgs: everything the operator can say, in one frozen record.

    command line ──▶ server_args_cli.parse ─┐
    config file  ──▶ (the same parser)      ├─▶ ServerArgs ── resolve() ──▶ ServerArgs ──▶ every process, /server_info
    Engine(**kw) ──▶ ServerArgs.from_kwargs ┘   as typed,      once          no "auto"
                                                None = auto

One field is one flag, and its line says everything about it: default, meaning, group, other spellings, allowed values.
The command line, its help text, the config file, the Engine's keywords and the docs' parameter atlas are all
generated from these lines, so they cannot disagree.

Invariants: the record is frozen; `resolve` is the only place that turns "auto" (None) into values, runs once before
any process is spawned, and is idempotent; a flag that tinysrt knows but does not do yet is refused by name, unless
its value asks for nothing.

Names and defaults are those of the articles tinysrt follows (`lpm`, 0.88, 8192, port 30000); on a CPU the sizes
resolve to what a laptop bears. SGLang (`server_args.py`) calls three fields by short names (`tp_size`, `pp_size`,
`dp_size`); every flag spelling is accepted here as a keyword, and `to_info` shows both.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import importlib.util
import logging
import os
import random
import re
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from tinysrt.errors import StartupError

logger = logging.getLogger(__name__)

CACHE_AWARE_POLICIES = ("lpm", "dfs-weight")
HUMAN_UNITS = {"k": 10**3, "M": 10**6, "G": 10**9, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30}

# What a laptop bears: the values that the seeds' GPU defaults resolve to on a CPU, unless typed.
CPU_KV_POOL_BYTES = 2 * 2**30  # at most this, and at most CPU_KV_POOL_SHARE of the memory that is available
CPU_KV_POOL_SHARE = 0.25
CPU_CHUNKED_PREFILL_SIZE = 512
CPU_MAX_RUNNING_REQUESTS = 64
GPU_CHUNKED_PREFILL_SIZE = 8192
MEM_FRACTION_STATIC = 0.88

KERNELS = ("torch_native", "numba", "triton")
ATTENTION_FLAGS = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")
INSTALL = {"numba": "pip install numba", "triton": "pip install 'tinysrt[triton]'"}


@dataclass(frozen=True)
class Flag:
    """What a field's line says beside its name and type; kept in the field's metadata under "flag"."""

    group: str
    default: Any
    help: str
    also: tuple[str, ...] = ()  # other spellings, without the dashes
    choices: tuple[str, ...] = ()
    auto: str | None = None  # what None resolves to, in words
    later: str | None = None  # this flag arrives with ...; until then any other value is refused
    now: tuple[Any, ...] = ()  # values of a `later` flag that ask for nothing tinysrt lacks
    human: bool = False  # an integer that may be typed 8k, 1.5M, 4Ki
    low: float | None = None  # smallest value

    def spellings(self, name: str) -> list[str]:
        return [name.replace("_", "-"), *self.also]

    @property
    def state(self) -> str:
        """For help and atlas: empty if the flag does what it says."""
        if self.later:
            return f"arrives with {self.later}"
        if self.later is None:
            return ""
        return "always so" if self.now == (True,) else "left out"


def _flag(group: str, default: Any, help: str, **rest: Any) -> Any:
    return dataclasses.field(default=default, metadata={"flag": Flag(group, default, help, **rest)})


# One word a group: the titles are the sections of the help text and of the atlas.
ACCESS, REQUEST, DETOKENIZER = "Access layer", "Tokenizer and requests", "Detokenizer"
MODEL, MEMORY, GRAPHS = "Model and parallelism", "Memory and scheduling", "Graphs"
SPECULATIVE, LOGGING, OWN = "Speculative decoding", "Logging and metrics", "Limits and tools of tinysrt"
GROUPS = (ACCESS, REQUEST, DETOKENIZER, MODEL, MEMORY, GRAPHS, SPECULATIVE, LOGGING, OWN)
access, request, detok, model, memory, graph, spec, log, own = (functools.partial(_flag, group) for group in GROUPS)

# fmt: off
_HTTP2, _GRPC, _KEYS = "the HTTP/2 transport", "the gRPC transport", "authorization"
_WORKERS, _PARSERS, _GRAMMAR = "several workers", "the output parsers", "constrained output"
_KERNELS = "the fast attention kernels"
_SPEC, _METRICS, _LEFT_OUT = "speculative decoding", "metrics", ""


@dataclass(frozen=True, kw_only=True)
class ServerArgs:
    # ---- access layer: the main process, HTTP ----
    host: str = access("127.0.0.1", "address to listen on")
    port: int = access(30000, "HTTP port; 0 takes a free one", low=0)
    enable_http2: bool = access(False, "serve HTTP/2 with Granian instead of Uvicorn", later=_HTTP2)
    http2_max_concurrent_streams: int = access(200, "streams per HTTP/2 connection", later=_HTTP2)
    http2_initial_connection_window_size: int = access(2**20, "HTTP/2 flow-control window in bytes", later=_HTTP2)
    grpc_mode: bool = access(False, "gRPC instead of HTTP", also=("smg-grpc-mode",), later=_GRPC)
    grpc_port: int | None = access(None, "gRPC beside HTTP, on this port", later=_GRPC)
    api_key: str | None = access(None, "bearer token that every normal request must carry", later=_KEYS)
    admin_api_key: str | None = access(None, "bearer token of the management endpoints", later=_KEYS)
    served_model_name: str | None = access(
        None, "name in /v1/models and in answers; no colon (reserved for base:adapter)", auto="the model path")
    fastapi_root_path: str = access("", "path prefix that a proxy in front strips")
    ssl_keyfile: str | None = access(None, "TLS key file; needs --ssl-certfile")
    ssl_certfile: str | None = access(None, "TLS certificate file; needs --ssl-keyfile")
    skip_server_warmup: bool = access(False, "send no warm-up request: up at once, first answer slower")
    warmups: str | None = access(None, "named warm-up functions, comma-separated", later=_LEFT_OUT)

    # ---- tokenizer and requests: the main process ----
    tokenizer_path: str | None = request(None, "folder or hub id of the tokenizer", auto="the model path")
    tokenizer_mode: str = request("auto", "auto takes the fast tokenizer where there is one", choices=("auto", "slow"))
    tokenizer_backend: str = request(
        "huggingface", "library that tokenizes", choices=("huggingface", "fastokens"), later=_LEFT_OUT)
    tokenizer_worker_num: int = request(1, "HTTP and tokenizer processes", low=1, later=_WORKERS)
    skip_tokenizer_init: bool = request(False, "no tokenizer anywhere: input_ids in, output_ids out")
    enable_tokenizer_batch_encode: bool = request(False, "tokenize a list of prompts in one call", later=_LEFT_OUT)
    enable_dynamic_batch_tokenizer: bool = request(False, "tokenize concurrent prompts together", later=_LEFT_OUT)
    chat_template: str | None = request(None, "built-in name, .jinja or .json file", auto="the tokenizer's own")
    hf_chat_template_name: str | None = request(None, "which of several named templates", auto="the first")
    default_chat_template_kwargs: dict[str, Any] | None = request(
        None, "JSON object under each request's chat_template_kwargs; the request wins per key")
    trust_request_chat_template: bool = request(False, "let a request bring its own chat template")
    sampling_defaults: str = request(
        "model", "where chat completions take their sampling defaults: generation_config.json, or OpenAI's",
        choices=("model", "openai"))
    preferred_sampling_params: dict[str, Any] | None = request(
        None, "JSON object of sampling parameters under every request's own")
    reasoning_parser: str | None = request(None, "splits thinking from the answer", later=_PARSERS)
    tool_call_parser: str | None = request(None, "finds tool calls in the answer", later=_PARSERS)
    batch_notify_size: int = request(16, "waiters woken before the event loop gets a turn", low=1)
    stream_interval: int = request(1, "output tokens between two chunks of a stream", low=1)
    incremental_streaming_output: bool = request(False, "/generate streams what is new instead of all so far")
    stream_response_default_include_usage: bool = request(False, "end every OpenAI stream with a usage chunk")
    enable_cache_report: bool = request(False, "report cached prompt tokens in OpenAI usage")
    allow_auto_truncate: bool = request(False, "cut over-long input and max_new_tokens instead of answering 400")
    grammar_backend: str | None = request(
        None, "engine for constrained output", choices=("xgrammar", "outlines", "llguidance", "none"),
        later=_GRAMMAR, now=("none",))

    # ---- detokenizer ----
    detokenizer_worker_num: int = detok(1, "detokenizer processes", low=1, later=_WORKERS)
    disable_tokenizer_batch_decode: bool = detok(False, "decode row by row", later=_LEFT_OUT, now=(True,))

    # ---- model and parallelism: the scheduler processes ----
    model_path: str | None = model(
        None, "folder or hub id of the model", also=("model",), auto="the demo model, fetched once")
    load_format: str = model(
        "auto", "auto reads safetensors; dummy makes random weights from a fixed seed",
        choices=("auto", "safetensors", "dummy"))
    dtype: str = model(
        "auto", "number format of weights and activations; auto takes the checkpoint's",
        choices=("auto", "half", "float16", "bfloat16", "float", "float32"))
    kv_cache_dtype: str = model("auto", "number format of the KV cache; auto takes the model's", later=_LEFT_OUT)
    context_length: int | None = model(
        None, "longest sequence, prompt and answer together", human=True, low=1, auto="the model's")
    trust_remote_code: bool = model(False, "run Python that comes with the model's tokenizer or configuration")
    tensor_parallel_size: int = model(
        1, "scheduler processes that share each layer", also=("tp-size", "tp"), low=1)
    pipeline_parallel_size: int = model(
        1, "stages that share the layers; no overlap then", also=("pp-size", "pp"), low=1)
    data_parallel_size: int = model(1, "independent replicas", also=("dp-size", "dp"), low=1)
    nccl_port: int | None = model(
        None, "port where the ranks of one machine meet (and the next ones, for replicas), instead of in a file", low=1)
    dist_init_addr: str | None = model(None, "host:port of node 0, where the ranks of several machines meet")
    nnodes: int = model(1, "machines that share the ranks evenly; node 0 serves", low=1)
    node_rank: int = model(0, "this machine's number", low=0)
    device: str | None = model(None, "cpu or cuda (CUDA_VISIBLE_DEVICES says which)", auto="cuda where there is one")
    random_seed: int | None = model(None, "seeds what is drawn by chance", low=0, auto="drawn below 2^30, and logged")
    attention_backend: str | None = model(
        None, "kernels of attention and of the small functions between matmuls; torch_native is plain PyTorch",
        choices=KERNELS, auto="triton on CUDA, numba on a CPU")
    prefill_attention_backend: str | None = model(
        None, "attention of prefill alone", choices=KERNELS, auto="--attention-backend")
    decode_attention_backend: str | None = model(
        None, "attention of decode alone", choices=KERNELS, auto="--attention-backend")
    sampling_backend: str | None = model(
        None, "sampling kernels", choices=("pytorch", "flashinfer"), auto="pytorch", later=_LEFT_OUT, now=("pytorch",))

    # ---- memory and scheduling: the scheduler process ----
    mem_fraction_static: float | None = memory(
        None, "share of device memory for weights and KV pool together",
        auto=f"{MEM_FRACTION_STATIC}; on a CPU --kv-pool-bytes decides unless this is typed")
    max_total_tokens: int | None = memory(
        None, "upper limit of the KV pool, in tokens", human=True, low=1, auto="what the memory holds")
    max_running_requests: int | None = memory(
        None, "requests that may run at once", low=1,
        auto=f"from the KV pool's size; on a CPU {CPU_MAX_RUNNING_REQUESTS}")
    max_queued_requests: int | None = memory(
        None, "waiting requests before new ones get 503", low=1, auto="no limit")
    chunked_prefill_size: int | None = memory(
        None, "prompt tokens per prefill pass, a multiple of the page size; -1 turns chunking off",
        auto=f"{GPU_CHUNKED_PREFILL_SIZE}; on a CPU {CPU_CHUNKED_PREFILL_SIZE}")
    max_prefill_tokens: int = memory(16384, "prompt tokens per prefill pass, all requests", human=True, low=1)
    prefill_max_requests: int | None = memory(None, "requests per prefill pass", low=1, auto="no limit")
    schedule_policy: str = memory(
        "lpm", "order of the waiting queue; the cache-aware ones (lpm, dfs-weight) become fcfs without radix cache",
        choices=("lpm", "fcfs", "dfs-weight", "lof", "random"))
    schedule_conservativeness: float = memory(1.0, "how much future output admission reserves for; above 1: more")
    page_size: int = memory(1, "tokens per page of the KV pool", low=1)
    disable_radix_cache: bool = memory(False, "share no prefixes between requests")
    radix_eviction_policy: str = memory(
        "lru", "who leaves the radix tree first", choices=("lru", "lfu", "slru", "priority", "tlru"), later=_LEFT_OUT)
    disable_overlap_schedule: bool | None = memory(
        None, "process each result before the next step is launched",
        auto="overlap on CUDA, but not with --pp; none on a CPU")
    enable_mixed_chunk: bool = memory(False, "let decode rows ride along with a chunked prefill")
    scheduler_recv_interval: int = memory(1, "steps between looks at the input socket", later=_LEFT_OUT)
    prefill_decode_interval: int | None = memory(None, "decode rounds between two prefills", later=_LEFT_OUT)
    enable_priority_scheduling: bool = memory(False, "order by the requests' priority", later=_LEFT_OUT)
    retraction_policy: str = memory(
        "length", "who gives up its memory first", choices=("length", "priority"), later=_LEFT_OUT)
    watchdog_timeout: float = memory(300.0, "seconds after which a forward counts as hung and ends the server")
    soft_watchdog_timeout: float | None = memory(None, "seconds after which stacks are dumped", later=_LEFT_OUT)
    sleep_on_idle: bool = memory(False, "an idle scheduler sleeps instead of spinning", later=_LEFT_OUT, now=(True,))

    # ---- graphs ----
    cuda_graph_max_bs_decode: int | None = graph(
        None, "largest captured decode batch; unset: by GPU memory, 8 to 512, and on a CPU 32",
        also=("cuda-graph-max-bs",), low=1)
    cuda_graph_bs_decode: list[int] | None = graph(
        None, "captured decode batch sizes, instead of the usual ones", also=("cuda-graph-bs",))
    cuda_graph_max_bs_prefill: int | None = graph(None, "largest captured prefill, in tokens", low=1, later=_LEFT_OUT)
    cuda_graph_backend_decode: str | None = graph(
        None, "whether decode is captured (SGLang also has breakable)", choices=("full", "disabled"),
        auto="full where --graph-capture is not none")
    cuda_graph_backend_prefill: str | None = graph(
        None, "how prefill is captured", choices=("full", "breakable", "disabled"), later=_LEFT_OUT, now=("disabled",))
    disable_cuda_graph: bool = graph(False, "capture nothing (SGLang now says --cuda-graph-backend-decode disabled)")
    disable_cuda_graph_padding: bool = graph(
        False, "replay exact batch sizes only; every size up to the largest is captured")
    enable_torch_compile: bool = graph(
        False, "on a CPU: compile whole decode steps, one for each of a few batch sizes; needs a C++ compiler")
    torch_compile_max_bs: int = graph(32, "largest compiled batch", low=1)
    graph_capture: str | None = graph(
        None, "how a decode step is captured; tape and eager show on any machine what a CUDA graph does, and are slow",
        choices=("cuda", "tape", "eager", "compile", "none"),
        auto="cuda on a GPU; on a CPU compile with --enable-torch-compile, else none")

    # ---- speculative decoding ----
    speculative_algorithm: str | None = spec(None, "EAGLE, EAGLE3, NEXTN, STANDALONE or NGRAM", later=_SPEC)
    speculative_draft_model_path: str | None = spec(
        None, "folder or hub id of the draft model", also=("speculative-draft-model",), later=_SPEC)
    speculative_num_steps: int | None = spec(None, "draft depth", later=_SPEC)
    speculative_eagle_topk: int | None = spec(None, "branches per draft step", later=_SPEC)
    speculative_num_draft_tokens: int | None = spec(None, "tokens verified per step", later=_SPEC)
    speculative_accept_threshold_single: float = spec(1.0, "relaxes acceptance of one token", later=_SPEC)
    speculative_accept_threshold_acc: float = spec(1.0, "relaxes acceptance of a path", later=_SPEC)
    speculative_use_rejection_sampling: bool = spec(False, "exact rejection sampling", later=_SPEC)
    speculative_attention_mode: str = spec(
        "prefill", "kernels of verification", choices=("prefill", "decode"), later=_SPEC)
    speculative_token_map: str | None = spec(None, "reduced draft vocabulary", later=_SPEC)
    speculative_ngram_min_bfs_breadth: int = spec(1, "n-gram tree: smallest breadth", later=_SPEC)
    speculative_ngram_max_bfs_breadth: int = spec(10, "n-gram tree: largest breadth", later=_SPEC)
    speculative_ngram_max_trie_depth: int = spec(18, "n-gram tree: depth", later=_SPEC)
    speculative_ngram_capacity: int = spec(10_000_000, "n-gram tree: nodes", later=_SPEC)
    speculative_ngram_match_type: str = spec(
        "BFS", "n-gram tree: how it is searched", choices=("BFS", "PROB"), later=_SPEC)

    # ---- logging and metrics ----
    log_level: str = log("info", "how much the server says", choices=("debug", "info", "warning", "error", "critical"))
    log_level_http: str | None = log(
        None, "the same for HTTP alone", choices=("debug", "info", "warning", "error", "critical"),
        auto="warning, or --log-level where that says less")
    log_requests: bool = log(False, "log every request", later=_METRICS)
    log_requests_level: int = log(2, "how much of it, 0 to 3", later=_METRICS)
    decode_log_interval: int = log(40, "decode steps between two log lines", low=1)
    enable_metrics: bool = log(False, "serve Prometheus metrics at /metrics", later=_METRICS)
    enable_metrics_for_all_schedulers: bool = log(False, "every rank reports", later=_METRICS)
    bucket_time_to_first_token: list[float] | None = log(None, "histogram buckets, seconds", later=_METRICS)
    bucket_inter_token_latency: list[float] | None = log(None, "histogram buckets, seconds", later=_METRICS)
    bucket_e2e_request_latency: list[float] | None = log(None, "histogram buckets, seconds", later=_METRICS)
    crash_dump_folder: str | None = log(None, "where the last requests are written at a crash", later=_LEFT_OUT)

    # ---- tinysrt's own ----
    max_request_bytes: int = own(32 * 2**20, "largest request body; above: 413", human=True, low=1)
    max_batch_size: int = own(1024, "most prompts in one request; above: 400", low=1)
    drain_timeout: float = own(30.0, "seconds that running requests get after SIGTERM", low=0)
    kv_pool_bytes: int | None = own(
        None, "memory of each rank's KV pool; decides alone, before --mem-fraction-static", human=True, low=1,
        auto="on a CPU 2 GiB, or its part of a quarter of the available memory where that is less")
    num_threads: int | None = own(None, "threads of the model's process", low=1, auto="PyTorch's choice")
    debug_invariants: bool = own(False, "prove after each step that every KV slot has one owner (slow)")
    trace_dir: str | None = own(None, "record trace events of all processes into this folder")
    # fmt: on

    @classmethod
    def from_kwargs(cls, **kwargs: Any) -> ServerArgs:
        """From keywords: field names or any flag's other spelling (`tp_size`, `model`), checked for type."""
        return cls(**keyword_values(kwargs))

    def resolve(self) -> ServerArgs:
        """Check, then give every "auto" its value. `model_path` must be known by now."""
        self.check()
        device = _resolve_device(self.device)
        on_cpu = device == "cpu"
        values: dict[str, Any] = {
            "device": device,
            "served_model_name": self.served_model_name or self.model_path,
            "tokenizer_path": self.tokenizer_path or self.model_path,
            "random_seed": random.SystemRandom().randrange(2**30) if self.random_seed is None else self.random_seed,
            **self._attention_backends(on_cpu),
            "sampling_backend": self.sampling_backend or "pytorch",
            "graph_capture": self._graph_capture(on_cpu),
            # A pipeline overlaps its stages instead. On a CPU nothing computes beside the scheduler's cores, and a new
            # request waits for one step more: first tokens come a fifth later (chapter 12).
            "disable_overlap_schedule": self.pipeline_parallel_size > 1
            or (on_cpu if self.disable_overlap_schedule is None else self.disable_overlap_schedule),
            "log_level_http": self.log_level_http or ("warning" if self.log_level == "info" else self.log_level),
        }
        if self.disable_radix_cache and self.schedule_policy in CACHE_AWARE_POLICIES:
            values["schedule_policy"] = "fcfs"  # nothing is cached, so nothing can be ordered by it
        if self.chunked_prefill_size is None:
            chunk = CPU_CHUNKED_PREFILL_SIZE if on_cpu else GPU_CHUNKED_PREFILL_SIZE
            values["chunked_prefill_size"] = -(-chunk // self.page_size) * self.page_size  # rounded up to whole pages
        elif self.chunked_prefill_size <= 0:
            values["chunked_prefill_size"] = -1  # one way to say "off"
        if on_cpu and self.max_running_requests is None:
            values["max_running_requests"] = CPU_MAX_RUNNING_REQUESTS
        if on_cpu and self.kv_pool_bytes is None and self.mem_fraction_static is None:
            share = CPU_KV_POOL_SHARE / self.ranks_on_this_machine()
            values["kv_pool_bytes"] = min(CPU_KV_POOL_BYTES, int(available_memory() * share))
        values["mem_fraction_static"] = self.mem_fraction_static or MEM_FRACTION_STATIC
        values["enable_torch_compile"] = values["graph_capture"] == "compile"
        values["cuda_graph_backend_decode"] = "disabled" if values["graph_capture"] == "none" else "full"
        return dataclasses.replace(self, **values)

    def _attention_backends(self, on_cpu: bool) -> dict[str, str]:
        asked = {name: getattr(self, name) for name in ATTENTION_FLAGS}
        half = self.dtype in ("half", "float16")
        for name, kernels in asked.items():
            option = f"--{name.replace('_', '-')} {kernels}"
            if kernels == "triton" and on_cpu and os.environ.get("TRITON_INTERPRET") != "1":
                raise StartupError(f"{option} needs a CUDA device, or TRITON_INTERPRET=1")
            if kernels == "numba" and not on_cpu:
                raise StartupError(f"{option} runs on a CPU; on CUDA there are torch_native and triton")
            if kernels == "numba" and half:
                raise StartupError(f"{option} has no kernels for {self.dtype}; use torch_native, or another --dtype")
            if kernels in ("numba", "triton") and importlib.util.find_spec(kernels) is None:
                raise StartupError(f"{option} needs the {kernels} package: {INSTALL[kernels]}")
        main = asked["attention_backend"]
        if main is None and not on_cpu:
            main = "triton"
        if main is None:
            main = "torch_native" if half or importlib.util.find_spec("numba") is None else "numba"
            if not half and main == "torch_native":
                logger.warning("numba is not installed: attention runs in plain PyTorch (%s)", INSTALL["numba"])
        return {name: kernels or main for name, kernels in asked.items()}

    def _graph_capture(self, on_cpu: bool) -> str:
        asked, off = self.graph_capture, self.disable_cuda_graph or self.cuda_graph_backend_decode == "disabled"
        if self.enable_torch_compile and asked not in (None, "compile"):
            raise StartupError(f"--enable-torch-compile and --graph-capture {asked} are two ways: choose one")
        if self.enable_torch_compile:
            asked = "compile"
        if off and asked not in (None, "none"):
            raise StartupError(f"--disable-cuda-graph captures nothing, and {asked!r} is a way to capture: choose one")
        if asked == "cuda" and on_cpu:
            raise StartupError("--graph-capture cuda needs a CUDA device; on a CPU there are tape, eager and compile")
        if asked == "compile" and not on_cpu:
            raise StartupError("--enable-torch-compile is for CPUs; on a GPU a CUDA graph does its work")
        if asked == "compile" and self.disable_cuda_graph_padding:
            raise StartupError("--enable-torch-compile compiles few batch sizes: not with --disable-cuda-graph-padding")
        return asked or ("none" if on_cpu or off or self.pipeline_parallel_size > 1 else "cuda")

    def _check_parallel(self) -> None:
        tp, pp, dp, nodes = (
            self.tensor_parallel_size, self.pipeline_parallel_size, self.data_parallel_size, self.nnodes
        )  # fmt: skip
        if nodes > 1 and dp > 1:
            raise StartupError("--dp puts replicas on one machine: for several, a server each with a router in front")
        if tp * pp % nodes:
            raise StartupError(f"--nnodes {nodes} does not divide the {tp * pp} ranks of --tp {tp} and --pp {pp}")
        if self.node_rank >= nodes:
            raise StartupError(f"--node-rank {self.node_rank} is not below --nnodes {nodes}")
        if nodes > 1 and self.dist_init_addr is None:
            raise StartupError("--nnodes needs --dist-init-addr host:port, an address of node 0 and a free port there")
        if self.dist_init_addr is not None:
            host, colon, port = self.dist_init_addr.rpartition(":")
            if not host or not port.isdecimal() or not 0 < int(port) < 65536:
                raise StartupError(f"--dist-init-addr {self.dist_init_addr!r} is not host:port")
            if self.nccl_port is not None:
                raise StartupError("--nccl-port and --dist-init-addr both say where the ranks meet: choose one")
            if dp > 1:
                raise StartupError("--dist-init-addr is one meeting place, and --dp needs one each: use --nccl-port")
        if self.nccl_port is not None and self.nccl_port + dp - 1 > 65535:
            raise StartupError(f"--nccl-port {self.nccl_port} is too high")
        capture = "compile" if self.enable_torch_compile else self.graph_capture
        if (tp > 1 and capture in ("tape", "compile")) or (pp > 1 and capture not in (None, "none")):
            raise StartupError(f"--graph-capture {capture} works within one process: not with --tp or --pp")
        if pp > 1 and self.disable_overlap_schedule is False:
            raise StartupError("--no-disable-overlap-schedule: with --pp there is no overlap, stages overlap instead")

    def ranks_on_this_machine(self) -> int:
        """Scheduler processes here; they share its cores and its main memory."""
        group = self.tensor_parallel_size * self.pipeline_parallel_size // self.nnodes
        return self.data_parallel_size * group

    def to_info(self) -> dict[str, Any]:
        """All fields flat, for /server_info; SGLang's short names beside ours, secrets hidden."""
        info = dataclasses.asdict(self)
        for secret in ("api_key", "admin_api_key"):
            info[secret] = "***" if info[secret] else None
        for short, name in SGLANG_NAMES.items():
            info[short] = info[name]
        return info

    def describe(self) -> str:
        """One log line: every field that differs from its default, in the order of the record."""
        info = self.to_info()
        told = [f"{name}={info[name]!r}" for name, flag in flags().items() if info[name] != flag.default]
        return ", ".join(told) or "all defaults"

    def check(self) -> None:
        """Refuse, in one line, what cannot be or is not here yet. Cheap: the command line asks before it loads much."""
        self._check_values()
        self._refuse_what_comes_later()

    def _refuse_what_comes_later(self) -> None:
        for name, flag in flags().items():
            value = getattr(self, name)
            if flag.later is None or value == flag.default or value in flag.now:
                continue
            shown = f"--{name.replace('_', '-')}" + ("" if value is True else f" {value}")
            reason = f"it arrives with {flag.later}" if flag.later else "tinysrt leaves it out"
            keep = "leave it out" if flag.default in (None, False, "") else f"leave it at {flag.default}"
            raise StartupError(f"{shown} is not supported: {reason}; {keep}")

    def _check_values(self) -> None:
        for name, flag in flags().items():
            value, option = getattr(self, name), f"--{name.replace('_', '-')}"
            if value is None:
                continue
            if flag.choices and value not in flag.choices:
                raise StartupError(f"{option} {value!r} is not one of {', '.join(flag.choices)}")
            if flag.low is not None and not value >= flag.low:
                raise StartupError(f"{option} must be at least {flag.low}, not {value}")
        if self.port > 65535:
            raise StartupError(f"--port must be at most 65535, not {self.port}")
        if self.mem_fraction_static is not None and not 0 < self.mem_fraction_static < 1:
            raise StartupError(f"--mem-fraction-static must be between 0 and 1, not {self.mem_fraction_static}")
        for name in ("schedule_conservativeness", "watchdog_timeout"):
            if not getattr(self, name) > 0:  # not "<= 0": that would let nan through
                raise StartupError(f"--{name.replace('_', '-')} must be above 0, not {getattr(self, name)}")
        chunk = self.chunked_prefill_size
        if chunk is not None and chunk > 0 and chunk % self.page_size:
            raise StartupError(f"--chunked-prefill-size {chunk} is not a multiple of --page-size {self.page_size}")
        self._check_parallel()
        sizes, largest = self.cuda_graph_bs_decode, self.cuda_graph_max_bs_decode
        if sizes is not None and (not sizes or min(sizes) < 1):
            raise StartupError("--cuda-graph-bs takes one or more batch sizes, each at least 1")
        if sizes and largest is not None and max(sizes) != largest:
            raise StartupError(f"--cuda-graph-max-bs {largest} and --cuda-graph-bs {max(sizes)} name two largest sizes")
        if self.served_model_name is not None and ":" in self.served_model_name:
            raise StartupError("--served-model-name must not contain ':' (reserved for base:adapter)")
        if (self.ssl_keyfile is None) != (self.ssl_certfile is None):
            raise StartupError("--ssl-keyfile and --ssl-certfile need each other")
        for path in (self.ssl_keyfile, self.ssl_certfile):
            if path is not None and not os.path.isfile(path):
                raise StartupError(f"no such file: {path}")


# SGLang's own field names, where they are not ours.
SGLANG_NAMES = {
    "tp_size": "tensor_parallel_size",
    "pp_size": "pipeline_parallel_size",
    "dp_size": "data_parallel_size",
}


@functools.cache
def flags() -> dict[str, Flag]:
    """Field name → its Flag, in the order of the record."""
    return {field.name: field.metadata["flag"] for field in dataclasses.fields(ServerArgs)}


@functools.cache
def value_types() -> dict[str, type]:
    """Field name → str, int, float, bool, dict or list[...]; what `| None` stands beside."""
    hints = typing.get_type_hints(ServerArgs)
    return {name: _without_none(hints[name]) for name in flags()}


@functools.cache
def keyword_names() -> dict[str, str]:
    """Every spelling as a Python keyword → field name."""
    return {
        spelling.replace("-", "_"): name for name, flag in flags().items() for spelling in flag.spellings(name)
    }


def keyword_values(keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Field name → value, from keywords in any spelling; an unknown, doubled or ill-typed one is a StartupError."""
    names = keyword_names()
    values: dict[str, Any] = {}
    for keyword, value in keywords.items():
        name = names.get(keyword)
        if name is None:
            raise StartupError(f"unknown argument {keyword!r}{did_you_mean(keyword, list(names))}")
        if name in values:
            raise StartupError(f"{name} is given twice, the second time as {keyword!r}")
        values[name] = _typed(name, value)
    return values


def parse_human_int(text: str) -> int:
    """'8k' → 8000, '4Ki' → 4096, '1.5M' → 1500000; case matters, and nothing is rounded."""
    unit = next((unit for unit in sorted(HUMAN_UNITS, key=len, reverse=True) if text.endswith(unit)), None)
    if unit is None:
        return int(text)
    number = text.removesuffix(unit)
    if re.fullmatch(r"\d+(\.\d+)?", number):
        value = Decimal(number) * HUMAN_UNITS[unit]  # decimal: 4.1k is 4100 exactly
        if value == int(value):
            return int(value)
    raise ValueError(f"{text!r} is not a whole number")


def did_you_mean(word: str, known: list[str]) -> str:
    close = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


# Where a container's memory limit stands: cgroup v2, then v1.
_CGROUPS = (
    ("/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def available_memory() -> int:
    """Bytes of main memory that this process may still use: what the kernel has left, or the container's limit."""
    import psutil

    available = psutil.virtual_memory().available
    for folder, limit_file, used_file, cached_name in _CGROUPS:
        try:
            limit = int(_read(f"{folder}/{limit_file}"))
            used = int(_read(f"{folder}/{used_file}"))
            stat = dict(line.split() for line in _read(f"{folder}/memory.stat").splitlines())
        except (OSError, ValueError):  # no such cgroup, or its limit is the word "max"
            continue
        # Files read once (a model, an installation) count as used but are given back when memory is asked for.
        available = min(available, max(limit - used + int(stat.get(cached_name, 0)), 0))
    return available


def _read(path: str) -> str:
    with open(path) as file:
        return file.read()


def _resolve_device(device: str | None) -> str:
    import torch  # slow to import, and only needed here

    has_cuda = torch.cuda.is_available()
    if device is None:
        return "cuda" if has_cuda else "cpu"
    kind, _, index = device.partition(":")
    if kind not in ("cpu", "cuda"):
        raise StartupError(f"--device {device!r} is not one of cpu, cuda")
    if index not in ("", "0"):
        raise StartupError(f"--device {device}: say which GPU with CUDA_VISIBLE_DEVICES={index} and --device {kind}")
    if kind == "cuda" and not has_cuda:
        raise StartupError("--device cuda: PyTorch finds no CUDA device; use --device cpu")
    return kind


def _without_none(hint: Any) -> Any:
    if isinstance(hint, types.UnionType):
        return next(part for part in typing.get_args(hint) if part is not types.NoneType)
    return hint


def _typed(name: str, value: Any) -> Any:
    """`value` if its type fits the field; integers pass as floats, and '8k' where the command line takes it."""
    flag, wanted = flags()[name], value_types()[name]
    if value is None and flag.default is None:
        return None
    if flag.human and isinstance(value, str):
        try:
            return parse_human_int(value)
        except ValueError:
            raise StartupError(f"{name}={value!r} is not a number such as 8000, 8k or 8Ki") from None
    if wanted is float and type(value) is int:
        return float(value)
    if isinstance(value, os.PathLike) and wanted is str:
        return os.fspath(value)
    kind = typing.get_origin(wanted) or wanted
    if type(value) is not kind:  # exact: True is no integer here
        raise StartupError(f"{name} must be {kind.__name__}, not {type(value).__name__} ({value!r})")
    return value
