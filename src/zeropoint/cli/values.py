"""What the words of the command line mean: sizes and schemes. Wrong ones are usage errors."""

from __future__ import annotations

import re

import typer

from ..codecs.compressed_tensors_config import LayerScheme, layer_scheme
from ..errors import FormatError, ZeropointError, near_misses
from ..formats import ALIASES, CATALOG
from ..schemes import LAYER_PRESETS, TENSOR_PRESETS

_SIZE = re.compile(r"(\d{1,15}(?:\.\d{1,6})?)\s*([KMGT]?)(?:i?B)?", re.ASCII | re.IGNORECASE)
_POWERS = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}


def parse_size(text: str) -> int:
    """Return a number of bytes: digits with K, M, G or T, which are powers of 1024.

    Raises typer.BadParameter for anything else, and for a size below one byte.

    >>> parse_size("2G"), parse_size("512MiB"), parse_size("1.5k")
    (2147483648, 536870912, 1536)
    """
    match = _SIZE.fullmatch(text.strip())
    nbytes = 0 if match is None else int(float(match[1]) * (1 << _POWERS[match[2].upper()]))
    if nbytes < 1:
        raise typer.BadParameter(
            f"size {text!r} must be a positive number with K, M, G or T, for example 2G or 512M"
        )
    return nbytes


def parse_scheme(text: str) -> LayerScheme:
    """Return the layer scheme that ``text`` asks for.

    Raises typer.BadParameter: with the closest names for an unknown one, with the reason for one that no
    layout holds or that needs calibration.

    >>> parse_scheme("w4a16").layout.value
    'pack-quantized'
    """
    try:
        return layer_scheme(text)
    except FormatError as error:
        head = text.strip().partition(":")[0]
        if not head.isidentifier():
            raise typer.BadParameter(str(error)) from error
        known = (*LAYER_PRESETS, *TENSOR_PRESETS, *CATALOG, *ALIASES)
        raise typer.BadParameter(f"scheme {head!r} is unknown; {near_misses(head, known)}") from error
    except ZeropointError as error:
        raise typer.BadParameter(str(error)) from error
