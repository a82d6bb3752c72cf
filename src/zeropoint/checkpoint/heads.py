"""The heads of a model, by its architecture: what turns the last hidden states into scores of words."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import Any

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
        ("FSMT", ("model.decoder.output_projection",)),
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
_SCORES = re.compile(
    r".*(LM|LMHeadModel|PreTraining|Generation|Text|CTC|Decoder|Alignment)$|BlipForQuestionAnswering$"
)
"""Names of architectures that have such a head; others, as BertModel, have none or one of classes."""


def says_tied(config: Mapping[str, Any]) -> bool:
    """Return whether a configuration says that the head is the embedding."""
    return config.get("tie_word_embeddings") is True


def heads_of(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the modules that are heads in the architectures of a configuration.

    >>> heads_of({"architectures": ["WhisperForConditionalGeneration"]})
    ('proj_out',)
    """
    named = config.get("architectures")
    architectures = tuple(a for a in named if isinstance(a, str)) if isinstance(named, list) else ()
    return _heads_of(architectures, tied=says_tied(config))


@functools.lru_cache(maxsize=64)
def _heads_of(architectures: tuple[str, ...], *, tied: bool) -> tuple[str, ...]:
    usual = ("lm_head",) if tied else ()
    found = (
        next((heads for name, heads in _HEADS if name.match(a) and _SCORES.match(a)), usual)
        for a in architectures
    )
    return tuple(dict.fromkeys(head for heads in found for head in heads))
