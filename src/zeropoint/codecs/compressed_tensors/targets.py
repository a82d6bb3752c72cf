r"""Targets of quantization_config: few expressions for one group's many modules.

A target is a module's name or ``re:`` and an expression that is matched from the start (compressed-tensors
0.20, utils/match.py). Names that differ in numbers share one, which lists the numbers where groups differ:

    re:.*\blayers\.(?:0|3)\.mlp\.down_proj$

What stands before the part that is numbered first is left open, since models call themselves differently
inside other models. This module knows names alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TypeAlias

_NUMBER = re.compile(r"(?<=\.)(\d+)(?=\.|$)|^(\d+)(?=\.)")
_ANY, _BEFORE = r"\d+", r".*\b"
_Tree: TypeAlias = "dict[str, _Tree] | int"
_Slots: TypeAlias = tuple[str, ...]


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
