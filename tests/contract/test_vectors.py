"""The kernels on vectors at the edges of what they take over: subnormals, codes, scales, machines."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import zeropoint as zp
from zeropoint.ops.threads import thread_limit

pytestmark = pytest.mark.rotating

WIDE = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "e3m4", "e5m2")
POWERS = ("mxfp4", "mxfp6_e3m2", "mxfp6_e2m3", "mxfp8_e4m3", "mxfp8_e5m2", "mxint8", "int4:g64:scale=e8m0")
V2 = "+cx16,+popcnt,+sse,+sse2,+sse3,+sse4.1,+sse4.2,+ssse3"
MACHINES = {"x86-64-v2": V2, "x86-64-v3": f"{V2},+avx,+avx2,+bmi,+bmi2,+f16c,+fma,+lzcnt,+movbe"}
"""Names of processors, with all their features: those that Numba does not get are the host's."""
ON_ANOTHER_MACHINE = """
import sys, torch, zeropoint as zp
from zeropoint.codecs.gguf import BLOCKS
dtypes, *schemes = sys.argv[1:]
torch.manual_seed(0)
for dtype in (getattr(torch, name) for name in dtypes.split(",")):
    for scheme in schemes:
        x = torch.cat([torch.randn(4, 544), torch.randn(4, 544) * 1e-6]).to(dtype)
        found = {}
        for backend in ("reference", "cpu"):
            with zp.only_backend(backend):
                q = zp.quantize(x, scheme)
                values = [q.data, *q.scales, zp.dequantize(q)]
                found[backend] = [value.view(torch.uint8) for value in values]
        assert all(map(torch.equal, found["reference"], found["cpu"])), (scheme, dtype)
    if dtype is torch.float16:
        bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.float16)
        x, found = bits[torch.isfinite(bits)].repeat(2)[: 1 << 16].reshape(-1, 256), {}
        for backend in ("reference", "cpu"):
            with zp.only_backend(backend):
                q = zp.quantize(x, "float8_e5m2:cast")
                again = zp.dequantize(q, torch.float16)
                found[backend] = [q.data, again.view(torch.uint8)]
        assert all(map(torch.equal, found["reference"], found["cpu"])), "every float16"
kind, found = BLOCKS["TQ1_0"], {}
q = zp.quantize(torch.randn(9, 512), kind.scheme)
q.data.random_(0, 256)
for backend in ("reference", "cpu"):
    with zp.only_backend(backend):
        lines = kind.encode(q)
        found[backend] = [lines, kind.decode(lines.roll(1, 0) ^ 37, q.scheme, (9, 512), q.dtype).data]
assert all(map(torch.equal, found["reference"], found["cpu"])), "digits"
print("equal")
"""


def equal_on(machine: str, dtypes: str, schemes: tuple[str, ...], cache: Path) -> tuple[int, str, str]:
    """Compare kernels and reference in a process whose kernels are compiled for another processor."""
    reported = {
        "NUMBA_CPU_NAME": machine,
        "NUMBA_CPU_FEATURES": MACHINES[machine],
        "NUMBA_CACHE_DIR": str(cache),
    }
    done = subprocess.run(
        [sys.executable, "-c", ON_ANOTHER_MACHINE, dtypes, *schemes],
        env=os.environ | reported, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


def finite_bfloat16() -> torch.Tensor:
    """Return every finite bfloat16, shuffled, in rows of 512."""
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    finite = every[torch.isfinite(every)]
    order = torch.randperm(finite.numel(), generator=torch.Generator().manual_seed(0))
    return torch.nn.functional.pad(finite[order], (0, -finite.numel() % 512)).reshape(-1, 512)


def assert_equal_bytes(x: torch.Tensor, params: zp.QuantizationParams) -> None:
    """Quantize on both backends and compare the codes."""
    with zp.only_backend("reference"):
        expected = zp.quantize(x, params)
    with zp.only_backend("cpu"):
        actual = zp.quantize(x, params)
    assert torch.equal(actual.data, expected.data), params.scheme


def assert_equal_values(q: zp.QuantizedTensor, dtype: torch.dtype) -> None:
    """Dequantize on both backends and compare the bytes of what is a number."""
    found = {}
    for backend in ("reference", "cpu"):
        with zp.only_backend(backend), thread_limit(1):
            found[backend] = zp.dequantize(q, dtype)
    same_number = found["cpu"].view(torch.uint8) == found["reference"].view(torch.uint8)
    lost = torch.isnan(found["reference"]).repeat_interleave(dtype.itemsize, 1)
    assert bool((same_number | lost).all())
    assert torch.equal(torch.isnan(found["cpu"]), torch.isnan(found["reference"]))


@pytest.mark.crossed
@pytest.mark.parametrize("element", WIDE)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_wide_floats_round_every_bfloat16_as_the_reference(element: str, dtype: torch.dtype) -> None:
    x = finite_bfloat16().to(dtype)
    for largest in (1e-30, 0.003, 1.0, 448.0, 3e5, 1e30):
        assert_equal_bytes(x, zp.choose_params(torch.tensor([[largest]], dtype=dtype), f"{element}:tensor"))


@pytest.mark.crossed
@pytest.mark.parametrize("rule", ["floor", "even", "ceil", "rceil"])
@pytest.mark.parametrize("scheme", ["int8_mx:g32:narrow", "float4_e2m1fn:g32", "float8_e4m3fn:g32"])
def test_blocks_of_subnormals_have_the_powers_of_the_reference(scheme: str, rule: str) -> None:
    bits = torch.tensor([1 << n for n in range(24)] + [(1 << 24) - (1 << n) for n in range(24)])
    near = (bits[:, None] + torch.arange(-2, 3)).clamp(0, 1 << 24).to(torch.int32).view(torch.float32)
    x = near.reshape(-1, 1) * torch.linspace(-1, 1, 32)
    for dtype in (torch.float32, torch.bfloat16):
        found = {}
        for backend in ("reference", "cpu"):
            with zp.only_backend(backend):
                found[backend] = zp.quantize(x.to(dtype), f"{scheme}:scale={rule}")
        assert torch.equal(*(q.scales[0].view(torch.uint8) for q in found.values()))
        assert torch.equal(*(q.data for q in found.values()))


@pytest.mark.crossed
@pytest.mark.parametrize("element", WIDE)
@pytest.mark.parametrize("dialect", ["zeropoint", "compressed-tensors"])
def test_long_rows_round_every_bfloat16_by_fields_as_the_reference(element: str, dialect: str) -> None:
    """In rows of 4096 mantissas are looked up; compressed-tensors rounds quotients to bfloat16 first."""
    x = finite_bfloat16().reshape(-1)
    x = torch.nn.functional.pad(x, (0, -x.numel() % 4096)).reshape(-1, 4096)
    for scale in (1.0, 0.75, 1.9921875, 3.14159, 2.0**-20, 1e-38, 3e-37, 1e30, 1.5e38):
        assert_equal_bytes(x, zp.QuantizationParams.new(scale, scheme=f"{element}:tensor:dialect={dialect}"))


@pytest.mark.parametrize("element", WIDE)
def test_long_rows_of_ordinary_data_round_as_the_reference(element: str) -> None:
    """Random scales, one a row; few codes are subnormal, which rows of every bfloat16 have in each strip."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(64, 4096, generator=generator) * torch.rand(64, 1, generator=generator).exp2()
    x[:, 17] = 0.0
    for scheme in (f"{element}:channel", f"{element}:channel:scale=input:dialect=compressed-tensors"):
        params = zp.choose_params(x.bfloat16(), scheme)
        assert_equal_bytes(x.bfloat16(), params)


@pytest.mark.parametrize("element", [*WIDE, "float6_e3m2fn", "float6_e2m3fn"])
def test_every_code_times_any_factor_decodes_as_the_reference(element: str) -> None:
    """Long blocks go by fields, unless a product is subnormal or too large, or a code is NaN."""
    q = zp.quantize(torch.ones(4, 512, dtype=torch.bfloat16), f"{element}:channel")
    generator = torch.Generator().manual_seed(6)
    for scale in (1.0, 0.75, 3.14159, 2.0**-20, 1e-36, 1e-30, 1e30, 1e36, 3e38):
        q.scales[0].fill_(scale)
        for keep in (0xFF, 0xF7, 0xB7):  # the last two have no NaN in formats of 8 bits
            codes = torch.randint(0, 256, q.data.shape, dtype=torch.uint8, generator=generator) & keep
            q.data.copy_(torch.where(codes == 0x80, codes.new_zeros(()), codes))
            assert_equal_values(q, torch.bfloat16)


@pytest.mark.parametrize("element", WIDE)
def test_wide_floats_round_values_next_to_every_tie_as_the_reference(element: str) -> None:
    fmt = zp.get_format(element)
    assert isinstance(fmt, zp.FloatFormat)
    values = torch.tensor([float(fmt.magnitude(code)) for code in range(fmt.max_code + 1)])
    ties = torch.cat([(values[1:] + values[:-1]) / 2, values])
    bits = ties.view(torch.int32)[:, None] + torch.arange(-3, 4, dtype=torch.int32)
    near = bits.clamp(0, 0x7F7FFFFF).view(torch.float32).flatten()
    x = torch.nn.functional.pad(torch.cat([near, -near]), (0, -2 * near.numel() % 128)).reshape(-1, 128)
    for scale in (1.0, 0.75, 2.0**-20, 3.14159):
        params = zp.QuantizationParams.new(scale, scheme=f"{element}:tensor")
        assert_equal_bytes(x * scale, params)


@pytest.mark.parametrize("dialect", ["zeropoint", "bitsandbytes"])
@pytest.mark.parametrize("element", ["nf4", "codebook[-3,-1,0.5,2,7,7.5,8]"])
def test_codebooks_round_values_next_to_every_middle_as_the_reference(element: str, dialect: str) -> None:
    """Fewer than 16 values leave boundaries that nothing is above; bitsandbytes multiplies by reciprocals."""
    fmt = zp.Scheme.parse(f"{element}:tensor").element
    assert isinstance(fmt, zp.CodebookFormat)
    middles = torch.tensor([*fmt.thresholds, *fmt.values, 9.0, -9.0])
    bits = middles.view(torch.int32)[:, None] + torch.arange(-3, 4, dtype=torch.int32)
    near = bits.view(torch.float32).nan_to_num(0.0).flatten()
    x = torch.nn.functional.pad(near, (0, -near.numel() % 64)).reshape(-1, 64)
    for scale in (1.0, 0.75, 2.0**-20, 3.14159):
        params = zp.QuantizationParams.new(scale, scheme=f"{element}:tensor:dialect={dialect}")
        assert_equal_bytes(x * scale, params)
        assert_equal_bytes(finite_bfloat16(), params)


@pytest.mark.crossed
@pytest.mark.parametrize("scheme", POWERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_code_times_every_power_decodes_as_the_reference(scheme: str, dtype: torch.dtype) -> None:
    x = torch.randn(256, 256, generator=torch.Generator().manual_seed(1))
    q = zp.quantize(x, scheme)
    generator = torch.Generator().manual_seed(2)
    q.data.copy_(torch.randint(0, 256, q.data.shape, dtype=torch.uint8, generator=generator))
    q.scales[0].view(torch.uint8).copy_(
        torch.arange(256, dtype=torch.uint8)[:, None].expand(q.scales[0].shape)
    )
    assert_equal_values(q, dtype)


X86 = pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="processors of x86-64")


@X86
@pytest.mark.slow
def test_another_processor_gives_the_same_bytes(tmp_path: Path) -> None:
    """It has no conversions of float16, for which LLVM calls functions that are not there."""
    code, said, errors = equal_on("x86-64-v2", "float16", (), tmp_path)
    assert (code, said) == (0, "equal\n"), errors


@X86
@pytest.mark.slow
@pytest.mark.parametrize("machine", MACHINES)
def test_other_processors_give_the_same_bytes_for_all_families(machine: str, tmp_path: Path) -> None:
    schemes = (
        "int8:channel", "int4:g128", "int4:g128:asym", "float8_e4m3fn:channel", "float8_e5m2:g32:scale=even",
        "mxfp4", "mxfp8_e4m3", "mxint8", "nvfp4", "nvfp4:dialect=compressed-tensors", "nf4", "int3:g64",
        "q4_0", "uint8:tensor:asym:dialect=torch", "int4:g32:scale=float16", "int8:block4x64", "int4:g7",
        "int2:g32", "uint2:g16:scale=uint4:scale2=float16@g32:offset=uint4:offset2=signed/float16@g32",
    )  # fmt: skip
    code, said, errors = equal_on(machine, "float32,bfloat16,float16", schemes, tmp_path)
    assert (code, said) == (0, "equal\n"), errors


@pytest.mark.parametrize("power", [-124, -30, 0, 41])
@pytest.mark.parametrize("bits", [4, 8])
def test_every_bfloat16_over_every_bfloat16_scale_rounds_as_torch_divides(bits: int, power: int) -> None:
    """Quotients of two bfloat16 come from products with reciprocals; torch divides and rounds to bfloat16."""
    x = finite_bfloat16().reshape(1, -1)
    x = torch.nn.functional.pad(x, (0, -x.numel() % 128))
    mantissas = torch.arange(128, 256, dtype=torch.float64).reshape(-1, 1)
    scales = (mantissas * 2.0 ** (power - 7)).to(torch.bfloat16)
    most = 2 ** (bits - 1) - 1
    for part in range(0, 128, 16):
        rows = x.expand(16, -1).contiguous()
        each = scales[part : part + 16]
        scheme = zp.Scheme.parse(f"int{bits}:g128:scale=input:dialect=compressed-tensors")
        grid = each.repeat(1, x.shape[1] // 128)
        params = zp.QuantizationParams(
            scheme=scheme, shape=tuple(rows.shape), scales=(grid,), dtype=torch.bfloat16
        )
        found = zp.quantize(rows, params).codes
        wanted = (rows / each).round().clamp(-most - 1, most)
        assert torch.equal(found.to(torch.float32), wanted.to(torch.float32))
