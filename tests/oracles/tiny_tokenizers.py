"""Tokenizers of a few hundred tokens, trained on two sentences, of the kinds that llama.cpp has."""

from __future__ import annotations

import json

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

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


def word_pieces() -> tokenizers.Tokenizer:
    """Return a tokenizer as BERT has it."""
    found = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    found.normalizer = normalizers.BertNormalizer()
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


SETTINGS = {
    "byte_level": {
        "bos_token": "<|begin|>", "eos_token": "<|end|>", "chat_template": "{{ messages[0].content }}"
    },
    "sentencepiece": {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
    "word_pieces": {
        "cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]", "unk_token": "[UNK]",
        "mask_token": "[MASK]",
    },
}  # fmt: skip
KINDS = {"byte_level": byte_level, "sentencepiece": sentencepiece, "word_pieces": word_pieces}


def files(kind: str) -> dict[str, bytes]:
    """Return the files of a tokenizer, by name."""
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **SETTINGS[kind]}
    made = {"tokenizer.json": KINDS[kind]().to_str(), "tokenizer_config.json": json.dumps(settings)}
    return {name: text.encode() for name, text in made.items()}
