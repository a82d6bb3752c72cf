"""The values of a format are those of its codes, decoded."""

import math

import pytest
import torch

import zeropoint as zp


@pytest.mark.parametrize(
    "name", ["e2m1", "e4m3", "int4", "uint3", "nf4", "ternary", "e3m2", "codebook[-1,0.5,2]"]
)
def test_values_are_those_that_torch_and_codes_have(name: str) -> None:
    fmt = zp.get_format(name)
    values = fmt.all_values()
    assert len(values) == fmt.code_count
    expected = [float(getattr(fmt.number(code), "value", fmt.number(code))) for code in range(fmt.code_count)]
    assert all(a == b or (math.isnan(a) and math.isnan(b)) for a, b in zip(values, expected, strict=True))


def test_float8_has_the_values_of_torch() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    ours = torch.tensor(zp.get_format("float8_e4m3fn").all_values(), dtype=torch.float64)
    assert torch.equal(ours.isnan(), codes.isnan())
    assert torch.equal(ours[~ours.isnan()], codes[~codes.isnan()])
    assert torch.equal(ours.signbit()[~ours.isnan()], codes.signbit()[~ours.isnan()])


def test_of_pairs_both_numbers_follow_each_other() -> None:
    fmt = zp.get_format("vector2[normal64]")
    assert len(fmt.all_values()) == 2 * fmt.code_count


def test_a_format_of_many_codes_says_what_to_ask_instead() -> None:
    with pytest.raises(zp.FormatError, match=r"has 4,294,967,296 codes; ask for numbers\(code\) of each"):
        zp.get_format("float32").all_values()
