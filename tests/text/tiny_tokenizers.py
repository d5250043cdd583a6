"""Small tokenizers of each kind, made on the spot: byte-level, pieces with byte fallback, and one that is neither."""

from __future__ import annotations

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from tinysrt.text.tokenizer import Tokenizer

CORPUS = [
    "The quick brown fox jumps over the lazy dog. It's 12 o'clock, isn't it? (Yes!)",
    "Příliš žluťoučký kůň úpěl ďábelské ódy. Où est-ce que c'est? Ça va, señor?",
    "你好，世界。山川湖海 こんにちは世界 안녕하세요 세계",
    "Привет, мир! Γειά σου Κόσμε שלום עולם مرحبا بالعالم नमस्ते दुनिया",
    "😀 👍 👍🏽 👩‍👩‍👧 🏳️‍🌈 é ñ ü",
] * 3


def byte_level() -> Tokenizer:
    """As GPT-2, Llama 3, Qwen and SmolLM2: 256 bytes, merges, three control tokens."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    return _wrap(backend, eos_token="<|im_end|>")


def bytes_only() -> Tokenizer:
    """Each id below 256 is that byte; 256 is a special end token. The tokenizer of the reference tables."""
    from tinysrt.text.token_bytes import byte_level_alphabet

    vocab = {char: byte for byte, char in enumerate(byte_level_alphabet())}
    backend = Backend(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<end>"])
    return _wrap(backend, eos_token="<end>")


def pieces(*, metaspace_decoder: bool = False) -> Tokenizer:
    """As Llama 2 and Mistral: "▁" for a space, "<0xE4>" for a byte that no piece covers; adds a <s>."""
    trained = Backend(models.BPE())
    trained.normalizer = normalizers.Replace(" ", "▁")
    # ASCII only: every other script goes through the bytes.
    words = ["".join(char for char in line if char.isascii()) for line in CORPUS]
    trained.train_from_iterator(words, trainers.BpeTrainer(vocab_size=160, show_progress=False))
    learned = sorted(trained.get_vocab().items(), key=lambda item: item[1])
    names = ["<unk>", "<s>", "</s>", *[f"<0x{byte:02X}>" for byte in range(256)]]
    names += [name for name, _ in learned if name not in names]
    merges = [tuple(pair) for pair in _merges(trained)]
    vocab = {name: index for index, name in enumerate(names)}
    backend = Backend(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    if metaspace_decoder:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
        backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first")])
    else:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        backend.decoder = decoders.Sequence(steps)
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in ("<unk>", "<s>", "</s>")])
    from tokenizers.processors import TemplateProcessing

    backend.post_processor = TemplateProcessing(single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)])
    return _wrap(backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def words() -> Tokenizer:
    """A WordPiece tokenizer: "##" joins, so decoding is not plain joining of bytes."""
    names = ["[UNK]", "[SEP]", "hello", "world", "##s", "!", "play", "##ing", "good", "morning"]
    backend = Backend(models.WordPiece(vocab={name: i for i, name in enumerate(names)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece(cleanup=False)
    backend.add_special_tokens(["[UNK]", "[SEP]"])
    return _wrap(backend, eos_token="[SEP]", unk_token="[UNK]")


def _wrap(backend: Backend, **special: str) -> Tokenizer:
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False, **special))


def _merges(backend: Backend) -> list[list[str]]:
    import json

    merges = json.loads(backend.to_str())["model"]["merges"]
    return [merge.split(" ") if isinstance(merge, str) else merge for merge in merges]
