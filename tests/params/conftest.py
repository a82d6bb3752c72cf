"""Every test of this folder judges the reference; other backends are compared with it elsewhere."""

from tests.reference_backend import reference_only

__all__ = ["reference_only"]
