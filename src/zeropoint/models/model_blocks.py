"""Blocks of a model, which run one after the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TypeVar

from torch import nn

from ..errors import CalibrationError, near_misses


def blocks_of(model: nn.Module, names: Sequence[str] = ()) -> list[tuple[str, nn.Module]]:
    """Return blocks by name, or children of the longest module list.

    Raises CalibrationError for a name that is not in the model, inside of another or there twice, for names
    in one text, and where nothing is named and there is no list of at least two.

    >>> [name for name, _ in blocks_of(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))]
    ['0', '1']
    """
    modules = dict(model.named_modules())
    if not names:
        lists = with_embeddings(
            model, {n: m for n, m in modules.items() if isinstance(m, (nn.ModuleList, nn.Sequential))}
        )
        longest = max(lists, key=lambda name: len(list(modules[name].children())), default=None)
        found = [] if longest is None else list(modules[longest].named_children())
        if len(found) < 2:
            raise CalibrationError(
                f"model (a {type(model).__name__}) has no ModuleList or Sequential of at least two blocks; "
                "name its blocks"
            )
        return [(f"{longest}.{key}".lstrip("."), child) for key, child in found]
    if isinstance(names, str):
        raise CalibrationError(f"blocks (={names!r}) must be a tuple of names; put the text in one")
    for name in names:
        if name not in modules or not name:
            raise CalibrationError(f"block {name!r} is not in the model; {near_misses(name, modules)}")
        if list(names).count(name) > 1:
            raise CalibrationError(f"block {name!r} is named {list(names).count(name)} times; name it once")
        inside = next((other for other in names if name.startswith(f"{other}.")), None)
        if inside is not None:
            raise CalibrationError(f"block {name!r} lies inside of block {inside!r}; name either")
    return [(name, modules[name]) for name in names]


def token_embeddings(model: nn.Module) -> nn.Module | None:
    """Return the embeddings of tokens of a model of transformers, or None."""
    with suppress(NotImplementedError):  # raised where a class does not say which these are
        found: nn.Module | None = getattr(model, "get_input_embeddings", lambda: None)()
        return found if hasattr(found, "num_embeddings") else None
    return None


M = TypeVar("M", bound=nn.Module)


def with_embeddings(model: nn.Module, found: Mapping[str, M]) -> dict[str, M]:
    """Return the modules in the part of a model that embeds tokens.

    A vision tower next to it does not run on text. All where transformers knows no embeddings.
    """
    embeddings = token_embeddings(model)
    place, inside = next((name for name, m in model.named_modules() if m is embeddings), ""), dict(found)
    while place:
        place = place.rpartition(".")[0]
        inside = {name: m for name, m in found.items() if not place or name.startswith(f"{place}.")}
        if inside:
            break
    return inside


def likely_blocks(model: nn.Module) -> list[tuple[str, ...]]:
    """Return names of blocks, first those that are likeliest a chain.

    These are the modules of the longest list, by the embeddings of tokens where there are some, of the other
    lists, and then the parts of the model, the largest first, each alone.
    """
    lists = {name: m for name, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m)}
    outer = {
        name: m
        for name, m in lists.items()
        if not any(name.startswith(f"{other}.") for other in lists) and not isinstance(m[0], nn.ModuleList)
    }
    first = with_embeddings(model, outer)
    size = {name: sum(p.numel() for p in m.parameters()) for name, m in model.named_modules()}
    longest = sorted(outer, key=lambda name: (name not in first, -len(outer[name]), -size[name]))
    found = [tuple(f"{name}.{key}" for key, _ in outer[name].named_children()) for name in longest]
    parts = sorted((name for name, _ in model.named_children()), key=lambda name: -size[name])
    return found + [(name,) for name in parts if name not in outer and size[name]]
