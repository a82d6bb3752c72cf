"""Model formats of weight files: tensor names, metadata, tokenizer.

Most files say nothing: names are the model's, and config.json and the tokenizer are other files. That
is the base class; a file that is a whole model to its engine has a format of its own. It opens no file.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..architectures import Config
from .containers.protocol import Found, Metadata, Read, Row
from .divided_tensors import TensorPiece, Whole
from .stored_forms import StoredForm

if TYPE_CHECKING:
    from .protocol import LayerScheme


WEIGHTED = "+imatrix"
"""Suffix of mixtures under an importance matrix."""


class FileTensor(NamedTuple):
    """A model tensor in a file, plain or quantized.

    name: its name; a weight's ends in ``.weight``. layer: how it is quantized, or None where it is not.
    shape: (out_features, in_features) of a quantized weight, whatever its tensors have; else its own. dtype:
    of the weight before it was quantized; None where torch does not know it.
    """

    name: str
    layer: LayerScheme | None
    shape: tuple[int, ...]
    dtype: torch.dtype | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFiles:
    """Facts of a model for a file's header.

    Args:
        config: config.json of the model, or an empty mapping.
        metadata: of the source's file.
        read: gives the bytes of a file of the source, such as tokenizer.json, or None where it is not there.
        rows: gives the most rows that a tensor of the source has.
        tensors: what the file holds.
        rewritten: whether it holds the codes of a source in the same layout, all of them as they are.
        mixture: the mixture that gave its tensors their types, if one did.
    """

    config: Config
    metadata: Metadata
    read: Callable[[str], bytes | None]
    rows: Callable[[], int]
    tensors: Iterable[FileTensor] = ()
    rewritten: bool = False
    mixture: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FileModel:
    """The model in a file that says itself what it is.

    config: config.json of the model. forms: for each tensor what it holds: the name in the model and the form
    of each part, of which most have one, or nothing for a tensor that follows from the configuration.
    """

    config: Config
    forms: Sequence[Sequence[tuple[str, StoredForm]]]


class ModelFormat:
    """A format of files without model metadata; others override it.

    Args:
        mixtures: names of mixtures of types that the engine's own tool gives to a model.
        mixture_method: the method by which that tool quantizes.
        of_importance: the mixtures that the tool does not make without an importance matrix.
        stack: what is in the names of tensors of which :meth:`parts` may say something.
        prefix: what the names of files begin with, before the container's.
        elsewhere: what notes say of omitted tensors that other files hold.
    """

    mixtures: frozenset[str] = frozenset()
    of_importance: frozenset[str] = frozenset()
    stack: str = ""
    prefix: str = ""
    elsewhere: str = ""
    mixture_method: str = ""

    def owns(self, metadata: Metadata) -> bool:
        """Return whether a file of the container is of this format."""
        return True

    def stored_form(self, name: str, shape: tuple[int, ...], config: Config) -> StoredForm | None:
        """Return the stored form of a tensor, or None if unchanged.

        The form is OMITTED where engines take no file with such a tensor and do without it. Raises
        CheckpointError where engines would not load a file with such a tensor.
        """
        return None

    def parts(self, name: str, shape: tuple[int, ...]) -> Sequence[tuple[str, StoredForm]]:
        """Return the model tensors in a file's tensor, with forms.

        None means that it is one itself. This is for files without model metadata; see :meth:`read` for
        others.
        """
        return ()

    def pieces(self, name: str, shape: tuple[int, ...], config: Config) -> Sequence[TensorPiece]:
        """Return the pieces of a model tensor, none if whole."""
        return ()

    def wholes(self, shapes: Mapping[str, tuple[int, ...]], config: Config) -> Sequence[Whole]:
        """Return the tensors of the model that files have in pieces.

        shapes: of all tensors that the files have, by the names of pieces. config: config.json of the model.
        """
        return ()

    def metadata(self, model: ModelFiles) -> Metadata:
        """Return the metadata of a file; here the source's texts."""
        return {key: value for key, value in model.metadata.items() if isinstance(value, str)}

    def fixed(self, config: Config) -> Sequence[Row]:
        """Return a file's constant tensors, derived from the configuration."""
        return ()

    def config_values(self, config: Config) -> Mapping[str, Any]:
        """Return additional values of config.json that engines look for."""
        return {}

    def remarks(self, model: ModelFiles) -> Sequence[str]:
        """Return sentences about what files lack that engines look for."""
        return ()

    def mixture(
        self, name: str, shapes: Mapping[str, tuple[int, ...]], config: Config
    ) -> Mapping[str, str] | None:
        """Return the presets of tensors in a mixture, or None.

        name: of the mixture, with WEIGHTED at its end where there is an importance matrix. shapes: of all
        tensors, by name. config: config.json of the model. Raises UnsupportedError for a model of which the
        tool's choice is not known.
        """
        return None

    def contradiction(self, metadata: Metadata, dtypes: Collection[str]) -> str | None:
        """Return a contradiction between metadata and tensors, or None."""
        return None

    def read(self, found: Sequence[Found], metadata: Metadata, data: Read) -> FileModel | None:
        """Return the model in a file, or None if unknown.

        found: its tensors, under the names of the file. metadata: of the file. data: gives bytes of the file.
        Raises CheckpointError where the file contradicts itself.
        """
        return None

    def companions(self, metadata: Metadata) -> Mapping[str, str]:
        """Return checkpoint files derived from metadata, such as the tokenizer's.

        By name.
        """
        return {}
