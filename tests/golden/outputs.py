"""The bytes of every preset, element, dialect and layout, as hashes, on inputs that are the same everywhere.

``python -m tests.golden.outputs`` writes outputs.json anew. A hash that changes is a byte that changes: the
changelog says so in bold, and why.
"""

import hashlib
import itertools
import json
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import torch
from tests.oracles import synthetic_llama

import zeropoint as zp
from zeropoint import quantize_checkpoint
from zeropoint.codecs.compressed_tensors import CODEC
from zeropoint.formats.catalog import CATALOG
from zeropoint.schemes import DIALECTS, PRESETS

HASHES = Path(__file__).with_name("outputs.json")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_BLOCKS = ("tensor", "channel", "token", "g32", "g100", "block4x64")
_OPTIONS = (
    "int4:g32:asym", "int8:channel:asym", "uint8:tensor:asym", "int4:g32:asym=real", "int4:g32:narrow",
    "int8:tensor:narrow:scale=rceil", "int4:g32:scale=float16", "int4:g32:scale=input",
    "uint4:g32:asym:scale=bfloat16", "int8:g32:scale=linear_up/bfloat16", "float8_e4m3fn:block4x64",
    "float8_e4m3fn:cast", "float6_e3m2fn:cast", "int8:cast", "int4:g32:round=stochastic(7)",
    "float4_e2m1fn:g16:scale=ue4m3:scale2=float16@g128:scale3=float32@tensor",
    *(f"float4_e2m1fn:g32:scale={rule}" for rule in ("floor", "even", "ceil", "rceil", "ceil7.25")),
    *(f"{s}:scale=search" for s in ("nvfp4", "mxfp4", "mxfp8", "int4:g32", "int4:g32:asym")),
    "int4:g32:scale=input:scale=search",
    "nvfp4:scale=four_over_six", "mxfp4_e2m1:scale=search2.4",
    *(f"int8:g32:round={mode}" for mode in ("half_away", "half_up", "floor", "ceil", "toward_zero")),
)  # fmt: skip
_DIALECT_SCHEMES = (
    "int8:channel", "int4:g32", "int4:g32:asym", "uint8:tensor:asym", "float8_e4m3fn:channel", "mxfp4",
    "mxfp8_e4m3", "nvfp4",
)  # fmt: skip
_REFUSED = (zp.errors.FormatError, zp.errors.SchemeError, zp.errors.RangeError, zp.errors.UnsupportedError)


def _input() -> torch.Tensor:
    """Return 24 rows of 200 values: of many sizes, with zeros of both signs, ties and empty blocks."""
    stream = np.random.RandomState(24)  # its streams are frozen by numpy's policy (NEP 19)
    values = stream.randint(-128, 128, (24, 200)) / 64 * 2.0 ** stream.randint(-6, 6, (24, 1))
    values += stream.standard_normal((24, 200)) * 2.0 ** stream.randint(-6, 6, (24, 1))
    values[3], values[4, :96], values[5, ::2], values[6] = 0.0, 0.0, -0.0, np.abs(values[6])
    values[7] = np.arange(200) / 4 - 25
    return torch.from_numpy(values.astype(np.float32))


def _digest(tensors: Iterator[torch.Tensor | None]) -> str:
    state = hashlib.sha256()
    for tensor in tensors:
        if tensor is not None:
            state.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
            state.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return state.hexdigest()[:16]


def _schemes() -> Iterator[str]:
    yield from PRESETS
    for element, blocks in itertools.product(CATALOG, _BLOCKS):
        yield f"{element}:{blocks}"
    yield from _OPTIONS
    for scheme, dialect in itertools.product(_DIALECT_SCHEMES, DIALECTS):
        yield f"{scheme}:dialect={dialect}"
    for preset in PRESETS.values():
        yield preset.weight
        if preset.input:
            yield preset.input


def _of_scheme(scheme: str, x: torch.Tensor) -> str:
    try:
        q = zp.quantize(x, scheme)
    except _REFUSED:
        return "refused"
    return _digest(iter((q.data, *q.scales, q.zero_point, q.dequantize())))


def tensors() -> Iterator[tuple[str, str]]:
    """Yield what each scheme makes of each dtype: codes, scales, zero points and values."""
    yield from _tensors((scheme, dtype) for scheme in dict.fromkeys(_schemes()) for dtype in DTYPES)


def a_third_of_tensors(part: int) -> Iterator[tuple[str, str]]:
    """Yield what a third of the schemes makes of one dtype each; the three parts have each scheme once."""
    schemes = list(dict.fromkeys(_schemes()))[part::3]
    yield from _tensors((scheme, DTYPES[n % 3]) for n, scheme in enumerate(schemes))


def _tensors(cases: Iterable[tuple[str, torch.dtype]]) -> Iterator[tuple[str, str]]:
    x = _input()
    for scheme, dtype in cases:
        # Formats without a sign refuse negative values.
        values = x.abs() if _of_scheme(scheme, x[:1, :8]) == "refused" else x
        yield f"tensor {scheme} {str(dtype)[6:]}", _of_scheme(scheme, values.to(dtype))


def models() -> Iterator[tuple[str, str]]:
    """Yield what each model preset without calibration makes of two linear layers."""
    x = _input()
    for name in (name for name, preset in PRESETS.items() if not preset.static):
        model = torch.nn.Sequential(torch.nn.Linear(200, 24), torch.nn.ReLU(), torch.nn.Linear(24, 24))
        with torch.no_grad():
            model[0].weight.copy_(x), model[2].weight.copy_(x[:, 60:84])
            model[0].bias.zero_(), model[2].bias.zero_()
        state = zp.quantize_model(model, name).model.state_dict()
        yield f"model {name}", _digest(v for _, v in sorted(state.items()) if isinstance(v, torch.Tensor))


def dense() -> Iterator[tuple[str, str]]:
    """Yield the files of a dense checkpoint under each preset and some schemes."""
    yield from _checkpoints(moe=False)


def experts() -> Iterator[tuple[str, str]]:
    """Yield the files of a mixture of experts under each preset and some schemes."""
    yield from _checkpoints(moe=True)


def _checkpoints(*, moe: bool) -> Iterator[tuple[str, str]]:
    texts = [name for name, preset in CODEC.presets.items() if not preset.static]
    texts += ["int4:g32", "int8:channel", "float8_e4m3fn:block128x128", "int8:tensor"]
    with tempfile.TemporaryDirectory() as top:
        source = synthetic_llama.write(Path(top) / "in", moe=moe)
        # No engine is known to read experts in MXFP6, so they are refused.
        for text in (text for text in texts if not (moe and text.startswith("mxfp6"))):
            out = Path(top) / text.replace(":", "-")
            quantize_checkpoint(str(source), str(out), text, force=moe)
            for file in sorted(out.iterdir()):
                if file.name.endswith((".safetensors", ".index.json")) or file.name == "config.json":
                    digest = hashlib.sha256(file.read_bytes()).hexdigest()[:16]
                    yield f"checkpoint {'experts' if moe else 'dense'} {text} {file.name}", digest


if __name__ == "__main__":
    found = dict(itertools.chain(tensors(), models(), dense(), experts()))
    HASHES.write_text(json.dumps(found, indent=0, sort_keys=True) + "\n")
