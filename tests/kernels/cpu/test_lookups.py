"""Elements that few formats have: kernels give what the reference gives, and run where they should."""

import pytest
import torch
from tests.contract.test_random_schemes import by_default, same
from tests.tables import each

import zeropoint as zp
from zeropoint.layout.blocks import mean_blocks
from zeropoint.ops.registry import Op, Request, explain
from zeropoint.schemes import PRESETS, Granularity, Scheme

pytestmark = pytest.mark.rotating

SHAPES = ((5, 512), (2, 3, 256), (7, 260), (3, 1))
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LOOKED_UP = (
    "tq1_0", "table4:channel", "table3:g1024:scale=float16", "table2:g32", "table1:g8", "table8:channel",
    "vector2[higgs16]:g16", "vector2[normal64]:g30", "vector4[1,0,0,1,-1,0,0,-1]:channel", "if4",
    "digits5[-1,0,1]:g256", "digits5[-1,0,1]:g16", "digits3[-1,-0.5,0,0.5,1]:g24", "choice[e2m1,int4]:g16",
)  # fmt: skip
OFFSETS = (
    "q4_k",
    "q2_k",
    "q5_k",
    "q4_1",
    "int4:g32:offset=float32",
    "uint4_double",
    "uint2:token:offset=float16",
)
POWERS = (
    "mx9", "mx6", "mx4", "mx9:scale=ceil/microexponent", "e2m1:g4:scale=ceil:scale2=even@g32",
    "int8:g2:scale=even/codebook[1,0.5]:scale2=rceil@g16", "e3m0:g2:scale=floor/e3m0fn:scale2=floor@g8",
)  # fmt: skip
WHOLE = (
    "int8:tensor", "uint8:tensor:asym", "float8_e4m3fn:tensor", "int4:tensor", "int8_power_of_two",
    "int8:tensor:scale=float16", "int4:tensor:scale=search", "nf4:tensor",
)  # fmt: skip


def numbers(shape: tuple[int, ...], magnitude: float = 1.0) -> torch.Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * magnitude
    x[0] *= 1e3
    return x


def everything(x: torch.Tensor, scheme: str) -> list[torch.Tensor]:
    """Return codes, parameters and values, in the own dtype and in bfloat16."""
    q = zp.quantize(x, scheme)
    return [q.data, *q.params.stored, q.dequantize(), q.dequantize(torch.bfloat16)]


def alike(x: torch.Tensor, scheme: str) -> bool:
    expected, found = by_default(lambda: everything(x, scheme))
    if isinstance(expected, type) or isinstance(found, type):
        return expected is found
    return all(map(same, expected, found))


@pytest.mark.parametrize("scheme", [*LOOKED_UP, *OFFSETS])
def test_codes_and_values_are_those_of_the_reference(scheme: str) -> None:
    for shape in SHAPES:
        for dtype in DTYPES:
            assert alike(numbers(shape).to(dtype), scheme), (shape, dtype)


@pytest.mark.parametrize("scheme", [*POWERS, *WHOLE, "nf4_double"])
def test_scales_of_numbers_of_any_size_are_those_of_the_reference(scheme: str) -> None:
    for shape in ((64, 64), (3, 1024), (2, 3, 256)):
        for magnitude in (1.0, 1e-38, 2e-40, 1e30, 0.0):
            for dtype in DTYPES[:2]:
                assert alike(numbers(shape, magnitude).to(dtype), scheme), (shape, magnitude, dtype)


@pytest.mark.parametrize("scheme", ["tq1_0", "digits5[-1,0,1]:g32", "mx9", "mx6"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_codes_of_no_number_have_the_values_of_the_reference(scheme: str, dtype: torch.dtype) -> None:
    q = zp.quantize(numbers((4, 1024)).to(dtype), scheme)
    q.data.random_(0, 256, generator=torch.Generator().manual_seed(0))
    expected, found = by_default(q.dequantize)
    assert same(expected, found)


def test_rows_longer_than_a_cache_get_their_offsets() -> None:
    assert alike(numbers((2, 40_960)), "uint4:g32:offset=float16")


@each(
    "scheme, operator",
    [
        *((scheme, Op.DEQUANTIZE) for scheme in (*LOOKED_UP, *OFFSETS)),
        *((scheme, Op.QUANTIZE_DYNAMIC) for scheme in ("tq1_0", "table4:channel", "digits5[-1,0,1]:g256")),
        ("table4:channel", Op.QUANTIZE),
    ],
)
def test_kernels_run_what_they_know(scheme: str, operator: Op) -> None:
    request = Request(
        op=operator, scheme=Scheme.parse(scheme), shape=(4, 1024), dtype=torch.float32,
        own_dtype=torch.float32, device=torch.device("cpu"),
    )  # fmt: skip
    assert explain(request).chosen == "cpu"


PLAIN_TORCH = {("if4", Op.QUANTIZE_DYNAMIC): "compares the errors of both grids of each block"}
"""Presets that plain torch serves on a CPU, with the reason: benchmarks/kernels.py --all has their speed."""


@each("preset, operator", [(name, op) for name in PRESETS for op in (Op.QUANTIZE_DYNAMIC, Op.DEQUANTIZE)])
def test_no_preset_is_left_to_plain_torch_without_a_reason(preset: str, operator: Op) -> None:
    for dtype in DTYPES:
        request = Request(
            op=operator, scheme=Scheme.parse(preset), shape=(64, 1024), dtype=dtype, own_dtype=dtype,
            device=torch.device("cpu"),
        )  # fmt: skip
        assert (explain(request).chosen == "cpu") == ((preset, operator) not in PLAIN_TORCH), dtype


@pytest.mark.parametrize("scheme", ["tq1_0", "table4:channel", "vector2[higgs16]:g16"])
def test_plans_decode_and_encode_as_calls_do(scheme: str) -> None:
    x = numbers((4, 512))
    q = zp.quantize(x, scheme)
    assert torch.equal(zp.plan("dequantize", scheme, (4, 512)).run(q), q.dequantize())
    assert torch.equal(zp.plan("dequantize", q.params, (4, 512)).run(q), q.dequantize())
    assert torch.equal(zp.plan("quantize", scheme, (4, 512)).run(x).data, q.data)


def test_numbers_that_are_not_finite_are_refused_under_given_tables() -> None:
    params = zp.choose_params(numbers((4, 64)), "table4:channel")
    x = numbers((4, 64))
    x[2, 5] = torch.nan
    with pytest.raises(zp.NonFiniteError, match=r"\(2, 5\)"):
        zp.quantize(x, params)


def test_means_are_those_of_exact_sums() -> None:
    import math

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 20_000, generator=generator) * torch.exp2(
        torch.randn(3, 20_000, generator=generator) * 30
    )
    expected = [math.fsum(row.tolist()) / 20_000 for row in x.double()]
    assert mean_blocks(x, Granularity.channel()).flatten().tolist() == expected
    assert mean_blocks(x.double() / 3, Granularity.channel()).flatten().tolist() == [
        math.fsum(row.tolist()) / 20_000 for row in x.double() / 3
    ]
