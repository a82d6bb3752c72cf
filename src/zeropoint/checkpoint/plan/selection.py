"""Selection of tensors to quantize: default rules and user patterns.

This module decides from names, dtypes and shapes alone; it reads no data and knows no file layout. Rules are
tried in order, the first that applies gives the reason, and every tensor gets one.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...architectures import ADAPTED, adapted_module, heads_of, is_adapter, layer_type
from ...codecs import registry
from ...codecs.containers.safetensors import TORCH_DTYPES
from ...codecs.known import CONFIG_KEYS, is_quantized
from ...errors import CheckpointError, option, printable
from ...loaded_names import is_table, transformers_names
from ...patterns import name_pattern, name_patterns, near_patterns
from ...recipes import Recipe, Rule, Subject
from ..read.source import CONFIG, Source
from ..read.storage import shown
from ..read.tensor_entries import Entries, TensorEntry, code_operators

FLOATS = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
"""Dtypes in which codes are written as floats, with the names that safetensors has for them."""
WEIGHT_DTYPES = frozenset(FLOATS.values())
"""Dtypes of weights that are quantized, as safetensors spells them."""
_FLOATS = (*WEIGHT_DTYPES, "F64")
WEIGHT = ".weight"


class Why(enum.Enum):
    """Source of a decision."""

    LINEAR = "linear"
    """The weight of a linear layer, which is what the job is about."""
    DEFAULT = "default"
    """Kept by the default rules: not a linear weight, or one that is better kept."""
    USER = "user"
    """The user's pattern said so."""
    UNFIT = "unfit"
    """A linear weight that cannot be quantized as asked; the user did not ask to keep it."""
    UNNAMED = "unnamed"
    """A linear weight that no rule of the recipe names, and the recipe has no default."""
    ROTATED = "rotated"
    """Written as other floats, of the same model in a rotated space."""


class DequantizePolicy(enum.Enum):
    """Treatment of layers that are quantized already."""

    NONE = "none"
    """A checkpoint that has any is refused."""
    FIRST = "first"
    """Those that are selected start from their dequantized values; the others keep their codes."""
    EVERY = "every"
    """As FIRST, and the others are written as floats."""
    LOSSLESS = "lossless"
    """They are converted to the layout that is written, without loss, or refused."""
    CONVERT = "convert"
    """As LOSSLESS, and quantized anew where they would be refused."""

    @property
    def converts(self) -> bool:
        """Whether codes become other codes."""
        return self in (DequantizePolicy.LOSSLESS, DequantizePolicy.CONVERT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Options of the selection.

    include: patterns of tensors to quantize although the default rules keep them.
    ignore: patterns of tensors to keep; it wins over include.
    strict: whether a linear weight that is kept although no option says so is an error, and so a set
    of layers that engines run as one but that would not have one scheme. fit: whether weights whose inputs
    are no multiple of the group of their scheme get a smaller group. kv_scales: whether scales of a float8
    cache of keys and values are written, too.
    dequantize: what is done with layers that are quantized already. floats: dtype of their values, as
    safetensors spells it; by default that which the configuration names, or bfloat16. without_inputs: names
    of tensors that a run of the model gave no inputs to learn from. as_stored: whether layers keep the names
    and rows of the files, which rules name, for plans that are compared. No option has the last two.

    A pattern is a glob, or ``re:`` and a regular expression that must match from the start; it is tried on
    the tensor's name and on its module's name (without ``.weight``). Raises PatternError for a malformed
    regular expression.
    """

    include: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    strict: bool = False
    fit: bool = False
    kv_scales: bool = False
    dequantize: DequantizePolicy = DequantizePolicy.NONE
    floats: str | None = None
    without_inputs: frozenset[str] = frozenset()
    as_stored: bool = False

    def __post_init__(self) -> None:
        name_patterns((*self.include, *self.ignore))

    def includes(self, name: str) -> bool:
        """Return whether an include pattern names a tensor or its module."""
        return any(names(pattern, name) for pattern in self.include)

    def recipe(self, asked: Recipe) -> Recipe:
        """Return all rules: ``asked``, these patterns, and the default rules.

        Patterns to ignore come first, then the rules of ``asked``, patterns to include, and DEFAULT_RULES.
        The default of ``asked`` decides about weights of linear layers that no rule names.
        """
        default = asked.default
        place = default.place if default.gives is None else "included by a pattern"
        ignore = (Rule(name=p, gives=None, place=f"ignored by {printable(p)}") for p in self.ignore)
        include = (replace(default, name=p, place=place) for p in self.include)
        return replace(asked, rules=(*ignore, *asked.rules, *include, *DEFAULT_RULES))


def names(pattern: str, name: str) -> bool:
    """Return whether ``pattern`` names a tensor or its module."""
    compiled = name_pattern(pattern)
    return compiled.matches(name) or compiled.matches(module_of(name))


def module_of(name: str) -> str:
    """Return the module that a tensor belongs to as its weight.

    >>> module_of("model.layers.0.mlp.up_proj.weight")
    'model.layers.0.mlp.up_proj'
    """
    return name.removesuffix(WEIGHT)


_FLOAT64 = Rule(
    types=("Linear",),
    dtypes=("float64",),
    gives=None,
    reason="float64, which no engine reads in this layout; convert it first",
)
DEFAULT_RULES = (
    Rule(types=("Embedding",), gives=None, reason="an embedding"),
    Rule(types=("Norm",), gives=None, reason="a norm"),
    Rule(types=("Router",), gives=None, reason="a router"),
    Rule(types=("Head",), gives=None, reason="a head"),
    Rule(types=("Adapter",), gives=None, reason="a part of an adapter"),
    Rule(
        types=("Draft",), gives=None, reason="a head that drafts tokens, fewer of which hold when quantized"
    ),
    Rule(types=("Indexer",), gives=None, reason="an indexer, which engines run in floats"),
    Rule(types=("Outer",), gives=None, reason="outside of the blocks of a diffusion model"),
    Rule(types=("Modulation",), gives=None, reason="a modulation of a norm (AdaLN) of a diffusion model"),
    _FLOAT64,
)
"""Rules of tensors that are kept by default."""
_UNFIT = (_FLOAT64,)
"""Reasons to keep weights of linear layers, which are reported."""


def is_fused_experts(entry: TensorEntry) -> bool:
    """Return whether a tensor stacks all experts of a layer."""
    return entry.stack is not None


def not_a_weight(entry: TensorEntry) -> str | None:
    """Return why no scheme can quantize a tensor, or None."""
    problem = _no_weight(entry)
    return entry.stack.problem if problem is None and entry.stack is not None else problem


def is_linear_weight(entry: TensorEntry, entries: Entries, config: Mapping[str, Any]) -> bool:
    """Return whether the default rules quantize a tensor as linear weight."""
    subject = subject_of(entry, entries, config)
    return not_a_weight(entry) is None and not any(rule.matches(subject) for rule in DEFAULT_RULES)


def why_kept(rule: Rule) -> Why:
    """Return where the decision of ``rule`` to keep a weight comes from."""
    if rule.place:
        return Why.USER
    return Why.UNFIT if rule in _UNFIT else Why.DEFAULT if rule in DEFAULT_RULES else Why.UNNAMED


def subject_of(entry: TensorEntry, entries: Entries, config: Mapping[str, Any]) -> Subject:
    """Return the recipe subject of a tensor of ``entries``.

    Its type is what the default rules take it for: one of :func:`~zeropoint.architectures.layer_type`, or
    Other.
    """
    module = module_of(entry.name)
    kind = layer_type(module, config) if entry.use is None else entry.use.kind
    if kind == "Embedding" and entry.use is None and _projects(entry, entries):
        kind = "Linear"
    if kind == "Linear" and _no_weight(entry) is not None:
        kind = "Other"
    if kind == "Linear" and entry.use is None and _NUMBER.search(module) is None:
        kind = _as_loaded(entry, entries, config)
    dtype = TORCH_DTYPES.get(entry.dtype)
    return Subject(
        name=module,
        type=kind,
        shape=entry.shape,
        dtype=entry.dtype if dtype is None else str(dtype).removeprefix("torch."),
        parameter=entry.name,
    )


_NUMBER = re.compile(r"\.\d+\.")


def _as_loaded(entry: TensorEntry, entries: Entries, config: Mapping[str, Any]) -> str:
    """Return the type of a matrix outside blocks, as transformers loads it.

    It has the name that a head has there, or is a table, which has no bias.
    """
    module = module_of(entry.name)
    if not set(heads_of(config)).isdisjoint(transformers_names(module, config)):
        return "Head"
    return "Embedding" if f"{module}.bias" not in entries and is_table(module, config) else "Linear"


def is_embedding(entry: TensorEntry, entries: Entries, config: Mapping[str, Any]) -> bool:
    """Return whether a tensor is an embedding table."""
    return subject_of(entry, entries, config).type == "Embedding"


_TABLES = re.compile("embed|position|token_type", re.IGNORECASE)
"""Parts of the names of embeddings, or of modules around them."""


def _projects(entry: TensorEntry, entries: Entries) -> bool:
    """Return whether a matrix named as embedding is a projection.

    A table has no bias, and as many rows as there are ids. Of a projection, other layers take what it gives,
    while none takes what it is given.
    """
    if len(entry.shape) != 2:
        return False
    bias = entries.get(f"{module_of(entry.name)}.bias")
    if bias is not None and bias.shape == entry.shape[:1]:
        return True
    (rows, columns), taken = entry.shape, entries.columns_but(_TABLES)
    return taken[rows] > 0 and not taken[columns]


def _no_weight(entry: TensorEntry) -> str | None:
    """Return why a tensor is no float matrix, or None."""
    if entry.dtype not in _FLOATS:
        return f"{entry.dtype}, not a float"
    if is_fused_experts(entry):
        return None
    if entry.use is not None and entry.use.reason is not None:
        return entry.use.reason
    if len(entry.shape) != 2:
        return f"{len(entry.shape)}-D, not a matrix"
    if not entry.name.endswith(WEIGHT):
        return EXPERTS_AS_ROWS if _has_experts_as_rows(entry) else "not named *.weight"
    return None


EXPERTS_AS_ROWS = "the experts of a layer one below the other, which no layout holds"
"""Why a matrix like DBRX's is kept."""


def _has_experts_as_rows(entry: TensorEntry) -> bool:
    *before, last = entry.name.split(".")
    return "experts" in before and "bias" not in last and min(entry.shape) > 1


def check_patterns(selection: Selection, tensors: Iterable[str]) -> None:
    """Raise CheckpointError, with near misses, for patterns without a match."""
    known = list(tensors)
    idle = [p for p in (*selection.include, *selection.ignore) if not any(names(p, name) for name in known)]
    if idle:
        hint = near_patterns(idle[0], map(module_of, known)) if len(known) <= _HINT_LIMIT else ""
        listed = ", ".join(printable(pattern) for pattern in idle)
        hint = hint or "zeropoint inspect lists the names"
        raise CheckpointError(f"pattern {listed} matches no tensor of the checkpoint; {hint}")


# The closest name is found by comparing with each, at some microseconds a name.
_HINT_LIMIT = 20_000


def require_unquantized(entries: Iterable[TensorEntry], config: Mapping[str, Any] | None, place: str) -> None:
    """Raise CheckpointError for a checkpoint that is quantized already."""
    for key in CONFIG_KEYS:
        found = (config or {}).get(key)
        if found not in (None, {}):
            method: object = found
            remedy = _UNREADABLE
            if isinstance(found, dict):
                method = registry.method_in(found)
                remedy = _UNREADABLE if registry.claiming(found) is None else _dequantize()
            raise CheckpointError(f"{place} is quantized already ({key} says {method!r}); {remedy}")
    for entry in entries:
        held = f"{place} is quantized already (it holds {printable(entry.name)}, {entry.dtype}"
        if entry.use is not None and entry.use.part is not None:
            raise CheckpointError(f"{held}); {_dequantize()}")
        if operators := code_operators(entry):
            raise CheckpointError(f"{held}, which {operators} multiplies); {_UNREADABLE}")
        if entry.use is None and is_quantized(entry.name, entry.dtype):
            raise CheckpointError(
                f"{held}), but its configuration does not say how; {_UNREADABLE if config else _NO_CONFIG}"
            )


def _dequantize() -> str:
    return (
        "pass the original checkpoint, or what zeropoint dequantize makes of it; quantize and search do that "
        f"themselves with {option('dequantize_first', True)}"
    )


_UNREADABLE = "pass the original checkpoint"
_NO_CONFIG = "pass the directory whose config.json says how, or the original checkpoint"


_ADAPTER_CONFIG = "adapter_config.json"


def require_model(source: Source) -> None:
    """Raise CheckpointError for an adapter, or a useless config.json."""
    part = _adapter_alone(source)
    if part is not None:
        raise CheckpointError(
            f"{shown(source.root)} is an adapter (it holds {printable(part)}), not a model; merge it into "
            "its base model first, as with merge_and_unload() of PEFT"
        )
    if source.config is None and Path(CONFIG) in source.companions:
        raise CheckpointError(
            f"{shown(source.root / CONFIG)} is not a valid configuration, and the result could not say in it "
            "what is quantized; correct it, or remove it to quantize the weights alone"
        )


def _adapter_alone(source: Source) -> str | None:
    """Return a part of a bare adapter, or None for a model.

    Models may hold adapters next to their weights; next to an adapter there may be heads that it came with.
    """
    parts = [name for name in source.entries if is_adapter(name)]
    saved = Path(_ADAPTER_CONFIG) in source.companions
    if not parts:
        return _ADAPTER_CONFIG if saved and source.config is None else None
    if saved:
        bases = {f"{adapted_module(name)}{ending}" for name in parts for ending in (WEIGHT, ADAPTED + WEIGHT)}
        return None if any(name in source.entries for name in bases) else parts[0]
    others = (e for e in source.entries.values() if len(e.shape) > 1 and not is_adapter(e.name))
    return parts[0] if next(others, None) is None else None
