"""Activations in operators of ONNX give the numbers of our operators, in torch and in onnxruntime."""

from pathlib import Path

import onnx
import onnxruntime
import pytest
import torch
from torch import nn

import zeropoint as zp
from zeropoint.errors import UnsupportedError
from zeropoint.export.onnx import export_onnx
from zeropoint.export.onnx.activations import dynamic, require_dynamic
from zeropoint.models import DynamicQuantize
from zeropoint.recipes import Activation
from zeropoint.training import FakeQuantize

DYNAMIC = [
    "int8:token", "int8:tensor", "int8:token:narrow", "uint8:token:asym", "uint8:tensor:asym",
    "int4:g32:asym", "uint4:token", "int16:token", "int4:g32:scale=bfloat16", "float8_e4m3fn:token",
    "float8_e5m2:tensor",
    "mxfp8_e4m3", "mxfp8_e5m2", "mxfp6_e3m2", "mxfp6_e2m3", "mxfp4_e2m1", "mxint8", "mxfp4_e2m1:scale=even",
    "mxfp8_e4m3:scale=ceil", "mxfp8_e4m3:scale=rceil", "int8:tensor:narrow:scale=ceil",
]  # fmt: skip
STATIC = [
    "int8:tensor", "int8:tensor:narrow", "uint8:tensor:asym", "uint8:channel-1:asym",
    "int8:channel-1:narrow", "int4:tensor:asym", "int4:channel-1", "uint5:tensor", "int16:tensor",
    "uint16:tensor:asym", "int12:tensor", "float8_e4m3fn:tensor", "float8_e4m3fn:channel-1",
    "float8_e5m2:tensor", "int8:tensor:scale=ceil",
]  # fmt: skip


def samples(magnitude: float = 1.0) -> torch.Tensor:
    """Return numbers of many magnitudes: rows of zeros, powers of two, ties among them."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6, 5, 96, generator=generator) * torch.randn(6, 5, 1, generator=generator).exp()
    powers = torch.sign(x) * 2.0 ** torch.floor(torch.log2(x.abs()))
    x = torch.where(torch.rand(x.shape, generator=generator) < 0.2, powers, x) * magnitude
    x[0, 0] = 0
    x[0, 1, :8] = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, 127.0, -128.0, 3.5]) * magnitude
    return x


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.int32 if x.dtype == torch.float32 else torch.int16)


def _held(x: torch.Tensor, scheme: str) -> torch.Tensor:
    """Return data that the scheme has codes for: without zero points, unsigned ones have none below 0."""
    return x.abs() if scheme.startswith("uint") and "asym" not in scheme else x


@pytest.mark.crossed
@pytest.mark.parametrize("scheme", DYNAMIC)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_formula_gives_the_bits_of_quantize(scheme: str, dtype: torch.dtype) -> None:
    for magnitude in (1.0, 1e-30, 1e30):
        x = _held(samples(magnitude).to(dtype), scheme)
        require_dynamic(x, zp.Scheme.parse(scheme))
        assert torch.equal(bits(dynamic(x, scheme)), bits(zp.quantize(x, scheme).dequantize())), magnitude


class Every(nn.Module):
    """The input through each quantizer by itself."""

    def __init__(self, quantizers: list[nn.Module]) -> None:
        super().__init__()
        self.quantizers = nn.ModuleList(quantizers)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(quantizer(x) for quantizer in self.quantizers)


def outputs(model: nn.Module, x: torch.Tensor, path: Path) -> list[torch.Tensor]:
    """Return what onnxruntime gives for the exported model, optimized as it is by default."""
    export_onnx(model, (x[:2],), path, dynamic_shapes=[{0: torch.export.Dim.AUTO}])
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    return [torch.from_numpy(each) for each in session.run(None, {name: x.numpy()})]


@pytest.mark.slow
@pytest.mark.parametrize("unsigned", [False, True])
def test_onnxruntime_quantizes_dynamic_inputs_to_the_same_numbers(unsigned: bool, tmp_path: Path) -> None:
    # uint4 without a zero point refuses negative values, which the exported model would clip.
    texts = [text for text in DYNAMIC if unsigned or text != "uint4:token"]
    model = Every([DynamicQuantize(Activation(scheme=zp.Scheme.parse(t), dynamic=True)) for t in texts])
    x = torch.cat([samples(), samples(1e-20)])
    x = x.abs() if unsigned else x
    found = outputs(model, x, tmp_path / "model.onnx")
    wrong = [
        text
        for text, ours, theirs in zip(texts, model(x), found, strict=True)
        if not torch.equal(ours, theirs)
    ]
    assert wrong == []
    assert len(found) == len(texts)


def test_onnxruntime_quantizes_static_inputs_to_the_same_numbers(tmp_path: Path) -> None:
    x = samples()
    quantizers: list[nn.Module] = [FakeQuantize.from_tensor(_held(x[2:4] / 2, text), text) for text in STATIC]
    model = Every(quantizers)
    found = outputs(model, x, tmp_path / "model.onnx")
    wrong = [
        text
        for text, ours, theirs in zip(STATIC, model(x), found, strict=True)
        if not torch.equal(ours, theirs)
    ]
    assert wrong == []
    kinds = {node.op_type for node in onnx.load(tmp_path / "model.onnx").graph.node}
    assert {"QuantizeLinear", "DequantizeLinear"} <= kinds


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("nf4:g32", "ONNX has no operator that rounds to its codes"),
        ("nvfp4:dialect=zeropoint", "scales of 2 levels do not follow the data in ONNX"),
        ("int8:token:round=stochastic(1)", "ONNX rounds half to even and saturates"),
        ("int8:token:dialect=torch", "ONNX does not follow dialect torch"),
        ("int8:block2x2", "blocks of block2x2 do not follow the data in ONNX"),
        ("int8:g36", r"groups of 36 do not divide the last axis \(96\)"),
    ],
)
def test_dynamic_schemes_without_a_formula_are_an_error(text: str, reason: str, tmp_path: Path) -> None:
    model = Every([DynamicQuantize(Activation(scheme=zp.Scheme.parse(text), dynamic=True))])
    with pytest.raises(
        UnsupportedError, match=rf"^layer quantizers\.0: .* cannot be written to ONNX: {reason}"
    ):
        export_onnx(model, (samples(),), tmp_path / "model.onnx")
    assert list(tmp_path.iterdir()) == []


def test_static_schemes_without_an_operator_are_an_error(tmp_path: Path) -> None:
    for text, reason in (
        ("float6_e3m2fn:tensor", "QuantizeLinear writes no float6_e3m2fn"),
        ("int20:tensor", "QuantizeLinear writes no codes wider than int16"),
    ):
        model = Every([FakeQuantize.from_tensor(samples(), text)])
        with pytest.raises(UnsupportedError, match=reason):
            export_onnx(model, (samples(),), tmp_path / "model.onnx")
