"""A hand-written little scheduler that drives ModelRunner, and tiny random checkpoints to drive it with.

It does what the real scheduler does for the runner and nothing else: gives rows and slots, logs table writes, builds
ForwardBatches. Slots are handed out in a shuffled order, so that nothing works by accident of contiguity.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import transformers

from tinysrt.model_executor.forward_batch_info import ForwardBatch, ForwardMode, LogprobSpec, TableUpdate
from tinysrt.model_executor.model_config import ModelConfig
from tinysrt.model_executor.model_runner import ModelRunner
from tinysrt.model_executor.sampling_batch_info import SamplingBatchInfo
from tinysrt.model_executor.step_result import StepResult
from tinysrt.observe.trace import Recorder
from tinysrt.sampling_params import SamplingParams
from tinysrt.server_args import ServerArgs

VOCAB = 300
TINY = dict(
    vocab_size=VOCAB,
    hidden_size=48,
    intermediate_size=80,
    num_hidden_layers=3,
    num_attention_heads=6,
    num_key_value_heads=2,
    max_position_embeddings=512,
    initializer_range=0.2,
    eos_token_id=7,
)
MOE = dict(head_dim=16, moe_intermediate_size=20)
FAMILIES = {
    "llama": (transformers.LlamaConfig, dict(tie_word_embeddings=True)),
    "llama-biased": (transformers.LlamaConfig, dict(attention_bias=True, mlp_bias=True, head_dim=16)),
    "llama3-rope": (
        transformers.LlamaConfig,
        dict(
            rope_parameters=dict(
                rope_type="llama3",
                rope_theta=10000.0,
                factor=4.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=64,
            )
        ),
    ),
    "linear-rope": (
        transformers.LlamaConfig,
        dict(rope_parameters=dict(rope_type="linear", rope_theta=10000.0, factor=2.0)),
    ),
    "mistral": (transformers.MistralConfig, dict(sliding_window=None, head_dim=8)),
    "mistral-window": (transformers.MistralConfig, dict(sliding_window=24, head_dim=8)),
    "qwen2": (transformers.Qwen2Config, dict(tie_word_embeddings=True)),
    "qwen2.5-untied": (transformers.Qwen2Config, dict(tie_word_embeddings=False, rope_theta=1e6)),
    # The last layer of three has a window.
    "qwen2-window": (
        transformers.Qwen2Config,
        dict(use_sliding_window=True, sliding_window=13, max_window_layers=2),
    ),
    "qwen3": (transformers.Qwen3Config, dict(head_dim=16)),
    "qwen3-biased": (transformers.Qwen3Config, dict(head_dim=16, attention_bias=True, tie_word_embeddings=True)),
    "yarn-rope": (
        transformers.Qwen3Config,
        dict(
            head_dim=16,
            max_position_embeddings=64,
            rope_parameters=dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=64),
        ),
    ),
    "qwen3_moe": (
        transformers.Qwen3MoeConfig,
        dict(MOE, num_experts=8, num_experts_per_tok=3, norm_topk_prob=True),
    ),
    # Dense, sparse, dense: every second layer, the fourth excepted. A window in all, as transformers has it.
    "qwen3_moe-mixed": (
        transformers.Qwen3MoeConfig,
        dict(
            MOE,
            num_hidden_layers=4,
            num_experts=5,
            num_experts_per_tok=2,
            norm_topk_prob=False,
            decoder_sparse_step=2,
            mlp_only_layers=[3],
            use_sliding_window=True,
            sliding_window=40,
        ),
    ),
}


def save_tiny_model(
    family: str,
    folder: Path,
    *,
    max_shard_size: str = "5GB",
    dtype=torch.float32,
    save_original_format: bool = True,  # experts one by one, as published; False: in one tensor
    **overrides,
):
    """A random checkpoint on disk, and the transformers model it came from. Norms and biases are random too."""
    config_class, extra = FAMILIES[family]
    torch.manual_seed(11)
    config = config_class(**(TINY | extra | overrides))
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(folder, max_shard_size=max_shard_size, save_original_format=save_original_format)
    return model


def edit_config(folder: Path, **changes) -> None:
    """Change keys of config.json; `...` removes one."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))


def make_runner(folder: Path, **args) -> ModelRunner:
    server_args = ServerArgs(
        **(
            dict(model_path=str(folder), device="cpu", max_total_tokens=4096, max_running_requests=16, num_threads=1)
            | args
        )
    ).resolve()
    config = ModelConfig.from_pretrained(
        str(folder), context_length=server_args.context_length, dtype=server_args.dtype
    )
    return ModelRunner(server_args, config, trace=Recorder("test"))


@dataclass
class Row:
    row: int
    ids: list[int]  # prompt and output known to the host
    prompt_len: int
    params: SamplingParams
    slots: list[int] = field(default_factory=list)  # of positions 0 .. len(slots)-1
    computed: int = 0  # positions whose KV is written
    stop_ids: frozenset[int] = frozenset()

    @property
    def output(self) -> list[int]:
        return self.ids[self.prompt_len :]


GREEDY = SamplingParams(top_k=1)


class LittleScheduler:
    def __init__(self, runner: ModelRunner, seed: int = 0):
        self.runner = runner
        size = runner.max_total_num_tokens
        self.free = list(np.random.default_rng(seed).permutation(np.arange(1, size + 1)))
        self.rows = list(range(runner.max_running_requests, 0, -1))
        self.writes: dict[int, int] = {}
        self.step = 0

    def add(self, prompt: list[int], params: SamplingParams = GREEDY, share: tuple[Row, int] | None = None) -> Row:
        """A request; `share=(other, n)`: its first n positions reuse the KV of another, as the radix cache does."""
        row = Row(self.rows.pop(), list(prompt), len(prompt), params)
        if share is not None:
            other, n = share
            assert other.ids[:n] == row.ids[:n] and n <= other.computed
            self._assign(row, other.slots[:n])
            row.computed = n
        return row

    def _assign(self, row: Row, slots: list[int]) -> None:
        for slot in slots:
            self.writes[row.row * self.runner.table_width + len(row.slots)] = int(slot)
            row.slots.append(int(slot))

    def _allocate(self, row: Row, length: int) -> None:
        self._assign(row, [self.free.pop() for _ in range(length - len(row.slots))])

    def _update(self) -> TableUpdate | None:
        if not self.writes:
            return None
        update = TableUpdate(
            torch.tensor(list(self.writes), dtype=torch.int64),
            torch.tensor(list(self.writes.values()), dtype=torch.int32),
        )
        self.writes = {}
        return update

    def batch(
        self,
        mode: ForwardMode,
        rows: list[Row],
        ends: list[int],
        *,
        decoding: int = 0,
        logprob: LogprobSpec | None = None,
    ) -> ForwardBatch:
        """`ends[i]`: the sequence length of rows[i] once the forward has run. The last `decoding` rows are decode rows
        of a mixed batch; for them, as in DECODE, the input token comes from the relay."""
        ids: list[int] = []
        positions: list[int] = []
        locs: list[int] = []
        lens: list[int] = []
        prefixes: list[int] = []
        lanes: list[int] = []
        for i, (row, end) in enumerate(zip(rows, ends, strict=True)):
            self._allocate(row, end)
            from_relay = mode is ForwardMode.DECODE or i >= len(rows) - decoding
            if from_relay:
                assert end == row.computed + 1
                lanes.append(len(ids))
                ids.append(0)
            else:
                ids += row.ids[row.computed : end]
            positions += range(row.computed, end)
            locs += row.slots[row.computed : end]
            lens.append(end - row.computed)
            prefixes.append(row.computed)
        for row, end in zip(rows, ends, strict=True):
            row.computed = end
        statics = SamplingBatchInfo.for_requests(
            [row.params for row in rows],
            [row.row for row in rows],
            [row.prompt_len for row in rows],
            [row.stop_ids for row in rows],
            self.runner.vocab_size,
            "cpu",
        )
        if mode is ForwardMode.DECODE:
            produced = None
        else:
            produced = [None if i >= len(rows) - decoding else list(row.output) for i, row in enumerate(rows)]
        self.step += 1
        mixed = mode is ForwardMode.MIXED
        return ForwardBatch(
            forward_mode=mode,
            step=self.step,
            input_ids=torch.tensor(ids),
            positions=torch.tensor(positions),
            out_cache_loc=torch.tensor(locs),
            req_pool_indices=torch.tensor([row.row for row in rows]),
            seq_lens=torch.tensor(ends),
            seq_lens_cpu=list(ends),
            table_update=self._update(),
            relay_lanes=torch.tensor(lanes) if mixed else None,
            relay_rows=torch.tensor([row.row for row in rows[len(rows) - decoding :]]) if mixed else None,
            extend_seq_lens=[] if mode is ForwardMode.DECODE else lens,
            extend_prefix_lens=[] if mode is ForwardMode.DECODE else prefixes,
            sampling_info=statics.at_step(ends, produced),
            logprob=logprob,
        )

    def launch(self, batch: ForwardBatch) -> StepResult:
        logits = self.runner.forward(batch)
        return self.runner.to_host(self.runner.sample(logits, batch), batch)

    def prefill(self, rows: list[Row], chunk: int | None = None, logprob: LogprobSpec | None = None) -> StepResult:
        """All rows together; with `chunk`, in pieces of so many tokens each. Appends the token of the last piece."""
        targets = [len(row.ids) for row in rows]
        while True:
            left = [(row, target) for row, target in zip(rows, targets, strict=True) if row.computed < target]
            ends = [target if chunk is None else min(row.computed + chunk, target) for row, target in left]
            result = self.launch(self.batch(ForwardMode.EXTEND, [row for row, _ in left], ends, logprob=logprob))
            for (row, target), token in zip(left, result.next_token_ids, strict=True):
                if row.computed == target:
                    row.ids += token
            if all(row.computed == target for row, target in zip(rows, targets, strict=True)):
                return result

    def decode(self, rows: list[Row], steps: int = 1, logprob: LogprobSpec | None = None) -> StepResult:
        for _ in range(steps):
            result = self.launch(
                self.batch(ForwardMode.DECODE, rows, [row.computed + 1 for row in rows], logprob=logprob)
            )
            for row, token in zip(rows, result.next_token_ids, strict=True):
                row.ids += token
        return result


def reference_logprobs(model, ids: list[int]) -> torch.Tensor:
    """(len(ids), vocab): row i is the log distribution of the token at i + 1."""
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].float().log_softmax(-1)


def assert_greedy(model, row: Row, steps: int) -> None:
    """The row's first `steps` outputs are what transformers decodes greedily from its prompt.

    One forward over prompt and output checks them all: token i is right if it is the arg max given those before it.
    A token may differ only where the two best are within 1e-4 of each other.
    """
    assert len(row.output) >= steps
    scores = reference_logprobs(model, row.ids)[row.prompt_len - 1 : -1]
    for i in range(steps):
        gap = scores[i].max() - scores[i, row.output[i]]
        assert gap < 1e-4, f"output {i}: {row.output[i]} instead of {int(scores[i].argmax())}, {gap:.4f} behind"
