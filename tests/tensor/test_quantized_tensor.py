"""QuantizedTensor: what it counts, how it is saved, moved, copied and walked."""

import copy
import json
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.utils import _pytree as pytree

import zeropoint as zp
from zeropoint import CheckpointError, DtypeError, QuantizedTensor, RangeError, SchemeError, ShapeError
from zeropoint.schemes import PRESETS

SCHEMES = [
    *dict.fromkeys(preset.weight for preset in PRESETS.values()),
    "int8:channel",
    "uint3:g5:asym=real",
    "uint8:tensor:asym:dialect=onnx",
    "int12:token",
    "float8_e5m2:cast",
    "int5:tensor:round=stochastic(3)",
    "codebook[-3.0,0.5,1.0]:g4",
]
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


def sample(
    scheme: str, shape: tuple[int, ...] = (3, 37), dtype: torch.dtype = torch.float32
) -> QuantizedTensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    return zp.quantize(x.to(dtype), scheme)


def same(a: QuantizedTensor, b: QuantizedTensor) -> bool:
    return torch.equal(a.data, b.data) and a.params == b.params and (a.shape, a.dtype) == (b.shape, b.dtype)


@pytest.mark.parametrize(
    ("scheme", "dtype", "wanted"),
    [
        ("int8:tensor", torch.float32, 3 * 37 + 4),
        ("int4:tensor", torch.float32, 3 * 19 + 4),
        ("int4:g16", torch.float32, 3 * 19 + 9 * 4),
        ("int4:g16:asym", torch.float32, 3 * 19 + 9 * 4 + 5),
        ("int4:g16:asym=real", torch.float32, 3 * 19 + 9 * 8),
        ("int4:g16:scale=input", torch.bfloat16, 3 * 19 + 9 * 2),
        ("mxfp4", torch.float32, 3 * 19 + 6),
        ("nvfp4", torch.float32, 3 * 19 + 9 + 4),
        ("mx9", torch.float32, 3 * 37 + 9 + 8),
        ("float8_e5m2:cast", torch.float32, 3 * 37),
    ],
)
def test_the_bytes_are_codes_in_whole_rows_and_every_parameter(
    scheme: str, dtype: torch.dtype, wanted: int
) -> None:
    q = sample(scheme, dtype=dtype)
    assert q.nbytes == wanted
    assert q.bits_per_value == 8 * wanted / 111
    assert q.compression_ratio == 111 * dtype.itemsize / wanted


def test_a_file_holds_no_more_than_the_counted_bytes(tmp_path: Path) -> None:
    q = sample("nvfp4", (64, 64))
    q.save(tmp_path / "q.safetensors")
    tensors = load_file(tmp_path / "q.safetensors")
    assert sum(t.nbytes for t in tensors.values()) == q.nbytes


@pytest.mark.crossed
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_is_saved_is_loaded_bit_for_bit(scheme: str, dtype: torch.dtype, tmp_path: Path) -> None:
    q = sample(scheme, dtype=dtype)
    q.save(tmp_path / "q.safetensors")
    loaded = QuantizedTensor.load(tmp_path / "q.safetensors")
    assert same(loaded, q)
    assert torch.equal(loaded.dequantize(), q.dequantize())


@pytest.mark.parametrize("shape", [(), (1,), (0,), (0, 5), (5, 0), (2, 3, 4)])
def test_any_shape_is_saved_and_loaded(shape: tuple[int, ...], tmp_path: Path) -> None:
    q = sample("int4:tensor:asym", shape)
    q.save(tmp_path / "q.safetensors")
    assert same(QuantizedTensor.load(tmp_path / "q.safetensors"), q)


def test_parameters_of_another_dtype_than_the_tensor_are_kept(tmp_path: Path) -> None:
    params = zp.choose_params(torch.ones(2, 8, dtype=torch.bfloat16), "int8:channel:scale=input")
    q = zp.quantize(torch.ones(2, 8), params)
    q.save(tmp_path / "q.safetensors")
    loaded = QuantizedTensor.load(tmp_path / "q.safetensors")
    assert (loaded.dtype, loaded.params.dtype) == (torch.float32, torch.bfloat16)
    assert same(loaded, q)


def test_a_saved_tensor_is_plain_safetensors_and_executes_nothing(tmp_path: Path) -> None:
    q = sample("int4:g16:asym")
    q.save(tmp_path / "q.safetensors")
    assert not zipfile.is_zipfile(tmp_path / "q.safetensors")
    with safe_open(tmp_path / "q.safetensors", "pt") as file:
        assert sorted(file.keys()) == ["data", "scale1", "zero_point"]
        facts = json.loads(file.metadata()["zeropoint"])
    assert facts == {
        "scheme": "int4:g16:asym", "shape": [3, 37], "dtype": "float32", "params_dtype": "float32",
        "own_params": True,
    }  # fmt: skip


def rewrite(path: Path, *, facts: dict[str, object] | None = None, **tensors: torch.Tensor | None) -> Path:
    """Save a tensor with some header facts or tensors replaced, or left out where the value is None."""
    q = sample("int4:g16:asym")
    q.save(path)
    with safe_open(path, "pt") as file:
        header = json.loads(file.metadata()["zeropoint"]) | (facts or {})
    header = {k: v for k, v in header.items() if v is not None}
    kept = {k: v for k, v in (load_file(path) | tensors).items() if v is not None}
    save_file(kept, path, metadata={"zeropoint": json.dumps(header)})
    return path


@pytest.mark.parametrize(
    "facts",
    [
        {"shape": None},
        {"shape": [3, -37]},
        {"shape": [3, 37.0]},
        {"shape": "3x37"},
        {"shape": [True, 37]},
        {"scheme": None},
        {"scheme": "int4:g16:asym:nonsense"},
        {"scheme": 4},
        {"dtype": "float31"},
        {"dtype": "save"},
        {"dtype": ["float32"]},
        {"params_dtype": None},
    ],
)
def test_a_damaged_header_is_named(facts: dict[str, object], tmp_path: Path) -> None:
    path = rewrite(tmp_path / "q.safetensors", facts=facts)
    with pytest.raises(
        CheckpointError, match=r"metadata 'zeropoint' of .*q.safetensors \(='\{.*\) is damaged"
    ):
        QuantizedTensor.load(path)


@pytest.mark.parametrize(
    "header",
    [
        "", "{", "[]", "null", "12", '{"shape": [1e400]}', "\x1b[31m",
        pytest.param("[" * 100_000, id="deep list"), pytest.param('{"a":' * 100_000, id="deep object"),
    ],
)  # fmt: skip
def test_a_header_that_is_no_mapping_is_named_and_escaped(header: str, tmp_path: Path) -> None:
    save_file({"data": torch.zeros(1, dtype=torch.uint8)}, tmp_path / "q", metadata={"zeropoint": header})
    with pytest.raises(CheckpointError, match="is damaged") as caught:
        QuantizedTensor.load(tmp_path / "q")
    assert "\x1b" not in str(caught.value)


def test_a_file_of_other_tensors_is_refused(tmp_path: Path) -> None:
    save_file({"weight": torch.zeros(2)}, tmp_path / "w.safetensors")
    with pytest.raises(
        CheckpointError, match=r"w.safetensors holds no zeropoint tensor; its metadata has no key"
    ):
        QuantizedTensor.load(tmp_path / "w.safetensors")


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"\x80\x02}q\x00.", b"\xff" * 64])
def test_a_file_that_is_no_safetensors_is_refused(content: bytes, tmp_path: Path) -> None:
    """Nothing is unpickled, whatever the file is."""
    (tmp_path / "q.bin").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"q.bin is not a safetensors file"):
        QuantizedTensor.load(tmp_path / "q.bin")


def test_a_missing_file_is_an_ordinary_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="absent"):
        QuantizedTensor.load(tmp_path / "absent")


@pytest.mark.parametrize(
    ("data", "have"),
    [
        (None, "absent"),
        (torch.zeros(3, 18, dtype=torch.uint8), r"torch.uint8, shape \(3, 18\)"),
        (torch.zeros(57, dtype=torch.uint8), r"torch.uint8, shape \(57,\)"),
        (torch.zeros(3, 19, dtype=torch.int8), r"torch.int8, shape \(3, 19\)"),
    ],
)
def test_codes_of_another_shape_or_dtype_are_refused(
    data: torch.Tensor | None, have: str, tmp_path: Path
) -> None:
    path = rewrite(tmp_path / "q.safetensors", data=data)
    with pytest.raises(
        CheckpointError, match=rf"tensor 'data' of .* \({have}\) must be torch.uint8 of shape \(3, 19\)"
    ):
        QuantizedTensor.load(path)


def test_damaged_parameters_are_refused_when_loaded(tmp_path: Path) -> None:
    path = tmp_path / "q.safetensors"
    with pytest.raises(SchemeError, match=r"tensors \['scale1'\] are missing"):
        QuantizedTensor.load(rewrite(path, scale1=None))
    with pytest.raises(SchemeError, match="zero_point must be given"):
        QuantizedTensor.load(rewrite(path, zero_point=None))
    with pytest.raises(RangeError, match=r"scale 1 \(=0.0\) of block \(0, 0\) must be finite"):
        QuantizedTensor.load(rewrite(path, scale1=torch.zeros(3, 3)))
    with pytest.raises(ShapeError, match=r"scale 1 \(shape \(3, 2\)\) must have shape \(3, 3\)"):
        QuantizedTensor.load(rewrite(path, scale1=torch.ones(3, 2)))
    with pytest.raises(RangeError, match=r"zero_point \(=8\) of block \(0, 0\) must lie in -8..7"):
        QuantizedTensor.load(rewrite(path, zero_point=torch.full((3, 3), 8, dtype=torch.int32)))


@pytest.mark.parametrize("scheme", ["int8:channel", "uint4:g5:asym", "nvfp4", "mx9", "int8:cast"])
def test_a_quantized_tensor_is_a_tree_of_its_tensors(scheme: str) -> None:
    q = sample(scheme)
    leaves, tree = pytree.tree_flatten({"weight": q, "bias": torch.ones(2)})
    count = 1 + len(q.scales) + (q.zero_point is not None)
    assert len(leaves) == count + 1
    assert all(isinstance(leaf, torch.Tensor) for leaf in leaves)
    assert same(pytree.tree_unflatten(leaves, tree)["weight"], q)
    doubled = pytree.tree_map(lambda leaf: leaf.clone(), q)
    assert same(doubled, q)
    assert doubled.data.data_ptr() != q.data.data_ptr()


def test_packed_codes_are_not_cast_to_a_dtype_of_values() -> None:
    with pytest.raises(DtypeError, match=r"would change packed codes; use dequantize\(torch.float16\)"):
        sample("int4:g32").to(torch.float16)


@pytest.mark.parametrize("scheme", ["int8:channel", "uint4:g5:asym", "nvfp4"])
def test_a_quantized_tensor_moves_with_all_its_tensors(scheme: str) -> None:
    q = sample(scheme)
    meta = q.to("meta")
    leaves = pytree.tree_leaves(meta)
    assert all(leaf.is_meta for leaf in leaves)
    assert meta.device.type == "meta"
    assert (meta.shape, meta.dtype, meta.nbytes) == (q.shape, q.dtype, q.nbytes)
    assert meta.dequantize().shape == q.shape
    assert "QuantizedTensor" in repr(meta)
    assert same(q.to("cpu"), q)


def test_a_deep_copy_shares_no_memory() -> None:
    q = sample("uint4:g5:asym")
    other = copy.deepcopy(q)
    assert same(other, q)
    other.data.zero_()
    other.scales[0].zero_()
    assert not same(other, q)
    assert same(sample("uint4:g5:asym"), q)


@pytest.mark.crossed
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("wanted", DTYPES)
def test_values_come_in_any_dtype_rounded_once(dtype: torch.dtype, wanted: torch.dtype) -> None:
    q = sample("int8:channel", dtype=dtype)
    assert q.dequantize().dtype == dtype
    values = q.dequantize(wanted)
    assert values.dtype == wanted
    assert q.scales[0].dtype == torch.float32
    exact = q.codes.double() * q.scales[0].double()
    if torch.float64 in (dtype, wanted):
        assert torch.equal(values, exact.to(wanted))
    else:
        assert torch.equal(values, (q.codes.float() * q.scales[0]).to(wanted))


@pytest.mark.parametrize(
    ("scheme", "dtype"),
    [
        ("int4", torch.int8),
        ("int8", torch.int8),
        ("int12", torch.int16),
        ("uint8", torch.uint8),
        ("nf4", torch.uint8),
    ],
)
def test_codes_of_signed_integers_are_signed(scheme: str, dtype: torch.dtype) -> None:
    q = zp.quantize(torch.tensor([0.0 if scheme.startswith("uint") else -1.0, 1.0]), scheme)
    assert q.codes.dtype == dtype
    assert bool((q.codes < 0).any()) == scheme.startswith("int")


def test_the_repr_says_scheme_shape_dtype_and_size() -> None:
    assert repr(sample("int4:g16")) == (
        "QuantizedTensor(int4:g16, shape=(3, 37), dtype=torch.float32, integers in 93 bytes, "
        "6.703 bits a value)"
    )
    assert "codes in" in repr(sample("mxfp4"))


def test_a_quantized_tensor_cannot_be_changed_by_assignment() -> None:
    with pytest.raises(AttributeError, match="cannot assign"):
        sample("int8").shape = (1,)  # type: ignore[misc]


@pytest.mark.parametrize(
    ("scale", "error", "message"),
    [
        (-torch.ones(3, 1), RangeError, r"scale 1 \(=-1.0\) of block \(0, 0\) must be finite"),
        (torch.zeros(3, 1), RangeError, r"scale 1 \(=0.0\)"),
        (torch.full((3, 1), torch.nan), RangeError, r"scale 1 \(=nan\)"),
        (torch.ones(3, 1).half(), SchemeError, r"scale 1 \(dtype torch.float16\) must be torch.float32"),
        (torch.ones(3), ShapeError, r"scale 1 \(shape \(3,\)\) must have shape \(3, 1\)"),
    ],
)
def test_given_parameters_are_checked_before_they_are_used(
    scale: torch.Tensor, error: type[Exception], message: str
) -> None:
    x = torch.ones(3, 4)
    params = zp.QuantizationParams(scheme=zp.Scheme.parse("int8:channel"), shape=(3, 4), scales=(scale,))
    for use in (zp.quantize, zp.fake_quantize):
        with pytest.raises(error, match=message):
            use(x, params)
