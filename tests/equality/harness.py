"""The whole request path below the sockets, with a real model: Scheduler, pools, worker and ModelRunner in one process.

    Ask ─▶ RealEngine.play ─▶ Answer ─▶ Ledger.check ◀─ Reference (Hugging Face)

After every step each slot and row must have one owner. `Switches` names everything that must not change an answer;
`covering_set` picks combinations of them in which every pair of values meets.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import torch

from tests.equality.reference import TIE, Reference
from tests.scheduler.late_worker import LateWorker
from tinysrt.bench.fake_model import ListInbox, ListOutbox
from tinysrt.managers.overlap_worker import OverlapWorker
from tinysrt.managers.schedule_batch import StepMemory
from tinysrt.managers.scheduler import Scheduler
from tinysrt.managers.seats import Limits
from tinysrt.managers.tp_worker import TpWorker
from tinysrt.mem_cache.allocator import make_allocator
from tinysrt.mem_cache.chunk_cache import ChunkCache
from tinysrt.mem_cache.memory_pool import ReqToTokenPool
from tinysrt.mem_cache.radix_cache import RadixCache
from tinysrt.messages import (
    AbortReq,
    ContinueGenerationReqInput,
    FinishAbort,
    FinishReason,
    Message,
    OutputMeta,
    PauseGenerationReqInput,
    TokenizedGenerateReqInput,
)
from tinysrt.model_executor.model_config import ModelConfig
from tinysrt.model_executor.model_runner import ModelRunner
from tinysrt.observe.trace import Recorder
from tinysrt.sampling_params import SamplingParams
from tinysrt.server_args import ServerArgs
from tinysrt.text.tokenizer import Tokenizer

LOGPROB_TOLERANCE = 1e-3
GREEDY = SamplingParams(top_k=1)
SENT_BACK_AT = (4, 13, 37, 61)  # `tight`: before these steps everyone who holds memory loses it


# ---- what must not change an answer ----------------------------------------------------------------


@dataclass(frozen=True)
class Switches:
    loop: str = "overlap"  # normal; overlap: a forward thread; late: overlap whose forwards run as late as they can
    radix: bool = True
    chunk: int = -1
    page: int = 1
    mixed: bool = False
    tight: bool = False  # a small pool, an admission that hopes too much, and now and then everyone is sent back
    policy: str = "lpm"
    graph: str = "none"  # tape, compile: how decode steps are captured, see `graph_capture.py`
    backend: str = "numba"  # torch_native, numba: kernels and attention

    def __str__(self) -> str:
        words = [
            self.loop,
            "radix" if self.radix else "no-radix",
            f"chunk{self.chunk}",
            f"page{self.page}",
            self.policy,
            self.graph,
            self.backend,
        ]
        return "-".join(words + ["mixed"] * self.mixed + ["tight"] * self.tight)


VALUES: dict[str, tuple[Any, ...]] = {
    "loop": ("normal", "overlap", "late"),
    "radix": (True, False),
    "chunk": (16, 64, -1),
    "page": (1, 16),
    "mixed": (False, True),
    "tight": (False, True),
    "policy": ("lpm", "fcfs", "dfs-weight", "lof", "random"),
    "graph": ("none", "tape"),
    "backend": ("numba", "torch_native"),
}


def all_switches() -> list[Switches]:
    return [Switches(*values) for values in itertools.product(*VALUES.values())]


def pairs(switches: Switches) -> set[tuple[tuple[str, Any], tuple[str, Any]]]:
    settings = [(f.name, getattr(switches, f.name)) for f in fields(switches)]
    return set(itertools.combinations(settings, 2))


def covering_set() -> list[Switches]:
    """Greedy: again and again the combination that shows the most pairs not seen yet."""
    everything = all_switches()
    missing = set().union(*map(pairs, everything))
    chosen = []
    while missing:
        richest = max(everything, key=lambda switches: len(pairs(switches) & missing))
        chosen.append(richest)
        missing -= pairs(richest)
    return chosen


# ---- models ------------------------------------------------------------------------------------------


@dataclass
class Model:
    """A checkpoint, loaded twice: by transformers and by tinysrt. One runner serves many schedulers in turn, and what
    earlier ones left in its tables and its KV must not matter."""

    folder: Path
    reference: Reference
    pool_tokens: int = 4096
    runners: dict[tuple[str, str], ModelRunner] = field(default_factory=dict)  # by way of capturing and backend

    @cached_property
    def config(self) -> ModelConfig:
        return ModelConfig.from_pretrained(str(self.folder), dtype="float32")

    def runner_for(self, graph: str, backend: str = "numba") -> ModelRunner:
        if (graph, backend) not in self.runners:
            self.runners[graph, backend] = self._make_runner(graph, backend)
        return self.runners[graph, backend]

    def _make_runner(self, graph: str, backend: str) -> ModelRunner:
        args = ServerArgs(
            model_path=str(self.folder), device="cpu", dtype="float32", max_total_tokens=self.pool_tokens,
            max_running_requests=40, page_size=16, num_threads=1, graph_capture=graph, attention_backend=backend,
            cuda_graph_bs_decode=[2] if graph == "compile" else [1, 2, 4, 6, 12, 24],
        ).resolve()  # fmt: skip
        runner = ModelRunner(args, self.config, trace=Recorder("test"))
        runner.capture_graphs(args)
        return runner

    @property
    def runner(self) -> ModelRunner:
        return self.runner_for("none")

    def can_capture(self, backend: str) -> bool:
        """The plain PyTorch experts ask the host how many rows each gets, which a captured step cannot."""
        return self.config.hf_config.model_type != "qwen3_moe" or backend != "torch_native"

    @property
    def eos_ids(self) -> frozenset[int]:
        return self.config.eos_token_ids


# ---- asking and being answered --------------------------------------------------------------------------


@dataclass(frozen=True)
class Ask:
    rid: str
    prompt: list[int]
    params: SamplingParams = GREEDY
    at: int = 0  # the step before which it arrives
    stream: bool = True
    logprobs: bool = False
    start: int = -1  # logprob_start_len
    top: int = 0
    named: list[int] | None = None  # token_ids_logprob

    def having(self, **params: Any) -> Ask:
        """The same with other sampling parameters."""
        return replace(self, params=msgspec.structs.replace(self.params, **params))

    def message(self) -> TokenizedGenerateReqInput:
        return TokenizedGenerateReqInput(
            rid=self.rid, reply_to="", input_ids=self.prompt, sampling_params=self.params, stream=self.stream,
            return_logprob=self.logprobs, logprob_start_len=self.start, top_logprobs_num=self.top,
            token_ids_logprob=self.named,
        )  # fmt: skip


@dataclass
class Answer:
    """All messages about one request, joined as a client joins them."""

    ids: list[int] = field(default_factory=list)
    finish: FinishReason | None = None
    meta: OutputMeta | None = None  # of the last message
    logprobs: list[float] = field(default_factory=list)
    top: list[Any] = field(default_factory=list)
    named: list[Any] = field(default_factory=list)
    input: list[tuple[float | None, int]] | None = None
    input_top: list[Any] | None = None
    input_named: list[Any] | None = None

    @property
    def cached_tokens(self) -> int:
        assert self.meta is not None
        return self.meta.cached_tokens


class RealEngine:
    """A scheduler on a real model, driven step by step. As a context manager it ends its forward thread."""

    def __init__(
        self,
        model: Model,
        switches: Switches = Switches(),  # noqa: B008 (frozen)
        *,
        capacity: int | None = None,
        max_running: int = 32,
        tokenizer: Tokenizer | None = None,
        **server_args: Any,
    ):
        self.tight = switches.tight
        self.args = ServerArgs(
            model_path=str(model.folder), device="cpu", random_seed=0, max_running_requests=max_running,
            disable_overlap_schedule=switches.loop == "normal", disable_radix_cache=not switches.radix,
            chunked_prefill_size=switches.chunk, page_size=switches.page, enable_mixed_chunk=switches.mixed,
            schedule_policy=switches.policy, **server_args,
        ).resolve()  # fmt: skip
        runner = model.runner_for(switches.graph if model.can_capture(switches.backend) else "none", switches.backend)
        self.graphs, page = runner.graphs, switches.page
        self.replayed_before = self.graphs.replayed if self.graphs is not None else 0
        self.capacity = capacity or runner.max_total_num_tokens
        assert self.capacity <= runner.max_total_num_tokens and self.capacity % page == 0
        pool = ReqToTokenPool(max_running, runner.table_width)
        allocator = make_allocator(self.capacity, page)
        worker = {"normal": TpWorker, "overlap": OverlapWorker, "late": LateWorker}[switches.loop]
        self.inbox = ListInbox([])
        self.outbox = ListOutbox()
        self.scheduler = Scheduler(
            self.args,
            worker=worker(runner),
            memory=StepMemory(pool, allocator, (RadixCache if switches.radix else ChunkCache)(pool, allocator, page)),
            limits=Limits(
                context_len=model.config.context_len, max_running_requests=max_running, vocab_size=runner.vocab_size,
                eos_ids=model.eos_ids, capacity=self.capacity, page_size=page,
            ),
            inbox=self.inbox,
            outbox=self.outbox,
            trace=Recorder("scheduler"),
            tokenizer=tokenizer,
        )  # fmt: skip
        self.advance = self.scheduler.step_normal if switches.loop == "normal" else self.scheduler.step_overlap
        self.steps = 0
        self.modes: Counter[str] = Counter()  # steps by forward mode
        self.chunks = 0  # steps that ended with a prompt half computed
        self.widest = 0  # most requests in one step

    def __enter__(self) -> RealEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.scheduler.worker.close()

    @property
    def replayed(self) -> int:
        """Decode steps that were replayed."""
        return self.graphs.replayed - self.replayed_before if self.graphs is not None else 0

    def step(self, messages: Sequence[Message] = ()) -> None:
        self.inbox.messages += messages
        if self.tight:
            self.scheduler.new_token_ratio = 0.0  # never learns that running requests grow
            if self.steps in SENT_BACK_AT:
                pause = PauseGenerationReqInput(reply_to="", mode="retract")
                self.inbox.messages += [pause, ContinueGenerationReqInput(reply_to="")]
        self.steps += 1
        self.advance(self.inbox.receive(block=False))
        self.scheduler.check_invariants()
        seats = self.scheduler.seats
        if seats.cur_batch is not None:
            self.modes[seats.cur_batch.forward_mode.name] += 1
            self.widest = max(self.widest, len(seats.cur_batch))
        if seats.chunked_req is not None:
            self.chunks += 1
            assert seats.chunked_req not in seats.running_batch.reqs, "half a prompt would decode"

    def play(self, asks: Iterable[Ask], aborts: Iterable[tuple[int, str]] = ()) -> dict[str, Answer]:
        """Send everything at its step, run until all is answered; `aborts`: (step, rid). At the end all is free."""
        asks, aborts = list(asks), list(aborts)
        last = max([ask.at for ask in asks] + [at for at, _ in aborts])
        for turn in range(last + 1):
            arriving: list[Message] = [ask.message() for ask in asks if ask.at == turn]
            self.step([*arriving, *(AbortReq(rid=rid) for at, rid in aborts if at == turn)])
        self.finish()
        memory = self.scheduler.memory
        assert memory.tree.protected_size() == 0 and memory.available() == self.capacity
        return {ask.rid: self.answer(ask.rid) for ask in asks}

    def finish(self) -> None:
        """Until nothing is left to do."""
        for _ in range(20_000):
            if self.scheduler.is_idle() and not self.inbox.messages:
                return
            self.step()
        raise AssertionError(f"not idle: {self.scheduler.state()}")

    def answer(self, rid: str) -> Answer:
        answer = Answer()
        for out in self.outbox.outs.pop(rid, []):
            assert answer.finish is None, f"{rid} was answered after its end"
            answer.ids += out.new_ids
            answer.meta, answer.finish = out.meta, out.meta.finish
            if out.meta.logprobs is not None:
                news = out.meta.logprobs
                answer.logprobs += news.output
                answer.top += news.output_top
                answer.named += news.output_ids
                if news.input is not None:
                    assert answer.input is None, f"{rid}: input scores were sent twice"
                    answer.input, answer.input_top, answer.input_named = news.input, news.input_top, news.input_ids
        for message in self.outbox.messages:
            if isinstance(message, AbortReq) and message.rid == rid:
                assert answer.meta is None, f"{rid} was ended twice"
                answer.finish = message.finish
        return answer


# ---- comparing ----------------------------------------------------------------------------------------


class Ledger:
    """Compares answers with the reference, and keeps count: how many positions, and how many were excused."""

    def __init__(self) -> None:
        self.compared = 0
        self.excused = 0

    def check(self, model: Model, ask: Ask, answer: Answer, *, whole: bool = True) -> None:
        """Token for token, and score for score where scores were asked for. `whole` False: an aborted request's
        answer may stop anywhere.

        After an excused difference the reference goes on from what tinysrt has said, so every later token counts."""
        assert answer.finish is not None, f"{ask.rid} got no end"
        stops = frozenset() if ask.params.ignore_eos else model.eos_ids | frozenset(ask.params.stop_token_ids)
        limit = ask.params.max_new_tokens
        assert limit is not None
        done = 0
        while True:
            got = answer.ids[done:]
            want = model.reference.decode(ask.prompt, limit - done, ask.params, answer.ids[:done], stops)
            same = common_length(got, want.ids)
            if ask.logprobs:
                self._check_scores(ask, answer, done, want.scores[:same])
            self.compared += same
            if same == len(got) and (same == len(want.ids) or not whole):
                break
            where = f"{ask.rid}, token {done + same}: {got[same : same + 1]} instead of {want.ids[same : same + 1]}"
            assert same < len(got) and same < len(want.ids), f"{where}, one text is longer"
            assert want.margins[same] <= TIE, f"{where}, the reference is sure by {want.margins[same]:.2g}"
            if ask.params.is_greedy:
                assert want.scores[same].max() - want.scores[same, got[same]] <= TIE, f"{where}, which is no near tie"
            if ask.logprobs:
                self._check_scores(ask, answer, done + same, want.scores[same : same + 1])
            self.compared += 1
            self.excused += 1
            done += same + 1
            if done == limit or got[same] in stops:
                assert done == len(answer.ids), f"{where}: goes on after its end"
                break
        self._check_counts(ask, answer)
        if ask.logprobs and ask.start >= 0 and not isinstance(answer.finish, FinishAbort):
            self._check_input_scores(model, ask, answer)

    def _check_counts(self, ask: Ask, answer: Answer) -> None:
        if answer.meta is None:  # aborted before it had run
            return
        assert answer.meta.prompt_tokens == len(ask.prompt)
        assert answer.meta.completion_tokens == len(answer.ids)
        assert 0 <= answer.meta.cached_tokens <= len(ask.prompt) - 1
        expected = len(answer.ids) if ask.logprobs else 0
        assert len(answer.logprobs) == expected
        assert len(answer.top) == (expected if ask.top else 0)
        assert len(answer.named) == (0 if ask.named is None else expected)

    def _check_scores(self, ask: Ask, answer: Answer, begin: int, scores: torch.Tensor) -> None:
        for k, row in enumerate(scores.log_softmax(-1), start=begin):
            close(answer.logprobs[k], row[answer.ids[k]], f"{ask.rid}, score of token {k}")
            check_lists(ask, row, answer.top[k] if ask.top else None, answer.named[k] if ask.named else None)

    def _check_input_scores(self, model: Model, ask: Ask, answer: Answer) -> None:
        """Entry i scores the token at start + i, given those before it; nothing precedes the first."""
        assert answer.input is not None, f"{ask.rid}: no input scores"
        assert [token for _, token in answer.input] == ask.prompt[ask.start :]
        assert [score for score, _ in answer.input[:1]] == [None][: len(answer.input)]
        rows = model.reference.logprobs(ask.prompt)
        for i, (score, token) in enumerate(answer.input[1:], start=1):
            row = rows[ask.start + i - 1]
            assert score is not None
            close(score, row[token], f"{ask.rid}, score of prompt token {ask.start + i}")
            top = answer.input_top[i] if ask.top and answer.input_top else None
            named = answer.input_named[i] if ask.named and answer.input_named else None
            check_lists(ask, row, top, named)


def check_lists(ask: Ask, row: torch.Tensor, top: Any, named: Any) -> None:
    """Best-first lists by value (near ties may swap), asked-for ids by id."""
    if ask.top:
        for (score, token), value in zip(top, row.topk(ask.top).values, strict=True):
            close(score, value, f"{ask.rid}, top list")
            close(score, row[token], f"{ask.rid}, top list, token {token}")
    if ask.named:
        assert [token for _, token in named] == ask.named
        for score, token in named:
            close(score, row[token], f"{ask.rid}, token {token}")


def close(got: float, want: torch.Tensor, what: str) -> None:
    difference = abs(got - float(want))
    assert difference < LOGPROB_TOLERANCE or got == float(want), f"{what}: {got} instead of {float(want)}"


def common_length(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
