"""Tokenizers of a few hundred tokens, trained on two sentences, of the kinds that llama.cpp has."""

from __future__ import annotations

import functools
import json
import struct

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from zeropoint.codecs.llama_cpp.pre_tokenizers import PRE_TOKENIZERS

TEXT = (
    "The quick brown fox jumps over the lazy dog, and 12 other foxes watch it; then all of them sleep until "
    "the morning. Nobody knows why they're here, but it doesn't matter: x = 3.14 * (a + b) / 2!\n"
)


def byte_level() -> tokenizers.Tokenizer:
    """Return a tokenizer as SmolLM2 has it."""
    found = tokenizers.Tokenizer(models.BPE())
    found.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    found.decoder = decoders.ByteLevel()
    special = ["<|begin|>", "<|end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    found.train_from_iterator([TEXT] * 4, trainer)
    return found


def cut_like(name: str) -> tokenizers.Tokenizer:
    """Return a byte-level tokenizer that cuts texts as another does; name: as llama.cpp has it."""
    found = json.loads(byte_level().to_str())
    found["pre_tokenizer"] = PRE_TOKENIZERS[name]
    return tokenizers.Tokenizer.from_str(json.dumps(found))


def word_pieces(*, lowercase: bool = True) -> tokenizers.Tokenizer:
    """Return a tokenizer as BERT has it, with the case of letters or without."""
    found = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    found.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    found.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    found.decoder = decoders.WordPiece()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trainer = trainers.WordPieceTrainer(vocab_size=200, special_tokens=special, show_progress=False)
    found.train_from_iterator([TEXT] * 4, trainer)
    ends = [("[CLS]", 2), ("[SEP]", 3)]
    found.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    return found


def sentencepiece() -> tokenizers.Tokenizer:
    """Return a tokenizer as Llama 2 has it: BPE with a mark for spaces, and bytes for what has no token."""
    pieces = tokenizers.Tokenizer(models.BPE())
    pieces.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    trainer = trainers.BpeTrainer(vocab_size=120, show_progress=False)
    pieces.train_from_iterator([TEXT.strip()] * 4, trainer)
    learned = json.loads(pieces.to_str())["model"]
    first = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocab = {token: number for number, token in enumerate([*first, *learned["vocab"]])}
    merges = [tuple(merge) for merge in learned["merges"]]
    found = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    found.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    found.decoder = decoders.Sequence(steps)
    found.add_special_tokens(["<unk>", "<s>", "</s>"])
    found.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return found


def charsmap(replaced: dict[str, str]) -> bytes:
    """Return a compiled table that replaces characters of one byte, as sentencepiece has it.

    Units of 32 bits: where the children of one lie (from bit 10 on), whether a key ends there (bit 8) and the
    byte that leads to it (bits 0 to 7); or, with bit 31, where the replacement lies.
    """
    units, texts = [0] * 1024, b""
    units[0] = 256 << 10
    for number, (key, text) in enumerate(replaced.items()):
        child, value = 256 ^ ord(key), 512 + number
        units[child] = (child ^ value) << 10 | 1 << 8 | ord(key)
        units[value] = 1 << 31 | len(texts)
        texts += text.encode() + b"\0"
    return struct.pack(f"<I{len(units)}I", 4 * len(units), *units) + texts


SPACES = {"\t": " ", "\n": " ", "\r": " ", "\f": " "}


def unigram(*, words: bool = True) -> tokenizers.Tokenizer:
    """Return a tokenizer as XLM-RoBERTa has it; words: whether whitespace is dropped."""
    found = tokenizers.Tokenizer(models.Unigram())
    table = normalizers.Precompiled(charsmap({**SPACES, "Q": "q", "!": "."}))
    mark = pre_tokenizers.Metaspace(prepend_scheme="always")
    found.normalizer = table
    if words:
        found.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), mark])
    else:
        found.normalizer = normalizers.Sequence(
            [table, normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
    found.decoder = decoders.Metaspace(prepend_scheme="always")
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    trainer = trainers.UnigramTrainer(
        vocab_size=150, special_tokens=special, unk_token="<unk>", show_progress=False,
    )  # fmt: skip
    texts = [TEXT] * 4 if words else [word for word in TEXT.split() for _ in range(4)]
    found.train_from_iterator(texts, trainer)
    ends = [("<s>", 0), ("</s>", 2)]
    found.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=ends)
    return found


_UNIGRAM = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
_BERT = {
    "cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]", "unk_token": "[UNK]",
    "mask_token": "[MASK]",
}  # fmt: skip
SETTINGS = {
    "unigram": _UNIGRAM, "unigram_lines": _UNIGRAM, "word_pieces": _BERT, "word_pieces_cased": _BERT,
    "byte_level": {
        "bos_token": "<|begin|>", "eos_token": "<|end|>", "chat_template": "{{ messages[0].content }}"
    },
    "sentencepiece": {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
}  # fmt: skip
CUTS = ("gpt-4o", "deepseek-v3", "qwen35", "dbrx")
KINDS = {
    "byte_level": byte_level, "sentencepiece": sentencepiece, "word_pieces": word_pieces, "unigram": unigram,
    "unigram_lines": lambda: unigram(words=False), "word_pieces_cased": lambda: word_pieces(lowercase=False),
    **{name: functools.partial(cut_like, name) for name in CUTS},
}  # fmt: skip


def files(kind: str) -> dict[str, bytes]:
    """Return the files of a tokenizer, by name."""
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **SETTINGS.get(kind, SETTINGS["byte_level"])}
    made = {"tokenizer.json": KINDS[kind]().to_str(), "tokenizer_config.json": json.dumps(settings)}
    return {name: text.encode() for name, text in made.items()}
