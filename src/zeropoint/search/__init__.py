"""Which format each layer gets under a budget: errors of all candidates in one pass, then the best choice.

This package knows plans, codecs and tiles of a checkpoint through the rooms of ``checkpoint/``; what it finds
is a recipe, which ``quantize`` takes like any other. It writes no weights.
"""

from .budgets import Budget
from .knapsack import Allocation, frontier, solve

__all__ = ["Allocation", "Budget", "frontier", "solve"]
