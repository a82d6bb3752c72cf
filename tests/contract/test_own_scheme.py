"""A two-level scheme with minima of a user's own: one line, and everything that other schemes have."""

from pathlib import Path

import pytest
import torch
from torch.utils import _pytree as pytree

import zeropoint as zp
from zeropoint.errors import RangeError, ShapeError

SCHEMES = (
    "uint3:g16:scale=uint5:scale2=bfloat16@g64:offset=int7:offset2=bfloat16@g64",
    "uint4:g32:scale=uint6:scale2=float16@g64:offset=uint6:offset2=signed/float16@g64",
    "float4_e2m1fn:g16:scale=ue4m3:scale2=float32@tensor:offset=float16",
    "nf4:g16:scale=linear_late/dynamic8:scale2=float32@g64:center=float32@tensor",
    "int6:g32:scale=signed_late/float16:dialect=ggml",
)


def tensor() -> torch.Tensor:
    x = torch.randn(6, 128, generator=torch.Generator().manual_seed(3))
    return x * torch.arange(1, 7)[:, None] + torch.arange(6)[:, None]


@pytest.mark.parametrize("text", SCHEMES)
def test_a_scheme_of_ones_own_has_a_bound_gradients_and_a_file(text: str, tmp_path: Path) -> None:
    x = tensor().requires_grad_()
    q = zp.quantize(x, text)
    assert zp.Scheme.parse(str(q.scheme)) == q.scheme
    assert q.bits_per_value == q.scheme.bits_per_value(q.shape)
    bound = q.error_bound().repeat_interleave(q.scheme.granularity.extents[0], -1)
    assert bool(((q.dequantize().double() - x.double()).abs() <= bound).all())
    q.params.validate()
    y = zp.fake_quantize(x, text)
    assert torch.equal(y, q.dequantize())
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.mean() > 0.9
    q.save(tmp_path / "own.safetensors")
    read = zp.QuantizedTensor.load(tmp_path / "own.safetensors")
    assert read.params == q.params
    assert torch.equal(read.dequantize(), q.dequantize())
    leaves, spec = pytree.tree_flatten(q)
    assert torch.equal(pytree.tree_unflatten(leaves, spec).dequantize(), q.dequantize())
    assert zp.explain(x.detach(), text, op="quantize").chosen == "reference"


@pytest.mark.parametrize("text", SCHEMES)
def test_given_parameters_give_the_values_of_fake_quantize(text: str) -> None:
    x = tensor()
    params = zp.choose_params(x, text)
    q = zp.quantize(x, params)
    assert torch.equal(zp.fake_quantize(x, params), q.dequantize())
    error = (q.dequantize().double() - x.double()).abs()
    assert bool(
        (error <= params.error_bound().repeat_interleave(128 // params.scales[0].shape[-1], -1)).all()
    )


def test_kernels_say_what_they_lack() -> None:
    reasons = [zp.explain(tensor(), text, op="quantize").reasons["cpu"] for text in SCHEMES]
    assert [reason.partition(" are known")[0] for reason in reasons] == [
        "offsets", "offsets", "offsets", "centered scales", "signed scales"
    ]  # fmt: skip


def test_a_part_of_a_tensor_has_no_level_that_follows_from_all_of_it() -> None:
    scheme = zp.Scheme.parse(SCHEMES[3])
    with pytest.raises(zp.UnsupportedError, match="follows from all blocks of a tensor"):
        zp.functional.quantize_part(tensor()[:2], scheme, (-1.0, 1.0))


@pytest.mark.parametrize(
    "text",
    [
        "int4:g4:scale=uint8:scale2=float16@channel",
        "nf4:g4:scale=linear_late/dynamic8:scale2=float32@channel:center=float32@channel",
    ],
)
def test_blocks_that_do_not_lie_in_those_of_the_next_level_are_an_error(text: str) -> None:
    assert zp.quantize(torch.ones(3, 17), text).shape == (3, 17)
    with pytest.raises(ShapeError, match="blocks of channel must be made of whole blocks of g4"):
        zp.quantize(torch.ones(17), text)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_coarse_scales_whose_product_overflows_are_an_error(backend: str) -> None:
    x = torch.tensor([[8.1768e36, 1.4914e37, 4.3621e37, 1.7014e38]])
    element, finest = "codebook[0.0,0.4000000059604645,0.5]:tensor", "scale=ue3m2b3finite"
    text = f"{element}:{finest}:scale2=rceil@tensor:scale3=float64@tensor"
    with zp.only_backend(backend), pytest.raises(RangeError, match="above the finest overflow"):
        zp.quantize(x, text)
