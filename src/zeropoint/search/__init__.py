"""Search of formats per layer under a budget: measure, then choose.

Errors of all candidates are measured in one pass. This package knows plans, codecs and tiles of a checkpoint
through the rooms of ``checkpoint/``; its result is a recipe, which ``quantize`` takes like any other. It
writes no weights.
"""

from .budgets import Budget
from .knapsack import Allocation, frontier, solve

__all__ = ["Allocation", "Budget", "frontier", "solve"]
