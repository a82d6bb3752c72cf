"""What a number is: format definitions, the catalog, the exact specification."""

from .catalog import ALIASES, CATALOG, SOURCES, format_name, get_format
from .choices import ChoiceFormat
from .codebooks import CodebookFormat
from .digits import DigitsFormat
from .floats import FloatFormat, Specials
from .integers import IntFormat
from .rounding import Overflow, RoundingMode
from .spec import Format
from .table_codes import TableFormat
from .vectors import VectorFormat

__all__ = [
    "ALIASES",
    "CATALOG",
    "SOURCES",
    "ChoiceFormat",
    "CodebookFormat",
    "DigitsFormat",
    "FloatFormat",
    "Format",
    "IntFormat",
    "Overflow",
    "RoundingMode",
    "Specials",
    "TableFormat",
    "VectorFormat",
    "format_name",
    "get_format",
]
