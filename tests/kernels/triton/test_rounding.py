"""Every rounding mode on a GPU has the bytes of the reference; seeds are given at run time."""

import importlib
import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.contract.test_backends import sample_for
from tests.kernels.triton.interpreter import DEVICE
from tests.kernels.triton.test_gradient_masks import gradients
from tests.kernels.triton.test_schemes import assert_same_bytes
from tests.tensors import same_bytes

import zeropoint as zp
from zeropoint.formats import RoundingMode
from zeropoint.formats.codes import round_steps, uniform_noise
from zeropoint.kernels.triton import backend
from zeropoint.kernels.triton.specialization import constants_of
from zeropoint.kernels.triton.starts import on_device
from zeropoint.ops import registry
from zeropoint.ops.library import request
from zeropoint.ops.registry import Op
from zeropoint.schemes import Rounding

pytestmark = pytest.mark.rotating

SHAPES = ((4, 256), (3, 5, 70), (17,))
QUICK = ("int8:channel", "mxfp4")
OTHERS = (
    "uint4:g32:asym", "nvfp4",
    "int3:g32", "int4:g128", "uint8:token:asym=real", "float8_e4m3fn:block16x32", "float8_e4m3fn:channel",
    "mxfp8_e4m3",
    "e4m0:token", "float8_e5m2fnuz:token", "mxint8", "int8:tensor", "mxfp6_e2m3", "float8_e5m2:channel",
    "int4:g128:scale=input:dialect=compressed-tensors", "nvfp4:dialect=modelopt", "int8:cast",
)  # fmt: skip
DIRECTED = [mode for mode in RoundingMode if mode not in (RoundingMode.HALF_EVEN, RoundingMode.STOCHASTIC)]


def assert_rounded_alike(scheme: str, rounding: str) -> None:
    """Compare all operators, and gradients, with those of the reference."""
    parsed = zp.Scheme.parse(f"{scheme}:round={rounding}")
    dtypes = itertools.cycle([torch.float32, torch.bfloat16, torch.float16])
    for shape, dtype in zip(SHAPES, dtypes, strict=False):
        if len(parsed.granularity.extents) > len(shape):
            continue
        x = sample_for(scheme, shape, dtype)
        assert assert_same_bytes(x, parsed) == 5
        with zp.only_backend("reference"):
            params = list(zp.quantize(x, parsed).params.stored)
        grad = torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(dtype)
        expected, found = gradients((x.float() * 1.5).to(dtype), grad, parsed, params)
        assert same_bytes(found, expected)


@pytest.mark.parametrize("scheme", [*QUICK, *(pytest.param(s, marks=pytest.mark.slow) for s in OTHERS)])
def test_stochastic_rounding_has_the_bytes_of_the_reference(scheme: str) -> None:
    assert_rounded_alike(scheme, "stochastic(7)")


@pytest.mark.parametrize(("scheme", "mode"), [
    ("mxfp4", RoundingMode.CEIL),
    *(
        pytest.param(scheme, mode, marks=pytest.mark.slow)
        for scheme, mode in itertools.product((*QUICK, *OTHERS), DIRECTED)
        if (scheme, mode) != ("mxfp4", RoundingMode.CEIL)
    ),
])  # fmt: skip
def test_every_mode_has_the_bytes_of_the_reference(scheme: str, mode: RoundingMode) -> None:
    assert_rounded_alike(scheme, mode.value)


def test_seeds_share_a_kernel_and_what_is_kept_of_it() -> None:
    x = sample_for("int8:channel", (3, 264), torch.float32).to(DEVICE)
    params = zp.choose_params(x, "int8:channel:round=stochastic(0)")
    with zp.only_backend("triton"):
        zp.fake_quantize(x, params)
        kept = registry.kernel_of.cache_info().currsize, registry.choose.cache_info().currsize
        launches = backend._launch_of.cache_info().currsize
        scheme, found = params.scheme, []
        for seed in range(1, 6):
            seeded = replace(params, scheme=replace(scheme, rounding=replace(scheme.rounding, seed=seed)))
            found.append(zp.fake_quantize(x, seeded))
    now = registry.kernel_of.cache_info().currsize, registry.choose.cache_info().currsize
    assert (now, backend._launch_of.cache_info().currsize) == (kept, launches)
    assert not any(torch.equal(a, b) for a, b in itertools.pairwise(found))


def test_a_plan_keeps_its_seed() -> None:
    x = sample_for("mxfp4", (4, 64), torch.bfloat16)
    for seed in (1, 16):
        scheme = f"mxfp4:round=stochastic({seed})"
        with zp.only_backend("reference"):
            expected = zp.quantize(x, scheme)
        for signature in (scheme, expected.params.to(DEVICE)):
            plan = zp.plan("quantize", signature, (4, 64), x.dtype, device=DEVICE, backend="triton")
            out = plan.empty()
            plan.run(x.to(DEVICE), out=out)
            assert same_bytes(out.data.cpu(), expected.data)


def test_compilation_knows_no_seed() -> None:
    x, made = torch.empty(2, 64, device=DEVICE), set()
    for seed in (0, 7):
        scheme = zp.Scheme.parse(f"int8:channel:round=stochastic({seed})")
        made.add(constants_of(request(Op.QUANTIZE, x, scheme).unseeded, None, chosen=False))
    assert len(made) == 1


def _kernel(name: str) -> Any:
    return getattr(importlib.import_module("tests.kernels.triton.rounding_kernels"), name)


@pytest.fixture
def rounded(interpreted: None) -> Callable[[str, torch.Tensor, torch.Tensor], torch.Tensor]:
    """Return numbers rounded to integers by the kernels' function, under given noise."""

    def run(rounding: str, numbers: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        scheme = zp.Scheme.parse("int8:channel")
        scheme = replace(scheme, rounding=Rounding(mode=RoundingMode(rounding)))
        k = constants_of(request(Op.QUANTIZE, numbers.to(DEVICE), scheme), None, chosen=False)
        out = torch.empty_like(numbers, device=DEVICE)
        args = numbers.to(DEVICE), noise.to(DEVICE), out, k, len(numbers)
        with on_device(out.device):
            _kernel("round_numbers")[(1,)](*args, enable_fp_fusion=False)
        return out.cpu()

    return run


def edges() -> tuple[torch.Tensor, torch.Tensor]:
    """Return numbers near multiples of 2**-32 and near integers, and noise that decides them, int32."""
    wholes = torch.tensor([0.0, -1.0, 1.0, -3.0, 100.0, -127.0])
    parts = torch.tensor(
        [0.5, 0.25, 2.0**-20, 2.0**-24, *(n * 2.0**-32 for n in range(9)), 2.0**-60, 2.0**-149]
    )
    near = (wholes[:, None] + parts).reshape(-1)
    near = torch.cat([near, -near]).unique()
    steps = torch.arange(-6, 7, dtype=torch.int32)
    numbers = (near.view(torch.int32)[:, None] + steps).view(torch.float32).reshape(-1)
    numbers = numbers[numbers.abs() < 200]
    wide = numbers.double() - numbers.double().floor()
    exact = (wide * 2.0**32).floor().clamp(0, 2**32 - 1).long()
    noise = (exact[:, None] + torch.arange(-2, 3)).clamp(0, 2**32 - 1)
    noise = torch.cat([noise, torch.tensor([0, 1, 2**31 - 1, 2**31, 2**32 - 1]).expand(len(numbers), -1)], 1)
    pairs = numbers[:, None].expand(noise.shape).reshape(-1)
    count = len(pairs) // 1024 * 1024
    return pairs[:count].contiguous(), noise.reshape(-1)[:count]


def test_noise_next_to_the_fraction_decides_as_in_the_reference(
    rounded: Callable[[str, torch.Tensor, torch.Tensor], torch.Tensor],
) -> None:
    numbers, noise = edges()
    for part, own in zip(numbers.split(1024), noise.split(1024), strict=True):
        expected = round_steps(part.double(), RoundingMode.STOCHASTIC, own.double() * 2.0**-32)
        signed = torch.where(own < 1 << 31, own, own - (1 << 32)).int()
        assert torch.equal(rounded("stochastic", part, signed).double() + 0.0, expected + 0.0)


@pytest.mark.parametrize("mode", DIRECTED, ids=lambda mode: mode.value)
def test_ties_and_their_neighbors_go_where_the_reference_has_them(
    rounded: Callable[[str, torch.Tensor, torch.Tensor], torch.Tensor], mode: RoundingMode
) -> None:
    halves = torch.arange(-64, 64) / 4
    x = torch.cat([(halves.view(torch.int32) + step).view(torch.float32) for step in range(-4, 4)])
    x = torch.where(torch.isfinite(x), x, 0.0)
    found = rounded(mode.value, x, torch.zeros(len(x), dtype=torch.int32))
    assert torch.equal(found.double() + 0.0, round_steps(x.double(), mode) + 0.0)


@pytest.mark.parametrize("start", [0, 2**32 - 64, 3 * 2**32 - 40, 2**40 + 8])
def test_noise_is_of_the_flat_index_past_two_to_the_32(interpreted: None, start: int) -> None:
    scheme = zp.Scheme.parse("int8:channel:round=stochastic(9)")
    k = constants_of(request(Op.QUANTIZE, torch.empty(1, 8, device=DEVICE), scheme), None, chosen=False)
    out = torch.empty(2, 128, dtype=torch.int32, device=DEVICE)
    _kernel("noise_from")[(1,)](out, 9, start // 8, k, 128)
    expected = (uniform_noise(9, start, 128, torch.device("cpu")) * 2.0**32).long()
    for found in out.cpu().long() % (1 << 32):
        assert found.tolist() == expected.tolist()
