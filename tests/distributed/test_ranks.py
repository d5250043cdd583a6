"""Sharded models and schedulers in step: ranks in threads, real gloo between them, Hugging Face as the judge."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.distributed.harness import Ranks, in_ranks, request
from tests.e2e.server import free_port
from tests.equality.reference import TIE, Reference
from tests.model_executor.harness import save_tiny_model
from tests.text.tiny_tokenizers import bytes_only
from tinysrt.distributed import rendezvous
from tinysrt.distributed.groups import FRAME, Tag
from tinysrt.distributed.parallel_state import SINGLE, ParallelState
from tinysrt.distributed.ranks import Seat
from tinysrt.errors import StartupError
from tinysrt.kernels.kernel_set import REFERENCE
from tinysrt.messages import (
    AbortReq,
    ContinueGenerationReqInput,
    FlushCacheReqInput,
    FlushCacheReqOutput,
    PauseGenerationReqInput,
)
from tinysrt.model_executor.layers.embedding import Embedding
from tinysrt.model_executor.layers.lm_head import LMHead
from tinysrt.model_executor.model_config import ModelConfig
from tinysrt.model_executor.models.llama import MLP
from tinysrt.model_executor.models.qwen3 import Qwen3ForCausalLM
from tinysrt.model_executor.weights import load_model
from tinysrt.sampling_params import SamplingParams
from tinysrt.server_args import ServerArgs

VOCAB = 301  # padded to 320, so the last rank's rows end in padding


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Path, Reference]]:
    made: dict[str, tuple[Path, Reference]] = {}

    def get(family: str, **config: Any) -> tuple[Path, Reference]:
        key = family + json.dumps(config, sort_keys=True)
        if key not in made:
            folder = tmp_path_factory.mktemp(family)
            shape = dict(num_attention_heads=8, num_key_value_heads=2, vocab_size=VOCAB) | config
            made[key] = (folder, Reference(save_tiny_model(family, folder, **shape)))
        return made[key]

    return get


def prompts(seed: int, lengths: tuple[int, ...] = (5, 17, 40, 3, 60, 9)) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(8, VOCAB, length).tolist() for length in lengths]


def assert_greedy(reference: Reference, asked: list[list[int]], answers: list[list[int]], length: int = 10) -> None:
    """Token for token; a difference may only begin where the reference's two best are as good as equal."""
    for prompt, answer in zip(asked, answers, strict=True):
        wanted = reference.greedy(prompt, length)
        assert len(answer) == length
        for got, token, margin in zip(answer, wanted.ids, wanted.margins, strict=True):
            if got != token:
                assert margin < TIE
                break


# ---- what ranks say to each other ----------------------------------------------------------------------


@pytest.mark.parametrize("tp", [2, 3])
def test_a_sum_is_the_same_bits_on_every_rank(tmp_path: Path, tp: int) -> None:
    parts = torch.randn(tp, 7, 33, generator=torch.Generator().manual_seed(1)).bfloat16()
    sums = in_ranks(tp, tmp_path, lambda parallel: parallel.all_reduce(parts[parallel.rank].clone()))
    assert all(torch.equal(sums[0], other) for other in sums)
    assert torch.equal(sums[0], parts.float().sum(0).bfloat16())


def test_gathered_parts_stand_side_by_side(tmp_path: Path) -> None:
    parts = torch.randn(3, 7, 5, generator=torch.Generator().manual_seed(1))
    for whole in in_ranks(3, tmp_path, lambda parallel: parallel.all_gather(parts[parallel.rank])):
        assert torch.equal(whole, torch.cat(list(parts), dim=-1))


@pytest.mark.parametrize("where", ["file", "tcp"])
def test_ranks_that_never_come_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    monkeypatch.setattr(rendezvous, "JOIN_TIMEOUT", timedelta(seconds=0.5))
    port = free_port() if where == "tcp" else None
    args = ServerArgs(tensor_parallel_size=3, device="cpu", nccl_port=port)
    with pytest.raises(StartupError, match=re.escape("after 0.5 s these of 3 ranks are still missing: [1, 2]")):
        rendezvous.join(args, Seat(), str(tmp_path))


@pytest.mark.parametrize("length", [0, 1, FRAME - 9, FRAME - 8, FRAME - 7, 3 * FRAME])
def test_messages_of_every_length_arrive_in_order(tmp_path: Path, length: int) -> None:
    def talk(parallel: ParallelState) -> list[bytes]:
        assert parallel.messages is not None
        if parallel.rank == 0:
            for i in range(5):
                parallel.messages.tell_all(bytes([i]) * length, Tag.STEP)
            parallel.messages.finish()
            return []
        return [parallel.messages.hear(0, Tag.STEP) for _ in range(5)]

    assert in_ranks(3, tmp_path, talk)[1:] == [[bytes([i]) * length for i in range(5)]] * 2


# ---- layers ----------------------------------------------------------------------------------------------


def test_a_sharded_embedding_is_exact(tmp_path: Path) -> None:
    weight = torch.randn(VOCAB, 16, generator=torch.Generator().manual_seed(2))
    ids = torch.tensor([0, 159, 160, 161, 300, 7, 160])

    def look_up(parallel: ParallelState) -> Tensor:
        embedding = Embedding(VOCAB, 16, parallel)
        assert embedding.weight.shape == (160, 16)
        rows = weight[parallel.rank * 160 : (parallel.rank + 1) * 160]
        embedding.weight.zero_()
        embedding.weight[: len(rows)] = rows
        return embedding(ids)

    for x in in_ranks(2, tmp_path, look_up):
        assert torch.equal(x, weight[ids])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gathered_logits_are_those_of_the_whole_head(tmp_path: Path, dtype: torch.dtype) -> None:
    weight = torch.randn(VOCAB, 16, generator=torch.Generator().manual_seed(3)).to(dtype)
    hidden = torch.randn(5, 16, generator=torch.Generator().manual_seed(4)).to(dtype)
    whole = LMHead(16, VOCAB, SINGLE).to(dtype)
    whole.weight.copy_(weight)

    def logits(parallel: ParallelState) -> Tensor:
        head = LMHead(16, VOCAB, parallel).to(dtype)
        rows = weight[parallel.rank * 160 : (parallel.rank + 1) * 160]
        head.weight.fill_(float("nan"))  # what lies in the padding must not be seen
        head.weight[: len(rows)] = rows
        head.weight[len(rows) :] = 0.0
        return head(hidden)

    first, second = in_ranks(2, tmp_path, logits)
    assert first.shape == (5, VOCAB) and first.is_contiguous() and torch.equal(first, second)
    torch.testing.assert_close(first, whole(hidden), rtol=1e-2 if dtype is torch.bfloat16 else 1e-5, atol=1e-4)


def test_a_sharded_mlp_adds_its_bias_once(tmp_path: Path, checkpoint: Any) -> None:
    folder, _ = checkpoint("llama-biased")
    config = ModelConfig.from_pretrained(str(folder), dtype="float32")
    x = torch.randn(4, config.hidden_size, generator=torch.Generator().manual_seed(5))

    def apply(parallel: ParallelState) -> Tensor:
        with torch.inference_mode():
            model = load_model(config, torch.float32, torch.device("cpu"), "auto", kernels=REFERENCE, parallel=parallel)
            mlp = model.model.layers["1"].mlp
            assert isinstance(mlp, MLP)
            return mlp(x)

    whole = apply(SINGLE)
    for part in in_ranks(2, tmp_path, apply):
        torch.testing.assert_close(part, whole, rtol=1e-5, atol=1e-5)


# ---- loading ---------------------------------------------------------------------------------------------


def test_ranks_together_hold_the_checkpoint_and_no_more(tmp_path: Path, checkpoint: Any) -> None:
    """Heads, hidden units and rows of the vocabulary are cut; norms are everyone's; a stage has its layers only."""
    folder, _ = checkpoint("qwen3", head_dim=16)
    config = ModelConfig.from_pretrained(str(folder), dtype="float32")

    def names_and_sizes(parallel: ParallelState) -> dict[str, int]:
        with torch.device("meta"):
            model = Qwen3ForCausalLM(config, kernels=REFERENCE, parallel=parallel)
        return {name: parameter.numel() for name, parameter in model.named_parameters()}

    whole = names_and_sizes(SINGLE)
    ranks = in_ranks(2, tmp_path, names_and_sizes, pp=2)
    assert set().union(*ranks) == set(whole)
    for stage in (ranks[:2], ranks[2:]):
        assert stage[0].keys() == stage[1].keys()
        for name in stage[0]:
            parts = [rank[name] for rank in stage]
            if "norm" in name:
                assert parts == [whole[name]] * 2
            elif "embed" in name or "lm_head" in name:
                assert parts == [160 * config.hidden_size] * 2
            else:
                assert parts == [whole[name] // 2] * 2
    assert not any(".2." in name for name in ranks[0]) and not any(".0." in name for name in ranks[2])


@pytest.mark.parametrize(
    ("tp", "pp", "message"),
    [
        (3, 1, "--tp 3 does not divide the attention heads, 8"),
        (16, 1, "--tp 16 does not divide the attention heads, 8"),
        (1, 4, "--pp 4 is more than the model has layers, 3"),
    ],
)
def test_sizes_that_do_not_fit_the_model_are_refused_in_one_line(
    checkpoint: Any, tp: int, pp: int, message: str
) -> None:
    folder, _ = checkpoint("llama")
    config = ModelConfig.from_pretrained(str(folder), dtype="float32")
    parallel = ParallelState(tp_size=tp, pp_size=pp)
    with pytest.raises(StartupError, match=message):
        load_model(config, torch.float32, torch.device("cpu"), "auto", kernels=REFERENCE, parallel=parallel)


def test_key_value_heads_that_do_not_line_up_with_the_ranks_are_refused() -> None:
    with pytest.raises(StartupError, match="no multiple of the key/value heads, 3"):
        ParallelState(tp_size=4).share_of_heads(3)
    with pytest.raises(StartupError, match="--tp 4 does not divide the key/value heads, 6"):
        ParallelState(tp_size=4).share_of_heads(6)


# ---- whole schedulers --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "tp", "pp", "config"),
    [
        ("llama", 2, 1, {}),  # tied
        ("qwen3", 4, 1, {"head_dim": 16}),  # two KV heads for four ranks; not tied
        ("qwen2", 2, 1, {"num_key_value_heads": 1}),
        ("llama-biased", 1, 2, {}),
        ("llama", 1, 3, {}),  # tied: the last stage has the embedding too
        ("qwen3", 2, 2, {"head_dim": 16, "tie_word_embeddings": True}),
    ],
)
def test_ranks_answer_like_hugging_face(
    tmp_path: Path, checkpoint: Any, family: str, tp: int, pp: int, config: dict[str, Any]
) -> None:
    folder, reference = checkpoint(family, **config)
    asked = prompts(6)
    with Ranks(folder, tmp_path, tp=tp, pp=pp, chunked_prefill_size=32, debug_invariants=True) as ranks:
        assert_greedy(reference, asked, ranks.generate(asked))


def test_a_mixture_of_experts_is_sharded_too(tmp_path: Path, checkpoint: Any) -> None:
    folder, reference = checkpoint("qwen3_moe")
    asked = prompts(7, (5, 17, 30))
    with Ranks(folder, tmp_path, tp=2) as ranks:
        assert_greedy(reference, asked, ranks.generate(asked))


@pytest.mark.parametrize("loop", ["overlap", "normal", "pipeline"])
def test_dice_are_thrown_alike(tmp_path: Path, checkpoint: Any, loop: str) -> None:
    """Trap 69: policy random, sampling at temperature 1, a pool that is too small, aborts; the states stay equal."""
    folder, _ = checkpoint("llama")
    flags: dict[str, Any] = {"tp": 2} if loop != "pipeline" else {"pp": 2}
    with Ranks(
        folder, tmp_path, **flags, schedule_policy="random", disable_overlap_schedule=loop != "overlap",
        max_total_tokens=160, chunked_prefill_size=16, schedule_conservativeness=0.05,
    ) as ranks:  # fmt: skip
        params = SamplingParams(temperature=1.0, top_p=0.9, frequency_penalty=0.5, max_new_tokens=25, ignore_eos=True)
        for turn, prompt in enumerate(prompts(8, (5, 17, 30, 3, 40, 9, 12, 4))):
            seeded = SamplingParams(
                **{f: getattr(params, f) for f in params.__struct_fields__} | {"sampling_seed": turn}
            )
            ranks.step([request(f"r{turn}", prompt, seeded)])
        ranks.step([AbortReq(rid="r1"), AbortReq(rid="r7")])
        ranks.step([PauseGenerationReqInput(reply_to="", mode="retract")])
        ranks.step([FlushCacheReqInput(reply_to="")])
        ranks.step([ContinueGenerationReqInput(reply_to="")])
        ranks.run()
        outbox = ranks.ranks[0].outbox
        assert FlushCacheReqOutput(success=True, message="Cache flushed.") in outbox.messages
        assert all(len(outbox.output_ids(f"r{i}")) == 25 for i in range(8) if i not in (1, 7))


@pytest.mark.parametrize("flags", [{"tp": 2}, {"pp": 2}])
def test_a_stop_regex_is_judged_by_one_rank(tmp_path: Path, checkpoint: Any, flags: dict[str, int]) -> None:
    """Its time limit is a clock, and clocks differ: here the second rank's would always have run out."""
    folder, _ = checkpoint("llama")
    with Ranks(folder, tmp_path, tokenizer=bytes_only(), **flags) as ranks:  # type: ignore[arg-type]
        params = SamplingParams(top_k=1, ignore_eos=True, max_new_tokens=20, stop_regex=["[a-z]{50}"])
        ranks.step([request("r", [1, 2, 3], params)])
        matcher = ranks.ranks[1].scheduler.live["r"].stop_matcher
        assert matcher is not None
        matcher._budget = -1e9
        ranks.run()
        assert len(ranks.ranks[0].outbox.output_ids("r")) == 20


def test_scores_travel_through_a_pipeline(tmp_path: Path, checkpoint: Any) -> None:
    folder, reference = checkpoint("llama")
    prompt = prompts(9, (12,))[0]
    with Ranks(folder, tmp_path, pp=2) as ranks:
        message = request("r", prompt, SamplingParams(top_k=1, ignore_eos=True, max_new_tokens=3))
        message.return_logprob, message.logprob_start_len, message.top_logprobs_num = True, 0, 2
        ranks.step([message])
        ranks.run()
        outs = ranks.ranks[0].outbox.outs["r"]
    scores = [score for out in outs if out.meta.logprobs for score in out.meta.logprobs.output]
    ids = [*prompt, *(token for out in outs for token in out.new_ids)]
    wanted = reference.logprobs(ids)
    assert scores == pytest.approx([float(wanted[i - 1, ids[i]]) for i in range(12, 15)], abs=1e-3)
    (given,) = [out.meta.logprobs.input for out in outs if out.meta.logprobs and out.meta.logprobs.input]
    assert [s for s, _ in given[1:]] == pytest.approx([float(wanted[i - 1, ids[i]]) for i in range(1, 12)], abs=1e-3)
