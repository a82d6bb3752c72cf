"""The kernels on random schemes of the whole grammar: they give what the reference gives, or its error."""

import random
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tests.property.random_schemes import (
    WORDS,
    any_scheme,
    hard_tensor,
    random_scheme,
    random_tensor,
    words_of,
)
from tests.property.test_bound import excess

import zeropoint as zp
from zeropoint.formats.torch_dtypes import dtype_of
from zeropoint.ops import library
from zeropoint.schemes import ScaleLevel, Scheme

pytestmark = pytest.mark.rotating

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
PARTS = 8
"""Parts of a sweep, each with a seed of its own: what fails is found again in an eighth of the time."""
IN_THE_QUICK_SUITE, IN_THE_SLOW_ONE = 800, 50_000


def random_case(rng: random.Random) -> tuple[Scheme, torch.Tensor]:
    """Return a scheme that the kernels run and a tensor for it, half of them of whole steps of kernels."""
    while True:
        text, wide = random_scheme(rng), rng.random() < 0.5
        if wide:
            text = re.sub(r"\bg(\d+)", lambda group: f"g{int(group[1]) * 16}", text)
        try:
            scheme = Scheme.parse(text)
            x = random_tensor(rng, scheme, rng.choice(DTYPES))
            if wide and x.ndim:
                turns = [x.roll(n, -1) * rng.choice([1.0, 1.0, -0.25]) for n in range(rng.randrange(1, 24))]
                x = torch.cat(turns, -1)
            if zp.explain(x, scheme).chosen == "cpu" and all(fits_a_byte(level) for level in scheme.scales):
                return scheme, x
        except (zp.SchemeError, zp.FormatError):
            continue
        except zp.ShapeError:
            return scheme, x


def fits_a_byte(level: ScaleLevel) -> bool:
    """Return whether scales have a dtype of torch or are codes of a byte, as those that are kept have."""
    return level.format is None or dtype_of(level.format) is not None or level.format.bits <= 8


def outcome(function: Callable[[], Any]) -> Any:
    """Return what a function returns, or the class of zeropoint's error that it raises."""
    try:
        return function()
    except zp.ZeropointError as error:
        return type(error)


def on_both(function: Callable[[], Any]) -> tuple[Any, Any]:
    """Return the outcome on the reference and on the kernels."""
    found = []
    for backend in ("reference", "cpu"):
        with zp.only_backend(backend):
            found.append(outcome(function))
    return found[0], found[1]


def by_default(function: Callable[[], Any]) -> tuple[Any, Any]:
    """Return the outcome on the reference and on whatever runs it by default."""
    with zp.only_backend("reference"):
        expected = outcome(function)
    return expected, outcome(function)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Compare dtype, shape and bytes; every NaN is one."""
    if a.dtype.is_floating_point and a.element_size() > 1:
        nan = torch.isnan(a)
        if not torch.equal(nan, torch.isnan(b)):
            return False
        a, b = (t.masked_fill(nan, 0) for t in (a, b))
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*(bits_of(t) for t in (a, b)))


def bits_of(x: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor, flat."""
    flat = x.reshape(-1)
    return flat.view(torch.uint8) if flat.numel() else flat.to(torch.uint8)


def quantized(x: torch.Tensor, scheme: Scheme) -> list[torch.Tensor]:
    """Return codes, scales and zero points."""
    q = zp.quantize(x, scheme)
    q.params.validate()
    return [q.data, *q.params.stored]


def checks(rng: random.Random, scheme: Scheme, x: torch.Tensor) -> Iterator[tuple[str, Any, Any]]:
    """Yield what is compared, and both outcomes."""
    expected, found = on_both(lambda: quantized(x, scheme))
    yield "parameters and codes", expected, found
    if isinstance(expected, type) or scheme.chained is not None:  # of these, kernels make no other codes
        return
    with zp.only_backend("reference"):
        q = zp.quantize(x, scheme)
    params = q.params
    given = list(params.stored), str(scheme)
    hard = hard_tensor(rng, x, params)
    beyond = hard * rng.choice([1.0, 1.5, 4.0])
    yield "codes under given parameters", *on_both(lambda: library.quantize(hard, *given))
    yield "codes of larger numbers", *on_both(lambda: library.quantize(beyond, *given))
    if beyond.numel() and rng.random() < 0.3:
        beyond.view(-1)[rng.randrange(beyond.numel())] = rng.choice([torch.nan, torch.inf, -torch.inf])
    slope = torch.where(torch.rand(x.shape) < 0.5, 0.75, -2.0).to(x.dtype)
    yield "fake-quantized values", *on_both(lambda: library.fake_quantize(beyond, *given))
    yield "gradients", *on_both(lambda: library.fake_quantize_backward(slope, beyond, *given))
    wanted = *given, list(x.shape), rng.choice(DTYPES), x.dtype
    yield "values", *on_both(lambda: library.dequantize(q.data, *wanted))
    codes = torch.randint(0, 256, q.data.shape, dtype=torch.uint8, generator=seeded(rng))
    yield "values of any codes", *on_both(lambda: library.dequantize(codes, *wanted))


def seeded(rng: random.Random) -> torch.Generator:
    return torch.Generator().manual_seed(rng.randrange(1 << 31))


def agree(expected: Any, found: Any) -> bool:
    if isinstance(expected, torch.Tensor):
        return isinstance(found, torch.Tensor) and same(expected, found)
    if isinstance(expected, list):
        return isinstance(found, list) and all(map(same, expected, found))
    return expected is found


def assert_random_cases_agree(seed: int, count: int) -> None:
    rng = random.Random(seed)
    for number in range(count):
        scheme, x = random_case(rng)
        for what, expected, found in checks(rng, scheme, x):
            assert agree(expected, found), (
                f"{what} of case {number} of seed {seed}, {scheme} on {x.dtype} {tuple(x.shape)}: "
                f"{expected} on the reference, {found} on the kernels"
            )


@pytest.mark.parametrize("seed", range(PARTS))
def test_random_schemes_give_the_same_on_kernels_and_reference(seed: int) -> None:
    assert_random_cases_agree(seed, IN_THE_QUICK_SUITE // PARTS)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_fifty_thousand_random_schemes_give_the_same(part: int) -> None:
    assert_random_cases_agree(100 + part, IN_THE_SLOW_ONE // PARTS)


def any_case(rng: random.Random) -> tuple[str, Scheme, torch.Tensor]:
    """Return any scheme of the grammar, whatever runs it, and a tensor for it, some of them empty."""
    while True:
        text = any_scheme(rng)
        if rng.random() < 0.5:
            text = re.sub(r"\bg(\d+)", lambda group: f"g{int(group[1]) * 16}", text)
        try:
            scheme = Scheme.parse(text)
        except zp.ZeropointError:
            continue
        x = random_tensor(rng, scheme, rng.choice(DTYPES))
        if x.ndim and rng.random() < 0.5:
            x = torch.cat([x.roll(n, -1) for n in range(rng.randrange(1, 24))], -1)
        return text, scheme, x[:0] if x.ndim and rng.random() < 0.04 else x


def everyday(rng: random.Random, scheme: Scheme, x: torch.Tensor) -> Iterator[tuple[str, Any, Any]]:
    """Yield what users see of a scheme: on the reference, and on what runs it by default."""
    expected, own = found = by_default(lambda: zp.quantize(x, scheme))
    failed = isinstance(expected, type) or isinstance(own, type)
    yield "parameters and codes", *(q if isinstance(q, type) else [q.data, *q.params.stored] for q in found)
    if failed:
        return
    dtype = rng.choice(DTYPES)
    with zp.only_backend("reference"):
        values = expected.dequantize(dtype), outcome(lambda: zp.fake_quantize(x, scheme))
    yield "values", values[0], own.dequantize(dtype)
    yield "fake-quantized values", values[1], outcome(lambda: zp.fake_quantize(x, scheme))
    bound = own.error_bound()
    yield "largest error within the bound", True, bool(excess(own, x, bound) <= 1)


def sweep_of_any(seed: int, count: int) -> Counter[str]:
    """Compare ``count`` schemes that quantize their tensors; return how often each word was among them."""
    rng, words, taken = random.Random(seed), Counter[str](), 0
    while taken < count:
        text, scheme, x = any_case(rng)
        for what, expected, found in everyday(rng, scheme, x):
            assert agree(expected, found), (
                f"{what} of seed {seed}, {text} on {x.dtype} {tuple(x.shape)}: "
                f"{expected} on the reference, {found} by default"
            )
            if what == "values":
                taken += 1
                words.update(set(words_of(text, scheme)))
    return words


@pytest.mark.parametrize("seed", range(PARTS))
def test_schemes_with_any_words_of_the_grammar_give_the_same_by_default_and_on_the_reference(
    seed: int,
) -> None:
    assert sum(sweep_of_any(seed, 60).values()) > 0


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_20_000_schemes_with_every_word_of_the_grammar_give_the_same(
    part: int, capsys: pytest.CaptureFixture[str]
) -> None:
    words = sweep_of_any(1000 + part, 20_000 // PARTS)
    with capsys.disabled():
        counts = ", ".join(f"{word} {words[word]}" for word in sorted(WORDS))
        sys.stdout.write(f"\npart {part}, {20_000 // PARTS} schemes: {counts}\n")
    assert {word for word in WORDS if words[word] == 0} == set()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("text", ["int4:g16:scale=even:asym", "uint8:channel:scale=rceil:asym"])
def test_zero_points_under_powers_of_two_are_decoded_alike(text: str, dtype: torch.dtype) -> None:
    x = torch.randn(3, 32, generator=torch.Generator().manual_seed(1)).add(1).to(dtype)
    with zp.only_backend("reference"):
        q = zp.quantize(x, text)
        expected = q.dequantize()
    assert bool(q.zero_point.count_nonzero())  # type: ignore[union-attr]
    assert torch.equal(zp.quantize(x, text).dequantize(), expected)
    assert float((expected.double() - x.double()).abs().max()) <= float(q.error_bound().max())


def test_a_quotient_past_float16_is_an_error_on_both_sides() -> None:
    text = (
        "codebook[-0.05,0.0,0.04]:channel:scale=float8_ue4m3fn:scale2=float32@tensor:dialect=onnx-reference"
    )
    x = torch.tensor([[3378.0, -6068.0], [573.5, 2802.0]], dtype=torch.float16)
    for backend in ("reference", "cpu"):
        with (
            zp.only_backend(backend),
            pytest.raises(
                zp.RangeError, match=r"scale of block \(0, 0\) \(=inf\) does not fit float32@tensor"
            ),
        ):
            zp.quantize(x, text)
