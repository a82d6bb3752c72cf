"""Weights can be divided among devices where parts of their tensors are decoded to parts of the weight."""

from pathlib import Path

import pytest
import torch
from tests.checkpoint.written import ONE, save, weight
from tests.tensors import encoded

import zeropoint as zp
from zeropoint.checkpoint.plan.checkpoint_plan import make_plan
from zeropoint.checkpoint.plan.verdicts import WAYS, indivisible, problem
from zeropoint.checkpoint.read.source import open_source
from zeropoint.codecs.compressed_tensors import layer_scheme
from zeropoint.codecs.compressed_tensors.layout import (
    SHAPE,
    Layout,
    unfit,
)
from zeropoint.codecs.protocol import LayerScheme
from zeropoint.codecs.tensor_fields import WeightPart
from zeropoint.errors import CheckpointError

SCHEMES = ("int4:g32", "int3:g16", "int6:channel", "int4:g32:asym", "w8a8", "fp8_block", "mxfp4a16")
SHAPES = ((256, 256), (40, 96), (64, 160), (384, 128), (12, 512))


def cut(layer: LayerScheme, x: torch.Tensor, ways: int, axis: int) -> bool:
    """Return whether equal parts of the tensors in a file are decoded to equal parts of the weight."""
    q = zp.quantize(x, layer.weight)
    whole = encoded(layer, q)
    if x.shape[axis] % ways:
        return False
    parts = [dict[str, torch.Tensor]() for _ in range(ways)]
    shape = tuple(x.chunk(ways, axis)[0].shape)
    for suffix, tensor in whole.items():
        shared = suffix == SHAPE or (
            tensor.shape[axis] == 1 and layer.weight.granularity.grid(LARGE)[axis] == 1
        )
        if not shared and tensor.shape[axis] % ways:
            return False
        pieces = [tensor] * ways if shared else tensor.chunk(ways, axis)
        for part, piece in zip(parts, pieces, strict=True):
            part[suffix] = torch.tensor(shape) if suffix == SHAPE else piece.contiguous()
    try:
        values = [
            layer.codec.decode(layer, part, WeightPart(0, shape, x.dtype)).dequantize() for part in parts
        ]
    except CheckpointError:  # a tensor has another shape than the part needs
        return False
    return torch.equal(torch.cat(values, axis), q.dequantize())


LARGE = (1 << 20, 1 << 20)
"""A shape in which only blocks that have a whole axis are one."""


@pytest.mark.parametrize("text", SCHEMES)
def test_what_can_be_divided_is_what_is_decoded_part_by_part(text: str) -> None:
    layer = layer_scheme(text)
    judged = []
    for shape in SHAPES:
        if unfit(layer.weight, Layout(layer.layout), shape) is None:
            for ways in WAYS:
                for axis in (0, 1):
                    said = problem(layer, shape, ways, by_columns=axis == 1) is None
                    assert said is cut(layer, weight(*shape), ways, axis), (shape, ways, axis)
                    judged.append(said)
    assert set(judged) == {True, False}


def test_one_device_takes_whatever_was_written() -> None:
    for text in SCHEMES:
        layer = layer_scheme(text)
        for shape in SHAPES:
            for by_columns in (True, False):
                assert problem(layer, shape, 1, by_columns=by_columns) is None


@pytest.mark.parametrize(
    ("text", "shape", "by_columns", "reason"),
    [
        ("int4:g128", (64, 256), True, "256 columns / 4 = 64, not a multiple of the group, 128"),
        ("fp8_block", (256, 256), False, "256 rows / 4 = 64, not a multiple of the block, 128"),
        (
            "int4:channel",
            (64, 16),
            True,
            "16 columns / 4 = 4, not a multiple of the codes that fill whole words, 8",
        ),
        (
            "int4:g32:asym",
            (16, 32),
            False,
            "16 rows / 4 = 4, not a multiple of the zero points that fill whole words, 8",
        ),
        ("int8:channel", (6, 32), False, "6 rows cannot be split into 4"),
    ],
)
def test_the_reason_has_the_numbers(text: str, shape: tuple[int, int], by_columns: bool, reason: str) -> None:
    assert problem(layer_scheme(text), shape, 4, by_columns=by_columns) == reason


def test_layers_that_give_back_the_hidden_state_are_cut_by_columns(tmp_path: Path) -> None:
    names = ("m.self_attn.o_proj", "m.self_attn.q_proj", "m.mlp.down_proj", "m.mlp.up_proj")
    folder = save(tmp_path, {f"{name}.weight": weight(64, 128) for name in names})
    made = make_plan(open_source(folder), "int4:g64", limits=ONE)
    found = {(item.module, item.ways) for item in indivisible(made.weights)}
    assert found == {(f"m.{name}", ways) for name in ("self_attn.o_proj", "mlp.down_proj") for ways in (4, 8)}
