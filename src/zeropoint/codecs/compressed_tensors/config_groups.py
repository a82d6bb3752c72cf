r"""Groups, their targets, and ignored modules in a checkpoint's ``quantization_config``.

A target is a module's name or ``re:`` and an expression that is matched from the start (compressed-tensors
0.20, utils/match.py). Names that differ in numbers share one, which lists the numbers where groups differ:

    re:.*\blayers\.(?:0|3)\.mlp\.down_proj$

What stands before the part that is numbered first is left open, since models call themselves differently
inside other models.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from ...architectures import Config, is_expert
from ...loaded_layers import cannot_decode
from ...loaded_names import conversion, loaded_names
from ...patterns import REGEX
from ..protocol import Contents, LayerScheme
from .config import LINEAR, QUANT_METHOD, Group, Targets, WrittenGroup, matches, quantization_config
from .layout import SMALL

_NUMBER = re.compile(r"(?<=\.)(\d+)(?=\.|$)|^(\d+)(?=\.)")
_ANY, _BEFORE = r"\d+", r".*\b"
_Tree: TypeAlias = "dict[str, _Tree] | int"
_Slots: TypeAlias = tuple[str, ...]


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
        if module.layer is not None and module.layer.layout in SMALL and not is_expert(module.name)
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
        # vLLM takes a head for a Linear layer only where it is named, and compressed-tensors warns of names
        # behind a class that has the layer, too.
        names = dict.fromkeys((*contents.heads, LINEAR, *contents.nonlinear))
        return [Group(layer=layer, targets=tuple(names))]
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
    return sorted(modules, key=lambda layer: not any(map(is_expert, modules[layer])))


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


def targets(groups: Sequence[Iterable[str]], others: Iterable[str] = ()) -> list[tuple[str, ...]]:
    r"""Return the targets of each group.

    others: modules that no target should name by accident. Numbers that occur in ``others`` alone may be
    matched: the loader is configured to ignore those modules.

    >>> targets([["m.layers.0.up", "m.layers.1.up", "m.layers.1.down"], ["m.layers.0.down", "head"]])[1]
    ('re:.*\\blayers\\.0\\.down$', 'head')
    """
    families: dict[tuple[str, ...], _Tree] = {}
    for number, modules in enumerate(groups):
        for module in modules:
            _plant(families, module, number)
    tails: dict[tuple[str, ...], set[tuple[str, ...]]] = {}
    for words in {*families, *(_parted(module)[0] for module in others)}:
        for inner in _inner(words):
            tails.setdefault(inner, set()).add(words)
    found: list[list[str]] = [[] for _ in groups]
    for words, tree in families.items():
        # A boundary of a word is what tells layers from players, and needs a word to stand there.
        is_single = len(tails[_tail(words)]) == 1 and re.match(r"\w", _tail(words)[0]) is not None
        for number, expressions in enumerate(found):
            expressions += [_target(words, slots, short=is_single) for slots in _slots(tree, number)]
    return [tuple(expressions) for expressions in found]


def _parted(module: str) -> tuple[tuple[str, ...], _Slots]:
    """Return the words around the numbers of a name, and the numbers."""
    parts = [part for part in _NUMBER.split(module) if part is not None]
    return tuple(parts[::2]), tuple(parts[1::2])


def _plant(families: dict[tuple[str, ...], _Tree], module: str, group: int) -> None:
    words, numbers = _parted(module)
    if not numbers:
        families[words] = group
        return
    node = families.setdefault(words, {})
    for number in numbers[:-1]:
        assert isinstance(node, dict)
        node = node.setdefault(number, {})
    assert isinstance(node, dict)
    node[numbers[-1]] = group


def _tail(words: tuple[str, ...]) -> tuple[str, ...]:
    """Return a family from its first numbered part, ``layers.``, on."""
    if len(words) == 1 or not words[0]:
        return words
    return (words[0].rstrip(".").rpartition(".")[2] + ".", *words[1:])


def _inner(words: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
    """Return the tails of a family, at each of its numbers."""
    return tuple(_tail((word.lstrip("."), *words[n + 1 :])) for n, word in enumerate(words[:-1])) or (words,)


def _slots(node: _Tree, group: int) -> tuple[_Slots, ...]:
    """Return the number patterns of ``group``, a tuple for each expression."""
    if isinstance(node, int):
        return ((),) if node == group else ()
    below: dict[tuple[_Slots, ...], list[str]] = {}
    for number, child in node.items():
        below.setdefault(_slots(child, group), []).append(number)
    if len(below) == 1:
        return tuple((_ANY, *rest) for rests in below for rest in rests)
    return tuple((_either(numbers), *rest) for rests, numbers in below.items() for rest in rests)


def _either(numbers: Sequence[str]) -> str:
    return numbers[0] if len(numbers) == 1 else f"(?:{'|'.join(numbers)})"


def _target(words: tuple[str, ...], slots: _Slots, *, short: bool) -> str:
    if not slots:
        return words[0]
    head, *rest = (re.escape(word) for word in (_tail(words) if short else words))
    text = "".join(slot + word for slot, word in zip(slots, rest, strict=True))
    return f"re:{_BEFORE if short else ''}{head}{text}$"
