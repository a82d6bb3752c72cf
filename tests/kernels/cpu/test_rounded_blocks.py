"""Types of llama.cpp rounded by its kernels: the bytes of the reference, also of blocks near zero."""

import pytest
import torch

import zeropoint as zp
from zeropoint.errors import NonFiniteError, RangeError
from zeropoint.functional import quantize_part
from zeropoint.ops import reference

TYPES = ("q8_0", "q4_0", "q4_1", "q5_0", "q5_1")
BASE = torch.randn(24, 256, generator=torch.Generator().manual_seed(0))
MASK = torch.rand(24, 256, generator=torch.Generator().manual_seed(1))
KINDS = {
    "normal": BASE, "bfloat16": BASE.bfloat16(), "float16": BASE.half(),
    "zeros of both signs": BASE * (MASK > 0.9),
    "blocks of zeros": BASE * (torch.arange(24) % 3 > 0)[:, None], "ties": (BASE * 16).round() / 2,
    "near the smallest scale": BASE * 2.0**-22, "subnormal": BASE * 1e-42, "tiny": BASE * 1e-38,
    "equal": torch.ones(24, 256) * BASE[:, :1], "positive": BASE.abs(), "negative": -BASE.abs(),
    "outliers": torch.where(MASK > 0.98, BASE * 100, BASE),
    "of each size": BASE * 2.0 ** (torch.arange(24) - 20)[:, None],
}  # fmt: skip


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)


@pytest.mark.crossed
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", TYPES)
def test_codes_and_parameters_are_those_of_the_reference(text: str, kind: str) -> None:
    x, scheme = KINDS[kind], zp.Scheme.parse(text)
    assert zp.explain(x, text).chosen == "cpu"
    q = zp.quantize(x, text)
    data, params = reference.quantize_dynamic(x, scheme)
    assert torch.equal(q.data, data)
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(q.params.stored, params, strict=True))
    for part in (False, True):  # of a part the reference rounds
        out = zp.quantize(torch.full_like(x, 3.0), text)
        given = quantize_part(x, scheme, (-1e4, 1e4), out=out) if part else zp.quantize(x, text, out=out)
        assert given.data.data_ptr() == out.data.data_ptr()
        assert torch.equal(out.data, data)
        assert all(torch.equal(bits(a), bits(b)) for a, b in zip(out.params.stored, params, strict=True))


@pytest.mark.crossed
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", [*TYPES, "q2_k", "q4_k", "q6_k", "iq4_xs", "tq2_0"])
def test_values_are_those_of_the_reference(text: str, kind: str) -> None:
    x, scheme = KINDS[kind], zp.Scheme.parse(text)
    data, params = reference.quantize_dynamic(x, scheme)
    params = [*params]
    assert zp.explain(x, text, op="dequantize").chosen == "cpu"
    q = zp.QuantizedTensor(
        data=data, params=zp.QuantizationParams.of(scheme, tuple(x.shape), x.dtype, params),
        shape=tuple(x.shape), dtype=x.dtype,
    )  # fmt: skip
    wanted = reference.dequantize(
        data, scheme, params, shape=tuple(x.shape), dtype=x.dtype, own_dtype=x.dtype
    )
    assert torch.equal(bits(q.dequantize()), bits(wanted))


def test_trouble_is_named_by_the_reference() -> None:
    x = BASE.clone()
    x[3, 5] = float("nan")
    with pytest.raises(NonFiniteError, match=r"\(3, 5\)"):
        zp.quantize(x, "q4_0")
    with pytest.raises(RangeError) as ours:
        zp.quantize(BASE * 1e30, "q4_1")
    with pytest.raises(RangeError) as theirs:
        reference.quantize_dynamic(BASE * 1e30, zp.Scheme.parse("q4_1"))
    assert str(ours.value) == str(theirs.value)


@pytest.mark.parametrize("scheme", ["q4_0", "q8_0"])
def test_a_row_that_blocks_do_not_divide_has_the_codes_of_the_reference(scheme: str) -> None:
    x = BASE[:, :40]
    with zp.only_backend("reference"):
        expected = zp.quantize(x, scheme)
    found = zp.quantize(x, scheme)
    assert torch.equal(found.data, expected.data)
    assert torch.equal(found.dequantize(), expected.dequantize())
