"""Weights in 32-bit words, as GPTQ and AWQ store them: transposed, with scales and zero points of groups.

    X.qweight   I32: codes of X.weight (N, K)
    X.qzeros    I32 [K / g, ...]: zero points of groups of g inputs
    X.scales    F16 [K / g, N]

This module knows how fields fill words and what the layouts share; each has a codec of its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from ..architectures import Config
from ..errors import CheckpointError
from ..layout import packing
from ..schemes import Scheme
from .protocol import Entry, Known, LayerScheme, Record
from .safetensors_dtypes import TORCH_DTYPES

CODES, ZEROS, SCALES = "qweight", "qzeros", "scales"
WORD = 32
SCALE_DTYPES = ("F16", "BF16", "F32")


def group_of(weight: Scheme, columns: int) -> int:
    """Return how many inputs have one scale."""
    return int(weight.granularity.block_shape((1, columns))[1])


def whole_words(bits: int) -> tuple[int, int]:
    """Return the least number of words that hold whole fields, and how many fields these are."""
    common = math.gcd(bits, WORD)
    return bits // common, WORD // common


def words_of(fields: torch.Tensor, bits: int) -> torch.Tensor:
    """Return rows of unsigned fields as rows of int32 words, low bits first; a row must fill whole words."""
    stream = packing.pack(fields, bits)
    return stream.reshape(-1).view(torch.int32).view(len(fields), -1)


def fields_of(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the fields of rows of words; the inverse of :func:`words_of`."""
    stream = words.contiguous().reshape(-1).view(torch.uint8).view(len(words), -1)
    return packing.unpack(stream, bits, words.shape[1] * WORD // bits)


def part_of(tensors: Mapping[str, Entry], name: str) -> Entry:
    """Return a tensor of a layer; raises CheckpointError where it is missing."""
    if name not in tensors:
        raise CheckpointError(f"{name} is missing, which the layer needs")
    return tensors[name]


def with_scales(weight: Scheme, scales: Entry) -> Scheme:
    """Return ``weight``, whose scales are float16, with scales of the dtype that a file has."""
    if scales.dtype not in SCALE_DTYPES:
        raise CheckpointError(f"scales is {scales.dtype}, but must be one of {', '.join(SCALE_DTYPES)}")
    name = str(TORCH_DTYPES[scales.dtype]).removeprefix("torch.")
    return Scheme.parse(str(weight).replace("scale=float16", f"scale={name}"))


def record_of(
    layer: LayerScheme, shape: tuple[int, int], module: str, tensors: Mapping[str, Entry],
    known: Known | None, config: Config,
) -> Record:  # fmt: skip
    """Return the record of a layer; raises CheckpointError for tensors that its codec does not write so.

    known: what the stream knows of the original weight, or None. config: the model's configuration.
    """
    dtype = known.dtype if known is not None and known.shape == shape else _dtype(config)
    problem = layer.codec.refusal(layer, shape)
    if problem is not None:
        raise CheckpointError(problem)
    specs = layer.codec.tensors(layer, shape, dtype)
    for spec in specs:
        entry = tensors.get(spec.suffix)
        if entry is not None and (entry.shape, entry.dtype) != (spec.shape, spec.dtype):
            raise CheckpointError(
                f"{spec.suffix} is {entry.dtype} of shape {list(entry.shape)}, but must be {spec.dtype} of "
                f"shape {list(spec.shape)} for a weight of shape {list(shape)}"
            )
    parts = tuple(spec.suffix for spec in specs if spec.suffix in tensors)
    return Record(module=module, layer=layer, shape=shape, dtype=dtype, parts=parts)


def _dtype(config: Config) -> torch.dtype:
    named = config.get("dtype", config.get("torch_dtype"))
    return {"bfloat16": torch.bfloat16, "float32": torch.float32}.get(str(named), torch.float16)
