"""4-bit floats and integers from 16-bit floats by tables: the bytes of the reference, where tables pay."""

import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import zeropoint as zp
from zeropoint.errors import NonFiniteError, ZeropointError
from zeropoint.ops.library import only_backend

pytestmark = pytest.mark.rotating

SCHEMES = (
    "nvfp4",
    "nvfp4:dialect=zeropoint",
    "nvfp4:dialect=compressed-tensors-oneshot",
    "mxfp4",
    "mxfp4:dialect=zeropoint",
    "mxfp4:dialect=quark",
    "mxfp4:dialect=onnx",
    "float4_e2m1fn:g64:scale=float8_e8m0fnu",
    "float4_e2m1fn:g256:scale=float8_ue4m3fn:scale2=float32@tensor",
    "float4_e2m1fn:g16:scale=float8_e8m0fnu",
    "nvint4",
    "int4:g64:scale=float8_e8m0fnu:narrow",
)


def _magnitudes(dtype: torch.dtype) -> torch.Tensor:
    """Return blocks in which every finite magnitude comes, under some sixty largest ones."""
    most = 0x7F7F if dtype is torch.bfloat16 else 0x7BFF
    bits = torch.arange(most + 1)[: (most + 1) // 256 * 256].to(torch.int16)
    signs = torch.where(torch.arange(len(bits)) % 2 == 0, 0, -0x8000).to(torch.int16)
    return (bits | signs).view(dtype).reshape(-1, 256)


def _data(dtype: torch.dtype, kind: str) -> torch.Tensor:
    torch.manual_seed(0)
    if kind == "spread":
        # A largest magnitude in each block of 16, so that quotients of one scale meet all boundaries.
        x = _magnitudes(dtype).clone()
        top = x.abs().float().amax(1, keepdim=True).to(dtype)
        order = torch.randperm(x.numel())
        x = x.reshape(-1)[order].reshape(x.shape)
        x = torch.minimum(torch.maximum(x, -top), top)
        return x.repeat(20, 1)
    x = torch.randn(4096, 256) * torch.exp(2 * torch.randn(4096, 1))
    x[3], x[7, ::3] = 0.0, -0.0
    x[11] *= 1e-30
    return x.to(dtype)


@pytest.mark.crossed
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["normal", "spread"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_bytes_are_those_of_the_reference(scheme: str, kind: str, dtype: torch.dtype) -> None:
    x = _data(dtype, kind)
    q = zp.quantize(x, scheme)
    with only_backend("reference"):
        wanted = zp.quantize(x, scheme)
    assert torch.equal(q.data, wanted.data)
    for made, expected in zip(q.scales, wanted.scales, strict=True):
        assert torch.equal(made.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.crossed
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scheme", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_value_that_is_not_finite_is_named(scheme: str, dtype: torch.dtype, value: float) -> None:
    x = torch.randn(4096, 256).to(dtype)
    x[200, 17] = value
    with pytest.raises(NonFiniteError, match=r"\(200, 17\)"):
        zp.quantize(x, scheme)


def test_a_scale_that_does_not_fit_is_refused() -> None:
    x = torch.randn(4096, 256).bfloat16()
    x[200] *= 1e-6
    with pytest.raises(ZeropointError, match=r"\(200, 0\).*does not fit"):
        zp.quantize(x, "float4_e2m1fn:g32:scale=float8_e4m3fn")


@pytest.mark.slow
def test_random_schemes_of_large_tensors_have_the_bytes_of_the_reference() -> None:
    generator, done = random.Random(0), 0
    while done < 200:
        scale = generator.choice(["e8m0", "e5m2", "e4m3", "ue4m3", "ue5m3", "ue3m4"])
        whole = ":scale2=float32@tensor" if scale != "e8m0" and generator.random() < 0.5 else ""
        dialect = generator.choice(["zeropoint", "compressed-tensors", "onnx", "quark", "torch", "modelopt"])
        block = 2 ** generator.randrange(4, 10)
        scheme = (
            f"{generator.choice(['e2m1', 'e1m2', 'e3m0'])}:g{block}:scale={scale}{whole}:dialect={dialect}"
        )
        rows, cols = (1 << 19) // 512 + generator.randrange(5), generator.choice([512, 1024, 1088])
        x = torch.randn(rows, cols) * torch.exp2(torch.randint(-8, 8, (rows, 1)).float())
        x = x.to(generator.choice([torch.bfloat16, torch.float16]))
        results = []
        for backend in ("cpu", "reference"):
            try:
                with only_backend(backend):
                    results.append(zp.quantize(x, scheme))
            except ZeropointError as error:
                results.append(str(error))
        made, wanted = results
        if isinstance(made, str) or isinstance(wanted, str):
            assert made == wanted, scheme
            continue
        done += 1
        assert torch.equal(made.data, wanted.data), scheme
        for scales, expected in zip(made.scales, wanted.scales, strict=True):
            assert torch.equal(scales.view(torch.uint8), expected.view(torch.uint8)), scheme


def _small(seed: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(16, 256, generator=generator) * torch.exp2(
        torch.randint(-24, 14, (16, 1), generator=generator)
    )
    return x.to(dtype)


def _is_that_of_the_reference(x: torch.Tensor, scheme: str) -> bool:
    q = zp.quantize(x, scheme)
    with only_backend("reference"):
        wanted = zp.quantize(x, scheme)
    return torch.equal(q.data, wanted.data) and torch.equal(
        q.scales[0].view(torch.uint8), wanted.scales[0].view(torch.uint8)
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scheme", [text for text in SCHEMES if text.startswith(("mxfp4", "float4"))][:-2])
def test_tables_that_calls_share_give_the_same_bytes_and_outlive_a_number_that_is_refused(
    scheme: str, dtype: torch.dtype
) -> None:
    bad = _small(0, dtype)
    bad[3, 7] = torch.nan
    for seed in range(3):
        assert _is_that_of_the_reference(_small(seed, dtype), scheme)
        with pytest.raises(NonFiniteError, match=r"\(3, 7\)"):
            zp.quantize(bad, scheme)
    # Other threads have tables of their own.
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda seed: zp.quantize(_small(seed, dtype), scheme), range(100, 140)))
    with only_backend("reference"):
        wanted = [zp.quantize(_small(seed, dtype), scheme) for seed in range(100, 140)]
    assert all(torch.equal(a.data, b.data) for a, b in zip(found, wanted, strict=True))
