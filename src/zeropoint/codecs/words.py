"""Transposed weights in 32-bit words, shared by GPTQ and AWQ.

Scales and zero points are of groups.

    X.qweight   I32: codes of X.weight (N, K)
    X.qzeros    I32 [K / g, ...]: zero points of groups of g inputs
    X.scales    F16 [K / g, N]

This module knows how fields fill words and what the layouts share; each has a codec of its own.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping

import torch

from ..architectures import Config, model_type
from ..errors import CheckpointError, printable
from ..layout import packing
from ..layout.word_lines import WORD, WordLines
from ..ops.library import kernel
from ..ops.registry import Op, Request
from ..schemes import Scheme
from .compressed_tensors.tested import other_classes
from .engines import Facts, Loads, Problem, always, fused_alike
from .protocol import LayerScheme
from .records import Entry, Known, Record, model_dtype, record_of
from .safetensors_dtypes import TORCH_DTYPES

CODES, ZEROS, SCALES, GROUPS = "qweight", "qzeros", "scales", "g_idx"
SCALE_DTYPES = ("F16", "BF16", "F32")


def group_of(weight: Scheme, columns: int) -> int:
    """Return how many inputs have one scale."""
    return int(weight.granularity.block_shape((1, columns))[1])


def whole_words(bits: int) -> tuple[int, int]:
    """Return the fewest words of whole fields, and these fields' number."""
    common = math.gcd(bits, WORD)
    return bits // common, WORD // common


def words_of(fields: torch.Tensor, bits: int) -> torch.Tensor:
    """Return unsigned fields as whole int32 words, low bits first."""
    stream = packing.pack(fields, bits)
    return stream.reshape(-1).view(torch.int32).view(len(fields), -1)


@functools.lru_cache(maxsize=8)
def words_of_one(field: int, rows: int, count: int, bits: int) -> torch.Tensor:
    """Return rows of one repeated field as words, the same tensor always."""
    return words_of(torch.full((rows, count), field), bits)


def fields_of(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the fields of rows of words; the inverse of :func:`words_of`."""
    stream = words.contiguous().reshape(-1).view(torch.uint8).view(len(words), -1)
    return packing.unpack(stream, bits, words.shape[1] * WORD // bits)


_ORDER = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
"""The place in its eight that each 4-bit field of a word of AWQ has, low bits first."""
_PLACE = torch.argsort(_ORDER)


def interleaved_words(fields: torch.Tensor) -> torch.Tensor:
    """Return rows of 4-bit fields, in eights, as words in AWQ's order."""
    shape = fields.shape
    return words_of(
        fields.reshape(shape[0], -1, len(_ORDER))[..., _ORDER].reshape(shape), WORD // len(_ORDER)
    )


def interleaved_fields(words: torch.Tensor) -> torch.Tensor:
    """Return the fields of rows of words; the inverse of :func:`interleaved_words`."""
    fields = fields_of(words, WORD // len(_ORDER))
    return fields.view(len(fields), -1, len(_ORDER))[..., _PLACE].reshape(fields.shape)


INTERLEAVED = WordLines(places=tuple(_ORDER.tolist()))
"""Lines of words in the order of AWQ, which have the fields of eight rows at one column."""


def words_of_rows(
    data: torch.Tensor, scheme: Scheme, shape: tuple[int, int], order: WordLines
) -> torch.Tensor:
    """Return packed rows, uint8 (rows, bytes), as int32 lines of words.

    shape: rows, and the fields of each. A row fills whole words, or rows come by eights.
    """
    lines: torch.Tensor = kernel(_request(Op.TO_LINES, data, scheme, shape)).run(order, data)
    return lines[: shape[1]] if order.places else lines


def rows_of_words(
    lines: torch.Tensor, scheme: Scheme, shape: tuple[int, int], order: WordLines
) -> torch.Tensor:
    """Return lines of words as packed rows: inverse of :func:`words_of_rows`."""
    if order.places and len(lines) % 2:
        lines = torch.nn.functional.pad(lines, (0, 0, 0, 1))
    rows: torch.Tensor = kernel(_request(Op.FROM_LINES, lines, scheme, shape)).run(order, lines)
    return rows


def _request(op: Op, stored: torch.Tensor, scheme: Scheme, shape: tuple[int, int]) -> Request:
    kind = torch.float32
    return Request(op=op, scheme=scheme, shape=shape, dtype=kind, own_dtype=kind, device=stored.device)


def with_scales(weight: Scheme, scales: Entry) -> Scheme:
    """Return ``weight`` with scales in the dtype of a file."""
    if scales.dtype not in SCALE_DTYPES:
        raise CheckpointError(f"scales is {scales.dtype}, but must be one of {', '.join(SCALE_DTYPES)}")
    name = str(TORCH_DTYPES[scales.dtype]).removeprefix("torch.")
    return Scheme.parse(str(weight).replace("scale=float16", f"scale={name}"))


def word_record(
    layer: LayerScheme, module: str, tensors: Mapping[str, Entry], known: Known | None, *,
    shape: tuple[int, int], config: Config,
) -> Record:  # fmt: skip
    """Return a layer's record, float16 unless source or model says otherwise."""
    dtype = known.dtype if known is not None and known.shape == shape else model_dtype(config, torch.float16)
    return record_of(layer, module, tensors, shape=shape, dtype=dtype, optional=(GROUPS,))


def transformers(facts: Facts) -> Iterator[Problem]:
    """Yield the problems of transformers, which replaces Linear layers by name."""
    if facts.experts:
        yield Loads.NO, "it reads no experts in this layout"
    if facts.cut is not None:
        yield (
            Loads.NO,
            f"it makes other layers of {printable(facts.cut)}, which it does not of packed weights",
        )
    other = other_classes().get(model_type(facts.family))
    if other is not None:
        yield Loads.NO, other


def vllm(facts: Facts) -> Iterator[Problem]:
    """Yield what vLLM says of these layouts."""
    yield from fused_alike(facts)
    if facts.nonlinear or facts.transposed:
        yield Loads.NO, "quantized embeddings, routers and weights of Conv1D are not read"


tensorrt = always(Loads.PARTLY, "it reads groups of 4 bits for some models")
