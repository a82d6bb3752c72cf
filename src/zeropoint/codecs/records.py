"""Checkpoint tensors as codecs read them, and the resulting layers.

A codec opens no file: what it needs of one, it asks of a :class:`Listing`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import torch

from ..architectures import Config
from ..errors import CheckpointError
from ..recipes import Activation
from .held_schemes import FLOAT_SCALES

if TYPE_CHECKING:
    from .protocol import LayerScheme


T = TypeVar("T")


class Known(NamedTuple):
    """Facts of a source checkpoint about a quantized weight.

    Args:
        shape: (out_features, in_features).
        dtype: of the weight before it was quantized.
    """

    shape: tuple[int, int]
    dtype: torch.dtype


class Entry(Protocol):
    """A tensor of a file, as its header describes it."""

    @property
    def name(self) -> str:
        """Its full name in the file."""

    @property
    def dtype(self) -> str:
        """Its dtype in the container's spelling, such as ``F8_E4M3`` or ``Q4_0``."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""


class Listing(Protocol):
    """A checkpoint, as a codec that reads it sees it."""

    @property
    def config(self) -> Config:
        """The model's config.json, or an empty mapping."""

    @property
    def quantization(self) -> Mapping[str, Any]:
        """Quantization section of the configuration, or an empty mapping."""

    @property
    def metadata(self) -> Mapping[str, str]:
        """The texts in the metadata of all its files."""

    @property
    def graph(self) -> bytes:
        """A graph file's content without tensors, or empty bytes."""

    def document(self, name: str) -> Mapping[str, Any] | None:
        """Return a JSON file next to the configuration, or None.

        Args:
            name: of a file of the checkpoint.

        Raises:
            CheckpointError: where it is not a JSON object.
        """

    def read(self, entry: Entry) -> bytes:
        """Return the bytes of a small tensor.

        Args:
            entry: one of the tensors that were given to the reader.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A quantized weight of a checkpoint.

    Args:
        module: dotted name of its layer.
        layer: how it is quantized.
        shape: (out_features, in_features) of the weight that was quantized.
        dtype: of that weight.
        parts: the names that its codec has for its tensors, the codes first.
        experts: how many matrices of ``shape`` lie one after the other in each tensor, or None for one
            matrix.
    """

    module: str
    layer: LayerScheme
    shape: tuple[int, int]
    dtype: torch.dtype
    parts: tuple[str, ...]
    experts: int | None = None


class Reader(Protocol):
    """Reader of one checkpoint; only ``record`` has no default."""

    ignore: tuple[str, ...] = ()
    """Names or patterns of modules that the configuration says are not quantized."""

    def record(self, key: str, tensors: Mapping[str, Entry], known: Known | None) -> Record:
        """Return the quantized weight of some tensors.

        :func:`record_of` checks most of it.

        Args:
            key: what the codec's ``part_of`` calls the weight.
            tensors: its tensors, by what ``part_of`` calls them.
            known: what the source checkpoint says of the weight, or None without one.

        Raises:
            CheckpointError: where they contradict each other or the configuration.
            UnsupportedError: where they are well-formed, but not read here.
        """

    def expects(self, module: str) -> bool:
        """Return whether loaders take the linear layer ``module`` for a quantized one.

        Args:
            module: dotted name of a layer.
        """
        return False

    def kept(self) -> Callable[[str], bool]:
        """Return a predicate of module names that the configuration omits.

        By default, names of ``ignore`` leave out modules that have them, whole, in their own, as transformers
        does. A reader whose :meth:`record` refuses such layers has nothing to say here.
        """
        names = frozenset(self.ignore)
        return lambda module: bool(names) and not names.isdisjoint(_runs(module))

    def contradiction(self, module: str, layer: LayerScheme) -> str | None:
        """Return a contradiction between configuration and tensors, or None.

        Args:
            module: its dotted name.
            layer: how it is quantized, by its tensors.
        """
        return None

    def promised(self) -> Iterable[str]:
        """Return last parts of module names, each promised one quantized module."""
        return ()

    def named(self) -> Iterable[str]:
        """Return the modules that the configuration names one by one as quantized."""
        return ()

    def input_of(self, module: str) -> Activation | None:
        """Return how the inputs of a layer are quantized, or None.

        Args:
            module: dotted name of a layer.
        """
        return None


def _runs(module: str) -> Iterator[str]:
    """Yield the names that a dotted name has in it.

    >>> list(_runs("a.b"))
    ['a', 'a.b', 'b']
    """
    parts = module.split(".")
    for begin in range(len(parts)):
        for end in range(begin + 1, len(parts) + 1):
            yield ".".join(parts[begin:end])


def needed(tensors: Mapping[str, Entry], part: str, layout: str = "the layer") -> Entry:
    """Return a tensor of a weight; raises CheckpointError if missing.

    Args:
        tensors: of the weight, by part.
        part: which one.
        layout: what needs it, for the message.
    """
    if part not in tensors:
        raise CheckpointError(f"{part} is missing, which {layout} needs")
    return tensors[part]


def matrix(tensors: Mapping[str, Entry], part: str, layout: str = "the layer") -> tuple[int, int]:
    """Return a matrix's shape; raises CheckpointError for other tensors.

    Args:
        tensors: of the weight, by part.
        part: which one.
        layout: what needs it, for the message.
    """
    entry = needed(tensors, part, layout)
    if len(entry.shape) != 2:
        raise CheckpointError(f"{part} has shape {list(entry.shape)}, but must be a matrix")
    return entry.shape[0], entry.shape[1]


def float_scales(
    tensors: Mapping[str, Entry], part: str, layout: str = "the layer", known: Sequence[str] = FLOAT_SCALES
) -> str:
    """Return the dtype of scales; raises CheckpointError for unknown ones.

    Args:
        tensors: of the weight, by part.
        part: which one has the scales.
        layout: what needs it, for the message.
        known: the dtypes that are read.
    """
    dtype = needed(tensors, part, layout).dtype
    if dtype not in known:
        raise CheckpointError(f"{part} is {dtype}, but must be one of {', '.join(known)}")
    return dtype


def setting(config: Mapping[str, Any], key: str, default: T, fits: Callable[[Any], bool], wanted: str) -> T:
    """Return a configured value; raises CheckpointError for a malformed one.

    Args:
        config: ``quantization_config`` of config.json.
        key: of the value.
        default: what it is where the section has none.
        fits: whether a value can be right.
        wanted: what it must be, for the message.

    Example:
        >>> setting({"group_size": 64}, "group_size", -1, lambda n: n in (-1, 64), "-1 or 64")
        64
    """
    found: T | None = config.get(key)
    value = default if found is None else found
    if not fits(value):
        raise CheckpointError(
            f"{key} of quantization_config is {found!r:.40}, but must be {wanted}; the file is damaged"
        )
    return value


def group_size(found: object) -> int:
    """Return the inputs of a group; 0, for -1, means whole rows.

    Args:
        found: ``group_size`` of a configuration.

    Raises:
        CheckpointError: where it is neither -1 nor positive.
    """
    fits = type(found) is int and (found == -1 or found > 0)
    return max(0, setting({"group_size": found}, "group_size", 0, lambda _: fits, "-1 or positive"))


def names_in(quantization: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """Return the names in a configured list, none if missing.

    Args:
        quantization: ``quantization_config`` of config.json.
        key: of the list.

    Raises:
        CheckpointError: where it is no list of names.

    Example:
        >>> names_in({"ignore": ["lm_head"]}, "ignore"), names_in({}, "ignore")
        (('lm_head',), ())
    """

    def fits(found: object) -> bool:
        return isinstance(found, list) and all(isinstance(name, str) for name in found)

    return tuple(setting(quantization, key, list[str](), fits, "a list of names"))


def model_dtype(config: Config, default: torch.dtype) -> torch.dtype:
    """Return the dtype that config.json gives the model's weights.

    Args:
        config: config.json of the model.
        default: for a configuration that names none, or one that weights do not have.

    Example:
        >>> model_dtype({"torch_dtype": "bfloat16"}, torch.float32)
        torch.bfloat16
    """
    known = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
    return known.get(str(config.get("dtype", config.get("torch_dtype"))), default)


def record_of(
    layer: LayerScheme, module: str, tensors: Mapping[str, Entry], of: Known, optional: Collection[str] = ()
) -> Record:
    """Return the record of a weight with its codec's own tensors.

    Args:
        layer: how it is quantized.
        module: dotted name of its layer.
        tensors: of the weight, by suffix.
        of: shape and dtype of the weight.
        optional: suffixes of tensors that other writers leave out.

    Raises:
        CheckpointError: for a shape that the codec refuses, and for a tensor that is missing, is of another
            dtype or shape than the codec writes, or has no place in the layout. One number may be a list.
    """
    shape, dtype = of
    problem = layer.codec.refusal(layer, shape)
    if problem is not None:
        raise CheckpointError(problem)
    specs = {spec.suffix: spec for spec in layer.codec.tensors(layer, shape, dtype)}
    for suffix, spec in specs.items():
        if suffix in optional and suffix not in tensors:
            continue
        entry = needed(tensors, suffix, layer.layout)
        number = (entry.shape, spec.shape) == ((1,), ())
        if (entry.shape != spec.shape and not number) or entry.dtype != spec.dtype:
            raise CheckpointError(
                f"{suffix} is {entry.dtype} of shape {list(entry.shape)}, but must be {spec.dtype} of "
                f"shape {list(spec.shape)} for a weight of shape {list(shape)}"
            )
    surplus = sorted(tensors.keys() - specs.keys())
    if surplus:
        raise CheckpointError(f"{', '.join(surplus)} has no place in {layer.layout}")
    parts = tuple(suffix for suffix in specs if suffix in tensors)
    return Record(module=module, layer=layer, shape=shape, dtype=dtype, parts=parts)


class MatrixReader(Reader):
    """Reader of weights whose tensor ``weight`` has an item per code.

    Args:
        listing: a checkpoint that the codec claims.
        codec: whose readers these are.
    """

    kept_key: str
    """Key of the configuration with the names of modules that are not quantized."""
    dtype: torch.dtype
    """Dtype of models that say none."""
    optional: tuple[str, ...] = ()
    """Suffixes of tensors that other writers leave out."""

    def __init__(self, listing: Listing, codec: Any) -> None:
        self.listing, self.codec = listing, codec
        self.ignore = names_in(listing.quantization, self.kept_key)

    @abstractmethod
    def layer(self, key: str, tensors: Mapping[str, Entry]) -> LayerScheme:
        """Return how a weight is quantized.

        Args:
            key: the module.
            tensors: its tensors by suffix.

        """

    def record(self, key: str, tensors: Mapping[str, Entry], known: Known | None) -> Record:
        """See :class:`Reader`; ``key`` is the module."""
        layer = self.layer(key, tensors)
        shape = matrix(tensors, "weight", layer.layout)
        dtype = model_dtype(self.listing.config, self.dtype) if known is None else known.dtype
        return record_of(layer, key, tensors, Known(shape, dtype), self.optional)
