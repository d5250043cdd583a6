"""What the scheduler process builds before it says "ready"."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.model_executor.harness import save_tiny_model
from tests.text.tiny_tokenizers import byte_level
from tinysrt.bench.fake_model import ListInbox, ListOutbox
from tinysrt.managers.scheduler_process import build_scheduler
from tinysrt.messages import FinishLength, FinishStop, TokenizedGenerateReqInput
from tinysrt.observe.trace import Recorder
from tinysrt.sampling_params import SamplingParams
from tinysrt.server_args import ServerArgs


def test_fc08_every_end_token_that_any_file_of_the_model_names_ends_a_run(tmp_path: Path) -> None:
    tokenizer = byte_level().hf
    save_tiny_model("llama", tmp_path, vocab_size=len(tokenizer), eos_token_id=[11, 12])
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [12, 13]}))
    tokenizer.save_pretrained(tmp_path)
    args = ServerArgs(model_path=str(tmp_path), device="cpu", max_total_tokens=512, num_threads=1).resolve()
    inbox, outbox = ListInbox([]), ListOutbox()
    fakes: dict[str, Any] = {"inbox": inbox, "outbox": outbox}
    scheduler, info = build_scheduler(args, trace=Recorder("scheduler"), **fakes)
    named = [tokenizer.eos_token_id, 11, 12, 13]
    assert info["eos_token_ids"] == named
    for token in [*named, 14]:
        params = SamplingParams(top_k=1, max_new_tokens=4, logit_bias={token: 100.0})
        inbox.messages.append(
            TokenizedGenerateReqInput(rid=str(token), reply_to="", input_ids=[40], sampling_params=params)
        )
    for _ in range(20):
        scheduler.step_overlap(inbox.receive(block=False))
    scheduler.worker.close()
    finishes = {rid: outs[-1].meta.finish for rid, outs in outbox.outs.items()}
    assert finishes == {str(token): FinishStop(matched=token) for token in named} | {"14": FinishLength(length=4)}
