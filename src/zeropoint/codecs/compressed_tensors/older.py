"""Older forms of compressed-tensors layouts, which are only read.

For the weight ``X.weight`` of shape (N, K) with codes of b bits, in addition to layout.py:

    pack-quantized, before compressed-tensors 0.18 (its pull request 715), where b divides no word
        X.weight_packed        I32 [N, ceil(K / p)] with p = 32 // b: p fields a word, low bits first, and the
                               rest of its bits 0
        X.weight_zero_point    I32 [ceil(N / p), G], likewise
    int-quantized with zero points, naive-quantized of integers, and pack-quantized with one zero point
        X.weight               I8 [N, K], but for pack-quantized
        X.weight_zero_point    I8, with the shape of X.weight_scale
    in layouts of integers, after act-order (actorder: group), before compressed-tensors 0.19
        X.weight_g_idx         I32 [K]: the group of each column, or -1 where columns lie in their own order

Source: compressed-tensors 0.10 and 0.15 (compressors/quantized_compressors/pack_quantized.py and
naive_quantized.py; quantization/lifecycle/forward.py) and 0.20 (compressors/naive_quantized/base.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ...layout import packing
from ...schemes import Scheme, ZeroPoint
from ...tensor import QuantizedTensor
from ..block_extents import blocks, by_column
from ..tensor_fields import Tensors, TensorSpec
from ..words import to_words
from .layout import PACKED, WORD_BITS, ZERO_POINT, Layout, strategy

G_IDX = "weight_g_idx"


@dataclass(frozen=True, slots=True, kw_only=True)
class OlderForm:
    """Differences of a weight's stored tensors from written ones.

    layout: the one that the configuration names, where another would be written. apart: whether no field
    crosses a word. indexed: whether there is ``weight_g_idx``.
    """

    layout: Layout | None = None
    apart: bool = False
    indexed: bool = False

    @property
    def words(self) -> str:
        """Addition to the layout's name in reports."""
        return (" of fields apart" if self.apart else "") + (" with g_idx" if self.indexed else "")


NEWEST = OlderForm()
"""The form that is written."""


def fields_apart(layout: Layout, bits: int, width: int, columns: int) -> bool:
    """Return whether rows of words have no field across words.

    Rows that have as many words either way count as written by newer releases.

    >>> fields_apart(Layout.PACK, 3, 26, 256), fields_apart(Layout.PACK, 3, 24, 256)
    (True, False)
    """
    per = WORD_BITS // bits
    return layout is Layout.PACK and width == -(-columns // per) != -(-columns * bits // WORD_BITS)


def stored_otherwise(layout: Layout, weight: Scheme) -> bool:
    """Return whether such integers are written in another layout now."""
    if not weight.element.is_integer:
        return False
    affine = weight.zero_point is not ZeroPoint.NONE
    if layout is Layout.PACK:
        return affine and strategy(weight) == "tensor"
    return layout is Layout.NAIVE or (layout is Layout.INT and affine)


def tensor_specs(
    specs: tuple[TensorSpec, ...], weight: Scheme, form: OlderForm, shape: tuple[int, ...]
) -> tuple[TensorSpec, ...]:
    """Return the tensors of a weight; ``specs`` in newer files."""
    per = WORD_BITS // weight.bits
    found = list(specs)
    for at, spec in enumerate(specs):
        if form.apart and spec.suffix == PACKED:
            found[at] = replace(spec, shape=(shape[0], -(-shape[1] // per)))
        elif form.apart and spec.suffix == ZERO_POINT:
            found[at] = replace(spec, shape=(-(-shape[0] // per), spec.shape[1]), lines=1, per=per)
    if form.indexed:
        found.append(TensorSpec(suffix=G_IDX, dtype="I32", shape=(shape[1],), axis=None))
    return tuple(found)


def renewed(tensors: Tensors, weight: Scheme, form: OlderForm, shape: tuple[int, ...]) -> Tensors:
    """Return a part's tensors in the form of newer files."""
    if not form.apart:
        return tensors
    bits = weight.bits
    found = {**tensors, PACKED: _crossing(tensors[PACKED], bits, shape[1])}
    if ZERO_POINT in tensors:
        found[ZERO_POINT] = _crossing(tensors[ZERO_POINT].t(), bits, shape[0]).t().contiguous()
    return found


def _crossing(words: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """Return rows of separate fields as streams across words."""
    shifts = torch.arange(WORD_BITS // bits, dtype=torch.int32) * bits
    fields = (words.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)
    return to_words(packing.pack(fields.flatten(-2)[:, :count].contiguous(), bits))


def by_group_index(q: QuantizedTensor, groups: torch.Tensor) -> QuantizedTensor:
    """Return ``q`` with the parameters of each column's group.

    groups: (columns,) int32. Columns in their own order, or with -1 for it, keep the groups.
    """
    size = blocks(q.scheme)[1]
    if not size or -1 in groups or torch.equal(groups, torch.arange(len(groups)) // size):
        return q
    at = groups.long()
    zero = None if q.zero_point is None else q.zero_point[:, at]
    params = replace(q.params, scheme=by_column(q.scheme), scales=(q.scales[0][:, at],), zero_point=zero)
    return replace(q, params=params)
