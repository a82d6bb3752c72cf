"""Proofs of quantized layers: decoded parts against the original.

For each element, ``|x - decode(code)|`` must not exceed the bound that format and scale rule imply
(params/bounds.py); the bound is computed from the stored scales alone. Of a method that chooses scales which
clip, it is the bound of rounding, beyond what is clipped; a method may have none. Scales must be finite and
not 0; of two levels, a block's scale may be 0 where all its codes are. auto-round writes negative ones.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from ...codecs.tensor_fields import ROWS, WeightPart
from ...columns import MadeSequence, PackedBytes
from ...errors import ZeropointError
from ...layout.blocks import reduce_blocks, spread_blocks
from ...methods import Bound
from ...tensor import QuantizedTensor
from ..measure.tensor_error import TensorError, measure, measure_columns
from ..measure.tiles import Scratch
from ..measure.workers import Task
from ..plan.limits import Limits, value_bytes
from ..plan.row_reader import RowReader
from ..read.decoding import read_lines
from ..read.problems import Problem
from ..read.quantized_layers import StoredLayer
from ..read.storage import OpenFile, OpenFiles, Place

_CHECK_BYTES = 64
"""Temporaries for each number of a tile: values, errors and bounds in float64."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class LayerProof:
    """Result for a layer: error, and largest share of a bound.

    Both are None when there was no original to compare with; the second one, too, where the method proves no
    bound of elements.
    """

    layer: StoredLayer
    error: TensorError | None
    of_bound: float | None

    def __repr__(self) -> str:
        return f"{self.layer.module}: {'decoded' if self.error is None else self.error}"


class Proofs(MadeSequence[LayerProof]):
    """Proofs of layers by number, each made on request."""

    def __init__(self, layers: Sequence[StoredLayer]) -> None:
        self._layers = layers
        self._errors = PackedBytes(len(layers))
        self._of_bound = array("d", [0.0]) * len(layers)

    def keep(self, number: int, proof: LayerProof) -> None:
        """Keep what was found of the layer of a number."""
        if proof.error is not None:
            self._errors[number] = proof.error.pack()
            self._of_bound[number] = math.nan if proof.of_bound is None else proof.of_bound

    def __len__(self) -> int:
        return len(self._layers)

    def made(self, number: int) -> LayerProof:
        """Unpack the proof of a layer."""
        packed = self._errors.get(number)
        error = None if packed is None else TensorError.unpack(packed)
        known = packed is not None and not math.isnan(self._of_bound[number])
        of_bound = self._of_bound[number] if known else None
        return LayerProof(layer=self._layers[number], error=error, of_bound=of_bound)

    @property
    def measured(self) -> Iterator[tuple[LayerProof, TensorError]]:
        """The layers with an original, and the error of each."""
        return ((proof, proof.error) for proof in self if proof.error is not None)

    @property
    def of_bound(self) -> float | None:
        """The largest share of an element's bound, or None without an original."""
        return max((p.of_bound for p in self if p.of_bound is not None), default=None)

    @property
    def values(self) -> int:
        """Quantized numbers of all layers."""
        return sum(layer.values for layer in self._layers)

    @property
    def error(self) -> TensorError | None:
        """The joint error of all layers, or None without an original."""
        errors = (TensorError.unpack(packed) for packed in self._errors.values())
        return TensorError.merge(errors) if len(self._errors) else None


class Check(Task):
    """A task that looks for problems and keeps those that it finds."""

    def __init__(self, name: str, nbytes: int) -> None:
        super().__init__(name, nbytes)
        self.problems: list[Problem] = []

    def report(self, what: str) -> None:
        """Keep a problem with what the task is about."""
        self.problems.append(Problem(where=self.name, what=what))


class LayerCheck:
    """The check of one layer, in parts of some rows.

    number: of the layer. layer: what is stored. weight: the original, or None. bound: what limits errors
    under the method that chose its codes.
    """

    def __init__(
        self, number: int, layer: StoredLayer, weight: RowReader | None, bound: Bound = Bound.SCHEME
    ) -> None:
        self.number = number
        self.bound = bound
        self.layer = layer
        self.weight = weight
        self.files: dict[Place, OpenFile] = {}
        self.parts: list[LayerPart] = []
        self._open = 0

    def rows(self, limits: Limits) -> int:
        """Return the rows of a part."""
        cost = value_bytes(self.layer.weight, self.layer.dtype) + _CHECK_BYTES
        if self.weight is not None:
            cost += _CHECK_BYTES if self.weight.layer is not None else self.weight.dtype.itemsize
        extent, values = self.extents
        alignment = self.layer.codec.alignment(self.layer.layer, self.layer.shape)
        if self.weight is not None and self.layer.codec.axis(self.layer.layer) == ROWS:
            alignment = math.lcm(alignment, self.weight.block_rows)
        return limits.rows(values, min(alignment, extent), cost)

    @property
    def extents(self) -> tuple[int, int]:
        """Its rows or columns along the cut axis, and values of each."""
        axis = self.layer.codec.axis(self.layer.layer)
        return self.layer.shape[axis], self.layer.shape[1 - axis]

    def buffer_bytes(self, limits: Limits) -> int:
        """Return the bytes of the original that a part reads."""
        return 0 if self.weight is None else self.rows(limits) * self.extents[1] * self.weight.dtype.itemsize

    def tasks(self, limits: Limits, files: OpenFiles) -> Sequence[Check]:
        """Return the work; ``files`` are all files of both checkpoints, open."""
        self.files = {file: files[file] for file in (entry.file for entry in self.layer.tensors.values())}
        if self.weight is not None:
            self.files |= {file: files[file] for file in self.weight.files}
        height, step = self.extents[0], self.rows(limits)
        self.parts = [
            LayerPart(self, expert, start, min(step, height - start))
            for expert in range(self.layer.experts or 1)
            for start in range(0, height, step)
        ]
        self._open = len(self.parts)
        return self.parts

    def end(self) -> bool:
        """Count a finished part, and return whether it was the last."""
        self._open -= 1
        return not self._open

    def proof(self) -> LayerProof:
        """Return the proof of the layer from its parts."""
        errors = [part.error for part in self.parts if part.error is not None]
        if not errors or len(errors) < len(self.parts):
            return LayerProof(layer=self.layer, error=None, of_bound=None)
        worst = max(part.ratio for part in self.parts)
        of_bound = None if self.bound in _UNBOUNDED else worst
        return LayerProof(layer=self.layer, error=TensorError.merge(errors), of_bound=of_bound)


class LayerPart(Check):
    """Decode some rows of one expert, and compare them with the original."""

    def __init__(self, check: LayerCheck, expert: int, start: int, rows: int) -> None:
        super().__init__(check.layer.module, rows * check.extents[1] * check.layer.dtype.itemsize)
        self.check = check
        self.expert = expert
        self.start = start
        self.rows = rows
        self.ratio = 0.0
        self.error: TensorError | None = None

    def run(self, scratch: Scratch) -> None:
        """See :class:`Task`."""
        layer, values = self.check.layer, self.check.extents[1]
        shape = (self.rows, values) if self._by_rows else (values, self.rows)
        lines = read_lines(layer, self.check.files, self.start, self.rows, expert=self.expert)
        codec = layer.codec
        q = codec.decode(layer.layer, lines, WeightPart(self.start, shape, layer.dtype))
        damage = codec.damage(layer.layer, lines)
        if damage is not None:
            self.report(f"{self._where()}: {damage}")
        try:
            q.params.validate(negative_scales=layer.negative_scales)
        except ZeropointError as error:
            self.report(f"{self._where()}: {error}")
        if self.problems:
            return
        block = _lost_block(q)
        if block is not None:
            self.report(f"{self._where()}: the scale of block {block} is 0, but not all of its codes are")
        decoded = q.dequantize(torch.float32)
        if not _finite(decoded):
            self.report(f"{self._where()} decode to non-finite values")
        elif self.check.weight is not None:
            self._compare(q, decoded, lines, scratch.buffer)

    def _compare(
        self, q: QuantizedTensor, decoded: torch.Tensor, lines: dict[str, torch.Tensor], buffer: bytearray
    ) -> None:
        assert self.check.weight is not None
        weight = self.check.weight
        if self._kept(lines):
            self.error = self._measured(decoded, q)
            return
        if self._by_rows:
            first = self.expert * self.check.layer.shape[0] + self.start
            x = weight.read(self.check.files, first, self.rows, buffer)
        else:
            x = weight.read_columns(self.check.files, range(weight.shape[0]), (self.start, self.rows), buffer)
        # What is quantized from codes is quantized from floats of the model's dtype.
        x = x if weight.layer is not None and torch.equal(x, decoded) else x.to(q.dtype)
        layer = self.check.layer
        drift = layer.codec.drift(layer.layer, lines, WeightPart(self.start, q.shape, q.dtype))
        self.ratio = _of_bound((x, decoded), q, self.check.bound, drift)
        self.error = self._measured(x, q)
        if self.ratio > 1:
            self.report(f"{self._where()} are off by up to {self.ratio:.3g} times the proven bound")

    def _kept(self, lines: dict[str, torch.Tensor]) -> bool:
        """Return whether the original holds these very codes and scales."""
        assert self.check.weight is not None
        layer, old = self.check.layer, self.check.weight.layer
        if old is None or (old.layer, old.shape) != (layer.layer, layer.shape):
            return False
        theirs = read_lines(old, self.check.files, self.start, self.rows, expert=self.expert)
        return all(
            torch.equal(line.view(torch.uint8), theirs[suffix].view(torch.uint8))
            for suffix, line in lines.items()
        )

    def _where(self) -> str:
        expert = "" if self.check.layer.experts is None else f"expert {self.expert}, "
        return f"{expert}{'rows' if self._by_rows else 'columns'} from {self.start} on"

    def _measured(self, x: torch.Tensor, q: QuantizedTensor) -> TensorError:
        q = replace(q, dtype=x.dtype)
        if self._by_rows:
            return measure(x, q)
        layer = self.check.layer
        return measure_columns(x, q, layer.codec.alignment(layer.layer, layer.shape))

    @property
    def _by_rows(self) -> bool:
        return self.check.layer.codec.axis(self.check.layer.layer) == ROWS


def _finite(values: torch.Tensor) -> bool:
    """Return whether all of ``values`` are finite.

    A NaN is both their least and their largest. torch.isfinite, which makes tensors, took ten times as long:
    more than half the time of verify.
    """
    return not values.numel() or all(math.isfinite(float(end)) for end in torch.aminmax(values))


def _lost_block(q: QuantizedTensor) -> tuple[int, ...] | None:
    """Return the first block with scale 0 but nonzero codes, or None.

    Only the finest of several scales can be 0 at all.
    """
    element = q.scheme.element
    if len(q.scales) < 2 or not element.is_float:
        return None
    empty = q.scales[0].float() == 0
    if not bool(empty.any()):
        return None
    # Without the sign, what is left of a code of a float is 0 for zeros alone.
    magnitude = (q.codes.to(torch.int16) & (element.code_count // 2 - 1)).float()
    lost = empty & (reduce_blocks(magnitude, q.scheme.granularity, "amax", 0.0) > 0)
    return tuple(torch.nonzero(lost)[0].tolist()) if bool(lost.any()) else None


_UNBOUNDED = (Bound.OUTPUT, Bound.NONE)
"""Bounds that say nothing of elements: of outputs, which need statistics, or of nothing."""


def _of_bound(
    pair: tuple[torch.Tensor, torch.Tensor], q: QuantizedTensor, kind: Bound, drift: torch.Tensor | None
) -> float:
    """Return the largest error in parts of its block's bound.

    pair: what was quantized, and what it decodes to. drift: how far each scale may be from the one that codes
    were chosen with, which a code's value multiplies.

    Where scales may clip, the bound covers rounding, and what a number is beyond all codes is no part of
    its error. Without a bound of elements it is 0.
    """
    if kind in _UNBOUNDED:
        return 0.0

    def spread(values: torch.Tensor) -> torch.Tensor:
        return spread_blocks(values, q.scheme.granularity, tuple(x.shape))

    x, decoded = pair
    off = (x.double() - decoded.double()).abs_()
    if kind is Bound.ROUNDING:
        low, high = map(spread, q.params.representable())
        off -= torch.maximum(low - x, x - high).clamp_(min=0)
        bound = q.params.rounding_bound(torch.float32)
    else:
        bound = q.params.error_bound(torch.float32)
    if drift is not None:
        element = q.scheme.element
        bound = bound + drift * float(max(-element.min, element.max) + element.largest_gap / 2)
    ratio = torch.where(off <= 0, 0.0, off / spread(bound))
    return float(ratio.max()) if ratio.numel() else 0.0
