"""Tensors that are more than memory: those of torch.func, fake ones, with a lazy sign, and trees of ours."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

import zeropoint as zp

SCHEMES = ("int8:tensor", "uint4:g4:asym", "float4_e2m1fn:g4:scale=ue4m3:scale2=float32@tensor", "nf4:g8")


def fake(x: torch.Tensor) -> torch.Tensor:
    return zp.fake_quantize(x, zp.QuantizationParams.new(0.1))


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch's own, in jvp
@pytest.mark.parametrize(
    "transformed",
    [
        torch.func.vmap(fake),
        torch.func.grad(lambda y: fake(y).sum()),
        lambda x: torch.func.jvp(fake, (x,), (torch.ones_like(x),)),
        torch.func.jacrev(fake),
        torch.func.vmap(lambda y: zp.quantize(y, "int8:tensor").dequantize()),
    ],
)
def test_transforms_of_torch_func_are_refused_in_one_sentence(transformed: Callable[..., Any]) -> None:
    with pytest.raises(zp.DtypeError, match=r"wrapper of torch\.func.*torch\.autograd"):
        transformed(torch.randn(2, 8))


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_lazy_sign_is_seen(dtype: torch.dtype, backend: str) -> None:
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    lazy = torch._neg_view(x)
    assert lazy.is_neg()
    with zp.only_backend(backend):
        for scheme in SCHEMES:
            expected = zp.quantize(-x, scheme)
            found = zp.quantize(lazy, scheme)
            assert torch.equal(found.data, expected.data)
            assert torch.equal(zp.fake_quantize(lazy, found.params), zp.fake_quantize(-x, found.params))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_parameters_of_a_fake_tensor_are_fake(scheme: str) -> None:
    expected = zp.choose_params(torch.ones(4, 8), scheme)
    with FakeTensorMode() as mode:
        params = zp.choose_params(torch.randn(4, 8), scheme)
    outside = zp.choose_params(mode.from_tensor(torch.ones(4, 8)), scheme)
    for found in (params, outside):
        assert [s.shape for s in found.scales] == [s.shape for s in expected.scales]
        assert [s.dtype for s in found.scales] == [s.dtype for s in expected.scales]
        assert (found.zero_point is None) == (expected.zero_point is None)


def test_a_tree_map_keeps_the_dtype_of_parameters() -> None:
    params = zp.choose_params(torch.randn(4, 8).bfloat16(), "int8:channel:scale=input")
    q = zp.quantize(torch.randn(4, 8), params)
    again = pytree.tree_map(lambda leaf: leaf, q)
    again.params.validate()
    assert again.params == q.params


@pytest.mark.parametrize(
    ("element", "code"), [("ternary", 3), ("codebook[0,0.5,1]", 3), ("codebook[0,1,2,3,4]", 6)]
)
def test_codes_past_the_end_of_a_codebook_are_not_loaded(element: str, code: int, tmp_path: Path) -> None:
    q = zp.quantize(torch.zeros(2, 8), f"{element}:g8")
    q.save(tmp_path / "good.safetensors")
    assert torch.equal(zp.QuantizedTensor.load(tmp_path / "good.safetensors").data, q.data)
    with safe_open(tmp_path / "good.safetensors", "pt") as file:
        tensors, metadata = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118
    tensors["data"][0, 0] |= code
    save_file(tensors, tmp_path / "bad.safetensors", metadata=metadata)
    with pytest.raises(zp.CheckpointError, match=rf"holds code {code}; .* has 0\.\."):
        zp.QuantizedTensor.load(tmp_path / "bad.safetensors")
