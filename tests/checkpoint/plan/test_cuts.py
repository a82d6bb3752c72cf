"""How weights are cut into units and tiles: whole blocks and words, and memory, along either axis."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.checkpoint.written import LINEAR, save, weight

from zeropoint.checkpoint.plan import output_tensors
from zeropoint.checkpoint.plan.checkpoint_plan import make_plan
from zeropoint.checkpoint.plan.limits import BASE_MEMORY, Limits
from zeropoint.checkpoint.plan.output_tensors import Output, tile_bytes, tile_shape, tiles, unit_lines
from zeropoint.checkpoint.read.source import open_source
from zeropoint.codecs.registry import get_codec
from zeropoint.errors import CheckpointError

MIB = 1 << 20


def tensor(folder: Path, layout: str, to: str, limits: Limits, shape: tuple[int, int] = (512, 256)) -> Output:
    source = open_source(save(folder, {LINEAR: weight(*shape)}))
    return make_plan(source, to, limits=limits, codec=get_codec(layout)).weights[0]


@pytest.mark.parametrize(("to", "fields"), [("int4:g32", 8), ("int3:g32:asym", 32), ("int8:g64", 4)])
def test_tiles_of_columns_hold_rows_that_fill_whole_words(to: str, fields: int, tmp_path: Path) -> None:
    for values in (1, 5000, 40_000, 1 << 22):
        limits = Limits(workers=1, tile_values=values)
        item = tensor(tmp_path / str(values), "gptq", to, limits)
        rows, columns = tile_shape(item, limits)
        assert columns == 256
        assert rows % fields == 0
        assert rows == fields or rows * columns <= values


def test_tiles_cover_each_number_of_a_unit_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_tensors, "UNIT_VALUES", 512 * 48)
    limits = Limits(workers=1, tile_values=5000)
    for layout in ("gptq", "compressed-tensors"):
        item = tensor(tmp_path / layout, layout, "int4:g32", limits)
        step, seen = unit_lines(item), set[tuple[int, int]]()
        for start in range(0, item.extent, step):
            for tile in tiles(item, limits, start, min(step, item.extent - start)):
                found = {(row, column) for row in tile.rows for column in tile.columns}
                assert not seen & found
                seen |= found
        assert len(seen) == 512 * 256
        assert step < item.extent


def test_what_tiles_of_columns_leave_counts_as_memory(tmp_path: Path) -> None:
    limits = Limits(workers=1, tile_values=1 << 13)
    item = tensor(tmp_path, "gptq", "int4:g128", limits, (1024, 2048))
    rows, columns = tile_shape(item, limits)
    kept = sum(output.nbytes for output in item.tensors)
    assert tile_bytes(item, limits) == rows * columns * item.value_bytes + kept
    least = BASE_MEMORY + kept + 8 * columns * item.value_bytes
    assert tile_shape(item, Limits(workers=1, max_memory=least, tile_values=1)) == (8, columns)
    with pytest.raises(CheckpointError, match="too little for 8 rows of 2048 columns; use max_memory="):
        tile_shape(item, Limits(workers=1, max_memory=least - 1, tile_values=1))
