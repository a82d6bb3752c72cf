"""Consistency of a checkpoint's files: index, configuration, layers, scales.

This module needs no original. It reads small files and small tensors; layers are decoded in proofs.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch

from ...codecs.containers.onnx_graph import RUNTIME, STANDARD, all_graphs, parsed
from ...codecs.containers.safetensors import TORCH_DTYPES
from ...codecs.engines import ONNXRUNTIME, Facts, Loads
from ...codecs.known import ACTIVATION_SCALES, CACHE_PAIR, CACHE_SCALES, TOOL_FILES, TOOLS, cache_scheme
from ...codecs.protocol import Codec
from ...codecs.registry import claiming, codecs_in, methods
from ...errors import CheckpointError, printable
from ...loaded_names import loaded_names
from ...recipes import Activation
from ..measure.tiles import Scratch
from ..plan.limits import Limits
from ..plan.selection import WEIGHT, is_linear_weight, module_of
from ..read.index import IndexMap
from ..read.problems import Problem
from ..read.quantized_layers import StoredLayer, StoredLayers, configuration
from ..read.source import CONFIG, SINGLE_FILE, Source
from ..read.storage import OpenFiles, exists, read_bytes, shown
from ..read.tensor_entries import TensorEntry, code_operators
from .proofs import Check

_SMALL_BYTES = 1 << 20
"""Most bytes of a scale of inputs, of which there is one for a layer or for a channel."""


def require_readable(source: Source) -> None:
    """Raise CheckpointError, with the tool's name, for unknown layouts."""
    tool = other_tool(source)
    if tool is not None:
        raise CheckpointError(
            f"{shown(source.root)} is quantized by {tool}, whose layout is not read here, so nothing was "
            f"checked; read are {' and '.join(methods())}: verify it with the tool that wrote it"
        )


def other_tool(source: Source) -> str | None:
    """Return the tool behind an unknown layout, with its evidence."""
    config = configuration(source)
    if config is not None:
        if claiming(config) is not None:
            return None
        method = str(config.get("quant_method", config.get("quant_algo", "unknown")))
        tool = TOOLS.get(method, "a tool that is not known here")
        return f"{tool} (quant_method is {printable(method)})"
    operators = next(filter(None, map(code_operators, source.entries.values())), "") if source.graph else ""
    if operators:
        return f"a tool of ONNX ({operators} multiplies codes)"
    found = next((str(path) for path in source.companions if str(path) in TOOL_FILES), None)
    return None if found is None else f"{TOOL_FILES[found]} ({found})"


def contradictions(source: Source, stored: StoredLayers) -> list[Problem]:
    """Return contradictions between the configuration and the tensors."""
    config = configuration(source)
    codec = None if config is None else claiming(config)
    if config is None or codec is None or not source.container.indexed:
        return []
    found = list(_parts_of_others(codec, stored))
    leaves_out = stored.reader.kept()
    for layer in stored.layers:
        said = stored.reader.contradiction(layer.module, layer.layer)
        scales = _fixed_scale(layer, stored.reader.input_of(layer.module))
        if scales and all(source.entries.number(f"{layer.module}.{scale}") is None for scale in scales):
            said = f"its inputs have a fixed scale in the configuration, but {scales[0]} is missing"
        if leaves_out(layer.module):
            said = "it is quantized, but the configuration leaves it out, so loaders would not find it"
        if said is not None:
            found.append(Problem(where=layer.module, what=said))
    if not (found or stored.layers or stored.problems) and cache_scheme(config) is None:
        what = f"it says that weights are quantized in {codec.title}, but none is"
        found.append(Problem(where=CONFIG, what=what))
    return [*found, *_unkept(stored)]


def _unkept(stored: StoredLayers) -> Iterator[Problem]:
    """Yield what the configuration says is quantized, and is not."""
    promised = set(stored.reader.promised())
    if promised:
        there = {module.rpartition(".")[2] for module in stored.modules}
        there |= {problem.where.rpartition(".")[2] for problem in stored.problems}
        for name in sorted(promised - there):
            what = "the configuration says that it is quantized, but it is not, so loaders would not find it"
            yield Problem(where=name, what=what)


def claims_of_files(source: Source) -> list[Problem]:
    """Return contradictions in the metadata of self-describing files."""
    if source.container.indexed:
        return []
    codec = codecs_in(source.container.name)[0]
    found = []
    for shard, metadata in source.metadata.items():
        dtypes = {e.dtype for e in source.entries.values() if e.file.name == shard and len(e.shape) > 1}
        said = codec.model_format.contradiction(metadata, dtypes)
        found += [] if said is None else [Problem(where=shard, what=said)]
    return found


def _fixed_scale(layer: StoredLayer, given: Activation | None) -> tuple[str, ...]:
    """Return the possible suffixes of a static input scale, if any."""
    names = layer.codec.input_names
    if given is None or given.dynamic or names is None or layer.experts is not None:
        return ()
    return (names.needed(given), *names.also)


def _parts_of_others(codec: Codec, stored: StoredLayers) -> Iterator[Problem]:
    """Yield weights with tensors of another layout than the configured one."""
    others = [found for found in codecs_in(codec.container) if found is not codec]
    parts: dict[str, dict[str, list[str]]] = {}
    for entry in stored.others:
        if is_extra_scale(entry.name, stored):
            continue
        asked = [(other.title, other.part_of(entry.name, entry.dtype)) for other in others]
        sure = [(title, part) for title, part in asked if part is not None and part[2]]
        # Suffixes of some codecs end in other codecs' suffixes, and the longer one says more.
        longest = max((len(part[1]) for _, part in sure), default=0)
        for title, (key, part, _) in sure:
            if len(part) == longest:
                parts.setdefault(key, {}).setdefault(title, []).append(part)
    for key, titles in parts.items():
        most = max(map(len, titles.values()))
        named = [title for title, found in titles.items() if len(found) == most]
        held = titles[named[0]]
        what = f"{' and '.join(held)} {'is' if len(held) == 1 else 'are'} of {' or '.join(named)}, but the "
        yield Problem(where=key, what=f"{what}configuration says that weights are in {codec.title}")


def is_extra_scale(name: str, stored: StoredLayers) -> bool:
    """Return whether a tensor is an input, output or cache scale."""
    module, _, last = name.rpartition(".")
    return last in CACHE_SCALES or (last in ACTIVATION_SCALES and stored.modules.number(module) is not None)


class ExtraScaleCheck(Check):
    """Check that an input or cache scale is finite and positive."""

    def __init__(self, entry: TensorEntry, files: OpenFiles) -> None:
        super().__init__(entry.name, entry.nbytes)
        self.entry = entry
        self.file = files[entry.file]

    def run(self, scratch: Scratch) -> None:  # noqa: ARG002 (it needs a few numbers)
        """See :class:`Task`."""
        dtype = TORCH_DTYPES.get(self.entry.dtype)
        if dtype is None or not self.nbytes or self.nbytes > _SMALL_BYTES:
            self.report(
                f"{self.entry.dtype} of shape {list(self.entry.shape)} is neither a scale nor a zero point"
            )
            return
        if self.name.endswith("zero_point"):
            return
        raw = read_bytes(self.file, self.entry.begin, self.nbytes)
        values = torch.frombuffer(raw, dtype=dtype).double()
        bad = ~(torch.isfinite(values) & (values > 0))
        if bool(bad.any()):
            self.report(f"the scale {float(values[bad][0])} must be finite and positive")
        elif self.name.rpartition(".")[2] in CACHE_PAIR and bool((values == 1).all()):
            self.report("the scale is 1, which engines take where none was learned; calibrate the cache")


def cached_layers(entries: Iterable[TensorEntry]) -> dict[str, set[str]]:
    """Return each attention layer's cache scales, by the layer's name."""
    found: dict[str, set[str]] = {}
    for entry in entries:
        module, _, last = entry.name.rpartition(".")
        if last in CACHE_PAIR:
            found.setdefault(_OF_KEYS_OR_VALUES.sub("", module), set()).add(last)
    return found


_OF_KEYS_OR_VALUES = re.compile(r"\.[kv]_proj$")
_OF_ATTENTION = re.compile(r"(.+)\.(?:k_proj|qkv_proj)\.[^.]+", re.DOTALL)
_NUMBER = re.compile(r"\d+")


def cache_problems(source: Source, stored: StoredLayers) -> list[Problem]:
    """Return attention layers without the cache scales of their kind."""
    found = cached_layers(stored.others)
    kinds = {_NUMBER.sub("", layer) for layer in found}
    names = (match[1] for name in source.entries if kinds and (match := _OF_ATTENTION.fullmatch(name)))
    layers = dict.fromkeys(name for name in names if _NUMBER.sub("", name) in kinds)
    return [
        Problem(where=layer, what=f"its cache has no {' and '.join(missing)}, which engines take for 1")
        for layer in dict.fromkeys([*layers, *found])
        if (missing := sorted(CACHE_PAIR - found.get(layer, set())))
    ]


def unlisted(source: Source, stored: StoredLayers) -> list[Problem]:
    """Return unlisted, unquantized linear weights, which loaders leave uninitialized."""
    found = []
    for entry in stored.others:
        module = module_of(entry.name)
        linear = is_linear_weight(entry, source.entries, source.config or {})
        if (
            (linear or module.rpartition(".")[2] == "lm_head")
            and entry.name.endswith(WEIGHT)
            and stored.reader.expects(module)
        ):
            what = "neither quantized nor ignored by the configuration"
            found.append(Problem(where=module, what=what))
    return found


def idle_targets(source: Source, stored: StoredLayers) -> list[Problem]:
    """Return the absent modules that a group lists by name."""
    broken = {problem.where for problem in stored.problems}
    idle = [
        target
        for target in stored.reader.named()
        if target not in broken
        and stored.modules.number(target) is None
        and source.entries.number(target) is None
        and source.entries.number(f"{target}{WEIGHT}") is None
    ]
    if not idle:
        return []
    # Groups also hold the names that a loader gives to modules.
    config = source.config or {}
    loaded = {name for module in stored.modules for name in loaded_names(module, config)}
    return [
        Problem(where=target, what="a group of the configuration names it, but it is not there")
        for target in idle
        if target not in loaded
    ]


def index_problems(source: Source) -> Sequence[Problem]:
    """Return an index's errors: of shards, its total; else everything."""
    name = source.index or SINGLE_FILE + ".index.json"
    path = source.root / name
    if (source.index is None and source.shards != (SINGLE_FILE,)) or not exists(path):
        return []
    table = IndexMap(path)
    try:
        wrong = _misplaced(source, table)
    except (ValueError, RecursionError) as error:
        return [Problem(where=name, what=f"it is not an index: {error!r:.200}")]
    problems = [Problem(where=tensor, what=f"{name} does not say where it is") for tensor in sorted(wrong)]
    if table.total_size is not None and table.total_size != source.entries.nbytes:
        what = f"total_size is {table.total_size!r:.40}, but the tensors have {source.entries.nbytes} bytes"
        problems.append(Problem(where=name, what=what))
    return problems


def _misplaced(source: Source, table: IndexMap) -> set[str]:
    """Return the tensors that a single file's index misplaces."""
    wrong, named = set(), bytearray(len(source.entries))
    for tensor, shard in table:
        number = source.entries.number(tensor)
        if number is not None:
            named[number] = True
        if number is None or shard != SINGLE_FILE:
            wrong.add(tensor)
    wrong |= {name for name, found in zip(source.entries, named, strict=True) if not found}
    return wrong if source.index is None else set()


_KNOWN = (*STANDARD, RUNTIME, "ai.onnx.ml")
"""Domains whose operators every build of onnxruntime has."""


def runtime_problems(
    source: Source, stored: StoredLayers, original: Source | None, limits: Limits
) -> tuple[list[Problem], list[str]]:
    """Return why onnxruntime rejects a model, and why it was not tried."""
    if not source.graph:
        return [], []
    file = source.shards[0]
    reason = "it lies behind a URL"
    if isinstance(source.root, Path):
        reason = _untried(source, stored, limits)
        error = None if reason else source.container.load_error(source.root / file)
        if error is None and not reason:
            return [], []
        if error is not None and not _is_broken(original):
            return [Problem(where=file, what=error)], []
        reason = reason or "it does not load the original either"
    return [], [f"{file} was not loaded into onnxruntime: {reason}"]


def _is_broken(original: Source | None) -> bool:
    """Return whether onnxruntime does not load the original, where there is one."""
    if original is None or not original.graph or not isinstance(original.root, Path):
        return False
    return original.container.load_error(original.root / original.shards[0]) is not None


def _untried(source: Source, stored: StoredLayers, limits: Limits) -> str:
    """Return why loading the model would say nothing, or nothing."""
    size = sum(entry.nbytes for entry in source.entries.values())
    room = (limits.max_memory - limits.base_memory) // 2
    if size > room:
        return f"its {size:,} bytes are above the {room:,} that the limit of memory leaves"
    nodes = (node for graph in all_graphs(parsed(source.graph)) for node in graph.node)
    foreign = sorted({node.domain for node in nodes if node.domain not in _KNOWN})
    if foreign:
        return f"it has operators of {printable(', '.join(foreign)[:100])}"
    facts = Facts(
        family={}, layers=tuple({layer.layer for layer in stored.layers}), experts=frozenset(), section={},
        nonlinear=False, transposed=False, wider=False, whole_experts=False, split=None,
    )  # fmt: skip
    rules = (layer.codec.engines[ONNXRUNTIME] for layer in facts.layers)
    return next((why for rule in rules for loads, why in rule(facts) if loads is Loads.NO), "")
