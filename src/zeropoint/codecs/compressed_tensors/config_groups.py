"""Groups and ignored modules in a checkpoint's ``quantization_config``."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from ...architectures import Config
from ...loaded_layers import cannot_decode
from ...loaded_names import conversion, loaded_names
from ...patterns import REGEX
from ..protocol import Contents, LayerScheme
from .config import LINEAR, QUANT_METHOD, Group, Targets, WrittenGroup, matches, quantization_config
from .layout import SMALL
from .targets import targets

_EXPERT = re.compile(r"(^|\.)experts\.\d+\.")


def section(contents: Contents) -> dict[str, Any]:
    """Return the quantization section, merged with the previous configuration."""
    old, family = contents.previous, contents.family

    def quantized() -> Iterator[str]:
        return (module.name for module in contents.modules() if module.layer is not None or module.keeps)

    ignored = list(contents.kept)
    ignored += _elsewhere(ignored, quantized, family)
    ignored += _ignored_before(old, set(ignored), quantized)
    # Others have words and objects of their own there.
    cache = old.get("kv_cache_scheme") if old.get("quant_method") == QUANT_METHOD else None
    names = {found.row.name for found in contents.tensors()}
    decodes = not (cannot_decode(names, family) or _cuts(contents))
    return quantization_config(_groups(contents), ignored, kv_cache=cache, decodes=decodes)


def _cuts(contents: Contents) -> bool:
    """Return whether transformers splits small-float layers, which it cannot decode."""
    return any(
        conversion(f"{module.name}.weight", contents.family)
        for module in contents.modules()
        if module.layer is not None and module.layer.layout in SMALL and not _EXPERT.search(module.name)
    )


def _elsewhere(ignored: Sequence[str], modules: Callable[[], Iterable[str]], family: Config) -> list[str]:
    """Return the loaders' names of ignored modules, clear of ``modules``.

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
    old: Mapping[str, Any], ignored: set[str], modules: Callable[[], Iterable[str]]
) -> list[str]:
    """Return previously ignored names that are not quantized now."""
    before = [target for target in old.get("ignore") or [] if target not in ignored]
    if not before:
        return []
    here = set(modules())
    idle = {target for target in before if target.startswith(REGEX)}
    idle = {target for target in idle if not any(map(Targets([target]).match, here))}
    return [t for t in before if (t in idle if t.startswith(REGEX) else t not in here)]


def _groups(contents: Contents) -> list[Group | WrittenGroup]:
    """Return the groups: one for the class, or several by names.

    compressed-tensors tries names before classes, vLLM gives all experts the scheme of the class where one is
    named, and transformers 5.23 gives them the first group whose expressions speak of experts. So no class is
    named where there are several groups, and the experts' group comes first.
    """
    old, family = contents.previous, contents.family
    modules: dict[LayerScheme | str, list[str]] = {}
    kept = []
    for module in contents.modules():
        if module.layer is not None:
            modules.setdefault(module.layer, []).append(module.name)
        elif module.keeps:
            modules.setdefault(_group_of(module.name, old), []).append(module.name)
        else:
            kept.append(module.name)
    if len(modules) == 1:
        (layer,) = modules
        assert isinstance(layer, LayerScheme)
        return [Group(layer=layer, targets=(LINEAR, *contents.nonlinear))]
    ordered = _experts_first(modules)
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


def _experts_first(modules: Mapping[Any, Sequence[str]]) -> list[Any]:
    return sorted(modules, key=lambda layer: not any(map(_EXPERT.search, modules[layer])))


def _group_of(module: str, old: Mapping[str, Any]) -> str:
    """Return the older configuration's group of a layer."""
    groups: Mapping[str, Any] = old["config_groups"]
    return next(name for name, g in groups.items() if matches(module, g["targets"], linear=True))


def described(modules: Mapping[LayerScheme, Sequence[str]], kept: Sequence[str]) -> dict[str, Any]:
    """Return the quantization section for modules with file names alone."""
    if len(modules) == 1:
        return quantization_config([Group(layer=layer, targets=(LINEAR,)) for layer in modules], kept)
    ordered = _experts_first(modules)
    found = targets([modules[layer] for layer in ordered], kept)
    groups = [Group(layer=layer, targets=names) for layer, names in zip(ordered, found, strict=True)]
    return quantization_config(groups, kept)
