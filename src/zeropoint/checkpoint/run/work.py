"""Process one unit tile by tile: read, quantize, measure, write and hash.

Whatever runs the units, threads here or processes on other machines, calls :func:`process` and :func:`scan`.
A tile is as many rows as the limits allow; tiles follow each other in order, so neither bytes nor hashes
depend on their size.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import torch

from ...codecs.act_order import group_index, in_groups
from ...codecs.tensor_fields import ROWS, WeightPart
from ...errors import NonFiniteError, UnsupportedError, ZeropointError, count, option, printable
from ...functional import dequantize
from ...layout.packing import flat_bytes
from ...methods import LOSSLESS, LayerData, method_named
from ...methods.lossless import difference
from ...methods.method import NO_DATA
from ...methods.rotate import unrotated
from ...tensor import QuantizedTensor
from ..measure.tensor_error import TensorError, exact_sum, measure
from ..measure.tiles import Scratch, extremes_of, scales_in, widest
from ..plan.decoded import read_groups
from ..plan.limits import Limits
from ..plan.output_tensors import Output, OutputTensor, Tile, tile_shape, tiles
from ..plan.row_reader import Literal
from ..read.storage import Files, OpenFile, OpenFiles, shown
from .directory import Partials
from .folder import copy_range, write_at
from .unit_results import Hashes, ScanResult, UnitResult
from .units import Span, Unit

PIECE = 1 << 20
"""Bytes that are hashed and copied at once: few enough to stay in cache between the two."""


def buffer_bytes(todo: Iterable[Unit], limits: Limits) -> int:
    """Return the buffer bytes that a thread needs for ``todo``."""
    kinds = {of.kind: of for unit in todo if not (of := unit.output).copied}
    shapes = ((of, *tile_shape(of, limits)) for of in kinds.values())
    sizes = (min(rows, of.shape[0]) * columns * _item(of) for of, rows, columns in shapes)
    return max((PIECE, *sizes))


def _item(of: Output) -> int:
    """Return the bytes per value of a tile; codes count as float32."""
    return torch.float32.itemsize if of.of_codes else of.dtype.itemsize


def _read(
    of: Output, files: Files, tile: Tile, buffer: bytearray
) -> tuple[torch.Tensor, QuantizedTensor | None]:
    """Return the values of a tile in ``buffer``, and any source codes."""
    if not of.of_codes:
        return of.read(files, *tile, buffer), None
    codes = of.codes(files, *tile)
    out = torch.frombuffer(buffer, dtype=torch.float32, count=math.prod(codes.shape)).view(codes.shape)
    return dequantize(codes, out=out), codes


def scan(unit: Unit, limits: Limits, scratch: Scratch) -> ScanResult:
    """Return the extremes of a unit, and its scale sum where needed.

    Raises NonFiniteError as :func:`process` does: other weights may share the scale that follows, and are not
    at fault.
    """
    of, found, scales = unit.output, list[tuple[float, float]](), array("d")
    means = of.layer.codec.needs_mean(of.layer)
    with OpenFiles() as files:
        for tile in tiles(of, limits, unit.start, unit.count):
            x, _ = _read(of, files, tile, scratch.buffer)
            found.append(extremes_of(x))
            if not all(map(math.isfinite, found[-1])):
                error = NonFiniteError(f"the extremes are {found[-1]}")
                raise _named(error, of, files, tile, scratch.buffer)
            if means:
                scales.extend(scales_in(x, of.layer.codec.with_mean(of.layer, 0.0).weight))
    low, high = widest(found)
    return ScanResult(number=unit.number, low=low, high=high, scales=len(scales), sum=exact_sum(scales))


def process(
    unit: Unit, partials: Partials, limits: Limits, scratch: Scratch, data: LayerData = NO_DATA
) -> UnitResult:
    """Process a unit into the partial files.

    data: of the weight that it is a part of. Raises NonFiniteError with tensor, file and first index;
    RangeError when a scale fits no format; CheckpointError when the source changed or a file cannot be read
    or written.
    """
    with OpenFiles() as files, partials.open(unit.file) as target:
        if isinstance(unit.output.reader, Literal):
            return _add(unit, unit.output.reader.data, target)
        if unit.output.copied:
            return _copy(unit, files[unit.output.source.file], target, scratch.buffer)
        by_name = {tensor.name: tensor for tensor in unit.output.tensors}
        writers = [_Writer(target, span, by_name[span.tensor]) for span in unit.spans]
        parts = tiles(unit.output, limits, unit.start, unit.count)
        if unit.output.to is None:
            for tile in parts:
                _restore_tile(unit, files, tile.rows, scratch.buffer, writers[0])
            return UnitResult.of(unit, [writers[0].hashes])
        errors = [_quantize_tile(unit.output, files, tile, (data, scratch), writers) for tile in parts]
    return UnitResult.of(unit, [writer.hashes for writer in writers], TensorError.merge(errors))


class _Writer:
    """Writes and hashes one span, from its begin to its end."""

    def __init__(self, target: int, span: Span, tensor: OutputTensor) -> None:
        self.span = span
        self._spec = tensor.spec
        self._target = target
        self._done = 0
        self._lines: torch.Tensor | None = None
        self._hashes = Hashes()

    def write(self, tensor: torch.Tensor) -> None:
        """Append a tensor in cache-sized pieces."""
        data = memoryview(flat_bytes(tensor).numpy())  # type: ignore[arg-type]
        for begin in range(0, len(data), PIECE):
            piece = data[begin : begin + PIECE]
            self._hashes.update(piece)
            write_at(self._target, piece, self.span.begin + self._done)
            self._done += len(piece)

    def buffer(self, part: torch.Tensor, first: int) -> None:
        """Buffer a band of columns; write when the last band arrives."""
        across = tuple(part.shape[1:])
        width = self.span.size // max(1, len(part) * part.itemsize) if across else 0
        if across in {(), (width,)}:
            return self.write(part)
        if self._lines is None:
            self._lines = torch.empty(len(part), width, dtype=part.dtype)
        lines, per = self._spec.across
        begin = first // per * lines
        self._lines[:, begin : begin + part.shape[1]] = part
        if begin + part.shape[1] == width:
            self.write(self._lines)
        return None

    @property
    def hashes(self) -> Hashes:
        """The hashes of the span, all of which must have been written."""
        assert self._done == self.span.size, self.span
        return self._hashes


def _quantize_tile(
    weight: Output, files: Files, tile: Tile, means: tuple[LayerData, Scratch], writers: list[_Writer]
) -> TensorError:
    (data, scratch), by_rows = means, weight.axis == ROWS
    first = tile.rows.start == tile.columns.start == 0
    x, codes = _read(weight, files, tile, scratch.buffer)
    layer = weight.layer if data.mean is None else weight.layer.codec.with_mean(weight.layer, data.mean)
    codec, index, given = layer.codec, group_index(layer), x
    stored = weight.reader.layer
    order = {} if index is None or stored is None else {index: read_groups(stored, files)}
    if index is not None and stored is not None and codes is not None:
        codes = in_groups(codes, stored.weight, order[index])
        given = codes.dequantize(torch.float32)
    try:
        method = unrotated(method_named(weight.method))
        made = scratch.quantize(given, layer.weight, method, replace(data, codes=codes))
        q, known = made.q, made.errors
        tensors = codec.encode(layer, q)
        # What is measured and checked is what loaders read, where that may be something else.
        reads = codes is not None or data.mean is not None
        constants = codec.constants(layer, q.params, weight.shape) | order if first or reads else {}
        if reads:
            start = tile[weight.axis].start
            q = layer.codec.decode(layer, tensors | constants, WeightPart(start, q.shape, q.dtype))
            known = known if known is not None and x is given and _same(q, made.q) else None
            q = replace(q, dtype=x.dtype)
        measured = measure(x, q, known)
        if codes is not None and not math.isfinite(sum(measured.errors)):
            raise NonFiniteError(f"{codes.scheme} decodes to non-finite values")
        if weight.method == LOSSLESS and (measured.errors or measured.largest):
            # Loaders would not read the values that are to be kept.
            different = difference(x, q)
            if different is not None:
                raise UnsupportedError(f"{layer.layout} does not hold its values: {different}")
    except ZeropointError as error:
        raise _named(error, weight, files, tile, scratch.buffer) from error
    if first:
        tensors |= constants
    by_name = {codec.separator.join((weight.module, suffix)): tensor for suffix, tensor in tensors.items()}
    for writer in writers:
        part = by_name.get(writer.span.tensor)
        if part is not None:
            writer.write(part) if by_rows else writer.buffer(part, tile.rows.start)
    return measured


def _same(a: QuantizedTensor, b: QuantizedTensor) -> bool:
    """Return whether two matrices have equal bits and equal schemes."""
    pairs = zip((a.data, *a.params.stored), (b.data, *b.params.stored), strict=True)
    # torch.equal compares byte by byte.
    return (a.scheme, a.dtype) == (b.scheme, b.dtype) and all(
        np.array_equal(flat_bytes(mine).numpy(), flat_bytes(theirs).numpy()) for mine, theirs in pairs
    )


def _restore_tile(unit: Unit, files: Files, rows: range, buffer: bytearray, writer: _Writer) -> None:
    """Write some rows as floats; raises NonFiniteError for NaN and Inf."""
    reader = unit.output.reader
    x = reader.read_as_written(files, rows.start, len(rows), buffer)
    bad = ~torch.isfinite(x)
    if bool(bad.any()):
        row, column = torch.nonzero(bad)[0].tolist()
        facts = f"{shown(reader.entry.file.name)}, {reader.entry.dtype}, shape {list(reader.entry.shape)}"
        raise NonFiniteError(
            f"tensor {printable(reader.entry.name)} ({facts}) decodes to non-finite values, first at "
            f"row {rows.start + row}, column {column} ({float(x[row, column])}); pass the original checkpoint"
        )
    writer.write(x)


def _copy(unit: Unit, source: OpenFile, target: int, buffer: bytearray) -> UnitResult:
    """Hash and copy source bytes, in the kernel where possible."""
    hashes, (span,) = Hashes(), unit.spans
    begin = unit.output.source.begin + unit.start
    local = source.descriptor is not None
    piece = memoryview(buffer)[: PIECE if local else len(buffer)]
    for done in range(0, unit.nbytes, len(piece)):
        part = piece[: unit.nbytes - done]
        source.read_into(part, begin + done)
        hashes.update(part)
        to = span.begin + done
        if local:
            copy_range(source, target, begin=begin + done, to=to, size=len(part))
        else:
            write_at(target, part, to)
    return UnitResult.of(unit, [hashes])


def _add(unit: Unit, data: bytes, target: int) -> UnitResult:
    """Write and hash bytes that lie in no file."""
    hashes, (span,) = Hashes(), unit.spans
    hashes.update(memoryview(data))
    write_at(target, memoryview(data), span.begin)
    return UnitResult.of(unit, [hashes])


def _named(
    error: ZeropointError, weight: Output, files: Files, tile: Tile, buffer: bytearray
) -> ZeropointError:
    """Return an error with the tensor's name and its first non-finite value."""
    source = weight.source
    layer = weight.reader.layer
    held = source.dtype if layer is None else layer.weight
    facts = f"{shown(source.file.name)}, {held}, shape {list(source.shape)}"
    place = f"tensor {printable(source.name)} ({facts})"
    found = _first_non_finite(weight, files, tile, buffer)
    if found is None:
        remedy = f"; quantize the original to this layout, or pass {option('allow_requantize', True)}"
        remedy = remedy if weight.method == LOSSLESS else ""
        return type(error)(f"{place}: {error}{remedy}")
    row, column, value, number = found
    where = f"first at row {row}, column {column}"
    if weight.shape != source.shape:
        where += f" of {printable(weight.module)}"
    return NonFiniteError(
        f"{place} contains {count(number, 'non-finite value')}, {where} ({value}); replace them, or "
        f"name it in {option('ignore')}"
    )


def _first_non_finite(
    weight: Output, files: Files, tile: Tile, buffer: bytearray
) -> tuple[int, int, float, int] | None:
    """Return a weight's first NaN or Inf and their count, or None.

    They are row, column, value and count. The weight is read in tiles of the size of ``tile``.
    """
    first: tuple[int, int, float] | None = None
    count = 0
    (rows, columns), (height, width) = weight.shape, map(len, tile)
    corners = [(row, column) for row in range(0, rows, height) for column in range(0, columns, width)]
    for row, column in corners:
        part = Tile(range(row, min(row + height, rows)), range(column, min(column + width, columns)))
        x, _ = _read(weight, files, part, buffer)
        bad = ~torch.isfinite(x)
        here = int(bad.sum())
        if here:
            place = torch.nonzero(bad)[0].tolist()
            value = float(x[tuple(place)])
            found = (place[0] + row, place[1] + column, value)
            first = found if first is None else min(first, found, key=lambda at: at[:2])
        count += here
    return None if first is None else (*first, count)
