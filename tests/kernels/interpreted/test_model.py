"""A whole model on the Triton kernels, in the interpreter, against torch_native: prefill, a mixed step with the next
chunk, and decode steps, greedy and sampled."""

from __future__ import annotations

import pytest
import torch

from tests.model_executor.harness import LittleScheduler, make_runner, save_tiny_model
from tinysrt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from tinysrt.sampling_params import SamplingParams

SAMPLED = SamplingParams(temperature=0.8, top_k=30, top_p=0.9, sampling_seed=4)


def same_step(runners, batches: list[ForwardBatch]) -> list[int]:
    """The same batch on both runners: equal logits, equal tokens."""
    logits = [runner.forward(batch) for runner, batch in zip(runners, batches, strict=True)]
    found, expected = (output.next_token_logits for output in logits)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    tokens = [
        runner.to_host(runner.sample(output, batch), batch).next_token_ids
        for runner, output, batch in zip(runners, logits, batches, strict=True)
    ]
    assert tokens[0] == tokens[1]
    return [token for (token,) in tokens[0]]


@pytest.mark.parametrize(("family", "greedy"), [("qwen3", True), ("mistral-window", False)])
def test_the_same_tokens_as_torch_native(family, greedy, tmp_path, guard):
    window = family == "mistral-window"
    save_tiny_model(
        "mistral" if window else family, tmp_path, num_hidden_layers=2, sliding_window=9 if window else None
    )
    runners = [make_runner(tmp_path, attention_backend=name) for name in ("triton", "torch_native")]
    schedulers = [LittleScheduler(runner) for runner in runners]
    params = SamplingParams(top_k=1) if greedy else SAMPLED
    prompts = [list(range(10, 23)), [5, 6, 7]]
    rows = [[s.add(prompt, params) for prompt in prompts] for s in schedulers]

    def step(mode: ForwardMode, order: list[int], ends: list[int], decoding: int = 0) -> None:
        batches = [
            s.batch(mode, [mine[i] for i in order], ends, decoding=decoding)
            for s, mine in zip(schedulers, rows, strict=True)
        ]
        tokens = same_step(runners, batches)
        for mine in rows:
            for i, end, token in zip(order, ends, tokens, strict=True):
                if end == len(mine[i].ids):
                    mine[i].ids.append(token)

    pools = [t[:1] for buffers in (runners[0].kv_pool.k_buffer, runners[0].kv_pool.v_buffer) for t in buffers]
    with guard.sharing(*pools):
        step(ForwardMode.EXTEND, [1], [3])
        step(ForwardMode.EXTEND, [0], [8])  # a chunk
        step(ForwardMode.MIXED, [0, 1], [13, 4], decoding=1)  # the rest of it, and a decode row
        step(ForwardMode.DECODE, [0, 1], [14, 5])
