"""Linear layers on a GPU: sums of codes are exact, those of values within their bound, for every shape."""

from collections.abc import Iterator

import pytest
import torch
from tests.kernels.triton.interpreter import DEVICE
from tests.tensors import normal
from torch import nn

import zeropoint as zp
from zeropoint.errors import NonFiniteError, UnsupportedError
from zeropoint.kernels.triton import linear_launch
from zeropoint.kernels.triton.linear_tiles import value_tiles
from zeropoint.models import quantize_model
from zeropoint.ops import library, registry
from zeropoint.ops.linear import linear_request
from zeropoint.ops.registry import Op, Request

pytestmark = pytest.mark.rotating

QUICK = ("int4:g128", "nvfp4", "uint4:g32:asym")
SLOW = (
    "int8:channel", "uint8:channel:asym", "int8:tensor", "int3:g8", "int2:channel", "int4:g24", "int4:g1",
    "float8_e4m3fn:channel", "float8_e5m2:tensor", "float8_e4m3fn:block16x32", "float6_e3m2fn:g32", "mxfp4",
    "mxfp8_e4m3", "nf4:g64", "int4:g32:scale=float16", "int8:channel1", "int4:g32:scale=ue4m3",
)  # fmt: skip
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = ((3, 40, 384), (20, 70, 200), (1, 5, 37))
"""Tokens, rows and columns: few tokens and many, in whole steps and not."""


@pytest.fixture(autouse=True)
def asked_again(interpreted: None) -> Iterator[None]:
    """Forget what the registry has chosen: the interpreter answers for tensors of the host."""

    def forget() -> None:
        for cached in (registry.choose, registry.kernel_of, registry.has_kernel):
            cached.cache_clear()

    forget()
    yield
    forget()


def computed(x: torch.Tensor, q: zp.QuantizedTensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return the output of a layer on values, by Triton's kernels."""
    here, added = q.to(DEVICE), None if bias is None else bias.to(DEVICE)
    with zp.only_backend("triton"):
        y = library.linear_values(
            x.to(DEVICE), here.data, list(here.params.stored), added, str(q.scheme), q.dtype
        )
    return y.cpu()


def product(
    x: torch.Tensor, q: zp.QuantizedTensor, bias: torch.Tensor | None, source: str,
    given: list[torch.Tensor] | None = None,
) -> torch.Tensor:  # fmt: skip
    """Return the output of a layer on codes, by Triton's kernels."""
    here, added = q.to(DEVICE), None if bias is None else bias.to(DEVICE)
    params = [each.to(DEVICE) for each in given or []]
    with zp.only_backend("triton"):
        y = library.linear(
            x.to(DEVICE), params, here.data, list(here.params.stored), added, source, str(q.scheme), q.dtype
        )
    return y.cpu()


def quantized(x: torch.Tensor, scheme: str) -> zp.QuantizedTensor:
    with zp.only_backend("reference"):
        return zp.quantize(x, scheme)


def assert_near(found: torch.Tensor, x: torch.Tensor, q: zp.QuantizedTensor, bias: torch.Tensor) -> None:
    """Compare with sums in float64 of values in the dtype of ``x``, within roundings of float32 and that."""
    with zp.only_backend("reference"):
        values = q.dequantize(x.dtype).double()
    exact = x.double() @ values.t() + bias.double()
    size = x.double().abs() @ values.abs().t() + bias.double().abs()
    bound = (x.shape[1] + 1) * 2.0**-24 * size + torch.finfo(x.dtype).eps / 2 * exact.abs()
    assert found.dtype == x.dtype
    assert bool(((found.double() - exact).abs() <= bound).all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scheme", [*QUICK, *(pytest.param(s, marks=pytest.mark.slow) for s in SLOW)])
def test_sums_of_values_are_within_their_bound(scheme: str, dtype: torch.dtype) -> None:
    for tokens, rows, cols in SHAPES if dtype is not torch.float32 else SHAPES[::2]:
        q, bias = quantized(normal(rows, cols, seed=rows), scheme), normal(rows, 2, seed=cols)[:, 0].to(dtype)
        x = normal(tokens, cols, seed=tokens).to(dtype)
        assert_near(computed(x, q, bias), x, q, bias)
        assert_near(computed(x.reshape(1, tokens, cols), q, None)[0], x, q, torch.zeros(rows))


def test_many_tokens_are_multiplied_by_the_dequantized_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_launch, "DECODED", 18)
    q, x, bias = quantized(normal(9, 64, seed=0), "mxfp4"), normal(19, 64, seed=1).bfloat16(), torch.ones(9)
    monkeypatch.setattr(linear_launch, "value_tiles", None)
    assert_near(computed(x, q, bias), x, q, bias)


def test_pairs_begin_at_whole_words() -> None:
    q, x = quantized(normal(9, 64, seed=0), "int4:channel"), normal(2, 65, seed=1).bfloat16().reshape(-1)
    odd = x[1:129].reshape(2, 64)
    assert odd.storage_offset() == 1
    assert torch.equal(computed(odd, q, None), computed(odd.clone(), q, None))


def test_only_pairs_of_whole_scales_meet_the_bytes_of_codes() -> None:
    def paired(scheme: str, cols: int, dtype: torch.dtype) -> bool:
        request = Request(
            op=Op.LINEAR_VALUES, scheme=zp.Scheme.parse(scheme), shape=(32, cols), dtype=dtype,
            own_dtype=dtype, device=torch.device(DEVICE),
        )  # fmt: skip
        return value_tiles(request, 1, bias=False).shape.paired

    assert paired("int4:g128", 256, torch.bfloat16)
    assert paired("int4:channel", 90, torch.float16)
    assert not paired("int4:channel", 91, torch.float16)
    assert not paired("int4:g24", 96, torch.float16)
    assert not paired("int4:g128", 256, torch.float32)
    assert not paired("int8:channel", 256, torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "scheme",
    ["int8:channel", *(pytest.param(s, marks=pytest.mark.slow) for s in ("int8:tensor", "uint4:channel"))],
)
@pytest.mark.parametrize("source", ["int8:token", "uint8:token:asym", "int8:token:narrow"])
def test_results_are_exact_sums_times_scales_in_that_order(
    source: str, scheme: str, dtype: torch.dtype
) -> None:
    for tokens, rows, cols in SHAPES:
        x, weight = normal(tokens, cols, seed=tokens).to(dtype), normal(rows, cols, seed=rows)
        q, bias = quantized(weight.abs() if scheme[0] == "u" else weight, scheme), normal(1, rows, seed=2)[0]
        given = quantized(x, source)
        codes = given.codes.long() - (0 if given.zero_point is None else given.zero_point)
        sums = (codes @ q.codes.long().t()).float()
        expected = (sums * q.scales[0].reshape(1, -1)) * given.scales[0].float() + bias
        assert torch.equal(product(x, q, bias, source), expected.to(dtype)), (tokens, rows, cols)


@pytest.mark.parametrize(
    "scheme",
    ["int4:g64", *(pytest.param(s, marks=pytest.mark.slow) for s in ("int8:g32", "int4:g96", "int8:g192"))],
)
@pytest.mark.parametrize("source", ["int8:token", "uint8:token:asym"])
def test_sums_of_groups_agree_with_the_reference(scheme: str, source: str) -> None:
    for tokens in (3, 20):
        x, q = normal(tokens, 384, seed=0), quantized(normal(21, 384, seed=1), scheme)
        with zp.only_backend("reference"):
            expected = library.linear(x, [], q.data, list(q.scales), None, source, scheme, q.dtype)
        torch.testing.assert_close(product(x, q, None, source), expected, rtol=1e-5, atol=2e-5)


def test_given_parameters_and_the_longest_sums_are_those_of_integers() -> None:
    weight = torch.full((2, 4096), -128.0)
    q = quantized(weight, "int8:tensor")
    unit = zp.QuantizationParams(
        scheme=q.scheme, shape=q.shape, scales=(torch.ones_like(q.scales[0]),), dtype=q.dtype
    )
    with zp.only_backend("reference"):
        q = zp.quantize(weight, unit)
    given = [torch.ones(1, 1), torch.full((1, 1), 7, dtype=torch.int32)]
    found = product(torch.full((3, 4096), 248.0), q, None, "uint8:tensor:asym", given)
    assert torch.equal(found, torch.full((3, 2), -128 * 248 * 4096, dtype=torch.int64).float())


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_refused_with_its_place(bad: float) -> None:
    x, q = torch.randn(2, 20, 64), quantized(normal(5, 64, seed=0), "int8:channel")
    x[1, 6, 63] = bad
    with pytest.raises(NonFiniteError, match=r"at \(1, 6, 63\)"):
        product(x, q, None, "int8:token")
    with pytest.raises(NonFiniteError, match=r"at \(1, 6, 63\)"):
        product(x, q, None, "int8:tensor", [torch.ones(1, 1)])


def test_nothing_comes_of_nothing() -> None:
    q = quantized(normal(5, 64, seed=0), "int8:channel")
    assert product(torch.empty(2, 0, 64), q, None, "int8:token").shape == (2, 0, 5)
    assert computed(torch.empty(0, 64), q, None).shape == (0, 5)


@pytest.mark.parametrize(
    ("source", "weight", "reason"),
    [
        ("", "int8:channel", "an input that is not quantized is multiplied by values of the weight"),
        ("int8:token", "int8:g16", "groups of 16 are not whole times 32"),
        ("int8:token:scale=search", "int8:channel", "are chosen by errors"),
        ("int8:token:scale=float8_e4m3fn", "int8:channel", "are not floats of one level"),
    ],
)
def test_what_the_kernels_do_not_multiply_is_left_to_others(source: str, weight: str, reason: str) -> None:
    dtypes = torch.float32, torch.float32
    request = linear_request(source, weight, (8, 64), dtypes, torch.device(DEVICE), given=False)
    with pytest.raises(UnsupportedError, match=reason):
        registry.choose(request, "triton")


def test_a_layer_takes_the_kernels_by_itself() -> None:
    torch.manual_seed(0)
    layer = quantize_model(nn.Sequential(nn.Linear(64, 48)).bfloat16(), "nvfp4a16").model.to(DEVICE)
    x = torch.randn(5, 64, dtype=torch.bfloat16, device=DEVICE)
    assert layer[0].explain().startswith("inputs are multiplied by dequantized panels; not by ")
    with torch.no_grad():
        found = layer(x)
        values = layer[0].weight.quantized().dequantize(torch.bfloat16)
        expected = x.double() @ values.double().t() + layer[0].bias.double()
    torch.testing.assert_close(found.double(), expected, rtol=2.0**-8, atol=1e-5)
    x.requires_grad_()
    layer(x).sum().backward()
    assert x.grad is not None
