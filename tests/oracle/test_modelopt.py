"""Four-over-six as nvidia-modelopt 0.47 exports it: its stored bytes, and the package itself where installed.

Its preset ``nvfp4_four_over_six`` tries 1 and 1.5 times the largest magnitude of each block under a tensor
scale of ``amax / (6 * 256)``, which is the rule ``four_over_six`` here. Every byte is the same but where a
reason is named:

- scales of blocks of zeros are 1 over the tensor scale there, as far as the format reaches, and 1 here;
- block scales within rounding of the middle between two values of float8_e4m3fn: it computes
  ``amax * factor / 6 * 256 / (amax_of_tensor / 6)`` in float32, and tries candidates that are rounded in yet
  another order;
- two candidates of nearly equal error, which it sums in float32.

Candidates are tried by a kernel for GPUs there; here its formula stands in, with its own scales and codes.
"""

import hashlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import zeropoint as zp

SCHEME = "nvfp4:scale=four_over_six:dialect=modelopt"
GRID = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)
NEAR = 2.0**-20
"""Of a few roundings of float32, in relation to a number; of a sum of 16 squares, too."""
# What theirs() below gave for vector(), of which 28 blocks of 32 take 4 for the largest magnitude.
SCALES = "7c736c635c7b746c645c77706b645b7c736c635c7b7467645c77746b645b7c73"
TENSOR_SCALE, CODES = 975699968, "1c5070453734bbaee83d3131ec4200fb"
"""The bits of the tensor scale, and the first 32 digits of the SHA-256 of the codes."""


def vector() -> torch.Tensor:
    """Return blocks of five sizes, none of which is near a tie."""
    numbers = (torch.arange(512) * 7919 % 1009 - 504).float() / 512
    return (numbers * torch.exp2(-(torch.arange(32) % 5).float()).repeat_interleave(16)).view(4, 128)


def test_the_bytes_are_those_of_modelopt() -> None:
    q = zp.quantize(vector(), SCHEME)
    assert q.scales[0].view(torch.uint8).numpy().tobytes().hex() == SCALES
    assert int(q.scales[1].view(torch.int32)) == TENSOR_SCALE
    assert hashlib.sha256(q.data.numpy().tobytes()).hexdigest()[:32] == CODES


def theirs(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return codes, block scales and the tensor scale that ModelOpt exports."""
    calibrator = pytest.importorskip("modelopt.torch.quantization.calib.mse").MseCalibrator
    nvfp4 = pytest.importorskip("modelopt.torch.quantization.qtensor.nvfp4_tensor").NVFP4QTensor
    rounded: Any = pytest.importorskip("modelopt.torch.quantization.tensor_quant").scaled_e4m3_impl
    blocks = x.float().view(-1, 16)
    amax = blocks.abs().amax(1, keepdim=True)
    whole = amax.max()

    def quantized(values: torch.Tensor, most: torch.Tensor) -> torch.Tensor:
        """Return what static_blockwise_fp4_fake_quant does, a kernel of Triton for GPUs."""
        scale = rounded(most / 6.0, whole * (448 / 256) / 6.0)
        safe = torch.where(scale == 0, 1.0, scale)
        found = GRID.float()[(nvfp4._cast_fp4(values.abs() / safe) & 7).long()] * safe
        return torch.where(scale == 0, 0.0, torch.where(values >= 0, found, -found))

    search = calibrator(
        amax, axis=0, step_size=0.5, start_multiplier=1.0, stop_multiplier=1.5, quant_func=quantized
    )
    search.collect(blocks)
    quantizer = SimpleNamespace(
        global_amax=whole, _amax=search.compute_amax(), block_sizes={-1: 16, "four_over_six": True}
    )
    scale, tensor = nvfp4.get_weights_scaling_factor_from_quantizer(quantizer, x)
    codes, _, _ = nvfp4.quantize(x.clone(), 16, scale, tensor)
    return codes._quantized_data, scale, tensor


def errors(x: torch.Tensor, scale: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of squares of each block."""
    blocks, step = x.double().view(len(x), -1, 16), (scale.double() * tensor.double())[..., None]
    closest = GRID[((blocks.abs() / step)[..., None] - GRID).abs().argmin(-1)] * step
    return (closest - blocks.abs()).square().sum(-1)


def unexplained(x: torch.Tensor) -> int:
    """Return how many blocks differ for no reason that the module names."""
    codes, scale, tensor = theirs(x)
    q = zp.quantize(x, SCHEME)
    assert float(q.scales[1]) == float(tensor)
    ours, scale = q.scales[0].float(), scale.float()
    off = ours != scale
    other = (q.data != codes).view(*off.shape, -1).any(-1)
    amax = x.double().view(len(x), -1, 16).abs().amax(-1)
    quotient = amax / (6 * tensor.double())
    values = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    middles = (values[1:] + values[:-1]) / 2
    tie = torch.zeros_like(off)
    for factor in (1.0, 1.5):
        wanted = quotient * factor
        tie |= ((wanted[..., None] - middles).abs() <= NEAR * wanted[..., None]).any(-1)
    mine, found = errors(x, ours, tensor), errors(x, scale, tensor)
    alike = (mine - found).abs() <= NEAR * mine
    return int((off & ~tie & ~alike & (amax > 0)).sum() + (other & ~off).sum())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_package_itself_gives_the_same_bytes_but_for_the_named_reasons(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    for number in range(60):
        x = torch.randn(64, 256, generator=generator)
        if number % 3 == 1:
            x *= torch.exp(2 * torch.randn(64, 16, generator=generator)).repeat_interleave(16, 1)
        x = ((x * 8).round() / 8 if number % 3 == 2 else x).to(dtype)
        x[3], x[5, :16], x[6, :16] = 0.0, 2.0**-20, -0.0
        assert unexplained(x) == 0, number
