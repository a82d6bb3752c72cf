"""Codes that represent several values: tables of vectors, and digits of one number."""

import io
import itertools
import re
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from rich.console import Console
from tests.tensors import normal

import zeropoint as zp
from zeropoint.errors import FormatError
from zeropoint.formats import CodebookFormat, DigitsFormat, Format, VectorFormat, format_name, get_format
from zeropoint.formats.exact import decode, encode
from zeropoint.formats.rounding import Overflow, RoundingMode
from zeropoint.report.formats import page_document, page_table

TEXTS = ("vector2[higgs16]", "vector3[0,0,0,1,0.5,-1,0.25,0,1]", "digits5[-1,0,1]", "digits3[0.5,2,1,0]")


@pytest.mark.parametrize("text", TEXTS)
def test_text_forms_round_trip(text: str) -> None:
    fmt = get_format(text)
    assert get_format(format_name(fmt)) == fmt == get_format(fmt.spelling)
    scheme = zp.Scheme.parse(f"{text}:g12:scale=float16")
    assert zp.Scheme.parse(str(scheme)) is scheme


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("vector2[1,2,3]", r"values \(length 3\) of vector2 must be whole rows of 2"),
        ("vector2[1,2]", r"rows \(length 1\) of a vector codebook must number 2..4096"),
        ("vector1[1,2]", "rows \\(of 1 values\\) of a vector codebook must all have as many, 2..16"),
        ("vector0[1,2]", "of vector0 must be whole rows of 0"),
        ("vector2[0,0,-0,0]", "values of a vector codebook must not all be zero"),
        ("vector2[1e39,0,0,0]", "values of a vector codebook must be finite in float32"),
        ("vector3[higgs16]", "values 'higgs16' of a codebook must be numbers separated by commas$"),
        ("vector2[normal32]", "separated by commas, or one of higgs16, normal64, normal256"),
        ("digits1[-1,0,1]", r"count \(=1\) of digits of base 3 must be at least 2"),
        ("digits11[-1,0,1]", "codes have at most 16 bits, not 18"),
        ("digits2[0,1,1]", "must have values that all differ"),
    ],
)
def test_tables_without_meaning_are_refused(text: str, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        get_format(text)


@pytest.mark.parametrize("text", TEXTS)
def test_one_number_is_neither_given_nor_taken(text: str) -> None:
    fmt = get_format(text)
    with pytest.raises(FormatError, match=f"0 of {fmt.kind} codes belongs to {fmt.per_code} values together"):
        decode(fmt, 0)
    with pytest.raises(FormatError, match="take whole tensors"):
        encode(fmt, Fraction(0), RoundingMode.HALF_EVEN, Overflow.SATURATE)


def runs(x: torch.Tensor, block: int, count: int) -> list[list[float]]:
    """Return the numbers of each code of a row, zeros in the place of those that are missing."""
    found = []
    for start in range(0, len(x), block):
        part = x[start : start + block].tolist()
        found += [part[at : at + count] + [0.0] * (count - len(part[at : at + count]))
                  for at in range(0, len(part), count)]  # fmt: skip
    return found


def code_of(fmt: Format, numbers: list[float]) -> int:
    """Return the code by definition: the nearest row, or digits that are nearest one by one."""
    if isinstance(fmt, VectorFormat):
        distances = [sum((n - v) ** 2 for n, v in zip(numbers, row, strict=True)) for row in fmt.rows]
        return distances.index(min(distances))
    assert isinstance(fmt, DigitsFormat)
    code = 0
    for number in numbers:
        code = code * fmt.base + encode(fmt.digit, Fraction(number))
    return code


@pytest.mark.crossed
@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize(("columns", "block"), [(24, 12), (31, 12), (7, 7)])
def test_codes_and_values_are_those_of_the_definition(text: str, columns: int, block: int) -> None:
    scheme = zp.Scheme.parse(f"{text}:g{block}")
    x = normal(5, columns) if scheme.element.signed else normal(5, columns).abs()
    q = zp.quantize(x, scheme)
    assert scheme.element.per_code > 1
    scale = q.scales[0].repeat_interleave(block, 1)[:, :columns]
    decoded = q.dequantize()
    for row, ratio in enumerate(x / scale):
        wanted = [code_of(scheme.element, each) for each in runs(ratio, block, scheme.element.per_code)]
        assert q.codes[row].tolist() == wanted
        ends = [min(block, columns - start) for start in range(0, columns, block)]
        numbers: list[float] = []
        left = iter(wanted)
        for length in ends:
            count = -(-length // scheme.element.per_code)
            block_values = itertools.chain.from_iterable(
                scheme.element.numbers(c) for c in itertools.islice(left, count)
            )
            numbers += [float(v) for v in block_values][:length]  # type: ignore[arg-type]
        assert torch.equal(decoded[row], torch.tensor(numbers) * scale[row])


@pytest.mark.parametrize("text", TEXTS)
def test_what_a_scheme_has_comes_with_the_format(text: str, tmp_path: Path) -> None:
    scheme = zp.Scheme.parse(f"{text}:g10")
    x = normal(3, 4, 25).abs()
    q = zp.quantize(x, scheme)
    assert q.codes.shape == scheme.code_shape((3, 4, 25))
    assert torch.equal(zp.fake_quantize(x, q.params), q.dequantize())
    bound = q.error_bound().repeat_interleave(10, 2)[..., :25]
    assert bool(((q.dequantize() - x).abs() <= bound).all())
    q.save(tmp_path / "q.safetensors")
    assert torch.equal(zp.QuantizedTensor.load(tmp_path / "q.safetensors").dequantize(), q.dequantize())
    assert q.nbytes * 8 / x.numel() == pytest.approx(q.bits_per_value)
    assert scheme.bits_per_value(x.shape) == pytest.approx(q.bits_per_value, rel=0.06)  # rows end on bytes
    found = zp.explain(x, scheme)
    assert found.chosen == "reference"
    assert f"{scheme.element.kind} codes, of several values each, are known to the reference" in str(found)


def test_a_vector_takes_a_gradient_and_a_scalar_a_code() -> None:
    params = zp.quantize(normal(6), "vector2[higgs16]:tensor").params
    x = normal(6).requires_grad_()
    zp.fake_quantize(x, params).sum().backward()
    assert x.grad is not None
    assert set(x.grad.tolist()) <= {0.0, 1.0}
    q = zp.quantize(torch.tensor(0.5), "digits5[-1,0,1]:tensor")
    assert q.dequantize() == 0.5
    assert q.codes.tolist() == [2 * 81 + 27 + 9 + 3 + 1]


def test_vectors_past_the_ends_have_the_bound_of_the_numbers_and_none_without_them() -> None:
    params = zp.quantize(torch.tensor([2.0, -1.0, 0.5, 0.25]), "vector2[higgs16]:tensor").params
    x = torch.tensor([7.0, -9.0, 0.0, 3.0])
    q = zp.quantize(x, params)
    assert bool(torch.isinf(q.error_bound()).all())
    off = (q.dequantize() - x).abs().max()
    assert 6 < float(off) <= float(q.error_bound(x)) < 14


def test_the_covering_radius_holds_and_is_not_idle() -> None:
    fmt = get_format("vector2[higgs16]")
    assert isinstance(fmt, VectorFormat)
    end = float(fmt.max)
    points = (
        torch.rand(20000, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 2 - 1
    ) * end
    table = torch.tensor(fmt.rows, dtype=torch.float64)
    farthest = float(torch.cdist(points, table).amin(1).max())
    assert farthest <= float(fmt.largest_gap) / 2 <= 1.1 * farthest


def test_digits_of_base_3_take_a_fifth_of_a_byte() -> None:
    ternary = DigitsFormat(CodebookFormat((-1.0, 0.0, 1.0)), 5)
    assert (ternary.bits, ternary.code_count, ternary.base) == (8, 243, 3)
    assert [ternary.numbers(code) for code in (0, 121, 242)] == [(-1,) * 5, (0,) * 5, (1,) * 5]
    assert zp.Scheme.parse("digits5[-1,0,1]:g20").bits_per_value((4, 20)) == 1.6 + 32 / 20


def test_a_code_past_the_digits_of_a_saved_tensor_is_refused(tmp_path: Path) -> None:
    q = zp.quantize(normal(2, 10), "digits5[-1,0,1]:g10")
    q.data.fill_(250)
    q.save(tmp_path / "q.safetensors")
    with pytest.raises(zp.CheckpointError, match=r"holds code 250; digits5.* has 0..242"):
        zp.QuantizedTensor.load(tmp_path / "q.safetensors")


@pytest.mark.parametrize(("text", "length"), [("digits5[-1,0,1]", 5), ("vector2[higgs16]", 2)])
def test_the_page_of_a_format_lists_the_values_of_each_code(text: str, length: int) -> None:
    document = page_document(text)
    assert document["run_length"] == length
    assert [len(values) for values in document["values"]] == [length] * document["codes"]
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(page_table(text))
    assert re.search(rf"run length +{length} *\n", console.export_text())
