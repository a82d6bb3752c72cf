"""ONNX types of codes by format, and formats by type."""

from __future__ import annotations

from ..formats import Format
from ..formats.catalog import CATALOG
from ..formats.torch_dtypes import dtype_of
from .containers.onnx import DATA_TYPES
from .containers.safetensors import FILE_DTYPES


def code_type(element: Format) -> str | None:
    """Return the ONNX type with a format's codes, or None.

    >>> from zeropoint.formats import get_format
    >>> [code_type(get_format(name)) for name in ("int4", "float8_e5m2", "float4_e2m1fn", "int3")]
    ['I4', 'F8_E5M2', 'F4', None]
    """
    if element.is_whole and element.is_integer:
        name = f"{'I' if element.signed else 'U'}{element.bits}"
        return name if name in DATA_TYPES and element.bits <= 16 else None
    if not element.is_float:
        return None
    native = dtype_of(element)
    if native is None:
        return "F4" if element == CATALOG["float4_e2m1fn"] else None
    name = FILE_DTYPES.get(native, "")
    return name if name.startswith("F8_") and name != "F8_E8M0" else None


ELEMENTS = {code_type(found): name for name, found in reversed([*CATALOG.items()])}
"""Type of ONNX to the format whose codes it holds."""
