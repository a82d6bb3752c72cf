"""Act-order (``desc_act``): weights whose inputs lie in groups out of order.

A file has the group of each input, ``g_idx``, and the scales and zero points of the groups. Decoding gives
each input the parameters of its group, in a block of its own. Back to groups leads this module: codes stay
where they are, and any input of a group has the group's parameters.
"""

from dataclasses import replace
from typing import Protocol, runtime_checkable

import torch

from ..schemes import Scheme
from ..tensor import QuantizedTensor
from .protocol import LayerScheme


@runtime_checkable
class ActOrder(Protocol):
    """Protocol of codecs whose files may have act-order."""

    def group_index(self, layer: LayerScheme) -> str | None:
        """Return the part with the group of each input, or None.

        layer: how the weight is quantized, and lies in its file.
        """

    def out_of_order(self, layer: LayerScheme) -> LayerScheme | None:
        """Return the same scheme under act-order, or None if not held."""


def group_index(layer: LayerScheme) -> str | None:
    """Return the part with the group of each input, or None.

    layer: how the weight is quantized, and lies in its file.
    """
    return layer.codec.group_index(layer) if isinstance(layer.codec, ActOrder) else None


def out_of_order(layer: LayerScheme) -> LayerScheme | None:
    """Return the same scheme under act-order, or None if not held."""
    return layer.codec.out_of_order(layer) if isinstance(layer.codec, ActOrder) else None


def in_groups(q: QuantizedTensor, scheme: Scheme, groups: torch.Tensor) -> QuantizedTensor:
    """Return rows of codes with the parameters of their groups.

    Its values equal those that ``q`` has only where inputs lie in order. q: rows in codes, each input in a
    block of its own, or in order. scheme: of the groups. groups: (columns,) the group of each input, or -1 in
    all where they lie in order.
    """
    if q.scheme.granularity == scheme.granularity:
        return q
    count = scheme.granularity.grid(q.shape)[1]
    first = torch.zeros(count, dtype=torch.int64)
    # Of several inputs of a group the last is kept; all have the same parameters.
    first[groups.long()] = torch.arange(len(groups))
    zero = None if q.zero_point is None else q.zero_point[:, first].contiguous()
    scales = (q.scales[0][:, first].contiguous(),)
    return replace(q, params=replace(q.params, scheme=scheme, scales=scales, zero_point=zero))
