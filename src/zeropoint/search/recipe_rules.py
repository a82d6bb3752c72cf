"""YAML recipes of choices: a rule per scheme and layer kind."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence

from ..errors import RecipeError, count, option
from ..recipes.document import MAX_BYTES
from .offers import EXPERT, KEEP

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_ANY = "\0"


def recipe_of(
    names: Mapping[str, str], *, method: str | None, without: Iterable[str] = (), comment: Sequence[str] = ()
) -> str:
    r"""Return the recipe that gives modules, by name, these presets or ``keep``.

    method: for all weights. without: modules that are kept since no candidate fits. comment: lines at the
    start. Raises RecipeError where the rules are too many for one recipe.

    >>> print(recipe_of({"layers.0.up": "q4_k", "layers.1.up": "q4_k", "head": "keep"}, method=None))
    default: keep
    rules:
      - name: "re:layers\\.(0|1)\\.up$"
        preset: "q4_k"
      - name: "re:head$"
        keep: "the search keeps it"
    """
    lines = [f"# {line}" for line in comment]
    lines += [] if method is None else [f"method: {json.dumps(method)}"]
    lines += ["default: keep", "rules:"]
    kept = dict.fromkeys(without, None)
    for (preset, _), pattern in _patterns({**names, **kept}).items():
        lines.append(f"  - name: {json.dumps(f're:{pattern}$')}")
        if preset is None:
            lines.append('    keep: "no candidate fits it"')
        elif preset == KEEP:
            lines.append('    keep: "the search keeps it"')
        else:
            lines.append(f"    preset: {json.dumps(preset)}")
    text = "\n".join(lines)
    if len(text) > MAX_BYTES:
        raise RecipeError(
            f"the recipe of {count(len(names), 'weight')} is longer than {MAX_BYTES >> 10} KiB; search with "
            f"fewer candidates, or name some weights in {option('ignore')}"
        )
    return text


def _patterns(names: Mapping[str, str | None]) -> dict[tuple[str | None, str], str]:
    """Return a regular expression per choice and kind of name."""
    numbers: dict[tuple[str | None, str], dict[str, None]] = {}
    for name, preset in names.items():
        # All experts of a layer have one choice.
        plain = EXPERT.sub(_ANY, name)
        layer = _NUMBER.search(plain)
        number = "" if layer is None else layer[0]
        kind = plain if layer is None else f"{plain[: layer.start()]}\1{plain[layer.end() :]}"
        numbers.setdefault((preset, kind), {})[number] = None
    return {
        (preset, kind): "".join(
            r"\d+" if part == _ANY else f"({'|'.join(found)})" if part == "\1" else re.escape(part)
            for part in re.split("([\0\1])", kind)
        )
        for (preset, kind), found in numbers.items()
    }
