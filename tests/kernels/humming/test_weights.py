"""Weights for humming-kernels, which runs on GPUs alone: their order of bits, and what is refused."""

from __future__ import annotations

import dataclasses
import importlib

import pytest
import torch
from tests.tensors import normal

import zeropoint as zp
from zeropoint.ops.registry import Op, Request

BACKEND = importlib.import_module("zeropoint.kernels.humming.backend")


def asked(scheme: str, shape: tuple[int, int] = (64, 128), dtype: torch.dtype = torch.bfloat16) -> Request:
    """Return the request of a layer on a GPU."""
    return Request(
        op=Op.LINEAR_VALUES, scheme=zp.Scheme.parse(scheme), shape=shape, dtype=dtype, own_dtype=dtype,
        device=torch.device("cuda"),
    )  # fmt: skip


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 7, 8])
def test_integers_count_from_the_lowest_in_words_of_low_bits_first(bits: int) -> None:
    request = asked(f"int{bits}:channel:scale=bfloat16")
    q = zp.quantize(normal(64, 128, seed=bits).bfloat16(), request.scheme)
    words = BACKEND._tensors(request, q.data, list(q.params.stored))["weight"].long() & 0xFFFFFFFF
    assert words.shape == (64, 4 * bits)
    for column in (0, 1, 10, 31, 127):
        word, low = divmod(column * bits, 32)
        found = words[:, word] >> low
        if low + bits > 32:
            found |= words[:, word + 1] << (32 - low)
        assert torch.equal((found & ((1 << bits) - 1)) - (1 << (bits - 1)), q.codes[:, column].long())


def test_scales_of_one_and_two_levels_are_handed_over_as_they_are() -> None:
    request = asked("nvfp4")
    q = zp.quantize(normal(64, 128, seed=0).bfloat16(), "nvfp4")
    tensors = BACKEND._tensors(request, q.data, list(q.params.stored))
    assert tensors["weight_scale"].dtype == torch.float8_e4m3fn
    assert tensors["weight_scale"].shape == (64, 8)
    assert torch.equal(tensors["weight_scale_2"], 1 / q.params.stored[1].reshape(1))
    assert torch.equal(tensors["weight"].view(torch.uint8), q.data)


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (asked("int4:g128:scale=bfloat16"), None),
        (asked("mxfp4"), None),
        (asked("nvfp4"), None),
        (asked("float8_e4m3fn:channel:scale=bfloat16"), None),
        (asked("mxfp6_e2m3"), None),
        (asked("int4:g128:scale=float32"), "no numbers of 8 bits"),
        (asked("uint4:g32:asym"), "none of its symmetric formats"),
        (asked("nf4:g64"), "none of its symmetric formats"),
        (asked("mxfp4", (72, 128)), "72 rows of 128 are not whole times 64 by 64"),
        (asked("mxfp4", dtype=torch.float32), "no 16-bit floats"),
        (asked("int4:tensor:scale=bfloat16"), "share scales"),
    ],
    ids=str,
)
def test_schemes_and_shapes_are_refused_with_a_reason(request_: Request, reason: str | None) -> None:
    found = BACKEND._scheme_refusal(request_) or BACKEND._shape_refusal(request_)
    assert (found is None) if reason is None else reason in str(found)


def test_it_is_asked_for_layers_on_a_gpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    BACKEND._absence.cache_clear()
    monkeypatch.setattr(BACKEND.importlib.util, "find_spec", lambda _: None)
    backend, request = BACKEND.BACKEND, asked("mxfp4")
    assert backend.refusal(request) == "needs the package humming-kernels, which is not installed"
    BACKEND._absence.cache_clear()
    other = dataclasses.replace(request, op=Op.QUANTIZE)
    assert backend.refusal(other) == "it multiplies values of a weight, and nothing else"
    host = dataclasses.replace(request, device=torch.device("cpu"))
    assert backend.refusal(host) == "the data is on cpu"
