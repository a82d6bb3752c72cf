"""Recipes: ordered rules by name, type and shape that assign schemes.

In Python or YAML. This package decides from names, types and shapes alone. It knows no model, no checkpoint
and no tensor.
"""

from typing import TYPE_CHECKING

from ..deferred_names import imported
from .assignment import Activation, Assignment
from .document import (
    Vocabulary,
    load_recipe,
    method_in,
    parse_recipe,
    read_recipe,
    recipe_schema,
    recipe_text,
    with_method,
)
from .family_recipes import FAMILIES
from .model_preset import model_preset
from .quality import PickedMethod, Quality, learns_from_data, one_name, picked, without_inputs
from .rules import Decision, Recipe, Rule, Subject

if TYPE_CHECKING:  # what quark writes is read where somebody asks for it
    from .quark import DeviceType as DeviceType
    from .quark import Dtype as Dtype
    from .quark import QSchemeType as QSchemeType
    from .quark import QuantizationMode as QuantizationMode
    from .quark import RoundType as RoundType
    from .quark import ScaleType as ScaleType
    from .quark import TQTThresholdInitMeth as TQTThresholdInitMeth
    from .quark import ZeroPointType as ZeroPointType
    from .quark import scheme_from_quark as scheme_from_quark

__all__ = [
    "scheme_from_quark",
    "ZeroPointType",
    "TQTThresholdInitMeth",
    "ScaleType",
    "RoundType",
    "QuantizationMode",
    "QSchemeType",
    "Dtype",
    "DeviceType",
    "FAMILIES",
    "Activation",
    "Assignment",
    "Decision",
    "PickedMethod",
    "Quality",
    "Recipe",
    "Rule",
    "Subject",
    "Vocabulary",
    "load_recipe",
    "method_in",
    "model_preset",
    "learns_from_data",
    "one_name",
    "parse_recipe",
    "picked",
    "without_inputs",
    "read_recipe",
    "recipe_schema",
    "recipe_text",
    "with_method",
]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        return imported(__name__, name)
