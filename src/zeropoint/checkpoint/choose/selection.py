"""Which tensors are quantized: the default rules by name, shape and dtype, and what the user says of it.

This module decides from names, dtypes and shapes alone; it reads no data and knows no file layout. Rules are
tried in order, the first that applies gives the reason, and every tensor gets one.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...architectures import heads_of, is_transposed
from ...codecs import registry
from ...codecs.known import CONFIG_KEYS, is_quantized
from ...codecs.safetensors_dtypes import TORCH_DTYPES
from ...errors import CheckpointError, near_misses, printable
from ...patterns import name_pattern
from ...recipes import Rule, Subject
from ..read.entries import TensorEntry

WEIGHT_DTYPES = ("F32", "BF16", "F16")
"""Dtypes of weights that are quantized, as safetensors spells them."""
_FLOATS = (*WEIGHT_DTYPES, "F64")
WEIGHT = ".weight"
GATE_UP, DOWN = "gate_up_proj", "down_proj"


class Why(enum.Enum):
    """Whose wish a decision follows."""

    LINEAR = "linear"
    """The weight of a linear layer, which is what the job is about."""
    DEFAULT = "default"
    """Kept by the default rules: not a linear weight, or one that is better left alone."""
    USER = "user"
    """The user's pattern said so."""
    UNFIT = "unfit"
    """A linear weight that cannot be quantized as asked; the user did not ask to keep it."""
    UNNAMED = "unnamed"
    """A linear weight that no rule of the recipe names, and the recipe has no default."""


class Dequantize(enum.Enum):
    """What becomes of layers that are quantized already."""

    NONE = "none"
    """A checkpoint that has any is refused."""
    FIRST = "first"
    """Those that are selected start from what their codes stand for; the others keep their codes."""
    EVERY = "every"
    """As FIRST, and the others are written as floats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Whether a tensor is quantized, on whose wish, and the reason in words."""

    quantize: bool
    why: Why
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """What the user asked for.

    include: patterns of tensors to quantize although the default rules keep them.
    ignore: patterns of tensors to keep; it wins over include.
    strict: whether a linear weight that is left alone although nobody asked for it is an error, and so a set
    of layers that engines run as one but that would not have one scheme.
    dequantize: what becomes of layers that are quantized already. floats: dtype of what they stand for, as
    safetensors spells it; by default that which the configuration names, or bfloat16.

    A pattern is a glob, or ``re:`` and a regular expression that must match from the start; it is tried on
    the tensor's name and on its module's name (without ``.weight``). Raises PatternError for a malformed
    regular expression.
    """

    include: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    strict: bool = False
    dequantize: Dequantize = Dequantize.NONE
    floats: str | None = None

    def __post_init__(self) -> None:
        for text in (*self.include, *self.ignore):
            name_pattern(text)

    def included(self, name: str) -> bool:
        """Return whether an include pattern names the tensor."""
        return any(self.named(pattern, name) for pattern in self.include)

    def ignored(self, name: str) -> str | None:
        """Return the first ignore pattern that names the tensor, or None."""
        return next((pattern for pattern in self.ignore if self.named(pattern, name)), None)

    def named(self, pattern: str, name: str) -> bool:
        """Return whether ``pattern``, one of ours, names the tensor."""
        compiled = name_pattern(pattern)
        return compiled.matches(name) or compiled.matches(module_of(name))


def module_of(name: str) -> str:
    """Return the module that a tensor belongs to as its weight.

    >>> module_of("model.layers.0.mlp.up_proj.weight")
    'model.layers.0.mlp.up_proj'
    """
    return name.removesuffix(WEIGHT)


# Each rule is (what stands in the last part of a module's name, what stands in the part before it, reason).
_EMBEDDING = re.compile(
    r"embed|position|token_type|^(wte|wpe|shared|relative_attention_bias)$", re.IGNORECASE
)
_NORM = re.compile(r"norm$|^ln(_\w*)?$|^layer_?norm", re.IGNORECASE)
_ROUTER = re.compile(r"router|^(gate|gating|wg)$|expert_gate$", re.IGNORECASE)
_HEAD = re.compile(r"(^|_)(lm_head|classifier|score|qa_outputs|head)$", re.IGNORECASE)
_HEAD_PARENT = re.compile(r"(^|_)(lm_head|classifier|score)$", re.IGNORECASE)
# Mistral's own checkpoints call the head `output`; BERT's heads live under `cls`.
_TOP_HEAD = re.compile(r"^(output$|cls\.)")


_AN_EMBEDDING, _A_NORM, _A_ROUTER, _A_HEAD = "an embedding", "a norm", "a router", "a head"
_TRANSPOSED = "a transposed Conv1D weight"
_TYPES = {
    _AN_EMBEDDING: "Embedding", _A_NORM: "Norm", _A_ROUTER: "Router", _A_HEAD: "Head", _TRANSPOSED: "Conv1D",
}  # fmt: skip
"""Why the default rules keep a matrix, to the type that rules see."""


def _by_name(module: str, config: Mapping[str, Any]) -> str | None:
    """Return why the default rules keep a matrix of this name, or None."""
    *before, last = module.split(".")
    parent = before[-1] if before else ""
    if _EMBEDDING.search(last) or (_EMBEDDING.search(parent) and not last.endswith("proj")):
        return _AN_EMBEDDING
    if _NORM.search(last):
        return _A_NORM
    if _ROUTER.search(last) or parent == "router":
        return _A_ROUTER
    if _HEAD.search(last) or _HEAD_PARENT.search(parent) or _TOP_HEAD.match(module):
        return _A_HEAD
    if module in heads_of(config):
        return _A_HEAD
    if is_transposed(module, config):
        return _TRANSPOSED
    return None


def is_fused_experts(entry: TensorEntry) -> bool:
    """Return whether a tensor has the name and rank of all experts of a layer in one."""
    return len(entry.shape) == 3 and module_of(entry.name).rpartition(".")[2] in (GATE_UP, DOWN)


def _experts_problem(entry: TensorEntry, entries: Mapping[str, TensorEntry]) -> str | None:
    """Return why fused experts cannot be split into one matrix a projection and expert, or None.

    The split takes (experts, out, in), with the gate's rows before those of up. Other layouts, as in gpt-oss
    and Llama 4, have the same names; the two shapes together tell them apart.
    """
    is_down = module_of(entry.name).endswith(DOWN)
    mine, other = (DOWN, GATE_UP) if is_down else (GATE_UP, DOWN)
    head, _, tail = entry.name.rpartition(mine)
    partner = entries.get(head + other + tail)
    if partner is None or len(partner.shape) != 3:
        return f"fused experts without {head}{other}{tail}, which would show their layout"
    gate_up, down = (partner, entry) if is_down else (entry, partner)
    stem = module_of(entry.name)
    if f"{stem}_bias" in entries or f"{stem}.bias" in entries:
        return "fused experts with a bias, which cannot be split"
    expected = (down.shape[0], 2 * down.shape[2], down.shape[1])
    if gate_up.shape != expected:
        return "fused experts that are not laid out as (experts, out, in)"
    return None


def choose(
    entry: TensorEntry,
    entries: Mapping[str, TensorEntry],
    selection: Selection,
    config: Mapping[str, Any],
    *,
    rule: Rule | None = None,
) -> Choice:
    """Return what happens to one tensor of a checkpoint, its shape's fit to the blocks aside.

    rule: the one of a recipe that names the tensor, or None. Patterns to ignore come first, then the rule,
    patterns to include, and the default rules.
    """
    pattern = selection.ignored(entry.name)
    if pattern is not None:
        return Choice(quantize=False, why=Why.USER, reason=f"ignored by {printable(pattern)}")
    if rule is not None and rule.gives is None:
        return Choice(quantize=False, why=Why.USER, reason=f"{rule.reason} ({rule.place})")
    included = selection.included(entry.name)
    problem = _no_weight(entry)
    if problem is None and is_fused_experts(entry):
        problem = _experts_problem(entry, entries)
        if problem is not None:
            return Choice(quantize=False, why=Why.UNFIT, reason=problem)
    if problem is not None:
        return Choice(quantize=False, why=Why.UNFIT if included else Why.DEFAULT, reason=problem)
    if rule is not None:
        return Choice(quantize=True, why=Why.USER, reason=rule.place)
    if included:
        return Choice(quantize=True, why=Why.USER, reason="included by a pattern")
    return _by_default(entry, config)


def _by_default(entry: TensorEntry, config: Mapping[str, Any]) -> Choice:
    """Return what happens to a matrix of floats of which the user says nothing."""
    kept = _by_name(module_of(entry.name), config)
    if kept is not None:
        why = Why.UNFIT if kept == _TRANSPOSED else Why.DEFAULT
        return Choice(quantize=False, why=why, reason=kept)
    if entry.dtype == "F64":
        return Choice(
            quantize=False,
            why=Why.UNFIT,
            reason="float64, which no engine reads in this layout; convert it first",
        )
    fused = "fused experts" if is_fused_experts(entry) else "a linear weight"
    return Choice(quantize=True, why=Why.LINEAR, reason=fused)


def subject_of(entry: TensorEntry, config: Mapping[str, Any]) -> Subject:
    """Return what the rules of a recipe look at in a tensor.

    Its type is what the default rules take it for: Linear, Embedding, Norm, Router, Head, Conv1D or Other.
    """
    module = module_of(entry.name)
    kept = _by_name(module, config)
    kind = _TYPES[kept] if kept is not None else "Other" if _no_weight(entry) else "Linear"
    dtype = TORCH_DTYPES.get(entry.dtype)
    return Subject(
        name=module,
        type=kind,
        shape=entry.shape,
        dtype=entry.dtype if dtype is None else str(dtype).removeprefix("torch."),
        parameter=entry.name,
    )


def _no_weight(entry: TensorEntry) -> str | None:
    """Return why a tensor is no matrix of floats that belongs to a module, or None."""
    if entry.dtype not in _FLOATS:
        return f"{entry.dtype}, not a float"
    if is_fused_experts(entry):
        return None
    if len(entry.shape) != 2:
        return f"{len(entry.shape)}-D, not a matrix"
    if not entry.name.endswith(WEIGHT):
        return "not named *.weight"
    return None


def check_patterns(selection: Selection, names: Iterable[str]) -> None:
    """Raise CheckpointError, with near misses, for each pattern that names no tensor: most likely a slip."""
    known = list(names)
    idle = [
        p
        for p in (*selection.include, *selection.ignore)
        if not any(selection.named(p, name) for name in known)
    ]
    if idle:
        modules = sorted(
            {part for name in known for part in (module_of(name), module_of(name).rpartition(".")[2])}
        )
        word = idle[0].removeprefix("re:").strip(".*^$")
        hint = near_misses(word, modules) if len(modules) <= _HINT_LIMIT else ""
        listed = ", ".join(printable(pattern) for pattern in idle)
        hint = hint if hint.startswith("did you mean") else "zeropoint inspect lists the names"
        raise CheckpointError(f"pattern {listed} matches no tensor of the checkpoint; {hint}")


# The closest name is found by comparing with each, at some microseconds a name.
_HINT_LIMIT = 20_000


def require_unquantized(entries: Sequence[TensorEntry], config: Mapping[str, Any] | None, place: str) -> None:
    """Raise CheckpointError when a checkpoint is quantized already: doing so again would destroy it."""
    for key in CONFIG_KEYS:
        found = (config or {}).get(key)
        if found not in (None, {}):
            method = found.get("quant_method") if isinstance(found, dict) else found
            remedy = _DEQUANTIZE if method in registry.methods() else _UNREADABLE
            raise CheckpointError(f"{place} is quantized already ({key} says {method!r}); {remedy}")
    for entry in entries:
        if is_quantized(entry.name, entry.dtype):
            raise CheckpointError(
                f"{place} is quantized already (it holds {printable(entry.name)}, {entry.dtype}), but its "
                f"configuration does not say how; {_UNREADABLE}"
            )


_DEQUANTIZE = "pass the original checkpoint, or add --dequantize-first to dequantize it first"
_UNREADABLE = "pass the original checkpoint"
