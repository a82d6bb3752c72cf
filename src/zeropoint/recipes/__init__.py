"""Recipes: ordered rules by name, type and shape that assign schemes.

In Python or YAML. This package decides from names, types and shapes alone. It knows no model, no checkpoint
and no tensor.
"""

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
from .quark import (
    DeviceType,
    Dtype,
    QSchemeType,
    QuantizationMode,
    RoundType,
    ScaleType,
    TQTThresholdInitMeth,
    ZeroPointType,
    scheme_from_quark,
)
from .rules import Decision, Recipe, Rule, Subject

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
