"""Quantizers for training: modules whose forward is what is deployed, with straight-through gradients.

They hold parameters and call the operators; how codes come about is not known here.
"""

from .fake_quantize import FakeQuantize, GradientMask
from .followed_range import FollowedRange
from .halves import dequantize_ste, quantize_ste
from .learned_scale import LearnedScale
from .learned_threshold import LearnedThreshold
from .pact import Pact
from .quantizer import Quantizer
from .thresholds import ThresholdRule

__all__ = [
    "FakeQuantize",
    "FollowedRange",
    "GradientMask",
    "LearnedScale",
    "LearnedThreshold",
    "Pact",
    "Quantizer",
    "ThresholdRule",
    "dequantize_ste",
    "quantize_ste",
]
