"""Static activation and KV-cache scales in the files of a codec.

All are one number. This module opens no file.
"""

from typing import NamedTuple

import torch

from ..formats import get_format
from ..recipes import Activation


class InputNames(NamedTuple):
    """Suffixes of the tensors that hold the parameters of static inputs.

    scale: of the finest scale. zero_point: of the zero point. global_scale: of the scale over all blocks, in
    schemes of two levels. shape: of each; all are one number. also: what files of others call the finest
    scale. signed: whether zero points of codes without a sign are int8, as if these had one.
    """

    scale: str
    zero_point: str
    global_scale: str
    shape: tuple[int, ...] = (1,)
    also: tuple[str, ...] = ()
    signed: bool = True

    @property
    def suffixes(self) -> tuple[str, ...]:
        """All suffixes."""
        return self.scale, self.zero_point, self.global_scale, *self.also

    def needed(self, given: Activation) -> str:
        """Return the suffix of the scale that static inputs always have."""
        return self.global_scale if given.local else self.scale


CACHE_FORMAT = get_format("float8_e4m3fn")
"""Format of a quantized cache's keys and values."""


class CacheScales(NamedTuple):
    """Places of float8 cache scales, two per attention layer.

    key, value: their names, after the attention layer's. shape: of each; both are one number. dtype: in which
    they are computed and stored, or None for the dtype of keys and values.
    """

    key: str
    value: str
    shape: tuple[int, ...] = ()
    dtype: torch.dtype | None = torch.float32

    def scale(self, largest: torch.Tensor) -> torch.Tensor:
        """Return the scale of keys or values from their largest magnitude.

        largest: the largest magnitude, in the dtype of keys and values: one number.
        """
        return (largest.to(self.dtype or largest.dtype) / float(CACHE_FORMAT.max)).reshape(self.shape)
