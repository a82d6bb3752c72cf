"""Quality of models as numbers: perplexity, KL divergence, choices, continuations and embeddings."""

from .divergence_meter import DivergenceMeter, divergence_meter
from .estimates import Estimate
from .evaluation import EvaluationSettings, evaluate, evaluate_checkpoint
from .evaluation_result import Evaluation, ModelQuality
from .language_statistics import language_statistics
from .mcnemar import mcnemar
from .text_windows import TextTokenizer, TextWindows, TokenizedText
from .token_scores import TokenScores, scores_of
from .window_probe import WindowProbe

__all__ = [
    "DivergenceMeter",
    "Estimate",
    "Evaluation",
    "EvaluationSettings",
    "ModelQuality",
    "TextTokenizer",
    "TextWindows",
    "TokenScores",
    "TokenizedText",
    "WindowProbe",
    "divergence_meter",
    "evaluate",
    "evaluate_checkpoint",
    "language_statistics",
    "mcnemar",
    "scores_of",
]
