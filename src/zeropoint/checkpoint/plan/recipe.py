"""Recipes for checkpoints: rules about tensors in files and layouts.

A rule sees of a tensor: its module's name and its own (`model.layers.0.mlp.up_proj`, with `.weight`), its
shape, its dtype, and as its type what the default rules take it for (selection.py). Presets are as for
``--to``, and a scheme's text is one too. This module decides nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from ...codecs.layer_schemes import layer_of, layer_scheme, preset_layers
from ...codecs.model_format import WEIGHTED
from ...codecs.protocol import Codec, LayerScheme
from ...codecs.registry import CODECS, DEFAULT, get_codec
from ...errors import RecipeError, SchemeError, ZeropointError, option, printable
from ...formats import IntFormat
from ...recipes import (
    FAMILIES,
    Assignment,
    Quality,
    Recipe,
    Rule,
    Vocabulary,
    method_in,
    parse_recipe,
    read_recipe,
    recipe_text,
    with_method,
)
from ...schemes import PRESETS, Scheme
from ...schemes.text import overridden, words

_DEFAULT = re.compile(r'default: "([\w+]+)"$', re.MULTILINE)
_WEIGHT = "weight"


def vocabulary(codec: Codec) -> Vocabulary:
    """Return the vocabulary of recipes for files of ``codec``."""

    def spelled(texts: Mapping[str, str]) -> Assignment:
        given = Assignment.of(**texts)
        weight = layer_scheme(texts[_WEIGHT], codec).weight if _WEIGHT in texts else None
        assignment = Assignment(weight=weight, input=given.input, output=given.output)
        return layer_of(assignment, codec).assignment

    return Vocabulary(preset=lambda text: layer_scheme(text, codec).assignment, spelled=spelled)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeText:
    """A recipe as YAML ``text``, and its ``name`` in messages."""

    text: str
    name: str = "recipe"

    def __post_init__(self) -> None:
        # It may come from a file, and goes to a terminal with every message.
        if not self.name.isprintable():
            object.__setattr__(self, "name", printable(self.name))

    @staticmethod
    def read(path: Path | str) -> RecipeText:
        """Return the recipe in a file; raises RecipeError if unreadable."""
        return RecipeText(text=read_recipe(path), name=Path(path).name)

    @staticmethod
    def named(name: str) -> RecipeText:
        """Return the recipe in a file, or a family's.

        Raises RecipeError for what is neither.

        >>> RecipeText.named("bert").name
        'recipe bert'
        """
        if name in FAMILIES and not Path(name).exists():
            return RecipeText(text=FAMILIES[name], name=f"recipe {name}")
        try:
            return RecipeText.read(name)
        except RecipeError as error:
            if Path(name).name == name and not Path(name).suffix:
                raise RecipeError(f"{error}, or name a family: {', '.join(FAMILIES)}") from error
            raise

    @staticmethod
    def given(recipe: RecipeText | Recipe | Path | str) -> RecipeText:
        """Return a recipe given as object, file, text or family.

        A text has several lines or is one mapping; anything else is a name, see :meth:`named`.

        >>> RecipeText.given("bert").name, RecipeText.given("default: w4a16").text
        ('recipe bert', 'default: w4a16')
        """
        if isinstance(recipe, RecipeText):
            return recipe
        if isinstance(recipe, Recipe):
            return RecipeText(text=recipe_text(recipe))
        is_text = isinstance(recipe, str) and ("\n" in recipe or ": " in recipe) and not Path(recipe).exists()
        return RecipeText(text=str(recipe)) if is_text else RecipeText.named(str(recipe))

    @staticmethod
    def of(scheme: str) -> RecipeText:
        """Return the recipe that gives one scheme to all linear weights.

        >>> RecipeText.of("w4a16").text
        'default: "w4a16"'
        """
        return RecipeText(text=f"default: {json.dumps(scheme)}", name=option("to", scheme))

    def by(self, method: str) -> RecipeText:
        r"""Return the recipe with ``method`` wherever a rule names none.

        method: a name, of a method or a quality.

        >>> RecipeText.of("w4a16").by("mse").text
        'default: "w4a16"\nmethod: "mse"'
        >>> RecipeText.named("bert").by("mse_weighted").text
        'method: "mse_weighted"\ndefault: w8a16\n'
        """
        return RecipeText(text=with_method(self.text, method), name=f"{self.name} with method {method}")

    @property
    def quality(self) -> Quality | None:
        """The quality that picks the methods of weights, or None."""
        word = method_in(self.text)
        return Quality(word) if word in set(Quality) else None

    @property
    def is_bare(self) -> bool:
        """Whether it is one scheme for all linear weights and nothing else.

        >>> RecipeText.of("int4:g64").is_bare, RecipeText.of("int4:g64").by("mse").is_bare
        (True, False)
        """
        return self.text.startswith('default: "') and "\n" not in self.text

    def mixture(self, codec: Codec) -> str | None:
        """Return the mixture that it gives to all weights, or None."""
        found = _DEFAULT.match(self.text)
        name = "" if found is None else found[1].lower()
        return name if name.removesuffix(WEIGHTED) in codec.model_format.mixtures else None

    def weighted(self) -> RecipeText:
        """Return the recipe with the importance-matrix variant of its mixture.

        >>> RecipeText.of("q4_k_m").weighted().text
        'default: "q4_k_m+imatrix"'
        """
        return replace(self, text=_DEFAULT.sub(rf'default: "\1{WEIGHTED}"', self.text, count=1))

    def of_types(self, types: Mapping[str, str], codec: Codec) -> RecipeText:
        """Return the recipe with its mixture replaced by tensor presets."""
        by_preset: dict[str, list[str]] = {}
        for name, preset in types.items():
            by_preset.setdefault(preset, []).append(re.escape(name))
        rules = [
            {"name": f"re:({'|'.join(names)})$", "preset": preset} for preset, names in by_preset.items()
        ]
        rest = _DEFAULT.sub("", self.text).strip()
        rest = rest or f"method: {json.dumps(codec.model_format.mixture_method)}"
        return RecipeText(text=f"rules: {json.dumps(rules)}\ndefault: keep\n{rest}", name=self.name)

    def parse(self, codec: Codec) -> Recipe:
        """Return its rules for ``codec``; raises RecipeError, with the line."""
        return parse_recipe(self.text, name=self.name, words=vocabulary(codec))


def one_scheme(layer: LayerScheme) -> Recipe:
    """Return the recipe that gives ``layer`` to all linear weights."""
    return Recipe(default=Rule(gives=layer.assignment))


def default_layer(recipe: Recipe, codec: Codec) -> LayerScheme | None:
    """Return the scheme of weights that no rule names, or None."""
    given = recipe.default.gives
    return None if given is None else layer_of(given, codec)


KEEP = RecipeText(text="default: keep", name="dequantize")
"""The recipe that quantizes nothing."""
KEPT = Recipe(default=Rule(gives=None))
"""The same, parsed."""


def codec_for(name: str | None, to: object = None) -> Codec:
    """Return the codec called ``name``, or the one for a scheme.

    For None, the only codec that holds the scheme in files of whole models, or the default codec. to: a
    scheme, a preset or a mixture, or None. ``q4_k_m`` is of one layout, which need not be named.

    >>> codec_for(None, "q4_k_m") is DEFAULT, codec_for(None, "w4a16") is DEFAULT
    (False, True)
    """
    if name is not None:
        return get_codec(name)
    if isinstance(to, str) and not _holds(DEFAULT, to):
        head = to.strip().partition(":")[0].lower()
        owners = [
            codec
            for codec in CODECS.values()
            if not codec.model_format.prefix
            and (head in codec.presets or head.removesuffix(WEIGHTED) in codec.model_format.mixtures)
        ]
        if len(owners) == 1:
            return owners[0]
    return DEFAULT


_GROUP, _FEW_BITS = "g128", 8
"""Granularity of integer presets; up to this bit width, one scale for a whole weight is unusual."""


def require_blocks(text: str, codec: Codec) -> None:
    """Raise SchemeError for few-bit integers with an implicit tensor scale.

    ``int4`` alone most likely means groups; ``int4:tensor`` is one scale by intent. The message has a scheme
    with groups and the closest preset, and names what the layout of ``codec`` holds alone: signed integers in
    place of ``uint4``. Raises what :func:`layer_scheme` raises.
    """
    asked, head = text.strip(), text.strip().partition(":")[0].lower()
    if head in codec.presets or head in PRESETS or "granularity" in words(text):
        layer_scheme(text, codec)
        return
    try:
        weight = Scheme.parse(asked)
    except ZeropointError:
        layer_scheme(text, codec)  # knows presets, too, and says which is close
        raise
    if not isinstance(weight.element, IntFormat) or weight.bits > _FEW_BITS or weight.granularity.extents:
        layer_scheme(text, codec)
        return
    weights_alone = (layer for layer in preset_layers(codec) if layer.input is None)
    near = sorted(
        weights_alone,
        key=lambda layer: (
            layer.weight.element != weight.element,
            layer.weight.zero_point != weight.zero_point,
            abs(layer.weight.bits - weight.bits),
        ),
    )
    signed = asked if weight.element.signed else asked[1:]  # uint4 to int4
    groups, whole = ([overridden(each, blocks) for each in (asked, signed)] for blocks in (_GROUP, "tensor"))
    others = [next((each for each in groups if _holds(codec, each)), None), *(each.name for each in near[:1])]
    offered = " or ".join(each for each in others if each is not None)
    alone = f", or {whole[0]} where one scale is meant" if _holds(codec, whole[0]) else ""
    raise SchemeError(
        f"{asked} has one scale for a whole weight, which leaves little of it; write {offered}{alone}"
    )


def _holds(codec: Codec, text: str) -> bool:
    """Return whether a layout holds a scheme."""
    try:
        layer_scheme(text, codec)
    except ZeropointError:
        return False
    return True
