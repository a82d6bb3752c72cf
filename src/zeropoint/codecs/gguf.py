"""GGUF block types: codes and scales together, row after row.

For the weight ``X.weight`` of shape (N, K), whose tensor has the same name and shape (all little-endian; K is
a multiple of the block; a half is a float16 number, and a value is ``scale * code``, plus the offset if any):

    type      values  bytes, in their order
    Q4_0          32   18: half scale, codes
    Q4_1          32   20: half scale, half offset, codes
    Q5_0          32   22: half scale, bit 4 of the codes, their bits 0 to 3
    Q5_1          32   24: half scale, half offset, bit 4, bits 0 to 3
    Q8_0          32   34: half scale, codes
    Q2_K         256   84: 16 times a 4-bit scale and a 4-bit offset, codes, half scale, half offset
    Q3_K         256  110: bit 2 of the codes, their bits 0 and 1, 16 scales of 6 bits, half scale
    Q4_K         256  144: half scale, half offset, 8 scales and 8 offsets of 6 bits, codes
    Q5_K         256  176: half scale, half offset, 8 and 8 of 6 bits, bit 4 of the codes, bits 0 to 3
    Q6_K         256  210: bits 0 to 3 of the codes, bits 4 and 5, 16 scales of 8 bits, half scale
    IQ4_NL        32   18: half scale, codes
    IQ4_XS       256  136: half scale, bits 4 and 5 of 8 scales, their bits 0 to 3, codes
    TQ1_0        256   54: codes, five to a byte and then four, half scale
    TQ2_0        256   66: codes, half scale
    Q2_0          64   18: half scale, codes
    MXFP4         32   17: e8m0 scale, codes
    NVFP4         64   36: 4 ue4m3 scales, codes

Where each bit lies, :data:`BLOCKS` says. Signed codes, and scales in 6 bits, are stored with half their range
added, and the half offset of Q2_K to Q5_K with the opposite sign. The scales of llama.cpp come from searches;
here they follow the rule of the scheme, and codes are rounded to nearest. A scale over a whole tensor of
NVFP4 is an ordinary tensor, which is kept and not applied. TQ1_0 has the numbers of TQ2_0 in codes of five.

Names, metadata and tokenizer are llama.cpp's for the families of :mod:`zeropoint.codecs.llama_cpp`;
tensors of others keep the names of the checkpoint, which gguf-py and zeropoint read.

Source: ggml-org/llama.cpp, ggml/src/ggml-common.h and gguf-py/gguf/quants.py. This module opens no file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from ..architectures import MOST_EXPERTS, model_type
from ..errors import CheckpointError, UnsupportedError, printable
from ..layout.bit_places import Bits, Digits, Field, Struct, field_size, whole
from ..ops.library import kernel
from ..ops.registry import Op, Request
from ..params import QuantizationParams
from ..schemes import PRESETS, Scheme
from ..tensor import QuantizedTensor
from .block_extents import no_matrix
from .containers.gguf import TYPES
from .engines import LLAMA_CPP, Facts, Loads, Problem, always, loader_not_run, rules
from .llama_cpp.families import family_of
from .llama_cpp.gguf_format import LlamaCppFormat
from .protocol import Codec, Contents, Documents, LayerScheme
from .records import Entry, Known, Listing, Reader, Record, model_dtype
from .tensor_fields import COLUMNS, Tensors, TensorSpec, WeightPart

WEIGHT = "weight"
_PRESETS = MappingProxyType({
    name: PRESETS[name]
    for name in (
        "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq4_nl", "iq4_xs",
        "tq1_0", "tq2_0", "q2_0", "mxfp4_e2m1",
    )
})  # fmt: skip
_NVFP4 = "float4_e2m1fn:g16:scale=float8_ue4m3fn:dialect=ggml"
_TERNARY, _TERNARY_64 = (
    PRESETS[name].weight.replace("ternary", "codebook[-1.0,0.0,1.0,2.0]") for name in ("tq2_0", "q2_0")
)
"""Two bits have a fourth code, which llama.cpp never writes, and reads as 2."""
_K_SCALES = tuple(
    (
        Bits(at, 4, 4, 4, shifts=(0,)),
        Bits(12, 4, 4, 4, shifts=(high,), first=4),
        Bits(at, 4, 4, 2, shifts=(4, 6), low=4),
    )
    for at, high in ((4, 0), (8, 4))
)
"""Of Q4_K and Q5_K: scales, then offsets. Four whole ones, and four of which others hold the highest bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockType:
    """A type of ggml.

    scheme: what its blocks mean. struct: where the numbers of a block lie.
    """

    scheme: Scheme
    struct: Struct

    @property
    def block(self) -> int:
        """Values in a block."""
        return field_size(self.struct.codes)

    def decode(
        self, lines: torch.Tensor, scheme: Scheme, shape: tuple[int, int], dtype: torch.dtype
    ) -> QuantizedTensor:
        """Return rows of blocks, uint8 (rows, bytes), in codes and levels."""
        wanted = _request(Op.SPLIT_BLOCKS, lines, scheme, shape, dtype)
        data, stored = kernel(wanted).run(self.struct, lines)
        params = QuantizationParams.of(scheme, shape, dtype, stored)
        return QuantizedTensor(data=data, params=params, shape=shape, dtype=dtype)

    def encode(self, q: QuantizedTensor) -> torch.Tensor:
        """Return a matrix's blocks, uint8 (rows, bytes): inverse of :meth:`decode`."""
        wanted = _request(Op.JOIN_BLOCKS, q.data, q.scheme, q.shape, q.dtype)
        lines: torch.Tensor = kernel(wanted).run(self.struct, q.data, q.params.levels)
        return lines


def _request(
    op: Op, stored: torch.Tensor, scheme: Scheme, shape: tuple[int, ...], dtype: torch.dtype
) -> Request:
    return Request(op=op, scheme=scheme, shape=shape, dtype=dtype, own_dtype=dtype, device=stored.device)


def _half(at: int) -> Field:
    return whole(at, 2)


def _negated_half(at: int) -> Field:
    return Bits(at, 1, 1), Bits(at + 1, 1, 1, first=1, flip=0x80)


_K_LEVELS = (_K_SCALES[0], _half(0), _K_SCALES[1], _negated_half(2))


def _type(name: str, text: str, codes: Field, *levels: Field) -> tuple[str, BlockType]:
    struct = Struct(TYPES[name].nbytes, codes, levels)
    return name, BlockType(scheme=Scheme.parse(text), struct=struct)


BLOCKS: MappingProxyType[str, BlockType] = MappingProxyType(dict((
    # What is read has any scale that the type holds, whatever rule picked it, and every code.
    _type("Q8_0", f"{PRESETS['q8_0'].weight}:narrow=no", whole(2, 32), _half(0)),
    _type("Q4_0", "q4_0", (Bits(2, 16, 16, 4, flip=8),), _half(0)),
    _type("Q4_1", "q4_1", (Bits(4, 16, 16, 4),), _half(0), _half(2)),
    _type("Q5_0", "q5_0", (Bits(6, 16, 16, 4), Bits(2, 4, 1, 1, low=4, flip=1)), _half(0)),
    _type("Q5_1", "q5_1", (Bits(8, 16, 16, 4), Bits(4, 4, 1, 1, low=4)), _half(0), _half(2)),
    _type(
        "Q2_K", "q2_k", (Bits(16, 64, 32, 2),), (Bits(0, 16, 16, 4, shifts=(0,)),), _half(80),
        (Bits(0, 16, 16, 4, shifts=(4,)),), _negated_half(82),
    ),
    _type(
        "Q3_K", "q3_k", (Bits(32, 64, 32, 2), Bits(0, 32, 32, 1, low=2, flip=1)),
        (Bits(96, 8, 8, 4), Bits(104, 4, 4, 2, low=4, flip=2)), _half(108),
    ),
    _type("Q4_K", "q4_k", (Bits(16, 128, 32, 4),), *_K_LEVELS),
    _type("Q5_K", "q5_k", (Bits(48, 128, 32, 4), Bits(16, 32, 32, 1, low=4)), *_K_LEVELS),
    _type(
        "Q6_K", "q6_k", (Bits(0, 128, 64, 4), Bits(128, 64, 32, 2, low=4, flip=2)), whole(192, 16),
        _half(208),
    ),
    _type("IQ4_NL", "iq4_nl", (Bits(2, 16, 16, 4),), _half(0)),
    _type(
        "IQ4_XS", "iq4_xs", (Bits(8, 128, 16, 4),),
        (Bits(4, 4, 1, 4), Bits(2, 2, 1, 2, low=4, flip=2)), _half(0),
    ),
    _type(
        "TQ1_0", "tq1_0", (Digits(0, 32), Digits(32, 16, first=160), Digits(48, 4, 4, first=160 + 80)),
        _half(52),
    ),
    _type("TQ2_0", _TERNARY, (Bits(0, 64, 32, 2),), _half(64)),
    _type("Q2_0", _TERNARY_64, (Bits(2, 16, 1, 2),), _half(0)),
    _type("MXFP4", "mxfp4_e2m1", (Bits(1, 16, 16, 4),), whole(0, 1)),
    _type("NVFP4", _NVFP4, (Bits(4, 32, 8, 4),), whole(0, 4)),
)))  # fmt: skip
"""The types that are read and written, with the schemes of what is read."""
_QUANTIZED = frozenset(name for name, found in TYPES.items() if found.block > 1)


_TYPE_OF = {found.scheme.structure: name for name, found in BLOCKS.items()} | {
    Scheme.parse(name).structure: name.upper() for name in ("tq2_0", "q2_0")
}


class GgufReader(Reader):
    """Reader of a file whose tensors each have a type."""

    def __init__(self, listing: Listing, codec: Codec) -> None:
        self._codec = codec
        self._dtype = model_dtype(listing.config, torch.float32)

    def record(self, key: str, tensors: Mapping[str, Entry], known: Known | None) -> Record:
        """See :class:`Reader`; ``key`` is the name of the tensor."""
        entry = tensors[WEIGHT]
        if entry.dtype not in BLOCKS:
            raise UnsupportedError(f"its type {entry.dtype} is not read here; read are {', '.join(BLOCKS)}")
        if len(entry.shape) not in (2, 3) or 0 in entry.shape or entry.shape[:-2] > (MOST_EXPERTS,):
            raise CheckpointError(
                f"its codes have shape {list(entry.shape)}, but must be a matrix, or one for each expert"
            )
        weight = BLOCKS[entry.dtype].scheme
        layer = LayerScheme(codec=self._codec, name=str(weight), weight=weight)
        *experts, rows, columns = entry.shape
        return Record(
            module=key if experts else key.removesuffix(".weight"),
            layer=layer,
            shape=(rows, columns),
            dtype=self._dtype if known is None else known.dtype,
            parts=(WEIGHT,),
            experts=experts[0] if experts else None,
        )


_NAMES = (
    "it asks for names of its own, which are known here for the families of docs/how-to/gguf.md with a whole "
    "config.json"
)


def _named(facts: Facts) -> Iterator[Problem]:
    """Yield the problem of llama.cpp with the checkpoint's tensor names."""
    if family_of(facts.family) is None:
        yield Loads.PARTLY, _NAMES


_DECODED = frozenset(
    ("gemma2", "gemma3", "gemma4", "gpt2", "lfm2", "llama", "phi3", "qwen2", "qwen3", "qwen35", "stablelm")
) | {"starcoder2"}
_DECODED_EXPERTS = frozenset(("qwen3moe", "qwen35moe"))
"""Architectures whose files transformers 5.23 loads with our values, by tests."""


def _transformers(facts: Facts) -> Iterator[Problem]:
    """Yield what transformers says, which decodes files of some families."""
    family = family_of(facts.family)
    if family is None:
        yield Loads.NO, _NAMES
    elif family.architecture not in (_DECODED_EXPERTS if family.experts else _DECODED):
        experts = " with experts" if family.experts else ""
        yield Loads.NO, f"5.23 does not read files of {family.architecture}{experts}"
    else:
        # Metadata give it a part of the configuration. It finds the family mistral by them alone.
        given = "" if model_type(facts.family) == "mistral" else ", config=AutoConfig.from_pretrained(OUT)"
        yield Loads.PARTLY, f"5.23 decodes it: from_pretrained(OUT, gguf_file='model.gguf'{given})"


_PLUGIN = "vllm-gguf-plugin 0.0.5, by which vLLM reads GGUF,"
_LACKS = frozenset(("TQ1_0", "TQ2_0", "Q2_0", "MXFP4", "NVFP4"))
"""Types that the plugin does not decode."""
_SPELLED = MappingProxyType(
    {
        "cohere": "command-r",
        "deepseek_v2": "deepseek2",
        "deepseek_v3": "deepseek2",
        "gemma3_text": "gemma3",
        "qwen2_moe": "qwen2moe",
        "qwen3_moe": "qwen3moe",
    }
)
"""The plugin's names of architectures by model_type, where the two differ."""
_OWN_NORMS, _OWN_EXPERTS = frozenset(("gemma3",)), frozenset(("olmoe",))
"""Architectures for which the plugin has code of its own."""


def _vllm(facts: Facts) -> Iterator[Problem]:
    """Yield the problems of vLLM's plugin, read off its source and tried."""
    family = family_of(facts.family)
    if family is None:
        yield Loads.NO, _NAMES
        return
    kind = model_type(facts.family)
    for name in sorted(_LACKS.intersection(layer.layout for layer in facts.layers)):
        yield Loads.NO, f"{_PLUGIN} has no {name}"
    if family.halves:
        yield (
            Loads.NO,
            f"{_PLUGIN} leaves heads of queries and keys interleaved: its output is wrong",
        )
    if (family.plus or family.reorders) and family.architecture not in _OWN_NORMS:
        yield Loads.NO, f"{_PLUGIN} takes values that llama.cpp changes for the model's: its output is wrong"
    if family.experts and family.architecture not in _OWN_EXPERTS:
        yield Loads.NO, f"{_PLUGIN} maps no experts that transformers has in one tensor"
    if _SPELLED.get(kind, kind) != family.architecture:
        yield Loads.NO, f"{_PLUGIN} does not know {printable(kind)}"
    yield Loads.UNCHECKED, "from 0.24 on it reads GGUF with the package vllm-gguf-plugin"


_NO_GGUF = always(Loads.NO, "it reads no GGUF")


@dataclass(frozen=True)
class Gguf(Codec):
    """See the module and :class:`Codec`."""

    name = "gguf"
    title = "the block types of GGUF"
    container = "gguf"
    presets = _PRESETS
    defaults = MappingProxyType({"scale": "float16"})
    engines = rules(
        transformers=_transformers,
        vllm=_vllm,
        sglang=loader_not_run,
        llama_cpp=_named,
        tensorrt=_NO_GGUF,
        onnxruntime=_NO_GGUF,
    )
    reader = GgufReader
    usual = (LLAMA_CPP,)
    candidates = ("q2_k", "q3_k", "iq4_xs", "iq4_nl", "q4_0", "q4_k", "q5_0", "q5_k", "q6_k", "q8_0")
    methods = tuple[str, ...](["gguf"])
    model_format = LlamaCppFormat()

    def layout(self, layer: LayerScheme) -> str:
        """See :class:`Codec`: the type."""
        weight = layer.weight
        name = _TYPE_OF.get(weight.structure)
        if name is None or layer.input is not None:
            raise UnsupportedError(
                f"scheme {weight} has no type in GGUF that is written here; use, for weights alone, "
                f"{', '.join(_PRESETS)}, or int8:g32 or int4:g32 with float16 scales"
            )
        return name

    def refusal(self, layer: LayerScheme, shape: tuple[int, ...]) -> str | None:
        block = BLOCKS[layer.layout].block
        if len(shape) == 2 and shape[1] % block:
            return f"last axis {shape[1]} is not a multiple of the block of {layer.layout}, {block}"
        return no_matrix(shape)

    def multiples(self, layer: LayerScheme, axis: int) -> list[tuple[int, str]]:
        return [(BLOCKS[layer.layout].block if axis == COLUMNS else 1, "the block")]

    def tensors(
        self, layer: LayerScheme, shape: tuple[int, ...], dtype: torch.dtype
    ) -> tuple[TensorSpec, ...]:
        return (TensorSpec(suffix=WEIGHT, dtype=layer.layout, shape=shape),)

    def encode(self, layer: LayerScheme, q: QuantizedTensor) -> dict[str, torch.Tensor]:
        return {WEIGHT: BLOCKS[layer.layout].encode(q)}

    def decode(self, layer: LayerScheme, tensors: Tensors, part: WeightPart) -> QuantizedTensor:
        lines = tensors[WEIGHT].view(torch.uint8)
        return BLOCKS[layer.layout].decode(lines, layer.weight, (part.shape[0], part.shape[1]), part.dtype)

    def part_of(self, name: str, dtype: str) -> tuple[str, str, bool] | None:
        return (name, WEIGHT, True) if dtype in _QUANTIZED else None

    def documents(self, contents: Contents) -> Documents:
        """See :class:`Codec`: the types of tensors say it all."""
        return Documents(section=None)


CODEC = Gguf()
