"""Model metadata of GGUF files for families that llama.cpp runs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from ...architectures import Config, model_type
from ...errors import UnsupportedError, option
from ...libraries import reading
from ..containers.gguf import ALIGNMENT, GgufValue
from ..containers.protocol import Found, Metadata, Read, Row
from ..containers.safetensors import FILE_DTYPES
from ..divided_tensors import TensorPiece, Whole
from ..model_format import WEIGHTED, FileModel, ModelFiles, ModelFormat
from ..stored_forms import StoredForm
from .families import family_of, form_of, pieces_of, wholes_of
from .mixtures import FILE_TYPES, MIXTURES, OF_IMPORTANCE, SMALLER, types_of
from .model_values import ARCHITECTURE, PlainValues, long_factors, model_values, read_model, rope_factors
from .tokenizer_files import tokenizer_files
from .vision_families import VISION, vision_family
from .vocabulary import tokenizer_values

_FILE_TYPES = MappingProxyType({
    "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9, "Q2_K": 10, "Q3_K": 11, "Q4_K": 14, "Q5_K": 16,
    "Q6_K": 18, "IQ4_NL": 25, "IQ4_XS": 30, "TQ1_0": 36, "TQ2_0": 37, "MXFP4": 38, "NVFP4": 39, "Q2_0": 41,
    "F32": 0, "F16": 1, "BF16": 32,
})  # fmt: skip
"""File types of llama.cpp by prevalent tensor type, which it shows and does not rely on."""
_TYPE_OF_FILE = MappingProxyType(
    {number: name for name, number in _FILE_TYPES.items() if name not in ("MXFP4", "NVFP4")}
    | {number: MIXTURES[name].upper() for name, number in FILE_TYPES.items()}
    | {19: "IQ2_XXS", 20: "IQ2_XS", 23: "IQ3_XXS", 24: "IQ1_S", 31: "IQ1_M"}
)
"""A type that such a file has; one of MXFP4 has it for experts, if there are any."""
FILE_TYPE, _VERSION = "general.file_type", "general.quantization_version"
_MADE_BY = "quantize."
"""Prefix of keys about another file's quantization."""


_config = reading("config.json does not describe a model of llama.cpp", "download the checkpoint again")
of_file = reading("what the file says of its model is damaged", "download or export it again")


class LlamaCppFormat(ModelFormat):
    """See :class:`ModelFormat`; unknown families keep the checkpoint's names."""

    mixtures = frozenset(MIXTURES)
    mixture_method = "ggml"
    of_importance = OF_IMPORTANCE

    @of_file
    def owns(self, metadata: Metadata) -> bool:
        return PlainValues(metadata).get(ARCHITECTURE) != VISION

    @_config
    def stored_form(self, name: str, shape: tuple[int, ...], config: Config) -> StoredForm | None:
        family = family_of(config)
        return None if family is None else form_of(family, name, shape, config)

    @_config
    def pieces(self, name: str, shape: tuple[int, ...], config: Config) -> Sequence[TensorPiece]:
        family = family_of(config)
        return () if family is None else pieces_of(family, name, shape, config)

    @_config
    def wholes(self, shapes: Mapping[str, tuple[int, ...]], config: Config) -> Sequence[Whole]:
        family = family_of(config)
        return () if family is None else wholes_of(family, shapes, config)

    @_config
    def metadata(self, model: ModelFiles) -> Metadata:
        if model.rewritten:
            return model.metadata
        family = family_of(model.config)
        kind = {} if family is None else {FILE_TYPE: file_type(model)}
        if _is_gguf(model.metadata):
            said = {key: value for key, value in model.metadata.items() if not key.startswith(_MADE_BY)}
            return {**said, **kind, _VERSION: 2}
        values: dict[str, Any] = {ALIGNMENT: 32, ARCHITECTURE: model_type(model.config) or "unknown"}
        if family is not None:
            tokenizer, _ = tokenizer_values(model.config, model.read, model.rows)
            values |= {**model_values(family, model.config), **kind, **tokenizer}
        for value in values.values():
            GgufValue.of(value)  # raises for what has no place in a file
        return {**values, _VERSION: 2}

    @_config
    def remarks(self, model: ModelFiles) -> Sequence[str]:
        family = family_of(model.config)
        if family is None or _is_gguf(model.metadata):
            return ()
        unlike = [*family.unlike(family.described(model.config))]
        if vision_family(model.config) is not None:
            how = f"convert {option('format', 'mmproj')} {option('to', 'float16')}"
            unlike.append(f"images need the vision part, which {how} writes")
        return [*tokenizer_values(model.config, model.read, model.rows)[1], *unlike]

    @_config
    def fixed(self, config: Config) -> Sequence[Row]:
        """See :class:`ModelFormat`: factors of rotary embeddings."""
        family = family_of(config)
        if family is None:
            return ()
        factors = rope_factors(family, config)
        return (*long_factors(family, config), *(() if factors is None else (factors,)))

    @_config
    def mixture(
        self, name: str, shapes: Mapping[str, tuple[int, ...]], config: Config
    ) -> Mapping[str, str] | None:
        family = family_of(config)
        if name.removesuffix(WEIGHTED) not in MIXTURES:
            return None
        if family is None:
            raise UnsupportedError(
                f"mixture {name} needs a family whose names in llama.cpp are known here, which config.json "
                "does not name with all its sizes; use one type, such as q4_k"
            )
        return types_of(name, family, shapes, config)

    @of_file
    def contradiction(self, metadata: Metadata, dtypes: Collection[str]) -> str | None:
        """See :class:`ModelFormat`: a file type that no tensor has."""
        said = PlainValues(metadata).get(FILE_TYPE)
        name = _TYPE_OF_FILE.get(said) if type(said) is int else None
        if name is None or not dtypes:
            return None
        smaller = SMALLER.get(name.lower(), name).upper()
        if {name, smaller} & set(dtypes):
            return None
        return f"{FILE_TYPE} is {said}, which is a file of {name}, but no tensor with several axes is {name}"

    @of_file
    def read(self, found: Sequence[Found], metadata: Metadata, data: Read) -> FileModel | None:
        return read_model(found, metadata, data)

    @of_file
    def companions(self, metadata: Metadata) -> Mapping[str, str]:
        return tokenizer_files(PlainValues(metadata))


def _is_gguf(metadata: Metadata) -> bool:
    """Return whether metadata comes from a GGUF file."""
    return isinstance(metadata.get(ARCHITECTURE), GgufValue)


def file_type(model: ModelFiles) -> int:
    """Return llama.cpp's file type: a mixture's, or the prevalent type's."""
    if model.mixture is not None:
        return FILE_TYPES[model.mixture.removesuffix(WEIGHTED)]
    codes: Counter[str] = Counter()
    floats: Counter[str] = Counter()
    for tensor in model.tensors:
        if tensor.layer is not None:
            codes[tensor.layer.layout] += math.prod(tensor.shape)
        elif tensor.dtype is not None and len(tensor.shape) > 1:
            floats[FILE_DTYPES[tensor.dtype]] += math.prod(tensor.shape)
    found = (codes or floats).most_common(1)
    return _FILE_TYPES.get(found[0][0], _FILE_TYPES["BF16"]) if found else _FILE_TYPES["BF16"]
