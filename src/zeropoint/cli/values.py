"""What the words of the command line mean: sizes, schemes and recipes. Wrong ones are usage errors."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TypeAlias

import typer

from ..checkpoint.plan_file import PlanFile
from ..checkpoint.recipe import RecipeText
from ..codecs.compressed_tensors_config import layer_scheme
from ..errors import FormatError, ZeropointError, near_misses
from ..formats import ALIASES, CATALOG
from ..schemes import LAYER_PRESETS, TENSOR_PRESETS

_SIZE = re.compile(r"(\d{1,15}(?:\.\d{1,6})?)\s*([KMGT]?)(?:i?B)?", re.ASCII | re.IGNORECASE)
Asked: TypeAlias = RecipeText | PlanFile
"""What a plan is asked for by."""
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


def parse_workers(text: str) -> int:
    """Return a number of threads; raises typer.BadParameter for anything but a whole number from 1 on.

    >>> parse_workers("8")
    8
    """
    if not re.fullmatch(r"\d{1,9}", text, re.ASCII) or int(text) < 1:
        raise typer.BadParameter(f"number of threads {text!r} must be a whole number from 1 on")
    return int(text)


def parse_scheme(text: str) -> RecipeText:
    """Return the recipe that gives all linear weights the layer scheme that ``text`` asks for.

    Raises typer.BadParameter: with the closest names for an unknown one, with the reason for one that no
    layout holds or that needs calibration.

    >>> parse_scheme("w4a16").name
    '--to w4a16'
    """
    try:
        layer_scheme(text)
    except FormatError as error:
        head = text.strip().partition(":")[0]
        if not head.isidentifier():
            raise typer.BadParameter(str(error)) from error
        known = (*LAYER_PRESETS, *TENSOR_PRESETS, *CATALOG, *ALIASES)
        raise typer.BadParameter(f"scheme {head!r} is unknown; {near_misses(head, known)}") from error
    except ZeropointError as error:
        raise typer.BadParameter(str(error)) from error
    return RecipeText.of(text)


def one_of(options: Mapping[str, Asked | None]) -> Asked:
    """Return the one value that was given; raises typer.BadParameter unless exactly one option was."""
    given = {name: value for name, value in options.items() if value is not None}
    if len(given) != 1:
        found = f"{' and '.join(given)} are" if given else "none is"
        raise typer.BadParameter(f"give exactly one of {', '.join(options)}; {found} given")
    (value,) = given.values()
    return value


def parse_recipe(path: str) -> RecipeText:
    """Return the recipe in the file at ``path``; raises typer.BadParameter when it is none."""
    try:
        recipe = RecipeText.read(path)
        recipe.parse()
    except ZeropointError as error:
        raise typer.BadParameter(str(error)) from error
    return recipe


def parse_plan(path: str) -> PlanFile:
    """Return the plan in the file at ``path``; raises typer.BadParameter when it is none."""
    try:
        return PlanFile.read(path)
    except ZeropointError as error:
        raise typer.BadParameter(str(error)) from error


_FLOATS = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


def parse_float_dtype(text: str) -> str:
    """Return the name that safetensors has for a dtype; raises typer.BadParameter for any but three.

    >>> parse_float_dtype("bfloat16")
    'BF16'
    """
    if text not in _FLOATS:
        raise typer.BadParameter(f"dtype {text!r} must be one of {', '.join(_FLOATS)}")
    return _FLOATS[text]
