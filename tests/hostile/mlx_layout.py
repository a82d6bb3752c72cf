"""Directories in the layout of MLX that say wrongly how they are quantized, or hold wrong tensors."""

from collections.abc import Mapping
from types import MappingProxyType

import torch
from tests.hostile.case import Case
from tests.hostile.layout import DROP, Layout, Table, cases_of, given

_U32, _U8 = torch.uint32, torch.uint8
MLX_LAYOUTS: Mapping[str, Layout] = MappingProxyType({
    "mlx": Layout(
        section={"group_size": 32, "bits": 4, "mode": "affine"},
        tensors={
            "a.weight": torch.zeros(8, 8, dtype=_U32), "a.scales": torch.ones(8, 2),
            "a.biases": torch.zeros(8, 2),
        },
    ),
})  # fmt: skip
_CONFIGS: Table = (
    (given(bits=7), "mode 'affine' with bits 7 and group_size 32 is not read; known are affine of"),
    (given(bits="4"), "mode 'affine' with bits '4' and group_size 32 is not read"),
    (given(bits=True), "mode 'affine' with bits True and group_size 32 is not read"),
    (given(bits=None), "mode 'affine' with bits None and group_size 32 is not read"),
    (given(bits=10**40), "mode 'affine' with bits 1000"),
    (given(group_size=0), "mode 'affine' with bits 4 and group_size 0 is not read"),
    (given(group_size=-32), "mode 'affine' with bits 4 and group_size -32 is not read"),
    (given(group_size=[32]), "mode 'affine' with bits 4 and group_size [32] is not read"),
    (given(mode="mxfp4", group_size=16), "mode 'mxfp4' with bits 4 and group_size 16 is not read"),
    (given(mode="mxfp4"), "scales is F32 of shape [8, 2], but must be U8 of shape [8, 2]"),
    (given(mode=["affine"]), "mode ['affine'] with bits 4 and group_size 32 is not read"),
    (given(mode="x\x1b[31m" * 500), "is not read; known are affine of"),
    (given(bits=8), "scales is F32 of shape [8, 2], but must be F32 of shape [8, 1]"),
    (given(a=5), "the configuration says 5 of it, but it has scales"),
    (given(a=False), "the configuration says False of it, but it has scales"),
    (given(a={}), "mode 'affine' with bits None and group_size None is not read"),
    (given(a={"bits": 8, "group_size": 32}), "scales is F32 of shape [8, 2], but must be F32 of shape"),
)
_TENSORS: Table = (
    (given(weight=DROP), "weight is missing, which MLX needs"),
    (given(scales=DROP), "scales is missing, which MLX needs"),
    (given(biases=DROP), "biases is missing, which affine needs"),
    (given(weight=torch.zeros(8, dtype=_U32)), "weight has shape [8]; only matrices are read"),
    (given(weight=torch.zeros(2, 8, 8, dtype=_U32)), "weight has shape [2, 8, 8]; only matrices are read"),
    (given(weight=torch.zeros(0, 8, dtype=_U32)), "is empty"),
    (given(weight=torch.zeros(8, 8)), "weight is F32 of shape [8, 8], but must be U32 of shape [8, 8]"),
    (given(weight=torch.zeros(8, 9, dtype=_U32)), "last axis 72 is not a multiple of the group, 32"),
    (given(scales=torch.ones(8, 3)), "scales is F32 of shape [8, 3], but must be F32 of shape [8, 2]"),
    (given(scales=torch.ones(8, 2, dtype=torch.int32)), "scales is I32, but must be one of"),
    (given(scales=torch.full((8, 2), float("nan"))), "scale 1 (=nan) of block (0, 0) must be finite"),
    (given(biases=torch.full((8, 2), float("inf"))), "must be finite"),
    (given(biases=torch.zeros(8, 2).half()), "biases is F16 of shape [8, 2], but must be F32 of shape [8,"),
    (given(biases=torch.zeros(16)), "biases is F32 of shape [16], but must be F32 of shape [8, 2]"),
)
MLX_CASES: tuple[Case, ...] = tuple(cases_of("mlx", MLX_LAYOUTS["mlx"], _CONFIGS, _TENSORS))
