"""Dialects compared with the programs whose bytes they promise, on random and adversarial tensors."""

import functools
import random
from typing import Any

import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper
from tests.property.random_schemes import random_tensor
from torch.ao.quantization import MinMaxObserver, PerChannelMinMaxObserver
from torch.ao.quantization.observer import ObserverBase

import zeropoint as zp
from zeropoint.errors import RangeError
from zeropoint.formats import get_format
from zeropoint.layout.blocks import spread_blocks
from zeropoint.params.chains import in_table
from zeropoint.schemes import Scheme
from zeropoint.schemes.dialects import get_dialect

pytestmark = pytest.mark.rotating

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
QUICK, SLOW = 40, 1500
"""Tensors for each scheme and dtype."""
COUNTS = [QUICK, pytest.param(SLOW, marks=pytest.mark.slow)]


def tensors(text: str, dtype: torch.dtype, count: int) -> list[torch.Tensor]:
    """Return tensors whose ranges have a width, as float32 numbers have one."""
    rng, found = random.Random(f"{text} {dtype}"), []
    scheme = Scheme.parse(text)
    while len(found) < count:
        x = random_tensor(rng, scheme, dtype)
        if x.ndim > 1 and x.numel() and bool(torch.isfinite(x.float().max() - x.float().min())):
            found.append(x)
    return found


def flat(x: torch.Tensor | None) -> list[float]:
    return [] if x is None else x.flatten().tolist()


OBSERVED = {
    "int8:tensor": (torch.qint8, torch.per_tensor_symmetric),
    "int8:tensor:asym": (torch.qint8, torch.per_tensor_affine),
    "uint8:tensor:asym": (torch.quint8, torch.per_tensor_affine),
    "int8:channel": (torch.qint8, torch.per_channel_symmetric),
    "int8:channel:asym": (torch.qint8, torch.per_channel_affine),
    "uint8:channel:asym": (torch.quint8, torch.per_channel_affine),
    "int4:channel1:asym": (torch.qint8, torch.per_channel_affine),
}


def observer_of(text: str) -> ObserverBase:
    """Return torch's observer with the codes and blocks of a scheme."""
    dtype, kind = OBSERVED[text]
    limits = {"quant_min": -8, "quant_max": 7} if text.startswith("int4") else {}
    if "channel" not in text:
        return MinMaxObserver(dtype=dtype, qscheme=kind, **limits)
    return PerChannelMinMaxObserver(ch_axis=int("channel1" in text), dtype=dtype, qscheme=kind, **limits)


def torchs(x: torch.Tensor, text: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return torch's scale, zero point and fake-quantized values."""
    observer, scheme = observer_of(text), Scheme.parse(text)
    observer(x)
    scale, zero = observer.calculate_qparams()
    if "channel" not in text:
        values = torch.fake_quantize_per_tensor_affine(x, scale, zero.int(), scheme.qmin, scheme.qmax)
    else:
        axis = int("channel1" in text)
        values = torch.fake_quantize_per_channel_affine(x, scale, zero.int(), axis, scheme.qmin, scheme.qmax)
    return scale, zero, values


@pytest.mark.crossed
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("text", OBSERVED)
def test_torch_observes_and_fake_quantizes_so(text: str, dtype: torch.dtype, count: int) -> None:
    for x in tensors(text, dtype, count):
        scale, zero, values = torchs(x, text)
        params = zp.choose_params(x, f"{text}:dialect=torch")
        q = zp.quantize(x, f"{text}:dialect=torch")
        assert flat(params.scales[0]) == flat(q.scales[0]) == flat(scale)
        assert flat(params.zero_point) == flat(q.zero_point) == (flat(zero) if "asym" in text else [])
        assert torch.equal(zp.fake_quantize(x, params), values), x


TYPES = {
    "int8": TensorProto.INT8, "uint8": TensorProto.UINT8, "int16": TensorProto.INT16,
    "uint16": TensorProto.UINT16, "int4": TensorProto.INT4, "float8_e4m3fn": TensorProto.FLOAT8E4M3FN,
    "float8_e5m2": TensorProto.FLOAT8E5M2,
}  # fmt: skip
REALS = {torch.float32: TensorProto.FLOAT, torch.float16: TensorProto.FLOAT16}


@functools.cache
def session(element: str, dtype: torch.dtype, axis: int | None, zeroed: bool) -> onnxruntime.InferenceSession:
    """Return a model of QuantizeLinear and DequantizeLinear; the codes come out as bytes."""
    kind, real = TYPES[element], REALS[dtype]
    attributes = {} if axis is None else {"axis": axis}
    given = ["x", "scale", "zero"] if zeroed else ["x", "scale"]
    output = {} if zeroed else {"output_dtype": kind}
    nodes = [
        helper.make_node("QuantizeLinear", given, ["codes"], **attributes, **output),
        helper.make_node("DequantizeLinear", ["codes", *given[1:]], ["values"], **attributes),
    ]
    inputs = [helper.make_tensor_value_info(n, real, None) for n in given[:2]]
    if zeroed:
        inputs.append(helper.make_tensor_value_info("zero", kind, None))
    outputs = [helper.make_tensor_value_info(n, k, None) for n, k in (("codes", kind), ("values", real))]
    graph = helper.make_graph(nodes, "both", inputs, outputs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 3, 1
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return onnxruntime.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])


def runtimes(x: torch.Tensor, q: zp.QuantizedTensor, element: str) -> tuple[Any, Any]:
    """Return onnxruntime's codes and values for the scales and zero points of ``q``."""
    axis = None if q.scales[0].numel() == 1 and "channel" not in str(q.scheme) else 0
    run = session(element, x.dtype, axis, q.zero_point is not None)
    scale = q.scales[0].flatten() if axis is not None else q.scales[0].reshape(())
    given = {"x": x.numpy(), "scale": scale.numpy()}
    if q.zero_point is not None:
        given["zero"] = q.zero_point.reshape(scale.shape).numpy().astype(element)
    values = {name: onnxruntime.OrtValue.ortvalue_from_numpy(array) for name, array in given.items()}
    codes, decoded = run.run_with_ort_values(None, values)
    return codes, decoded.numpy()


ONNX_CASES = [
    f"{element}:{blocks}{asym}"
    for element in ("int8", "uint8", "int16", "uint16", "float8_e4m3fn", "float8_e5m2")
    for blocks in ("tensor", "channel")
    for asym in (("", ":asym") if element.startswith(("int", "uint")) else ("",))
    if asym or not element.startswith("uint")
]


@pytest.mark.crossed
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("dtype", REALS, ids=str)
@pytest.mark.parametrize("text", ONNX_CASES)
def test_onnxruntime_quantizes_and_dequantizes_so(text: str, dtype: torch.dtype, count: int) -> None:
    element, tried = text.split(":")[0], 0
    for x in tensors(text, dtype, count):
        try:
            q = zp.quantize(x, f"{text}:scale=input:dialect=onnx")
        except zp.RangeError:
            continue  # a scale that float16 cannot hold
        codes, values = runtimes(x, q, element)
        if element.startswith(("int", "uint")):
            assert q.codes.tolist() == codes.numpy().tolist()
        mine = q.dequantize()
        assert mine.numpy().tobytes() == values.tobytes(), (x, mine, values)
        tried += 1
    assert tried > count // 2


@functools.cache
def dynamic() -> onnxruntime.InferenceSession:
    node = helper.make_node("DynamicQuantizeLinear", ["x"], ["codes", "scale", "zero"])
    kinds = (("codes", TensorProto.UINT8), ("scale", TensorProto.FLOAT), ("zero", TensorProto.UINT8))
    outputs = [helper.make_tensor_value_info(name, kind, None) for name, kind in kinds]
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, None)]
    graph = helper.make_graph([node], "dynamic", inputs, outputs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    return onnxruntime.InferenceSession(model.SerializeToString(), None, ["CPUExecutionProvider"])


@pytest.mark.parametrize("count", COUNTS)
def test_onnxruntime_quantizes_dynamically_so(count: int) -> None:
    text = "uint8:tensor:asym"
    for x in tensors(text, torch.float32, count):
        width = max(float(x.max()), 0.0) - min(float(x.min()), 0.0)
        if 0 < width / 255 < 2.0**-126:
            continue  # such scales are raised to the least normal number
        codes, scale, zero = dynamic().run(None, {"x": x.numpy()})
        q = zp.quantize(x, f"{text}:dialect=onnx")
        assert (flat(q.scales[0]), flat(q.zero_point)) == ([float(scale)], [int(zero)])
        assert q.codes.tolist() == codes.tolist()


def quarks(x: torch.Tensor, text: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return scales, zero points and codes by the formulas of Quark 0.13, on float32.

    quark/torch/quantization/observer/observer.py, calculate_int_quant_params, and
    quark/torch/kernel/hw_emulation/hw_emulation_interface.py, real_quantize_int_per_channel_affine.
    """
    scheme = Scheme.parse(text)
    flat = x.reshape(1, -1) if ":tensor" in text else x
    low, high = flat.amin(1, keepdim=True).clamp(max=0), flat.amax(1, keepdim=True).clamp(min=0)
    width = float(scheme.qmax - scheme.qmin)
    least = torch.tensor(torch.finfo(torch.float32).eps)
    if "asym" in text:
        scale = torch.max((high - low) / width, least)
        zero = (scheme.qmin - torch.round(low / scale).int()).clamp(scheme.qmin, scheme.qmax)
    else:
        scale = torch.max(torch.max(-low, high) / (width / 2), least)
        zero = torch.zeros_like(scale, dtype=torch.int32)
    codes = torch.round(flat * (1.0 / scale) + zero).clamp(scheme.qmin, scheme.qmax)
    return scale, zero, codes.reshape(x.shape)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize(
    "text", ["int8:tensor", "uint8:tensor:asym", "int8:channel:asym", "uint4:channel:asym"]
)
def test_quark_quantizes_so(text: str, count: int) -> None:
    for x in (t for t in tensors(text, torch.float32, count) if t.ndim == 2):
        scale, zero, codes = quarks(x, text)
        q = zp.quantize(x, f"{text}:dialect=quark")
        assert flat(q.scales[0]) == flat(scale)
        assert flat(q.zero_point) == (flat(zero) if "asym" in text else [])
        assert flat(q.codes) == flat(codes)


def test_quark_adds_an_odd_zero_point_before_it_rounds_a_tie() -> None:
    x = torch.tensor([[-1.0, 254.0, 0.5]])  # scale 1, zero point 1
    codes = {
        name: flat(zp.quantize(x, f"uint8:tensor:asym:dialect={name}").codes) for name in ("torch", "quark")
    }
    assert codes == {"torch": [0, 255, 1], "quark": [0, 255, 2]}
    assert flat(quarks(x, "uint8:tensor:asym")[2]) == codes["quark"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bitsandbytes_quantizes_nf4_so(dtype: torch.dtype, count: int) -> None:
    functional = pytest.importorskip("bitsandbytes.functional", reason="tests/oracles/more_peers.sh")
    generator = torch.Generator().manual_seed(count)
    table = torch.tensor(get_format("nf4").values)  # type: ignore[union-attr]
    for number in range(count):
        x = torch.randn(16, 256, generator=generator) * 2.0 ** (number % 24 - 12)
        middles = (table[:-1] + table[1:]) / 2
        x[0, 1:16], x[0, 0] = middles * 3, 3.0  # numbers on, or next to, the thresholds
        x = x.to(dtype)
        codes, state = functional.quantize_4bit(x, blocksize=64, quant_type="nf4", compress_statistics=False)
        q = zp.quantize(x, "nf4:g64:dialect=bitsandbytes")
        assert torch.equal(torch.stack([codes >> 4, codes & 15], 1).flatten(), q.codes.flatten().byte())
        assert torch.equal(state.absmax, q.scales[0].flatten().float())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("count", COUNTS)
def test_bitsandbytes_stores_absmax_so(count: int) -> None:
    functional = pytest.importorskip("bitsandbytes.functional", reason="tests/oracles/more_peers.sh")
    generator = torch.Generator().manual_seed(count)
    fmt = get_format("dynamic8")
    for number in range(count):
        x = torch.randn(700, generator=generator) * 2.0 ** (number % 24 - 12)
        codes, state = functional.quantize_blockwise(x, blocksize=256)
        factors = state.absmax.repeat_interleave(256)[:700]
        found = in_table(x, factors, fmt, get_dialect("bitsandbytes").table_steps)
        assert torch.equal(found, state.code[codes.int()])


INTEGERS = ("int4:g32", "int4:g32:asym", "int8:g64:asym", "int3:g64", "int2:g32:asym")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("text", INTEGERS)
def test_torchao_quantizes_integers_so(text: str, dtype: torch.dtype, count: int) -> None:
    peer = pytest.importorskip("torchao.quantization.quant_primitives", reason="tests/oracles/more_peers.sh")
    scheme = Scheme.parse(f"{text}:scale=input:dialect=torchao")
    group, asym = int(text.split(":")[1][1:]), text.endswith("asym")
    kind = peer.MappingType.ASYMMETRIC if asym else peer.MappingType.SYMMETRIC
    ends = {"quant_min": scheme.qmin, "quant_max": scheme.qmax}
    generator = torch.Generator().manual_seed(count)
    for number in range(count):
        x = torch.randn(8, 128, generator=generator) * 2.0 ** (number % 24 - 12)
        x[0], x[1] = 0, x[1].abs()
        x = x.to(dtype)
        scale, zero = peer.choose_qparams_affine(
            x, kind, (1, group), target_dtype=torch.int8, zero_point_dtype=torch.int8, keepdim=True, **ends
        )
        codes = peer.quantize_affine(x, (1, group), scale, zero, output_dtype=torch.int8, **ends)
        q = zp.quantize(x, scheme)
        assert torch.equal(q.scales[0][1:], scale[1:])  # of zeros it is the least normal number there
        assert torch.equal(q.codes.to(torch.int8), codes)
        off = (q.dequantize(torch.float32) - x.float()).abs().view(8, -1, group).amax(2)
        assert bool((off <= q.params.error_bound(torch.float32)).all())
        assert flat(q.zero_point) == (zero.flatten().tolist() if asym else [])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_errors_under_reciprocals_of_16_bits_are_within_their_bound(dtype: torch.dtype) -> None:
    rng = random.Random(f"reciprocals {dtype}")
    for text in (*INTEGERS, "int3:channel:narrow", "nf4:g32", "float8_e4m3fn:channel", "uint4:g16:asym=real"):
        scheme = Scheme.parse(f"{text}:dialect=torchao")
        for _ in range(60):
            x = random_tensor(rng, scheme, dtype)
            if not x.ndim:
                continue
            try:
                q = zp.quantize(x, scheme)
            except RangeError:
                continue
            off = (q.dequantize(torch.float32).double() - x.double()).abs()
            bound = spread_blocks(q.params.error_bound(torch.float32), scheme.granularity, tuple(x.shape))
            assert bool((off <= bound).all()), (text, x.tolist())


MODES = {"floor": "FLOOR", "even": "EVEN", "ceil": "CEIL", "rceil": "RCEIL"}
ELEMENTS = {
    "float8_e4m3fn": torch.float8_e4m3fn, "float8_e5m2": torch.float8_e5m2,
    "float4_e2m1fn": torch.float4_e2m1fn_x2,
}  # fmt: skip


@pytest.mark.crossed
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("mode", MODES)
def test_torchao_quantizes_mx_so(mode: str, element: str, count: int) -> None:
    peer = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor", reason="tests/oracles/more_peers.sh")
    generator = torch.Generator().manual_seed(count)
    for number in range(count):
        x = (torch.randn(8, 128, generator=generator) * 2.0 ** (number % 24 - 12)).bfloat16()
        if mode == "rceil":
            # The logarithm of a quotient that is a power of two, or next to one, is rounded there.
            x = torch.where(x.view(torch.int16) & 0x7F == 0, x * 1.0625, x)
        how = getattr(peer.ScaleCalculationMode, MODES[mode])
        scale, codes = peer.to_mx(x, ELEMENTS[element], 32, scaling_mode=how)
        q = zp.quantize(x, f"{element}:g32:scale={mode}:dialect=torchao")
        assert torch.equal(q.scales[0].view(torch.uint8), scale.view(torch.uint8))
        assert torch.equal(q.data, codes.view(torch.uint8))
