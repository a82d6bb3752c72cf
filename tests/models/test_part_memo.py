"""Outputs of solved parts are kept, and computed again for other inputs."""

import pytest
import torch
from torch import nn

from zeropoint.models.block_chain import holds_nan
from zeropoint.models.part_memo import PartMemo

_WORDS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float64: torch.int64}


class _Counting(nn.Linear):
    ran = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.ran += 1
        return super().forward(x.to(self.weight.dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("features", "first"), [(6, 0), (4, 1)])
def test_a_part_runs_again_for_inputs_that_differ_in_one_bit(
    dtype: torch.dtype, features: int, first: int
) -> None:
    part = _Counting(features, 2)
    memo = PartMemo(nn.Sequential(part), {"0": part}, lambda: 0, 1 << 20)
    memo.finish(["0"])
    # At an odd place of its memory where `first` is 1.
    x = torch.linspace(-1, 1, features + first, dtype=dtype)[first:]
    known = part(x)
    assert torch.equal(part(x.clone()), known)
    assert part.ran == 1
    other = x.clone()
    other.view(_WORDS[dtype])[-1] += 1
    assert torch.equal(part(other), nn.functional.linear(other.to(torch.float32), part.weight, part.bias))
    assert part.ran == 2


def test_infinities_whose_sum_is_nan_are_no_nan() -> None:
    ends = torch.tensor([torch.inf, 1.0, -torch.inf])
    assert not holds_nan([ends, torch.tensor([1])])
    assert holds_nan((ends, {"x": torch.tensor([0.0, torch.nan]).half()}))
