"""Encoding: special tokens exactly once, control tokens as text when asked; loading: one clear line."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.text import tiny_tokenizers
from tinysrt.errors import RequestError, StartupError
from tinysrt.text.tokenizer import Tokenizer


def test_the_demo_tokenizer_is_smollm2s(demo: Tokenizer) -> None:
    assert demo.vocab_size == 49_152
    assert [demo.token_text(index) for index in range(3)] == ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    assert demo.stop_ids == {2}
    assert demo.all_special_ids == list(range(17))
    assert [demo.token_text(index) for index in demo.encode("in 1234")] == ["in", " ", "1", "2", "3", "4"]


def test_fc18_a_text_that_starts_with_bos_does_not_get_a_second(pieces: Tokenizer) -> None:
    assert pieces.encode("dog")[0] == 1
    assert pieces.encode("<s>dog").count(1) == 1
    assert pieces.encode("<s><s>dog").count(1) == 2  # asked for
    assert 1 not in pieces.encode("dog", add_special_tokens=False)


def test_a_tokenizer_that_adds_no_bos_leaves_repeated_tokens_alone(demo: Tokenizer) -> None:
    assert demo.encode("<|im_start|><|im_start|>") == [1, 1]
    assert demo.encode("") == []


def test_control_tokens_can_be_read_as_text(demo: Tokenizer) -> None:
    assert demo.encode("a<|im_end|>") == [*demo.encode("a"), 2]
    as_text = demo.encode("a<|im_end|>", parse_special=False)
    assert 2 not in as_text
    assert demo.decode(as_text) == "a<|im_end|>"
    assert demo.encode("a<|im_end|>")[-1] == 2  # the other way of reading is not switched off


@pytest.mark.parametrize(
    "text", ["", " " * 1000, "a" * 1000, "é🎉" * 200, "<|im_end|>" * 50, "The quick brown fox. " * 50]
)
def test_the_fewest_tokens_are_never_too_many(demo: Tokenizer, text: str) -> None:
    assert demo.fewest_tokens(text) <= len(demo.encode(text))
    assert demo.fewest_tokens("x" * 10**6) > 8192


def test_a_beginning_gives_the_tokens_that_the_whole_text_begins_with(demo: Tokenizer) -> None:
    text = "The quick brown fox: naïve 🎉 12345. " * 2000
    whole = demo.encode(text)
    for tokens in (1, 7, 100):
        beginning = demo.beginning(text, tokens)
        assert len(beginning) < len(text) and demo.encode(beginning)[:tokens] == whole[:tokens]
    assert demo.beginning("short", 3) == "short"


def test_half_a_surrogate_pair_is_the_clients_error(demo: Tokenizer) -> None:
    with pytest.raises(RequestError, match="Unicode"):
        demo.encode("\ud83d")


def test_truncation_and_padding_left_in_a_tokenizer_file_do_nothing(tmp_path: Path) -> None:
    saved = tiny_tokenizers.byte_level()
    assert saved.backend is not None
    saved.backend.enable_truncation(4)
    saved.backend.enable_padding(length=8)
    saved.hf.save_pretrained(tmp_path)
    loaded = Tokenizer.load(str(tmp_path))
    assert loaded.decode(loaded.encode("The quick brown fox")) == "The quick brown fox"


def test_llama3s_end_of_message_is_a_stop(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizers.byte_level()
    tokenizer.hf.add_special_tokens({"additional_special_tokens": ["<|eom_id|>"]})
    again = Tokenizer(tokenizer.hf)
    assert again.extra_stop_ids == {again.vocab_size - 1}
    assert again.stop_ids == {2, again.vocab_size - 1}


@pytest.mark.parametrize("content", [None, "{", "{}"])
def test_no_usable_tokenizer_is_one_line(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
        (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    with pytest.raises(StartupError, match="No usable tokenizer") as error:
        Tokenizer.load(str(tmp_path))
    assert "\n" not in str(error.value)


def test_decode_batch_is_decode_of_each(demo: Tokenizer) -> None:
    batch = [demo.encode("one"), [], demo.encode("two é")]
    assert demo.decode_batch(batch) == ["one", "", "two é"]
