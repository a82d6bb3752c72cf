"""Presets, and schemes that kernels know in part: compiled, exported, empty, saved, within their bounds."""

import io
import math
from pathlib import Path

import pytest
import torch

import zeropoint as zp
from zeropoint.layout.blocks import spread_blocks
from zeropoint.schemes import PRESETS
from zeropoint.tensor import restored, restored_params

KINDS = [
    "int4:g4:center=float32@tensor", "int8:channel:center=float16@tensor",
    "nf4:g16:scale=float16:center=float32@tensor", "uint4:g32:offset=float16",
    "uint4:g16:scale=uint6:scale2=float16@g64:offset=uint6:offset2=signed/float16@g64",
    "int4:channel:asym:scale=uint8:scale2=float32@tensor", "int4:g16:scale=signed", "table2:g32",
    "table4:channel",
    "vector2[higgs16]:g16", "vector2[higgs16]:g16:scale=search", "vector4[1,0,0,1,-1,0,0,-1]:channel",
    "digits5[-1,0,1]:g15", "digits5[-1,0,1]:g15:scale=search", "digits3[-1,-0.5,0,0.5,1]:tensor",
    "choice[e2m1,int4]:g16", "codebook[-1,-0.5,0,0.25,1]:g16", "ternary:g32", "binary:channel", "iq4:g32",
    "int4:g16:scale=dynamic8", "int4:g32:scale=search", "e2m1:g16:scale=four_over_six/ue4m3",
    "int8:tensor:cast", "uint8:channel:scale=edge:offset=float32", "float8_e4m3fn:cast",
]  # fmt: skip


def matrix() -> torch.Tensor:
    return torch.randn(4, 240, generator=torch.Generator().manual_seed(0))


def rows_for(scheme: str) -> torch.Tensor:
    """Return a matrix of whole blocks of presets, whose last axis kinds of odd blocks do not divide."""
    return torch.randn(4, 256, generator=torch.Generator().manual_seed(0)) if scheme in PRESETS else matrix()


# torch.compile (2.13) makes an object of an autograd function itself, of which torch warns.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.rotating
@pytest.mark.parametrize("scheme", [*PRESETS, *KINDS])
def test_schemes_given_as_text_are_compiled(scheme: str) -> None:
    x = rows_for(scheme)
    torch._dynamo.reset()
    fake = torch.compile(lambda x: zp.fake_quantize(x, scheme), backend="eager", fullgraph=True)
    assert torch.equal(fake(x), zp.fake_quantize(x, scheme))
    values = torch.compile(lambda x: zp.quantize(x, scheme).dequantize(), backend="eager")
    assert torch.equal(values(x), zp.quantize(x, scheme).dequantize())


@pytest.mark.parametrize("scheme", KINDS)
def test_schemes_are_exported(scheme: str) -> None:
    class Fake(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return zp.fake_quantize(x, scheme)

    x = matrix()
    found = torch.export.export(Fake(), (x,)).module()(x)
    assert torch.equal(found, zp.fake_quantize(x, scheme))


@pytest.mark.rotating
@pytest.mark.parametrize("scheme", [*PRESETS, *KINDS])
def test_tensors_without_elements_have_codes_without_elements(scheme: str) -> None:
    for shape in [(0, 256), (256, 0), (3, 0, 64)]:
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            x = torch.zeros(shape, dtype=dtype)
            q = zp.quantize(x, scheme)
            assert (q.data.numel(), tuple(q.dequantize().shape), q.dequantize().dtype) == (0, shape, dtype)
            assert zp.fake_quantize(x, scheme).shape == x.shape
            assert q.error_bound().shape == q.scheme.granularity.grid(shape)


@pytest.mark.parametrize("scheme", KINDS)
def test_values_are_within_the_bound_on_every_backend_and_survive_files(scheme: str, tmp_path: Path) -> None:
    x = matrix()
    q = zp.quantize(x, scheme)
    with zp.only_backend("reference"):
        assert torch.equal(q.dequantize(), zp.quantize(x, scheme).dequantize())
    bound = spread_blocks(q.error_bound(x), q.scheme.granularity, q.shape)
    assert bool(((q.dequantize() - x).abs() <= bound).all())
    assert math.isfinite(float(bound.max()))
    q.save(tmp_path / "q.safetensors")
    torch.save(q, tmp_path / "q.pt")
    for read in (
        zp.QuantizedTensor.load(tmp_path / "q.safetensors"), torch.load(tmp_path / "q.pt", weights_only=True)
    ):  # fmt: skip
        assert torch.equal(read.data, q.data)
        assert read.params == q.params
        assert read.own_params is q.own_params


def test_a_pickle_with_codes_or_scales_of_other_shapes_is_refused() -> None:
    q = zp.quantize(matrix(), "int4:g16")
    with pytest.raises(zp.CheckpointError, match=r"must be torch.uint8 of shape \(4, 120\)"):
        restored(q.data[:2], q.params, q.shape, q.dtype, q.own_params)
    with pytest.raises(zp.CheckpointError, match="parameters of int4:g16 for a tensor of shape"):
        restored_params("int4:g16", q.shape, q.dtype, (q.scales[0][:2],), None, None)


def test_a_file_of_a_pickle_that_names_other_functions_is_still_refused() -> None:
    class Other:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return print, ("called",)

    file = io.BytesIO()
    torch.save([zp.quantize(matrix(), "int8:channel"), Other()], file)
    file.seek(0)
    with pytest.raises(Exception, match="Weights only load failed"):
        torch.load(file, weights_only=True)
