"""Write the conformance vectors: what every format, scheme, dialect and file layout makes of given numbers.

    python vectors/make_vectors.py [FOLDER]

The same version of the set has the same bytes; README.md next to this file says how they are read.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save, save_file

import zeropoint as zp
from zeropoint.checkpoint.plan.checkpoint_plan import make_plan
from zeropoint.checkpoint.plan.float_view import DecodedLayers
from zeropoint.checkpoint.read.quantized_layers import configuration, find_layers
from zeropoint.checkpoint.read.source import open_source
from zeropoint.checkpoint.read.storage import open_file
from zeropoint.checkpoint.run.loop import run
from zeropoint.codecs.containers.safetensors import TORCH_DTYPES
from zeropoint.codecs.layer_schemes import preset_layers
from zeropoint.codecs.protocol import LayerScheme
from zeropoint.codecs.registry import CODECS
from zeropoint.errors import ZeropointError
from zeropoint.formats import CATALOG, Format, format_name
from zeropoint.formats.choices import ChoiceFormat
from zeropoint.formats.exact import Number, Special, decode, encode
from zeropoint.params.tensors import parameter_names
from zeropoint.schemes import DIALECTS, PRESETS, Scheme

VERSION = 2
"""Of the set: a byte of an existing case that changes takes a new one."""
FOLDER = Path(__file__).parent
Tensors = dict[str, torch.Tensor]
Case = dict[str, Any]
Group = Iterator[tuple[Case, Tensors]]
_ALL_CODES, _WIDEST = 8, 16
"""Bits of formats of which all codes are given, and of the widest formats that are not left out."""
_BLOCK = 32
_LARGE = 3e38
_BASES = (
    "int8:channel", "int4:g32", "int4:g32:asym", "uint8:tensor:asym", "float8_e4m3fn:channel",
    "float4_e2m1fn:g32:scale=even", "float8_e4m3fn:g32:scale=even",
    "float4_e2m1fn:g16:scale=float8_ue4m3fn:scale2=float32@tensor",
)  # fmt: skip
"""What is written under every dialect."""
_SCALES = (
    "linear", "linear_up/float16", "linear_late/float16", "signed/float16", "signed_late/float16", "floor",
    "even", "ceil", "rceil",
)  # fmt: skip
_MODES = ("half_away", "half_up", "floor", "ceil", "toward_zero")
_RULES = (
    *(f"{e}:g32:scale={rule}" for e in ("int4", "float4_e2m1fn", "float8_e4m3fn") for rule in _SCALES),
    *(f"{e}:g32:round={mode}" for e in ("int4", "float4_e2m1fn") for mode in _MODES),
    "uint4:g32:offset=minimum/float16", "uint4:g32:offset=minimum_late/float16", "int4:g32:asym=real",
    "uint4:g32:scale=edge/float16:offset=float16", "uint3:g32:scale=edge_late/float16:offset=float16",
    "int4:g32:scale=search", "float4_e2m1fn:g32:scale=search/e8m0",
    *(f"float4_e2m1fn:g16:scale={r}/ue4m3:scale2=float32@tensor" for r in ("search", "four_over_six")),
    "int4:g32:narrow", "int8:tensor:narrow", "int8:block2x64", "float8_e4m3fn:cast", "int8:g100",
)  # fmt: skip
"""What is written under zeropoint's own dialect: rules of scales and offsets, roundings, blocks."""


def ordinary(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """Return rows in turns: normal numbers, ties, blocks with one outlier, and zeros, of several sizes."""
    stream = np.random.RandomState(rows * columns)  # its streams are frozen by numpy's policy (NEP 19)
    x = stream.standard_normal((rows, columns)) * 2.0 ** stream.randint(-6, 2, (rows, 1))
    for row in range(1, rows, 2):
        x[row] = (np.arange(columns) % 64 - 31) / 4 * 2.0 ** (row % 5 - 2)  # ties of integers and of floats
        for block in range(0, columns, 4 * _BLOCK):
            x[row, block : block + _BLOCK] *= 1e-3
            x[row, block + block // 4 % _BLOCK] = -100.0 if row % 4 == 1 else 96.0  # an outlier a block
            x[row, block + _BLOCK : block + 2 * _BLOCK] = 0.0
            x[row, block + 3 * _BLOCK // 2 : block + 2 * _BLOCK] = -0.0
    return torch.from_numpy(x.astype(np.float32)).to(dtype)


def extreme(dtype: torch.dtype) -> torch.Tensor:
    """Return one row whose blocks hold the ends of a dtype, and powers of two with their neighbors."""
    info, row = torch.finfo(dtype), torch.zeros(8, _BLOCK, dtype=torch.float64)
    below = 1 - info.eps / 2
    row[0, ::3], row[0, 1] = info.max / 4, -info.max / 4
    row[1], row[1, ::2] = info.smallest_normal, -info.smallest_normal
    row[2, ::5] = info.smallest_normal * info.eps
    powers = torch.exp2(torch.arange(_BLOCK, dtype=torch.float64) - 16)
    row[3], row[4], row[5] = powers, powers * below, -powers * (1 + info.eps)
    row[6, 7] = 2.0**-126 * 3
    row[7] = torch.arange(_BLOCK) - 7.5
    return row.reshape(1, -1).to(dtype)


def _as_float(number: Number) -> float:
    return float(number.value) if isinstance(number, Special) else float(number)


def _some_codes(fmt: Format) -> list[int]:
    """Return all codes of narrow formats, and of others those next to powers of two and to both ends."""
    if fmt.bits <= _ALL_CODES:
        return list(range(fmt.code_count))
    near = {(1 << bit) + off for bit in range(fmt.bits + 1) for off in (-2, -1, 0, 1)}
    return sorted(code for code in near if 0 <= code < fmt.code_count)


def _boundaries(values: list[float]) -> list[float]:
    """Return what is next to the middles of neighboring values, past both ends, and next to zero."""
    finite = np.array(sorted({v for v in values if np.isfinite(v)}))
    middles = np.array([(a + b) / 2 for a, b in pairwise(finite)]).astype(np.float32)
    down, up = (np.nextafter(middles, np.float32(end)) for end in (-np.inf, np.inf))
    past = [finite[-1] * 1.0625, finite[-1] * 3, finite[0] * 3, _LARGE, -_LARGE]
    quiet = np.array([0.0, -0.0, 1e-45, -1e-45, 1.2e-38], np.float32)
    loud = np.clip(past, -_LARGE, _LARGE).astype(np.float32)
    return [float(v) for v in np.concatenate([down, middles, up, loud, quiet])]


def formats() -> Group:
    """Yield codes with their values, and numbers with the codes that they round to, ties to even."""
    for name, fmt in CATALOG.items():
        if fmt.bits > _WIDEST or isinstance(fmt, ChoiceFormat):
            continue
        codes = _some_codes(fmt)
        values = [_as_float(decode(fmt, code)) for code in codes]
        inputs = [v for v in _boundaries(values) if v >= 0 or fmt.min < 0]
        encoded = [encode(fmt, Special.NEGATIVE_ZERO if str(v) == "-0.0" else Fraction(v)) for v in inputs]
        kind = torch.uint8 if fmt.bits <= _ALL_CODES else torch.uint16
        yield {"name": name, "format": fmt.spelling, "bits": fmt.bits}, {
            "codes": torch.tensor(codes).to(kind), "values": torch.tensor(values, dtype=torch.float32),
            "inputs": torch.tensor(inputs, dtype=torch.float32), "encoded": torch.tensor(encoded).to(kind),
        }  # fmt: skip


def _scheme_case(name: str, text: str, x: torch.Tensor) -> tuple[Case, Tensors]:
    """Return what a scheme makes of ``x``: codes, parameters by name, and values in float32."""
    scheme = Scheme.parse(text)
    q = zp.quantize(x, scheme)
    parameters = dict(zip(parameter_names(scheme), q.params.stored, strict=True))
    levels = {
        key: {"rule": level.rule.text, "format": format_name(level.format_for(_FORMATS[x.dtype])),
              "block": list(level.granularity.block_shape(tuple(x.shape)))}
        for key, level in zip(scheme.level_names, scheme.levels, strict=True)
    }  # fmt: skip
    case = {
        "name": name, "scheme": str(scheme), "element": scheme.element_name,
        "block": list(scheme.granularity.block_shape(tuple(x.shape))), "levels": levels,
        "zero_point": scheme.zero_point.value, "rounding": str(scheme.rounding),
        "dialect": scheme.dialect.name,
    }  # fmt: skip
    return case, {"inputs": x, "codes": q.codes, **parameters, "values": q.dequantize(torch.float32)}


_FORMATS = {torch.float32: CATALOG["float32"], torch.bfloat16: CATALOG["bfloat16"]}


def _schemes(texts: Mapping[str, str], inputs: Mapping[str, torch.Tensor]) -> Group:
    """Yield each scheme on each input; those that refuse an input, as too wide for a format, have no case."""
    for (text, scheme), (name, x) in ((t, i) for t in texts.items() for i in inputs.items()):
        signed = Scheme.parse(scheme).element.min < 0 or Scheme.parse(scheme).levels[1:]
        try:
            yield _scheme_case(f"{text}/{name}", scheme, x if signed else x.abs())
        except ZeropointError:
            continue


def presets() -> Group:
    """Yield the weights of every preset, from bfloat16."""
    inputs = {"ordinary": ordinary(2, 256, torch.bfloat16), "extreme": extreme(torch.bfloat16)}
    return _schemes({name: preset.weight for name, preset in PRESETS.items()}, inputs)


def dialects() -> Group:
    """Yield schemes under every dialect, and rules and roundings under zeropoint's own, from float32."""
    inputs = {"ordinary": ordinary(2, 128, torch.float32), "extreme": extreme(torch.float32)}
    texts = [*(f"{base}:dialect={dialect}" for dialect in DIALECTS for base in _BASES), *_RULES]
    return _schemes({text: text for text in texts}, inputs)


def layouts() -> Group:
    """Yield the tensors of a weight in every file layout, as files have them, and the values in float32."""
    for codec in CODECS.values():
        # A layout of graphs has vectors of its own in the standard; vision files are blocks of GGUF.
        if codec.container == "onnx" or codec.model_format.prefix:
            continue
        for layer in preset_layers(codec):
            with tempfile.TemporaryDirectory() as folder:
                yield from _layout(layer, Path(folder))


_EXPERTS = {"m.experts.gate_up_proj": (2, 32, 64), "m.experts.down_proj": (2, 32, 32)}


def _layout(layer: LayerScheme, folder: Path) -> Group:
    """Yield the layers of a checkpoint of one weight, or of the experts that a layout is for."""
    fused = layer.codec.fused_experts
    shapes = _EXPERTS if fused else {"m.up_proj.weight": _smallest(layer)}
    weights = {
        name: ordinary(int(np.prod(shape[:-1])), shape[-1], torch.bfloat16).reshape(shape)
        for name, shape in shapes.items()
    }
    biases = {f"{name}_bias": torch.zeros(2, weights[name].shape[-1]) for name in shapes if fused}
    (folder / "in").mkdir()
    save_file(weights | biases, folder / "in" / "model.safetensors")
    config = {"model_type": "gpt_oss" if fused else "llama", "dtype": "bfloat16"}
    (folder / "in" / "config.json").write_text(json.dumps(config))
    run(make_plan(open_source(folder / "in"), layer.name, codec=layer.codec), folder / "out")
    source = open_source(folder / "out")
    stored = find_layers(source)
    readers = DecodedLayers(source, stored, torch.float32)
    for each in stored.layers:
        files = {entry.file: open_file(entry.file) for entry in each.tensors.values()}
        tensors: Tensors = {}
        for part, entry in each.tensors.items():
            buffer = bytearray(entry.nbytes)
            files[entry.file].read_into(memoryview(buffer), entry.begin)
            raw = torch.frombuffer(buffer, dtype=TORCH_DTYPES.get(entry.dtype, torch.uint8))
            tensors[part] = raw.reshape(entry.shape if entry.dtype in TORCH_DTYPES else (entry.shape[0], -1))
        reader = readers[each.name]
        rows = each.values // reader.columns
        values = reader.read(files, 0, rows, bytearray(4 * each.values)).clone()
        case = {
            "name": f"{layer.codec.name}/{layer.name}/{each.name}", "layout": each.layer.layout,
            "scheme": str(each.weight), "shape": [rows, reader.columns],
            "stored": {part: {"name": e.name, "dtype": e.dtype} for part, e in each.tensors.items()},
            "quantization_config": configuration(source),
        }  # fmt: skip
        yield case, {**tensors, "inputs": weights[each.name], "values": values}
        for file in files.values():
            file.close()


def _smallest(layer: LayerScheme) -> tuple[int, int]:
    """Return a small shape of a weight that the layout holds."""
    shapes = [(rows, columns) for columns in (128, 256) for rows in (2, 8, 16, 32, 64, 128)]
    return next(shape for shape in shapes if layer.codec.refusal(layer, shape) is None)


GROUPS = (formats, presets, dialects, layouts)


def files() -> dict[str, bytes]:
    """Return the files of the set by name; of equal tensors in a file, it has the first."""
    made: dict[str, bytes] = {}
    index = []
    for group in GROUPS:
        made[file_name(group)], entry = file_of(group)
        index.append(entry)
    listed = ",\n".join(index)
    made["index.json"] = f'{{"version": {VERSION}, "files": {{\n{listed}\n}}}}\n'.encode()
    return made


def file_name(group: Callable[[], Group]) -> str:
    """Return the name of the file of a group."""
    return f"{group.__name__}.safetensors"


def file_of(group: Callable[[], Group]) -> tuple[bytes, str]:
    """Return the file of a group, and its entry in the index."""
    cases, tensors, stored = [], Tensors(), dict[tuple[object, ...], str]()
    for case, found in group():
        parts = {}
        for part, tensor in found.items():
            bits = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            name = f"{case['name']}/{part}"
            parts[part] = stored.setdefault((tensor.dtype, tuple(tensor.shape), bits), name)
            if parts[part] == name:
                tensors[name] = tensor.contiguous()
        cases.append(json.dumps({**case, "tensors": parts}))
    content = save(tensors, metadata={"version": str(VERSION)})
    digest, lines = hashlib.sha256(content).hexdigest(), ",\n".join(cases)
    return content, f'"{file_name(group)}": {{"sha256": "{digest}", "cases": [\n{lines}\n]}}'


def write(folder: Path) -> None:
    """Write the set into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files().items():
        (folder / name).write_bytes(content)


if __name__ == "__main__":
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
