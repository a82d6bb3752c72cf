"""Numbers of blocks in two levels, multiplied by a kernel: what plain torch multiplies them to."""

from unittest.mock import patch

import pytest
import torch

from zeropoint.kernels.cpu.host import arrays
from zeropoint.kernels.cpu.host.arrays import block_factors, block_offsets
from zeropoint.params.effective import effective_offset, effective_scale
from zeropoint.params.tensors import parameter_tensors
from zeropoint.schemes import Scheme

SCHEMES = (
    "q2_k", "q3_k", "q4_k", "q6_k", "iq4_xs", "int4:g32:scale=uint8:scale2=bfloat16@g64",
    "uint4:g32:scale=linear_up/float8_e4m3fn:scale2=float32@g256:offset=int8:offset2=float32@g256",
    "int3:g16:scale=int6:scale2=float16@token", "int4:g8:scale=int5:scale2=float8_e4m3fn@g64",
    "int4:g32:scale=float16:scale2=float32@g96", "int4:g32:scale=int6:scale2=float16@tensor",
)  # fmt: skip
APART = ("nvfp4", "q4_0", "int4:block2x32:scale=float16")


def any_bytes(scheme: Scheme, shape: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
    """Return levels of random bytes, numbers that are none and Inf among them."""
    generator = torch.Generator().manual_seed(2)
    found = []
    for grid, kind in parameter_tensors(scheme, shape, dtype):
        stored = torch.empty(grid, dtype=kind)
        raw = torch.randint(0, 256, (stored.nbytes,), generator=generator, dtype=torch.uint8)
        found.append(raw.view(kind).reshape(grid))
    return found


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Compare shapes and bits, but for what kind of no number there is."""
    bits = a.view(torch.int32) == b.view(torch.int32)
    return a.shape == b.shape and bool((bits | (a.isnan() & b.isnan())).all())


@pytest.mark.crossed
@pytest.mark.parametrize("text", [*SCHEMES, *APART])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(3, 768), (2, 40, 1536), (300, 768)])
def test_products_are_those_of_plain_torch(text: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    scheme = Scheme.parse(text)
    if len(shape) == 3 and "block2x32" in text:
        return
    stored = any_bytes(scheme, shape, dtype)
    with patch.object(arrays, "share", wraps=arrays.share) as shared:
        scale = torch.from_numpy(block_factors(scheme, stored, shape, dtype, dividing=False)[0])
        offset = block_offsets(scheme, stored, shape, dtype)
    assert shared.call_count == (text in SCHEMES) * (1 + bool(scheme.offsets))
    wanted = effective_scale(scheme, stored, shape, dtype)
    assert wanted is not None
    assert same(scale, wanted.reshape(-1) * float(scheme.element_step))
    own = effective_offset(scheme, stored, shape, dtype)
    assert (own is None) == (offset is None)
    assert own is None or offset is None or same(offset, own)


def test_coarse_blocks_that_end_with_the_row_are_left_to_plain_torch() -> None:
    scheme, shape = Scheme.parse("int4:g32:scale=int6:scale2=float16@g256"), (3, 320)
    stored = any_bytes(scheme, shape, torch.float32)
    scale = torch.from_numpy(block_factors(scheme, stored, shape, torch.float32, dividing=False)[0])
    wanted = effective_scale(scheme, stored, shape, torch.float32)
    assert wanted is not None
    assert same(scale, wanted.reshape(-1))
