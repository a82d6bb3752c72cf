"""Outlier Suppression+: which channels it shrinks, and what that does to a layer with outliers."""

from __future__ import annotations

from dataclasses import replace

import torch
from tests.tensors import normal
from torch import nn

import zeropoint as zp
from zeropoint.methods.nearest import METHOD as NEAREST
from zeropoint.methods.os_plus import STEP
from zeropoint.methods.rescaling import ChannelReader, Channels, rescaled
from zeropoint.schemes import Scheme


def channels(x: torch.Tensor) -> Channels:
    reader = ChannelReader(weight=normal(8, x.shape[1]), scheme=Scheme.parse("int4:channel"), method=NEAREST)
    return Channels(inputs=x, readers=(reader,), place=torch.arange(x.shape[1]))


def test_channels_within_the_threshold_stay_as_they_are() -> None:
    x = torch.tensor([[1.0, -2.0, 3.0, 100.0], [0.5, 1.0, -4.0, 50.0]])
    for note, scale in STEP.candidates(channels(x)):
        threshold = float(note.removeprefix("threshold "))
        largest = x.abs().amax(0).double()
        assert torch.allclose(scale, (largest / threshold).clamp_min(1.0), rtol=1e-2)
        assert scale[0] == 1.0
        assert scale[3] > 1.0


def test_inputs_of_zeros_have_no_candidate_that_is_better() -> None:
    found = rescaled(STEP, channels(torch.zeros(4, 4)))
    assert not found.steps.any()


class Tokens(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return zp.quantize(x, "int8:token").dequantize()


def test_a_layer_with_outliers_in_its_inputs_comes_closer() -> None:
    x = normal(256, 64, seed=1)
    x[:, ::16] *= 30
    reader = ChannelReader(weight=normal(32, 64), scheme=Scheme.parse("int8:channel"), method=NEAREST)
    reader = replace(reader, source=Tokens())
    found = rescaled(STEP, Channels(inputs=x, readers=(reader,), place=torch.arange(64)))
    assert float(found.note.split()[-2]) < 0.7
    assert int(found.steps[::16].min()) > int(found.steps[1:16].max())
