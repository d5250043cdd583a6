"""What the scheduler says of itself: log lines, load snapshots, /server_info, the seats in the trace.

Reads, never decides: nothing here feeds back into scheduling. The figures are SGLang's
(`managers/scheduler_metrics_mixin.py`); `token usage` counts cached tokens that nobody holds as unused, because they
can be had at any moment.
"""

from __future__ import annotations

import logging
from typing import Any

from tinysrt.managers.schedule_batch import Req, ScheduleBatch, StepMemory
from tinysrt.managers.seats import Limits, Seats
from tinysrt.messages import LoadSnapshot
from tinysrt.model_executor.forward_batch_info import ForwardMode

logger = logging.getLogger(__name__)


class SchedulerReport:
    def __init__(self, memory: StepMemory, limits: Limits, decode_log_interval: int, dp_rank: int | None = None):
        self.dp_rank = dp_rank
        self.memory = memory
        self.limits = limits
        self.decode_log_interval = decode_log_interval
        self.decode_steps = 0
        self.retracted = 0
        self.cache_hit_rate = 0.0  # of the last prefill
        self.last_throughput = 0.0  # output tokens a second
        self.idle = True  # the idle state has been reported
        self._tokens = 0
        self._since = 0.0

    def count(self, mode: ForwardMode, tokens: int) -> None:
        """A step's result was processed."""
        self.idle = False
        self._tokens += tokens
        if mode is ForwardMode.DECODE:
            self.decode_steps += 1

    def throughput(self, now: float) -> float:
        """Output tokens a second since the last call; a call within the same instant repeats the last figure."""
        if now > self._since:
            self.last_throughput = self._tokens / (now - self._since) if self._since else 0.0
            self._tokens, self._since = 0, now
        return self.last_throughput

    def used_tokens(self) -> int:
        return self.limits.capacity - self.memory.available()

    def log_prefill(self, batch: ScheduleBatch, seats: Seats) -> None:
        new = batch.reqs[: len(batch) - batch.num_decode_lanes]
        cached = sum(req.prefix_len for req in new)
        computed = sum(req.extend_len for req in new)
        self.cache_hit_rate = cached / max(1, cached + computed)
        logger.info(
            "Prefill batch, #new-seq: %d, #new-token: %d, #cached-token: %d, token usage: %.2f, #running-req: %d, "
            "#queue-req: %d",
            len(new),
            computed,
            cached,
            self.used_tokens() / self.limits.capacity,
            len(seats.running_batch),
            len(seats.waiting_queue),
        )

    def log_decode(self, seats: Seats, now: float, *, cuda_graph: bool) -> None:
        if self.decode_steps % self.decode_log_interval == 0:
            logger.info(
                "Decode batch, #running-req: %d, #token: %d, token usage: %.2f, cuda graph: %s, "
                "gen throughput (token/s): %.2f, #queue-req: %d",
                len(seats.running_batch),
                self.used_tokens(),
                self.used_tokens() / self.limits.capacity,
                cuda_graph,
                self.throughput(now),
                len(seats.waiting_queue),
            )

    def load_snapshot(self, live: int, seats: Seats, now: float) -> LoadSnapshot:
        """`live`: requests that have not ended, waiting ones included."""
        waiting = seats.waiting_queue
        return LoadSnapshot(
            dp_rank=self.dp_rank or 0,
            num_running_reqs=live - len(waiting),
            num_waiting_reqs=len(waiting),
            num_waiting_uncached_tokens=sum(req.num_tokens for req in waiting),
            num_used_tokens=self.used_tokens(),
            max_total_num_tokens=self.limits.capacity,
            max_running_requests=self.limits.max_running_requests,
            gen_throughput=self.throughput(now),
            cache_hit_rate=self.cache_hit_rate,
        )

    def internal_state(self, live: int, seats: Seats) -> dict[str, Any]:
        """For /server_info."""
        return {
            "dp_rank": self.dp_rank or 0,
            "num_running_reqs": live - len(seats.waiting_queue),
            "num_waiting_reqs": len(seats.waiting_queue),
            "num_used_tokens": self.used_tokens(),
            "num_cached_tokens": self.memory.tree.evictable_size() + self.memory.tree.protected_size(),
            "max_total_num_tokens": self.limits.capacity,
            "effective_max_running_requests_per_dp": self.limits.max_running_requests,
            "last_gen_throughput": round(self.last_throughput, 2),
            "num_retracted_reqs": self.retracted,
        }

    def seats_for_trace(self, seats: Seats, step: int) -> dict[str, Any]:
        """The step event: who sits where, and how full memory is."""

        def rids(reqs: list[Req]) -> list[str]:
            return [req.rid for req in reqs]

        assert seats.cur_batch is not None
        return {
            "step": step,
            "mode": seats.cur_batch.forward_mode.name,
            "waiting_queue": rids(seats.waiting_queue),
            "new_batch": rids(seats.new_batch.reqs) if seats.new_batch else [],
            "running_batch": rids(seats.running_batch.reqs),
            "cur_batch": rids(seats.cur_batch.reqs),
            "chunked_req": seats.chunked_req.rid if seats.chunked_req else None,
            "free_tokens": self.memory.allocator.available_size(),
            "evictable_tokens": self.memory.tree.evictable_size(),
            "protected_tokens": self.memory.tree.protected_size(),
        }
