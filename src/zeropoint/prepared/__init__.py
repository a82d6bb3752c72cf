"""Prepared kernels: calls resolved once, then run without allocation."""

from .plan import Guarantee, Plan, can_implement, plan

__all__ = ["Guarantee", "Plan", "can_implement", "plan"]
