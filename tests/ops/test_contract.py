"""What operators promise: any shape and stride, nothing modified, torch's operator checks, clear errors."""

import contextlib
import copy
import itertools
import math
import warnings
from collections.abc import Callable

import numpy as np
import pytest
import torch
from tests.tensors import normal
from torch.library import opcheck

import zeropoint as zp
from zeropoint import (
    DtypeError,
    FormatError,
    NonFiniteError,
    QuantizedTensor,
    RangeError,
    SchemeError,
    ShapeError,
)
from zeropoint.ops import reference
from zeropoint.ops.library import only_backend
from zeropoint.schemes import PRESETS

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
SCHEMES = [
    "int8:tensor",
    "int4:channel",
    "int8:channel-1",
    "uint8:token:asym",
    "int4:g4:asym",
    "uint3:g5:asym=real",
    "float8_e4m3fn:block2x3",
    "mxfp4",
    "nvfp4",
    "mx9",
    "nf4:g8",
    "table3:g5",
    "table4:block2x3:scale=float16",
    "int5:tensor:round=stochastic(3)",
    "float8_e5m2:cast",
]


def same(a: QuantizedTensor, b: QuantizedTensor) -> bool:
    return torch.equal(a.data, b.data) and a.params == b.params and a.shape == b.shape and a.dtype == b.dtype


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transpose": lambda x: x.transpose(-1, -2),
    "every second row": lambda x: x[::2],
    "every second column": lambda x: x[..., ::2],
    "storage offset": lambda x: x[..., 1:],
    "expanded": lambda x: x[:1].expand(x.shape),
    "flipped by index": lambda x: x[..., torch.arange(x.shape[-1] - 1, -1, -1)],
    "narrow": lambda x: x.narrow(-1, 2, 5),
    "unfold": lambda x: x.unfold(-1, 4, 2),
    "channels last": lambda x: x.reshape(2, 3, 2, 8).contiguous(memory_format=torch.channels_last),
    "overlapping": lambda x: torch.as_strided(x, (5, 8), (3, 1), 2),
}


@pytest.mark.crossed
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_stride_gives_the_result_of_the_contiguous_copy(
    scheme: str, view: str, dtype: torch.dtype
) -> None:
    base = normal(12, 8, dtype=dtype)
    x = VIEWS[view](base)
    before = base.clone()
    plain = x.contiguous().clone(memory_format=torch.contiguous_format)
    q = zp.quantize(x, scheme)
    assert same(q, zp.quantize(plain, scheme))
    assert torch.equal(zp.fake_quantize(x, q.params), zp.fake_quantize(plain, q.params))
    assert torch.equal(zp.fake_quantize(x, q.params), q.dequantize())
    assert torch.equal(base, before)


@pytest.mark.crossed
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (7,), (3, 7), (2, 3, 7), (2, 2, 3, 7), (2, 1, 2, 3, 7)])
def test_every_axis_of_every_rank_may_be_the_channel(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = normal(*shape, dtype=dtype)
    for axis in range(-len(shape), len(shape)):
        q = zp.quantize(x, f"int8:channel{axis}")
        moved = zp.quantize(x.movedim(axis, 0).contiguous(), "int8:channel")
        assert torch.equal(q.codes.movedim(axis, 0), moved.codes)
        assert torch.equal(q.dequantize().movedim(axis, 0), moved.dequantize())
    whole = zp.quantize(x, "int8")
    assert torch.equal(whole.codes.flatten(), zp.quantize(x.reshape(-1), "int8").codes)


@pytest.mark.parametrize(("axis", "shape"), [(2, (3, 4)), (-3, (3, 4)), (1, (3,)), (0, ())])
def test_an_axis_the_tensor_lacks_is_refused_with_the_shape(axis: int, shape: tuple[int, ...]) -> None:
    with pytest.raises(
        ShapeError, match=rf"granularity channel{'' if axis == 0 else axis} needs at least \d axes, got"
    ):
        zp.quantize(torch.ones(shape), f"int8:channel{axis}")


@pytest.mark.parametrize("scheme", ["int4:g32", "mxfp4", "nvfp4", "int8:token", "int8:block2x2"])
def test_a_scalar_has_no_axis_for_groups(scheme: str) -> None:
    """One scale for the whole tensor is all that fits."""
    with pytest.raises(ShapeError, match=r"needs at least \d axes, got shape \(\)"):
        zp.quantize(torch.tensor(1.0), scheme)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_vector_is_quantized_like_a_matrix_of_one_row(scheme: str) -> None:
    x = normal(37)
    if "block" in scheme or "channel" in scheme:
        scheme = "int8:token"
    assert torch.equal(zp.quantize(x, scheme).codes, zp.quantize(x[None], scheme).codes[0])


@pytest.mark.crossed
@pytest.mark.parametrize("columns", [1, 2, 31, 33, 63, 65, 192])
@pytest.mark.parametrize("scheme", ["int4:g128", "int4:g32:asym", "mxfp4", "nvfp4", "nf4:g64", "mx6"])
def test_a_ragged_last_group_is_a_group_of_its_own(scheme: str, columns: int) -> None:
    """Nothing outside the row affects it."""
    x = normal(3, columns) - 3.0  # all of one sign, so that a padded zero would be an extreme
    size = zp.Scheme.parse(scheme).granularity.extents[-1]
    size = max(size, 16) if scheme.startswith("mx6") else size
    q = zp.quantize(x, scheme)
    last = columns - (columns - 1) // size * size
    if zp.Scheme.parse(scheme).scales[-1].granularity.extents:
        tail = zp.quantize(x[:, columns - last :].contiguous(), scheme)
        assert torch.equal(q.codes[:, columns - last :], tail.codes)
    assert (
        (q.dequantize() - x).abs()
        <= q.error_bound().repeat_interleave(q.params.block_size[-1], -1)[:, :columns]
    ).all()


@pytest.mark.parametrize("size", [1, 3, 1000, 2**31 + 5, 2**40])
def test_a_group_of_any_size_is_defined(size: int) -> None:
    """A group larger than the row is the row."""
    x = normal(2, 3)
    q = zp.quantize(x, f"int8:g{size}:narrow")
    assert q.scales[0].shape == (2, 3 if size == 1 else 1)
    assert float((q.dequantize() - x).abs().max()) <= float(q.error_bound().max())


@pytest.mark.parametrize("text", ["int8:g0", "int8:g-1", "int8:block0x3"])
def test_a_group_size_below_one_is_refused(text: str) -> None:
    with pytest.raises(SchemeError, match=r"at least|positive|unknown"):
        zp.quantize(torch.ones(2, 3), text)


@pytest.mark.crossed
@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("length", range(1, 18))
def test_an_odd_count_of_codes_survives_packing(bits: int, length: int) -> None:
    """Pad bits are zero and the length is kept."""
    x = torch.full((2, length), -1.0)
    q = zp.quantize(x, f"int{bits}:narrow")
    assert q.data.shape == (2, -(-length * bits // 8))
    assert q.codes.tolist() == [[-(2 ** (bits - 1) - 1)] * length] * 2
    used = length * bits % 8
    assert used == 0 or not (q.data[:, -1] >> used).any()


@pytest.mark.crossed
@pytest.mark.parametrize("shape", [(0,), (0, 5), (5, 0), (2, 0, 3)])
@pytest.mark.parametrize(
    "scheme", ["int8:tensor", "int4:g4:asym", "mxfp4", "nvfp4", "mx9", "nf4:g8", "int8:cast"]
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_an_empty_tensor_gives_empty_results_of_consistent_shapes(
    scheme: str, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    x = torch.empty(shape, dtype=dtype, requires_grad=True)
    q = zp.quantize(x, scheme)
    q.params.validate()
    assert q.codes.shape == q.dequantize().shape == shape
    assert q.dequantize().dtype == dtype
    assert q.error_bound().shape == q.scheme.granularity.grid(shape) or not q.scales
    y = zp.fake_quantize(x, scheme)
    y.sum().backward()
    assert y.shape == shape
    assert x.grad is not None
    assert x.grad.shape == shape
    assert "QuantizedTensor" in repr(q)


@pytest.mark.parametrize("scheme", ["int8:channel", "nvfp4", "uint4:g4:asym", "int8:tensor:cast"])
def test_meta_tensors_give_meta_results_of_the_right_shapes(scheme: str) -> None:
    real, meta = zp.quantize(torch.ones(4, 10), scheme), zp.quantize(torch.ones(4, 10, device="meta"), scheme)
    assert meta.data.is_meta
    assert (meta.data.shape, meta.data.dtype) == (real.data.shape, real.data.dtype)
    for a, b in zip(meta.scales, real.scales, strict=True):
        assert (a.shape, a.dtype, a.device.type) == (b.shape, b.dtype, "meta")
    assert meta.dequantize().is_meta
    assert zp.fake_quantize(torch.ones(4, 10, device="meta"), scheme).is_meta
    params = zp.choose_params(torch.ones(4, 10, device="meta"), scheme)
    assert [s.shape for s in params.scales] == [s.shape for s in real.scales]


def torch_quantized() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch 2.13 deprecates these tensors, which still exist
        return torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)


BAD = {
    "int64": (
        lambda: torch.ones(3, dtype=torch.int64),
        r"x \(dtype torch.int64\) must be one of torch.float32",
    ),
    "bool": (lambda: torch.ones(3, dtype=torch.bool), r"x \(dtype torch.bool\) must be one of"),
    "uint8": (lambda: torch.ones(3, dtype=torch.uint8), r"x \(dtype torch.uint8\) must be one of"),
    "complex64": (
        lambda: torch.ones(3, dtype=torch.complex64),
        r"x \(dtype torch.complex64\) must be one of",
    ),
    "float8": (
        lambda: torch.ones(3).to(torch.float8_e4m3fn),
        r"x \(dtype torch.float8_e4m3fn\) must be one of",
    ),
    "sparse": (
        lambda: torch.eye(3).to_sparse(),
        r"x \(layout torch.sparse_coo, torch.float32\) must be a dense",
    ),
    "quantized": (torch_quantized, r"x \(layout torch.strided, torch.qint8\) must be a dense tensor"),
    "list": (lambda: [1.0, 2.0], r"x \(a list\) must be a torch.Tensor"),
    "array": (lambda: np.ones(3), r"x \(a ndarray\) must be a torch.Tensor"),
    "none": (lambda: None, r"x \(a NoneType\) must be a torch.Tensor"),
}


@pytest.mark.crossed
@pytest.mark.parametrize("call", [zp.quantize, zp.choose_params, zp.fake_quantize])
@pytest.mark.parametrize("kind", BAD)
def test_tensors_that_cannot_be_quantized_are_named(kind: str, call: Callable[..., object]) -> None:
    make, message = BAD[kind]
    with pytest.raises(DtypeError, match=message):
        call(make(), "int8")


class Wrapper(torch.Tensor):
    """A tensor that holds another one, as DTensor and torchao's tensors do."""

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], *_: object) -> torch.Tensor:
        return inner["inner"]

    @classmethod
    def __torch_dispatch__(
        cls, func: object, types: object, args: object = (), kwargs: object = None
    ) -> object:
        raise AssertionError(f"{func} must not run on a wrapper")


def test_wrapper_tensors_are_refused_by_their_type() -> None:
    wrapper = torch.Tensor._make_wrapper_subclass(Wrapper, (3,), dtype=torch.float32)
    with pytest.raises(DtypeError, match=r"x \(a Wrapper\) must be a plain tensor"):
        zp.quantize(wrapper, "int8")


def test_nested_tensors_are_refused() -> None:
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    with pytest.raises(DtypeError, match=r"must be a (dense|plain) tensor"):
        zp.quantize(nested, "int8")


@pytest.mark.crossed
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "scheme", ["int8", "int4:g4:asym", "mxfp4", "nvfp4", "nf4:g4", "mx9", "float8_e5m2:cast"]
)
def test_a_value_that_is_not_finite_is_an_error_with_its_place_and_count(scheme: str, value: float) -> None:
    x = torch.ones(3, 8)
    x[1, 5] = value
    x[2, 0] = math.nan
    message = rf"tensor \(shape \(3, 8\), torch.float32\) contains {value} at \(1, 5\); 2 non-finite values"
    for call in (zp.quantize, zp.choose_params, zp.fake_quantize):
        with pytest.raises(NonFiniteError, match=message):
            call(x, scheme)
    params = zp.choose_params(torch.ones(3, 8), scheme)
    with pytest.raises(NonFiniteError, match=message):
        zp.quantize(x, params)


@pytest.mark.parametrize("lane", range(32))
def test_infinity_in_any_lane_of_a_block_is_found(lane: int) -> None:
    x = torch.ones(2, 32)
    x[1, lane] = math.inf
    with pytest.raises(NonFiniteError, match=rf"contains inf at \(1, {lane}\); 1 non-finite"):
        zp.quantize(x, "mxfp4")


@pytest.mark.parametrize("payload", [0x7F800001, 0xFF800001, 0x7FC00000, 0xFFC12345])
def test_every_kind_of_nan_is_an_error(payload: int) -> None:
    x = torch.tensor([0, payload], dtype=torch.int64).to(torch.int32).view(torch.float32)
    with pytest.raises(NonFiniteError, match="contains nan at"):
        zp.quantize(x, "int8")


@pytest.mark.crossed
@pytest.mark.parametrize("scheme", [*SCHEMES, *PRESETS])
@pytest.mark.parametrize("dtype", DTYPES)
def test_random_bits_give_a_result_or_a_named_error(scheme: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(len(scheme))
    width = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    raw = torch.randint(-(2**31), 2**31, (16, 40 * 8), generator=generator, dtype=torch.int64)
    x = (raw * 2654435761).to(width).view(dtype)[:, :40]
    with pytest.raises(NonFiniteError, match="non-finite"):
        zp.quantize(torch.cat([x, torch.full((1, 40), math.nan, dtype=dtype)]), scheme)
    finite = torch.where(torch.isfinite(x), x, torch.zeros_like(x))
    if dtype == torch.float64:
        finite = finite.clamp(-1e30, 1e30)  # float32 scales end near 3e38
    parsed = zp.Scheme.parse(scheme)
    narrow = len(parsed.scales) == 1 and parsed.scales[0].format_for(zp.get_format("float32")).max < 2**100
    if parsed.chained is not None or narrow:
        with contextlib.suppress(RangeError):  # scales of float16, or of a byte, say so
            zp.quantize(finite, scheme)
        finite = finite.clamp(-1e4, 1e4)
    q = zp.quantize(finite, scheme)
    assert torch.equal(q.dequantize(), zp.fake_quantize(finite, scheme))
    if "_late" not in str(q.scheme):  # those give other codes under the scales as they are stored
        assert torch.equal(q.dequantize(), zp.fake_quantize(finite, q.params))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_input_is_never_modified_and_never_returned(scheme: str) -> None:
    x = normal(6, 8)
    before = x.clone()
    q = zp.quantize(x, scheme)
    y = zp.fake_quantize(x, q.params)
    y.zero_()
    q.data.zero_()
    for scale in q.scales:
        scale.view(torch.uint8).zero_()
    assert torch.equal(x, before)


@pytest.mark.parametrize("scheme", ["int8:cast", "float8_e4m3fn:cast", "int8:tensor"])
def test_results_alias_nothing(scheme: str) -> None:
    """Writing into the input afterwards changes no result."""
    x = normal(4, 8)
    q = zp.quantize(x, scheme)
    values, y = q.dequantize(), zp.fake_quantize(x, q.params)
    kept = copy.deepcopy(q), values.clone(), y.clone()
    x.fill_(100.0)
    assert same(q, kept[0])
    assert torch.equal(values, kept[1])
    assert torch.equal(y, kept[2])


def test_read_only_memory_can_be_quantized() -> None:
    array = np.frombuffer(np.arange(8, dtype=np.float32).tobytes(), dtype=np.float32)
    with pytest.warns(UserWarning, match="not writable"):
        x = torch.from_numpy(array)
    assert zp.quantize(x, "int8:narrow").codes.tolist()[-1] == 127


def test_inputs_that_require_gradients_give_codes_without_and_fake_values_with() -> None:
    x = normal(4, 8).requires_grad_()
    q = zp.quantize(x, "int8:channel")
    assert not q.data.requires_grad
    assert not any(s.requires_grad for s in q.scales)
    assert zp.fake_quantize(x, q.params).requires_grad
    assert zp.fake_quantize(torch.nn.Parameter(x.detach()), "int8").requires_grad


def test_inference_tensors_can_be_quantized() -> None:
    with torch.inference_mode():
        x = normal(4, 8)
        q = zp.quantize(x, "mxfp4")
        y = zp.fake_quantize(x, q.params)
    assert torch.equal(q.dequantize(), y)
    assert torch.equal(zp.quantize(x, "mxfp4").data, q.data)


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16])
def test_the_default_dtype_and_autocast_have_no_effect(default: torch.dtype) -> None:
    x = normal(4, 40)
    wanted = {scheme: zp.quantize(x, scheme) for scheme in SCHEMES}
    torch.set_default_dtype(default)
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            results = {scheme: zp.quantize(x, scheme) for scheme in SCHEMES}
            faked = {scheme: zp.fake_quantize(x, q.params) for scheme, q in wanted.items()}
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(same(results[s], wanted[s]) for s in SCHEMES)
    assert all(torch.equal(faked[s], wanted[s].dequantize()) for s in SCHEMES)


ARGUMENTS = [
    (scheme, dtype, affine)
    for scheme, affine in (("int8:channel", False), ("uint4:g4:asym", True), ("nvfp4", False), ("mx9", False))
    for dtype in (torch.float32, torch.bfloat16)
]


@pytest.mark.rotating
@pytest.mark.parametrize(("scheme", "dtype", "affine"), ARGUMENTS)
def test_operators_pass_the_checks_of_torch(scheme: str, dtype: torch.dtype, affine: bool) -> None:
    x = normal(4, 12, dtype=dtype)
    q = zp.quantize(x, scheme)
    assert (q.zero_point is not None) == affine
    text, params = q.params.text, list(q.params.stored)
    # The schema test of torch 2.13 compares tensors with a reduction that float8 lacks.
    tests = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    tests = tests if any(s.dtype.itemsize == 1 for s in params) else (*tests, "test_schema")
    calls = [
        (torch.ops.zeropoint.quantize_dynamic.default, (x, text)),
        (torch.ops.zeropoint.quantize.default, (x, params, text)),
        (torch.ops.zeropoint.dequantize.default, (q.data, params, text, [4, 12], dtype, dtype)),
        (torch.ops.zeropoint.fake_quantize.default, (x.clone().requires_grad_(), params, text)),
        (torch.ops.zeropoint.fake_quantize_backward.default, (x, x, params, text)),
    ]
    for operator, arguments in calls:
        assert set(opcheck(operator, arguments, test_utils=tests).values()) == {"SUCCESS"}


@pytest.mark.parametrize("scheme", ["int8:channel", "mxfp4", "uint4:g4:asym", "nvfp4"])
def test_a_compiled_function_has_no_graph_break_and_the_same_bytes(scheme: str) -> None:
    def run(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q = zp.quantize(x * 2, scheme)
        return q.data, q.dequantize() + 1, zp.fake_quantize(x, q.params)

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    x = normal(4, 12)
    for ours, theirs in zip(compiled(x), run(x), strict=True):
        assert torch.equal(ours, theirs)


def test_a_compiled_training_step_has_the_gradient_of_the_eager_one() -> None:
    params = zp.QuantizationParams.new(0.1, 3, "int4:tensor:asym")

    def loss(x: torch.Tensor) -> torch.Tensor:
        return (zp.fake_quantize(x, params) ** 2).sum()

    eager, compiled = normal(5, 7).requires_grad_(), normal(5, 7).requires_grad_()
    loss(eager).backward()
    torch.compile(loss, fullgraph=True, backend="aot_eager")(compiled).backward()
    assert eager.grad is not None
    assert compiled.grad is not None
    assert torch.equal(eager.grad, compiled.grad)


def test_operators_work_under_vmap_free_tracing_with_dynamic_shapes() -> None:
    compiled = torch.compile(
        lambda x: zp.fake_quantize(x, "int8:token"), fullgraph=True, dynamic=True, backend="aot_eager"
    )
    for rows, columns in itertools.product((2, 5), (3, 9)):
        x = normal(rows, columns)
        assert torch.equal(compiled(x), zp.fake_quantize(x, "int8:token"))


def test_a_tensor_of_large_strides_and_little_memory_is_indexed_in_64_bits() -> None:
    """Rows lie 2**30 elements apart, past 2**31 elements in all; the memory is virtual."""
    base = torch.ones(1).expand(2**33)
    meta = torch.empty_strided((5, 3), (2**30, 1), device="meta")
    assert zp.quantize(meta, "int8:channel").data.shape == (5, 3)
    x = base.as_strided((2, 3), (0, 0))
    assert torch.equal(zp.quantize(x.contiguous(), "int8").data, zp.quantize(x, "int8").data)


@pytest.mark.crossed
@pytest.mark.parametrize("scheme", [*SCHEMES, "int3:tensor", "int7:tensor:round=stochastic(8)"])
@pytest.mark.parametrize("shape", [(1003,), (57, 18), (3, 5, 60)])
@pytest.mark.parametrize("chunk", [8, 24, 64])
def test_the_size_of_chunks_changes_nothing(
    scheme: str, shape: tuple[int, ...], chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if len(shape) == 1 and "block" in scheme:
        scheme = "mxfp4"
    x = normal(*shape)
    whole = zp.quantize(x, scheme)
    values = whole.dequantize()
    monkeypatch.setattr(reference.chunks, "__defaults__", (chunk,))
    assert same(zp.quantize(x, scheme), whole)
    assert torch.equal(whole.dequantize(), values)
    assert torch.equal(zp.fake_quantize(x, whole.params), values)


def test_values_past_the_output_dtype_become_infinite() -> None:
    """A kernel returns Inf of the right sign; verifying a checkpoint is what refuses it."""
    q = zp.quantize(torch.tensor([3e38, -3e38, 1.0]), "int8:narrow")
    assert q.dequantize(torch.float16).tolist() == [math.inf, -math.inf, 0.0]
    params = zp.QuantizationParams.new(2.0**127, 0, "float8_e5m2")
    data = torch.tensor([0x7B, 0xFB, 0x3C], dtype=torch.uint8)
    q = QuantizedTensor(data=data, params=params, shape=(3,), dtype=torch.float32)
    assert q.dequantize().tolist() == [math.inf, -math.inf, 2.0**127]
    assert torch.isfinite(q.dequantize(torch.float64)).all()


def test_byte_swapped_arrays_are_refused_and_never_swapped_in_silence() -> None:
    swapped = np.arange(4, dtype=np.float32).astype(">f4")
    with pytest.raises(DtypeError, match=r"x \(a ndarray\) must be a torch.Tensor"):
        zp.quantize(swapped, "int8")
    with pytest.raises(ValueError, match="byte order"):
        torch.from_numpy(swapped)


@pytest.mark.parametrize(
    ("scheme", "message"),
    [
        ("int1", "bits"),
        ("int33", "bits"),
        ("int8:scale=flor", "flor"),
        ("int8:round=half_odd", "half_odd"),
        ("int8:overflow=wrap", "wrap"),
        ("int8:dialect=tensorflow", "tensorflow"),
        ("flaot8", "flaot8"),
        ("nf4:asym", "zero_point"),
        ("mxfp4:asym", "zero"),
    ],
)
def test_an_unknown_or_contradictory_scheme_is_refused_by_every_operator(scheme: str, message: str) -> None:
    """The wrong word is named."""
    for call in (zp.quantize, zp.choose_params, zp.fake_quantize):
        with pytest.raises((SchemeError, FormatError), match=message):
            call(torch.ones(4), scheme)


@pytest.mark.slow
def test_more_than_two_to_the_31_elements_have_correct_last_rows() -> None:
    """2**31 + 2**20 elements of one row's memory, so that only results take memory."""
    rows, columns = 2**11 + 1, 2**20
    x = torch.linspace(-1, 1, columns, dtype=torch.bfloat16).expand(rows, columns)
    assert x.numel() > 2**31
    q = zp.quantize(x, zp.choose_params(x[:1], "int4:tensor"))
    assert torch.equal(q.data[-1], q.data[0])
    assert torch.equal(q.data[0], zp.quantize(x[0].contiguous(), "int4:tensor").data)
    values = q.dequantize()
    assert torch.equal(values[-1], values[0])
    assert torch.equal(values[-1], zp.quantize(x[0].contiguous(), "int4:tensor").dequantize())


def test_a_least_scale_that_its_format_rounds_to_zero_makes_zeros() -> None:
    """ModelOpt's least scale, 2 ** -9, is stored as 0 in ue3m4."""
    x = torch.randn(64, 512) * torch.exp2(-torch.arange(64.0)).unsqueeze(1)
    scheme = "e2m1:g16:scale=ue3m4:scale2=float32@tensor:dialect=modelopt"
    with only_backend("cpu"):
        q = zp.quantize(x, scheme)
    with only_backend("reference"):
        assert torch.equal(q.data, zp.quantize(x, scheme).data)
