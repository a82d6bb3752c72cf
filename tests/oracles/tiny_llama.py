"""A Llama of two layers with a tokenizer, as loaders that ask for whole models want it."""

from __future__ import annotations

from pathlib import Path

import torch
from tests.peers import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

VOCABULARY = 256


def save(folder: Path, dtype: torch.dtype = torch.float16) -> transformers.LlamaForCausalLM:
    """Write the model, 14 linear layers and a head of its own, and return it."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=256, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128, tie_word_embeddings=False,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).to(dtype)
    model.save_pretrained(folder)
    words = {f"w{n}": n for n in range(VOCABULARY - 2)} | {"<unk>": VOCABULARY - 2, "</s>": VOCABULARY - 1}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>", pad_token="</s>"
    ).save_pretrained(folder)
    return model
