"""What a number is: format definitions, the catalog, the exact specification."""

from .catalog import ALIASES, CATALOG, SOURCES, format_name, get_format
from .rounding import Overflow, RoundingMode
from .spec import CodebookFormat, FloatFormat, Format, IntFormat, Specials

__all__ = [
    "ALIASES",
    "CATALOG",
    "SOURCES",
    "CodebookFormat",
    "FloatFormat",
    "Format",
    "IntFormat",
    "Overflow",
    "RoundingMode",
    "Specials",
    "format_name",
    "get_format",
]
