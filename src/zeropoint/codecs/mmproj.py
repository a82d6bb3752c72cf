"""Vision parts of models for llama.cpp's ``--mmproj``, in block types of GGUF.

Tensors lie as :mod:`~zeropoint.codecs.gguf` says. The file has the architecture ``clip``. Of the model it has
the vision encoder and the layers between it and the text model alone; see llama_cpp/vision_families.py. The
text model is written by ``--format gguf``. This module opens no file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..architectures import Config
from ..errors import UnsupportedError
from .containers.gguf import ALIGNMENT, GgufValue
from .containers.protocol import Found, Metadata, Read, Row
from .divided_tensors import TensorPiece, Whole
from .engines import Facts, Loads, Problem, not_read, rules
from .gguf import Gguf
from .llama_cpp.gguf_format import FILE_TYPE, LlamaCppFormat, file_type, of_file
from .llama_cpp.model_values import ARCHITECTURE, PlainValues
from .llama_cpp.vision_families import (
    FAMILIES,
    VISION,
    read_vision,
    vision_family,
    vision_form,
    vision_pieces,
    vision_values,
    vision_wholes,
)
from .model_format import FileModel, ModelFiles
from .stored_forms import StoredForm


class MmprojFormat(LlamaCppFormat):
    """See :class:`ModelFormat`; the text model is omitted."""

    mixtures: frozenset[str] = frozenset()
    prefix = "mmproj-"
    elsewhere = "of the text model, which the layout gguf writes"

    def owns(self, metadata: Metadata) -> bool:
        return not super().owns(metadata)

    def stored_form(self, name: str, shape: tuple[int, ...], config: Config) -> StoredForm | None:
        family = vision_family(config)
        return None if family is None else vision_form(family, name, shape)

    def pieces(self, name: str, shape: tuple[int, ...], config: Config) -> Sequence[TensorPiece]:
        family = vision_family(config)
        return () if family is None else vision_pieces(family, name, shape, config)

    def wholes(self, shapes: Mapping[str, tuple[int, ...]], config: Config) -> Sequence[Whole]:
        family = vision_family(config)
        return () if family is None else vision_wholes(family, shapes, config)

    def metadata(self, model: ModelFiles) -> Metadata:
        """See :class:`ModelFormat`; raises UnsupportedError for an unknown model."""
        family = vision_family(model.config)
        if family is None:
            known = ", ".join(name for each in FAMILIES for name in each.types)
            raise UnsupportedError(
                f"config.json describes no model whose vision part is known here; known are {known}"
            )
        values: dict[str, Any] = {ALIGNMENT: 32, ARCHITECTURE: VISION, FILE_TYPE: file_type(model)}
        values |= vision_values(family, model)
        for value in values.values():
            GgufValue.of(value)  # raises for what has no place in a file
        return {**values, "general.quantization_version": 2}

    @of_file
    def read(self, found: Sequence[Found], metadata: Metadata, data: Read) -> FileModel | None:
        return read_vision(found, PlainValues(metadata))

    def remarks(self, model: ModelFiles) -> Sequence[str]:
        return ()

    def fixed(self, config: Config) -> Sequence[Row]:
        return ()


def _loads(facts: Facts) -> Iterator[Problem]:
    if vision_family(facts.family) is None:
        yield Loads.NO, "the names of its vision part are not known here"
    yield Loads.PARTLY, "as its vision file, next to the text model in a GGUF file"


@dataclass(frozen=True)
class Mmproj(Gguf):
    """See the module and :class:`Codec`."""

    name = "mmproj"
    container = "gguf"
    title = "the vision files of llama.cpp (mmproj)"
    methods = ()  # no configuration names this layout
    engines = rules(transformers=not_read, vllm=not_read, llama_cpp=_loads)
    model_format = MmprojFormat()


CODEC = Mmproj()
