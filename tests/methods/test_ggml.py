"""Blocks of the method ``ggml`` against hashes of what llama.cpp writes, and against gguf-py and libgguf."""

import json
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.torch import save_file
from tests.oracles import ggml_golden

from zeropoint import quantize_checkpoint, verify_checkpoint
from zeropoint.codecs.gguf import BLOCKS
from zeropoint.errors import CalibrationError, RangeError, ShapeError, UnsupportedError
from zeropoint.methods import LayerData, method_named
from zeropoint.methods.method import NO_DATA
from zeropoint.schemes import Scheme
from zeropoint.stats import MeanSquare, Statistics

GGML = method_named("ggml")
HASHES = json.loads(ggml_golden.GOLDEN.read_text())["types"]
IMPORTANCES = ggml_golden.importances()
FOURTH = ("TQ2_0", "Q2_0")
"""Types that read a fourth code, which they do not write."""
NEWER = frozenset({"Q2_0"})
"""Types that neither gguf 0.19 nor libgguf 0.2.2 has; tests/codecs/test_gguf_blocks.py has their formula."""


def importance(values: npt.NDArray[np.float32] | None) -> LayerData:
    if values is None:
        return NO_DATA
    state = {
        "squares": torch.from_numpy(values).double(),
        "vectors": torch.tensor(1),
        "seen": torch.tensor(1),
    }
    found = Statistics(accumulator=MeanSquare(features=len(values)), state=state)
    return LayerData(statistics={"mean_square": found})


def blocks(name: str, x: npt.NDArray[np.float32], data: LayerData = NO_DATA) -> npt.NDArray[np.uint8]:
    scheme = Scheme.parse(name) if name in FOURTH else BLOCKS[name].scheme
    found = GGML.quantize(torch.from_numpy(x), scheme, data)
    return BLOCKS[name].encode(found.q).numpy()


def test_all_types_that_are_written_are_compared() -> None:
    assert BLOCKS.keys() - NEWER == ggml_golden.TYPES.keys() == HASHES.keys()


@pytest.mark.crossed
@pytest.mark.parametrize("given", IMPORTANCES)
@pytest.mark.parametrize("name", HASHES)
def test_blocks_are_those_of_llama_cpp(name: str, given: str) -> None:
    found = blocks(name, ggml_golden.weight(), importance(IMPORTANCES[given]))
    assert ggml_golden.digest(found) == HASHES[name][given]


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "TQ1_0", "TQ2_0"])
def test_types_without_a_search_are_those_of_gguf_py(name: str) -> None:
    x = np.random.RandomState(0).standard_normal((32, 512)).astype(np.float32)
    assert np.array_equal(blocks(name, x), gguf.quantize(x, gguf.GGMLQuantizationType[name]))


@pytest.mark.parametrize("name", ggml_golden.TYPES)
def test_blocks_are_those_of_libgguf(name: str) -> None:
    libgguf = pytest.importorskip("libgguf")
    number = ggml_golden.TYPES[name][0]
    x = np.random.RandomState(1).standard_t(3, (8, 512)).astype(np.float32)
    for values in IMPORTANCES.values():
        expected = np.frombuffer(libgguf.quantize_rows_raw(number, x, *x.shape, values), np.uint8)
        assert np.array_equal(blocks(name, x, importance(values)).ravel(), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_weights_of_other_dtypes_have_the_codes_of_their_float32(dtype: torch.dtype) -> None:
    x = torch.randn(4, 256, generator=torch.Generator().manual_seed(3)).to(dtype)
    for name in ("q4_k", "q6_k", "q4_0"):
        scheme = Scheme.parse(name)
        found, wide = GGML.quantize(x, scheme).q, GGML.quantize(x.float(), scheme).q
        assert found.dtype == dtype
        assert torch.equal(found.data, wide.data)
        assert all(torch.equal(a, b) for a, b in zip(found.params.levels, wide.params.levels, strict=True))


@pytest.mark.parametrize("scheme", ["q4_k", "q5_k", "q6_k", "q3_k", "q2_k", "iq4_xs"])
def test_a_search_lowers_the_error_of_rounding_to_nearest(scheme: str) -> None:
    x = torch.randn(16, 512, generator=torch.Generator().manual_seed(4))
    parsed = Scheme.parse(scheme)
    found, plain = (m.quantize(x, parsed).report(x).relative for m in (GGML, method_named("nearest")))
    assert found < plain


def test_importance_lowers_the_error_where_it_is_high() -> None:
    x = torch.randn(64, 512, generator=torch.Generator().manual_seed(5))
    heavy = np.where(np.arange(512) % 8 == 0, 100.0, 1.0).astype(np.float32)
    scheme = Scheme.parse("q2_k")
    given, plain = (GGML.quantize(x, scheme, d).q.dequantize() - x for d in (importance(heavy), NO_DATA))
    assert given[:, ::8].norm() < 0.8 * plain[:, ::8].norm()


def test_scales_that_llama_cpp_would_write_as_inf_are_an_error() -> None:
    with pytest.raises(
        RangeError, match=r"past linear_late/float16@g32, where llama.cpp writes one that is not"
    ):
        GGML.quantize(torch.full((1, 32), 1e7), Scheme.parse("q8_0"))


@pytest.mark.parametrize("preset", ["q4_k", "q6_k", "q4_0", "iq4_xs"])
def test_a_checkpoint_has_the_blocks_of_llama_cpp_and_is_verified(preset: str, tmp_path: Path) -> None:
    weight = ggml_golden.weight()
    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    save_file({"layer.weight": torch.from_numpy(weight)}, source / "model.safetensors")
    quantize_checkpoint(source, out, preset, format="gguf", method="ggml")
    (tensor,) = gguf.GGUFReader(next(out.glob("*.gguf"))).tensors
    assert ggml_golden.digest(tensor.data) == HASHES[preset.upper()]["none"]
    assert verify_checkpoint(out, against=source).ok


def test_what_no_type_of_ggml_holds_is_refused() -> None:
    with pytest.raises(
        UnsupportedError, match="method ggml is for the types of GGUF, such as q4_k, unlike int4"
    ):
        GGML.quantize(torch.zeros(2, 128), Scheme.parse("int4:g128"))
    with pytest.raises(UnsupportedError, match="unlike int4:g32:scale=float16; use method mse"):
        GGML.quantize(torch.zeros(2, 128), Scheme.parse("int4:g32:scale=float16"))  # one sign of scales
    with pytest.raises(
        ShapeError, match="last axis 96 is not a multiple of the block of q4_k, 256; method ggml"
    ):
        GGML.quantize(torch.zeros(2, 96), Scheme.parse("q4_k"))
    with pytest.raises(CalibrationError, match="mean_square is of 32 inputs, and the weight has shape"):
        GGML.quantize(torch.zeros(2, 64), Scheme.parse("q4_0"), importance(np.ones(32, np.float32)))


@pytest.mark.parametrize("given", [None, np.ones(256, np.float32)], ids=["plain", "important"])
@pytest.mark.parametrize("name", [name for name in BLOCKS if name not in ("MXFP4", "NVFP4")])
def test_weights_far_past_what_a_type_holds_are_refused(
    name: str, given: npt.NDArray[np.float32] | None
) -> None:
    """llama.cpp writes them as zeros or NaN: their squares overflow."""
    x = np.random.default_rng(0).standard_normal((2, 256)).astype(np.float32)
    for magnitude in (1e8, 3e18, 1e30):
        with pytest.raises(
            RangeError, match=r"the weight holds \S+, and \S+ at most|needs a scale or offset past"
        ):
            blocks(name, x * np.float32(magnitude), importance(given))
