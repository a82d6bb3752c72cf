"""Which tensor gets which scheme: ordered rules by name, type and shape, in Python or YAML.

This package decides from names, types and shapes alone. It knows no model, no checkpoint and no tensor.
"""

from .assignment import Activation, Assignment
from .document import load_recipe, parse_recipe
from .presets import MODEL_PRESETS, model_preset
from .rules import Decision, Recipe, Rule, Subject

__all__ = [
    "MODEL_PRESETS",
    "Activation",
    "Assignment",
    "Decision",
    "Recipe",
    "Rule",
    "Subject",
    "load_recipe",
    "model_preset",
    "parse_recipe",
]
