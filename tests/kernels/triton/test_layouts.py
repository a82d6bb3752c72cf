"""Blocks of llama.cpp and words of GPTQ and AWQ on a GPU: the bytes of plain torch."""

from dataclasses import replace

import pytest
import torch
from tests.kernels.triton.interpreter import DEVICE
from tests.tensors import same_bytes

import zeropoint as zp
from zeropoint.codecs.gguf import BLOCKS
from zeropoint.codecs.words import INTERLEAVED, rows_of_words, words_of_rows
from zeropoint.kernels.triton.layout_launch import Layouts, refusal
from zeropoint.layout.bit_places import Bits, Struct
from zeropoint.layout.word_lines import WordLines
from zeropoint.ops import structs
from zeropoint.ops.registry import Op, Request

pytestmark = pytest.mark.rotating

TAKEN = [name for name, kind in BLOCKS.items() if kind.scheme.element.per_code == 1]
SCHEME = zp.Scheme.parse("uint4")


def asked(op: Op, scheme: zp.Scheme, shape: tuple[int, ...]) -> Request:
    place = torch.empty(0, device=DEVICE).device
    return Request(
        op=op, scheme=scheme, shape=shape, dtype=torch.bfloat16, own_dtype=torch.bfloat16, device=place
    )


def assert_split_and_joined(struct: Struct, scheme: zp.Scheme, shape: tuple[int, ...]) -> None:
    wanted = asked(Op.SPLIT_BLOCKS, scheme, shape)
    size = structs.grid_of(struct, shape)[-1] * struct.nbytes
    lines = torch.randint(0, 256, (*shape[:-1], size), dtype=torch.uint8)
    expected, levels = structs.split_blocks(wanted, struct, lines)
    found, params = Layouts(wanted).split_blocks(struct, lines.to(DEVICE))
    assert same_bytes(found.cpu(), expected)
    assert all(same_bytes(a.cpu(), b) for a, b in zip(params, levels, strict=True))
    joined = Layouts(wanted).join_blocks(struct, found, params)
    assert same_bytes(joined.cpu(), structs.join_blocks(wanted, struct, expected, levels))


@pytest.mark.parametrize("name", TAKEN)
def test_blocks_are_split_and_joined_as_in_plain_torch(name: str) -> None:
    kind = BLOCKS[name]
    for shape in ((3, 2 * kind.block), (2, 5, kind.block)):
        assert_split_and_joined(kind.struct, kind.scheme, shape)


def test_bits_that_codes_lack_are_left_out() -> None:
    # Codes of 3 bits, in 4 from the second one on.
    struct = Struct(6, (Bits(0, 4, 4, 4, low=1),), ((Bits(4, 2, 2),),))
    scheme = zp.Scheme.parse("uint3:g8:scale=float16")
    lines = torch.randint(0, 256, (6, 12), dtype=torch.uint8)
    wanted = asked(Op.SPLIT_BLOCKS, scheme, (6, 16))
    expected, _ = structs.split_blocks(wanted, struct, lines)
    assert same_bytes(Layouts(wanted).split_blocks(struct, lines.to(DEVICE))[0].cpu(), expected)


def test_codes_of_several_values_are_left_to_the_reference() -> None:
    kind = BLOCKS["TQ1_0"]
    reason = refusal(asked(Op.JOIN_BLOCKS, kind.scheme, (1, kind.block)))
    assert reason == "digits codes are joined with scales by the reference"
    assert refusal(asked(Op.TO_LINES, SCHEME, (8, 12))) == (
        "rows that end within a word are known to the reference alone"
    )


@pytest.mark.parametrize("shape", [(8, 8), (24, 40), (128, 128), (136, 264), (264, 8)])
@pytest.mark.parametrize("order", [WordLines(), INTERLEAVED], ids=["along", "across"])
def test_words_are_transposed_as_in_plain_torch(order: WordLines, shape: tuple[int, int]) -> None:
    data = torch.randint(0, 256, (shape[0], shape[1] // 2), dtype=torch.uint8)
    for flip in (0, 0x89ABCDEF):
        own = replace(order, flip=flip)
        with zp.only_backend("reference"):
            expected = words_of_rows(data, SCHEME, shape, own)
        with zp.only_backend("triton"):
            found = words_of_rows(data.to(DEVICE), SCHEME, shape, own)
            back = rows_of_words(found, SCHEME, shape, own)
        assert same_bytes(found.cpu(), expected)
        assert same_bytes(back.cpu(), data)
