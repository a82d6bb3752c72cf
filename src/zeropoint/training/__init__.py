"""Quantizers for training: deployed forward, straight-through gradients.

They hold parameters and call the operators; how codes come about is not known here.
"""

from .fake_quantize import FakeQuantize, GradientMask, MovingAverageFakeQuantize
from .learned_scale import LearnedScale
from .learned_threshold import LearnedThreshold
from .pact import Pact
from .quantizer import Quantizer
from .straight_through import dequantize_ste, quantize_ste
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
