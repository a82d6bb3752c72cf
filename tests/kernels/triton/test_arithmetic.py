"""Triton's kernels where arithmetic goes wrong: ties, subnormals, lost scales, every bfloat16."""

import itertools
import math
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from tests.kernels.triton.interpreter import DEVICE

import zeropoint as zp
from zeropoint.kernels.triton import backend
from zeropoint.ops.library import request
from zeropoint.ops.registry import Op, explain

pytestmark = pytest.mark.rotating

LARGEST = torch.finfo(torch.float32).max


@pytest.fixture(autouse=True)
def triton_only(interpreted: None) -> Iterator[None]:
    with zp.only_backend("triton"):
        yield


def params_of(scales: torch.Tensor, shape: tuple[int, int], dtype: torch.dtype) -> zp.QuantizationParams:
    """Return int8 parameters with a scale for each row."""
    return zp.QuantizationParams(
        scheme=zp.Scheme.parse("int8:channel"), shape=shape, scales=(scales.reshape(-1, 1),), dtype=dtype
    )


def assert_same_codes(x: torch.Tensor, params: zp.QuantizationParams) -> None:
    found = zp.quantize(x.to(DEVICE), params.to(DEVICE)).to("cpu")
    with zp.only_backend("reference"):
        expected = zp.quantize(x, params)
    assert torch.equal(found.data, expected.data)


def test_every_bfloat16_takes_the_code_of_the_reference_under_any_scale() -> None:
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    x = every[torch.isfinite(every)]
    scales = torch.tensor([2.0**-128, 1e-38, 0.007, 1.0, 3.0, 1e30, LARGEST])
    rows = x.expand(len(scales), -1).contiguous()
    assert_same_codes(rows, params_of(scales, tuple(rows.shape), torch.bfloat16))


def test_ties_go_to_even_codes_and_ends_are_clamped() -> None:
    halves = torch.arange(-600, 600) / 2
    x = torch.stack([halves, torch.nextafter(halves, halves + 1), torch.nextafter(halves, halves - 1)])
    assert_same_codes(x, params_of(torch.ones(3), (3, 1200), torch.float32))
    few, one = torch.tensor([[0.5, 1.5, 2.5, -0.5, -1.5, 300.0, -300.0]]), torch.ones(1)
    found = zp.quantize(few.to(DEVICE), params_of(one, (1, 7), torch.float32).to(DEVICE))
    assert found.codes.tolist() == [[0, 2, 2, 0, -2, 127, -128]]


def test_a_block_whose_scale_was_lost_holds_zeros() -> None:
    x = torch.tensor([[1.0, -2.0, 0.0]] * 2)
    params = params_of(torch.tensor([0.5, 0.5]), (2, 3), torch.float32)
    params.scales[0][0], params.scales[0][1] = 0.0, math.inf
    kernel = request(Op.QUANTIZE, x.to(DEVICE), params.scheme)
    assert explain(kernel, "triton").chosen == "triton"
    data = torch.ops.zeropoint.quantize(x.to(DEVICE), [params.scales[0].to(DEVICE)], "int8:channel")
    assert data.tolist() == [[0, 0, 0]] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_every_code_has_the_value_of_the_reference_under_any_scale(dtype: torch.dtype) -> None:
    scales = torch.cat([torch.logspace(-38, 35, 400), torch.randn(100).abs(), torch.tensor([2.0**-128])])
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8).expand(len(scales), -1).contiguous()
    params = params_of(scales, (len(scales), 256), torch.float32)
    q = zp.QuantizedTensor(data=codes, params=params, shape=tuple(codes.shape), dtype=torch.float32)
    with zp.only_backend("reference"):
        expected = q.dequantize(dtype)
    found = q.to(DEVICE).dequantize(dtype).cpu()
    assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


def test_rows_and_blocks_of_any_number_are_found() -> None:
    for shape, scheme in itertools.product(
        ((1, 1), (5, 1), (1, 1025), (3, 4, 341), (2, 3, 4, 5)), ("int8:tensor", "int8:channel", "int8:token")
    ):
        x = torch.randn(shape) * torch.exp(torch.randn((*shape[:-1], 1)))
        with zp.only_backend("reference"):
            expected = zp.quantize(x, scheme)
        assert torch.equal(zp.quantize(x.to(DEVICE), scheme).data.cpu(), expected.data), (shape, scheme)


def test_tensors_of_the_host_are_refused_without_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    # A shape that no other test asked for: answers are kept.
    with pytest.raises(zp.UnsupportedError, match="'triton' cannot run quantize_dynamic: the data is on cpu"):
        zp.quantize(torch.ones(3, 19), "int8:channel")


def test_without_triton_there_is_a_reason() -> None:
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import importlib.util as u; found = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name == 'triton' else found(name, *a)\n"
        "import torch, zeropoint as zp\n"
        "print(zp.explain(torch.ones(2, 4), 'int8:channel').reasons['triton'])"
    )
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    reported = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert reported.stdout.strip() == "needs the package triton, which is not installed"


@pytest.mark.parametrize(("version", "taken"), [("3.5.1", False), ("3.6.0+git1", True), ("4.0", True)])
def test_versions_that_flush_subnormals_are_refused(
    version: str, taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("triton.__version__", version)
    backend._triton_refusal.cache_clear()
    wanted = request(Op.QUANTIZE, torch.ones(2, 4, device=DEVICE), zp.Scheme.parse("int8:channel"))
    reason = backend.BACKEND.refusal(wanted)
    backend._triton_refusal.cache_clear()
    refused = f"triton {version} takes subnormal quotients for zero; 3.6 does not"
    assert reason == (None if taken else refused)
