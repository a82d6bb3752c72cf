"""Prepared kernels: a call resolved once, that runs without parsing, dispatch, preparation or new memory."""

from .guarantee import Guarantee
from .plan import Plan, can_implement, plan

__all__ = ["Guarantee", "Plan", "can_implement", "plan"]
