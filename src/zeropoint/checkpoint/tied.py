"""Heads that are tied to an embedding: those that a checkpoint leaves out, and those that it holds twice.

A model whose configuration says ``tie_word_embeddings`` takes its head from the embedding. A checkpoint may
hold the head all the same; where its bytes are those of the embedding, nothing is lost without it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from .safetensors_file import TensorEntry
from .selection import module_of
from .source import Source
from .storage import open_file

_HEADS = tuple(
    (re.compile(pattern), heads)
    for pattern, heads in (
        ("(Whisper|Moonshine|Canary|CohereAsr)", ("proj_out",)),
        ("(Electra|ConvBert)", ("generator_lm_head",)),
        ("DistilBert", ("vocab_projector",)),
        ("Albert", ("predictions.decoder",)),
        ("(XLM|Flaubert)WithLMHead", ("pred_layer.proj",)),
        ("XLNetLMHead", ("lm_loss",)),
        ("(BridgeTower|Vilt)ForMaskedLM", ("mlm_score.decoder",)),
        ("ModernBert(Decoder)?For(Masked|Causal)LM", ("decoder",)),
        ("(BioGpt|TrOCR)ForCausalLM", ("output_projection",)),
        ("Kosmos2For", ("text_model.lm_head",)),
        ("GitForCausalLM", ("output",)),
        ("RwkvForCausalLM", ("head",)),
        ("Ultrabert", ("head.decoder",)),
        ("T5Gemma", ("lm_head.out_proj",)),
        ("SpeechT5ForSpeechToText", ("text_decoder_postnet.lm_head",)),
        ("BlipFor", ("text_decoder.cls.predictions.decoder",)),
        ("FSMT", ("decoder.output_projection",)),
        ("GraniteSpeech5ForCTC", ("ctc_head",)),
        ("Luke", ("lm_head.decoder", "entity_predictions.decoder")),
        ("(EuroBert|Funnel|ModernVBert|NeoMME|UltraVBert)", ("lm_head",)),
        ("(BertGeneration|Camembert|Esm|Data2VecText|XLMRoberta|Xmod|Roberta)", ("lm_head.decoder",)),
        (
            "(Bert|BigBirdFor|BlipText|ErnieFor|MegatronBert|RoCBert|RoFormer|VisualBert)",
            ("cls.predictions.decoder",),
        ),
        (".*For(MaskedLM|PreTraining)$", ("cls.predictions.decoder", "lm_head.decoder")),
        (".*(For(CausalLM|ConditionalGeneration)|LMHeadModel)$", ("lm_head",)),
    )
)
"""Heads by how an architecture's name begins, the first that fits: _tied_weights_keys of transformers."""
_EMBEDDING = re.compile(r"(^|\.)(embed_tokens|tok_embeddings|word_embeddings|wte|shared)\.weight$")
_COMPARED = 1 << 22
"""Bytes that are compared at once."""


def _heads(config: Mapping[str, Any]) -> list[str]:
    """Return the modules that are heads in the architectures of a configuration."""
    named = config.get("architectures")
    architectures = [a for a in named if isinstance(a, str)] if isinstance(named, list) else []
    usual = ("lm_head",) if _says_tied(config) else ()
    found = (next((heads for name, heads in _HEADS if name.match(a)), usual) for a in architectures)
    return list(dict.fromkeys(head for heads in found for head in heads))


def _says_tied(config: Mapping[str, Any]) -> bool:
    return config.get("tie_word_embeddings") is True


def _is(module: str, head: str) -> bool:
    return module == head or module.endswith("." + head)


def tied_heads(source: Source) -> list[str]:
    """Return heads that the model has and the checkpoint has not, since they are tied to an embedding."""
    present = [module_of(name) for name in source.entries]
    return [head for head in _heads(source.config or {}) if not any(_is(name, head) for name in present)]


def tied_copies(source: Source) -> dict[str, str]:
    """Return, by name, heads whose bytes are those of an embedding that the configuration ties them to.

    Reads both where dtype and shape agree. Raises CheckpointError when a file cannot be read.
    """
    config = source.config or {}
    if not _says_tied(config):
        return {}
    heads = [e for e in source.entries.values() if any(_is(module_of(e.name), h) for h in _heads(config))]
    embeddings = [e for e in source.entries.values() if _EMBEDDING.search(e.name)]
    return {
        head.name: embedding.name for head in heads for embedding in embeddings if _equal(head, embedding)
    }


def _equal(a: TensorEntry, b: TensorEntry) -> bool:
    """Return whether two tensors have one dtype, shape and bytes."""
    if (a.dtype, a.shape, a.nbytes) != (b.dtype, b.shape, b.nbytes):
        return False
    files = [open_file(a.file), open_file(b.file)]
    try:
        for start in range(0, a.nbytes, _COMPARED):
            parts = [bytearray(min(_COMPARED, a.nbytes - start)) for _ in files]
            for file, entry, part in zip(files, (a, b), parts, strict=True):
                file.read_into(memoryview(part), entry.begin + start)
            if parts[0] != parts[1]:
                return False
    finally:
        for file in files:
            file.close()
    return True
