"""Prepared kernels: calls resolved once, then run without allocation."""

from .guarantee import Guarantee
from .plan import Plan, can_implement, plan

__all__ = ["Guarantee", "Plan", "can_implement", "plan"]
