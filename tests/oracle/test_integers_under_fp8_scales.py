"""The preset nvint4 against its formula, in plain float64 of numpy."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import torch
from tests.tensors import normal

import zeropoint as zp

MOST = np.float32(448 * 7)


def test_nvint4_is_integers_up_to_seven_under_scales_of_nvfp4() -> None:
    x = normal(24, 96, seed=8)
    q = zp.quantize(x, "nvint4")
    blocks = x.numpy().reshape(24, 6, 16)
    tensor = np.float32(np.abs(blocks).max() / MOST)
    scales = (np.abs(blocks).max(2) / np.float32(7) / tensor).astype(ml_dtypes.float8_e4m3fn)
    assert np.array_equal(q.scales[0].float().numpy(), scales.astype(np.float32))
    assert q.scales[1].item() == tensor
    step = scales.astype(np.float32)[..., None] * tensor
    codes = np.clip(np.rint(blocks / step), -7, 7).reshape(24, 96)
    assert int((q.codes.numpy() != codes).sum()) == 0
    assert torch.equal(
        q.dequantize(), torch.from_numpy((codes * step.repeat(16, 2).reshape(24, 96)).astype(np.float32))
    )


def test_nvint4_has_less_error_than_nvfp4_for_values_without_tails() -> None:
    x = torch.rand(64, 256, generator=torch.Generator().manual_seed(1)) * 2 - 1
    errors = [(zp.quantize(x, name).dequantize() - x).square().mean() for name in ("nvint4", "nvfp4")]
    assert errors[0] < 0.6 * errors[1]
