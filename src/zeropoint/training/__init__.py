"""Quantizers for training: deployed forward, straight-through gradients.

They hold parameters and call the operators; how codes come about is not known here.
"""

from .fake_quantize import FakeQuantize, GradientMask, MovingAverageFakeQuantize
from .learned_scale import LearnedScale
from .learned_threshold import LearnedThreshold
from .pact import Pact
from .quantize_ste import dequantize_ste, quantize_ste
from .quantizer import Quantizer
from .thresholds import ThresholdRule

__all__ = [
    "FakeQuantize",
    "MovingAverageFakeQuantize",
    "GradientMask",
    "LearnedScale",
    "LearnedThreshold",
    "Pact",
    "Quantizer",
    "ThresholdRule",
    "dequantize_ste",
    "quantize_ste",
]
