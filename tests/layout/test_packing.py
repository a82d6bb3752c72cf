"""Packing against streams of bits kept as one big Python integer."""

import pytest
import torch

from zeropoint import ShapeError, get_format, pack, unpack
from zeropoint.formats.torch_dtypes import code_dtype
from zeropoint.layout.packing import as_values, flat_bytes, packed_length, row_length

WIDTHS = (*range(1, 17), 32)
LENGTHS = range(258)


def stream(codes: list[int], bits: int) -> bytes:
    """Return the codes as the bytes of one little-endian integer."""
    number = sum(code << (bits * place) for place, code in enumerate(codes))
    return number.to_bytes(-(-len(codes) * bits // 8), "little")


def random_codes(length: int, bits: int) -> list[int]:
    generator = torch.Generator().manual_seed(1000 * bits + length)
    return torch.randint(0, 1 << bits, (length,), generator=generator, dtype=torch.int64).tolist()


@pytest.mark.parametrize("bits", WIDTHS)
def test_packing_any_length_writes_the_bit_stream_of_a_big_integer(bits: int) -> None:
    for length in LENGTHS:
        codes = random_codes(length, bits)
        packed = pack(torch.tensor(codes, dtype=torch.int64), bits)
        assert packed.dtype == torch.uint8
        assert bytes(packed.tolist()) == stream(codes, bits), length


@pytest.mark.parametrize("bits", WIDTHS)
def test_unpacking_any_length_returns_the_codes_in_the_dtype_of_their_width(bits: int) -> None:
    for length in LENGTHS:
        codes = random_codes(length, bits)
        data = torch.tensor(list(stream(codes, bits)), dtype=torch.uint8)
        back = unpack(data, bits, length)
        assert back.dtype == code_dtype(bits)
        assert back.tolist() == codes, length


@pytest.mark.parametrize("bits", range(1, 17))
def test_every_pattern_survives_packing_next_to_every_kind_of_neighbor(bits: int) -> None:
    patterns = torch.arange(1 << bits)
    for neighbor in (0, (1 << bits) - 1):
        rows = torch.stack(
            [torch.full_like(patterns, neighbor), patterns, torch.full_like(patterns, neighbor)], -1
        )
        assert torch.equal(unpack(pack(rows, bits), bits, 3).to(torch.int64), rows)


@pytest.mark.parametrize("bits", WIDTHS)
def test_only_the_low_bits_of_a_code_count(bits: int) -> None:
    codes = torch.tensor([-1, -2, 5, -(1 << (bits - 1))])
    wanted = [code % (1 << bits) for code in codes.tolist()]
    assert bytes(pack(codes, bits).tolist()) == stream(wanted, bits)


@pytest.mark.parametrize("bits", [3, 4, 6, 7, 12])
def test_each_row_is_padded_to_whole_bytes_with_zero_bits(bits: int) -> None:
    ones = (1 << bits) - 1
    packed = pack(torch.full((2, 3, 5), ones), bits)
    assert packed.shape == (2, 3, packed_length(5, bits))
    row = bytes(packed[1, 2].tolist())
    assert int.from_bytes(row, "little") == (1 << (5 * bits)) - 1


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
def test_codes_of_any_integer_dtype_pack_alike(dtype: torch.dtype) -> None:
    codes = torch.tensor([1, 2, 3, 4, 5], dtype=dtype)
    assert torch.equal(pack(codes, 5), pack(codes.to(torch.int64), 5))
    assert torch.equal(pack(codes, 8), pack(codes.to(torch.int64), 8))


@pytest.mark.parametrize("bits", WIDTHS)
def test_strided_codes_pack_like_their_contiguous_copy_and_are_not_changed(bits: int) -> None:
    base = torch.arange(60).reshape(6, 10) % (1 << bits)
    kept = base.clone()
    for view in (base.t(), base[:, ::3], base[1:, 1:], base[:1].expand(4, 10)):
        assert torch.equal(pack(view, bits), pack(view.contiguous(), bits))
        data = pack(view, bits)
        assert torch.equal(unpack(data, bits, view.shape[-1]).to(torch.int64), view)
    assert torch.equal(base, kept)


@pytest.mark.parametrize("bits", WIDTHS)
def test_strided_bytes_unpack_like_their_contiguous_copy(bits: int) -> None:
    data = (torch.arange(12 * bits) * 37 % 256).reshape(6, 2 * bits).to(torch.uint8)
    strided = data[:, ::2]
    assert torch.equal(unpack(strided, bits, 8), unpack(strided.contiguous(), bits, 8))


@pytest.mark.crossed
@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("shape", [(0,), (0, 5), (5, 0)])
def test_empty_tensors_pack_to_empty_bytes(bits: int, shape: tuple[int, ...]) -> None:
    packed = pack(torch.zeros(shape, dtype=torch.int64), bits)
    assert packed.shape == (*shape[:-1], packed_length(shape[-1], bits))
    assert unpack(packed, bits, shape[-1]).shape == shape


@pytest.mark.parametrize("bits", WIDTHS)
def test_a_scalar_packs_like_a_row_of_one(bits: int) -> None:
    assert torch.equal(pack(torch.tensor(1), bits), pack(torch.tensor([1]), bits))
    assert row_length(()) == 1


@pytest.mark.parametrize("bits", WIDTHS)
def test_bytes_of_another_length_than_the_codes_take_are_refused(bits: int) -> None:
    length = packed_length(9, bits) + 1
    with pytest.raises(ShapeError, match=rf"must have {length - 1} bytes a row for 9 codes of {bits} bits"):
        unpack(torch.zeros(length, dtype=torch.uint8), bits, 9)


@pytest.mark.parametrize("bits", [2, 3, 4, 7, 8, 12, 16])
def test_patterns_of_signed_formats_become_negative_numbers(bits: int) -> None:
    patterns = torch.arange(1 << bits).to(code_dtype(bits))
    values = as_values(patterns, get_format(f"int{bits}"))
    assert values.tolist() == [c - (1 << bits) if c >= 1 << (bits - 1) else c for c in range(1 << bits)]


def test_patterns_of_int32_become_negative_numbers() -> None:
    patterns = torch.tensor([0, 2**31 - 1, 2**31, 2**32 - 1])
    values = as_values(patterns, get_format("int32"))
    assert values.dtype == torch.int32
    assert values.tolist() == [0, 2**31 - 1, -(2**31), -1]


@pytest.mark.parametrize("name", ["uint4", "float8_e4m3fn", "nf4"])
def test_patterns_of_other_formats_stay_as_they_are(name: str) -> None:
    patterns = torch.arange(16, dtype=torch.uint8)
    assert as_values(patterns, get_format(name)) is patterns


def test_the_bytes_of_one_number_do_not_depend_on_its_stride() -> None:
    pair = torch.tensor([[0x04030201, 0]], dtype=torch.int32)
    for one in (pair[:, :1], pair[:, :1].t(), pair[0, ::2]):
        assert flat_bytes(one).tolist() == [1, 2, 3, 4]
    assert flat_bytes(pair.expand(2, 2)[:, ::2]).tolist() == [1, 2, 3, 4, 1, 2, 3, 4]
    assert flat_bytes(pair[:, :0]).tolist() == []
