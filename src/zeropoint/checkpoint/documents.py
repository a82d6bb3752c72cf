"""The small files beside the shards: the index, and the configuration that says what is quantized."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from ..architectures import Config, loaded_names
from ..codecs.compressed_tensors_config import (
    LINEAR,
    Group,
    LayerScheme,
    Targets,
    WrittenGroup,
    matches,
    quantization_config,
)
from ..codecs.targets import targets
from ..errors import CheckpointError
from ..patterns import REGEX
from .config_text import CONFIG_KEY, WEIGHTS_ONLY_CONFIG, insert_config
from .decisions import Decision
from .experts import is_expert, matrices
from .origin import Floats
from .placement import Placement
from .selection import Why, is_fused_experts, module_of, subject_of
from .source import CONFIG, INDEX_SUFFIX, MAX_JSON_BYTES, SINGLE_FILE
from .texts import Text
from .tied import tied_heads

MANIFEST = "zeropoint_manifest.json"
"""Where the digests and error statistics of a run go; that of a source is not copied."""


def index_and_config(
    floats: Floats, decisions: Sequence[Decision], placement: Placement, *, staying: Sequence[Decision] = ()
) -> dict[str, Text]:
    """Return the index and the configuration, by file name.

    placement: of all output tensors. staying: layers that keep the codes which
    the configuration of ``floats`` describes.
    """
    source = floats.source
    index_name = source.index or SINGLE_FILE + ".index.json"
    assert index_name.endswith(INDEX_SUFFIX)
    texts = {index_name: Text.of(_index(placement))}
    config = _config(floats, decisions, staying)
    if source.config is not None and source.config_text is not None:
        text = insert_config(source.config_text, config) if config else source.config_text
        texts[CONFIG] = _readable(Text.of(text))
    elif config:
        texts[WEIGHTS_ONLY_CONFIG] = _readable(Text.of(json.dumps({CONFIG_KEY: config}, indent=2) + "\n"))
    return texts


def _index(placement: Placement) -> Iterator[str]:
    """Yield the index as json.dumps writes it with an indent of 2."""
    yield f'{{\n  "metadata": {{\n    "total_size": {placement.nbytes}\n  }},\n  "weight_map": {{'
    comma = ""
    for name, shard in placement.files():
        yield f"{comma}\n    {json.dumps(name)}: {json.dumps(shard)}"
        comma = ","
    yield "\n  }\n}\n"


def _readable(text: Text) -> Text:
    """Return the text of a configuration; raises CheckpointError for one that is too large to be read."""
    if text.size > MAX_JSON_BYTES:
        raise CheckpointError(
            f"{CONFIG} would have {text.size} bytes, above the limit of {MAX_JSON_BYTES} for what it says of "
            "layers by name; quantize all layers of a kind, or keep all of them"
        )
    return text


def _config(
    floats: Floats, decisions: Sequence[Decision], staying: Sequence[Decision]
) -> dict[str, Any] | None:
    """Return what is quantized and how, or None when nothing is; an older configuration is merged into it."""
    if not any(decision.quantized for decision in decisions):
        return None
    old, family = floats.config or {}, floats.source.config or {}
    groups = _groups(decisions, staying, old, family)
    codes = {decision.entry.name for decision in staying}
    ignored = _ignored(floats, (d for d in decisions if not d.quantized and d.entry.name not in codes))

    def modules() -> Iterator[str]:
        yield from (m.module for d in decisions if d.quantized for m in matrices(d.entry))
        yield from (module_of(d.entry.name) for d in staying)

    ignored += _elsewhere(ignored, modules, family)
    ignored += _ignored_before(old, set(ignored), modules)
    return quantization_config(groups, ignored, kv_cache=old.get("kv_cache_scheme"))


def _elsewhere(ignored: Sequence[str], modules: Callable[[], Iterator[str]], family: Config) -> list[str]:
    """Return what else names ignored modules, and none of ``modules``: the names that loaders give them.

    Numbered ones are named by expressions that hold inside of other models too, as where a model is loaded
    without its head.
    """
    kept = [name for module in ignored for name in loaded_names(module, family)]
    if any(map(str.isdigit, ".".join(kept).split("."))):
        others = (name for module in modules() for name in loaded_names(module, family))
        kept = list(targets([kept, others])[0])
    known = set(ignored)
    return [name for name in dict.fromkeys(kept) if name not in known]


def _ignored_before(
    old: Mapping[str, Any], ignored: Collection[str], modules: Callable[[], Iterator[str]]
) -> list[str]:  # fmt: skip
    """Return what an older configuration ignores as well, unless it names what is quantized now."""
    before = [target for target in old.get("ignore") or [] if target not in ignored]
    if not before:
        return []
    here = set(modules())
    idle = {target for target in before if target.startswith(REGEX)}
    idle = {target for target in idle if not any(map(Targets([target]).match, here))}
    return [t for t in before if (t in idle if t.startswith(REGEX) else t not in here)]


def _groups(
    decisions: Sequence[Decision], staying: Sequence[Decision], old: Mapping[str, Any], family: Config
) -> list[Group | WrittenGroup]:
    """Return the layers of each scheme and what names them: one scheme for the class, several by their names.

    compressed-tensors tries names before classes, vLLM gives all experts the scheme of the class where one is
    named, and transformers 5.23 gives them the first group whose expressions speak of experts. So no class is
    named where there are several groups, and that of the experts comes first.
    """
    modules: dict[LayerScheme | str, list[str]] = {}
    kept = []
    names = {decision.entry.name: _group_of(decision, old) for decision in staying}
    for decision in decisions:
        name = names.get(decision.entry.name)
        if decision.layer is not None:
            modules.setdefault(decision.layer, []).extend(m.module for m in matrices(decision.entry))
        elif name is not None:
            modules.setdefault(name, []).append(module_of(decision.entry.name))
        elif len(decision.entry.shape) == 2:
            kept.append(module_of(decision.entry.name))
    if len(modules) == 1:
        (layer,) = modules
        assert isinstance(layer, LayerScheme)
        return [Group(layer=layer, targets=(LINEAR, *odd_targets(decisions, family)))]
    ordered = sorted(modules, key=lambda layer: not any(map(is_expert, modules[layer])))
    found = targets(
        [[name for m in modules[layer] for name in loaded_names(m, family)] for layer in ordered],
        [name for module in kept for name in loaded_names(module, family)],
    )
    return [
        WrittenGroup(name=layer, layout=old.get("format"), written=old["config_groups"][layer], targets=names)
        if isinstance(layer, str)
        else Group(layer=layer, targets=names)
        for layer, names in zip(ordered, found, strict=True)
    ]


def _group_of(decision: Decision, old: Mapping[str, Any]) -> str:
    """Return the name of the group of the older configuration that a layer is in."""
    module = module_of(decision.entry.name)
    groups: Mapping[str, Any] = old["config_groups"]
    return next(name for name, g in groups.items() if matches(module, g["targets"], linear=True))


_MAYBE_ODD = re.compile(r"embed|position|token_type|wte|wpe|shared|bias|norm|router|gat(e|ing)$|wg$|(^|\.)ln")
_ODD = ("Embedding", "Norm", "Router")
"""What rules call modules that loaders do not make Linear layers of."""


def odd_targets(decisions: Iterable[Decision], family: Config) -> list[str]:
    """Return quantized modules that are no Linear layers, such as embeddings and routers."""
    return [
        module_of(d.entry.name)
        for d in decisions
        if d.quantized
        and d.choice.why is Why.USER
        and _MAYBE_ODD.search(module_of(d.entry.name))
        and subject_of(d.entry, family).type in _ODD
    ]


def _ignored(floats: Floats, kept: Iterable[Decision]) -> list[str]:
    """Return the modules that a loader must not take for quantized: kept matrices and tied heads.

    A Linear layer that is neither quantized nor listed is left uninitialized by transformers, without an
    error.
    """
    names: dict[str, None] = {}
    for decision in kept:
        entry = decision.entry
        if len(entry.shape) == 2 and entry.name.endswith(".weight"):
            names[module_of(entry.name)] = None
        elif is_fused_experts(entry):
            names[module_of(entry.name).rpartition(".")[0]] = None
    for head in tied_heads(floats.source):
        names[head] = None
    return list(names)
