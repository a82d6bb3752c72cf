"""Parsers of command-line arguments; mistakes are usage errors."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import typer

from ..errors import FormatError, ZeropointError, near_misses, parse_size
from . import lazy

if TYPE_CHECKING:
    from ..checkpoint.plan.file import PlanFile
    from ..checkpoint.plan.recipe import RecipeText
    from ..codecs.protocol import Codec
    from ..search.budgets import Budget

# What llama.cpp calls its types, and methods that other tools write in layouts of their own.
_MIXTURE = re.compile(r"(?:mostly_\w+|q[2-5]_k_[sml])(?:\+imatrix)?", re.IGNORECASE)
_OF_OTHERS = re.compile(r"(?:i?q[1-8]_\w+|gptq|gguf|awq|exl[23]|bnb|hqq)", re.IGNORECASE)


@contextlib.contextmanager
def usage_errors(option: str | None = None) -> Iterator[None]:
    """Turn errors about values inside the block into usage errors."""
    try:
        yield
    except ZeropointError as error:
        raise typer.BadParameter(str(error), param_hint=option) from error


def path_option(text: str, *, metavar: str = "FILE") -> Any:
    """Return the declaration of an option whose value is a path."""
    return typer.Option(metavar=metavar, parser=parse_path, help=text)


def parse_path(text: str) -> str:
    """Return a path or URL; raises typer.BadParameter for an empty one.

    >>> parse_path("models/a")
    'models/a'
    """
    if not text.strip():
        raise typer.BadParameter("it is empty, as an unset variable is; give a path, or . for this directory")
    return text


def parse_output(text: str) -> str:
    """Return an output path; raises typer.BadParameter for a weight file's name.

    >>> parse_output("out")
    'out'
    """
    if parse_path(text).endswith((".safetensors", ".gguf", ".bin", ".pt")):
        raise typer.BadParameter(f"{text!r} is the name of a file; give the directory that the files go into")
    return text


def parse_memory(text: str) -> int:
    """Return a number of bytes; raises typer.BadParameter for what is none.

    >>> parse_memory("512MiB")
    536870912
    """
    with usage_errors():
        return parse_size(text)


def parse_budget(text: str) -> Budget:
    """Return a budget; raises typer.BadParameter unless in bpw or bytes.

    >>> str(parse_budget("4.5bpw"))
    '4.5bpw'
    """
    with usage_errors():
        return lazy.Budget.parse(text)


def parse_candidates(text: str) -> str:
    """Return candidates joined by commas; raises typer.BadParameter for an unknown one.

    >>> parse_candidates("w4a16,keep")
    'w4a16,keep'
    """
    for name in candidates_in(text):
        if name != "keep":
            parse_scheme(name)
    return text


def candidates_in(text: str) -> list[str]:
    """Return candidates separated by commas outside of brackets.

    >>> candidates_in("w4a16, keep")
    ['w4a16', 'keep']
    """
    return [name.strip() for name in re.split(r",(?![^\[]*\])", text) if name.strip()]


def parse_workers(text: str) -> int:
    """Return a positive number of threads; raises typer.BadParameter otherwise.

    >>> parse_workers("8")
    8
    """
    if not re.fullmatch(r"\d{1,9}", text, re.ASCII) or int(text) < 1:
        raise typer.BadParameter(f"number of threads {text!r} must be a whole number from 1 on")
    return int(text)


def parse_device(text: str) -> str:
    """Return a device name, cpu or cuda; raises typer.BadParameter otherwise.

    >>> parse_device("cuda:1")
    'cuda:1'
    """
    if not re.fullmatch(r"cpu|cuda(:\d{1,3})?", text, re.ASCII):
        raise typer.BadParameter(f"device {text!r} must be cpu, cuda, or cuda:1 for the second GPU")
    return text


def parse_format(text: str) -> str:
    """Return a format's name; raises typer.BadParameter, with near names.

    >>> parse_format("GGUF")
    'gguf'
    """
    with usage_errors():
        return str(lazy.get_codec(text).name)


def require_scheme(text: str, codec: Codec) -> None:
    """Raise typer.BadParameter for a scheme that a codec cannot hold.

    The message has the closest names for an unknown one, and the reason for one that the codec does not hold
    or that needs calibration.
    """
    if lazy.RecipeText.of(text).mixture(codec) is not None:
        return
    if _MIXTURE.fullmatch(text.strip()):
        raise typer.BadParameter(
            f"{text} is a mixture of types of GGUF; add --format gguf", param_hint="'--to'"
        )
    head = text.strip().partition(":")[0].lower()
    if head in lazy.OF_LAYOUTS and head not in codec.presets:
        owners = [each.name for each in lazy.CODECS.values() if head in each.presets]
        raise typer.BadParameter(
            f"{head} is a preset of other layouts; add --format {' or '.join(owners)}", param_hint="'--to'"
        )
    with usage_errors("'--to'"):
        lazy.require_blocks(text, codec)


def require_no_data(text: str, codec: Codec | None, option: str = "--to") -> None:
    """Raise typer.BadParameter for a preset that needs data, with an alternative.

    What is wrong with its options comes first. option: that which names the preset.
    """
    head, colon, _ = text.strip().partition(":")
    given = (codec or lazy.DEFAULT).presets.get(head.lower())
    if given is not None and given.static and given.output is None:
        if colon:
            require_scheme(text, codec or lazy.DEFAULT)
        raise typer.BadParameter(
            f"preset {text!r} is refused: its inputs need scales observed on data; use {given.without_data}, "
            "or pass --calibration FILE",
            param_hint=f"'{option}'",
        )


def parse_scheme(text: str) -> str:
    """Return the text of a scheme whose first word is known.

    What it means, its codec says. Raises typer.BadParameter, with what to write instead, before torch is
    loaded.
    """
    head = text.strip().partition(":")[0]
    if not head.isidentifier() or head.lower() in (*lazy.PRESETS, *lazy.OF_LAYOUTS):
        return text
    if _MIXTURE.fullmatch(head):
        return text
    if _OF_OTHERS.fullmatch(head):
        raise typer.BadParameter(
            f"{head} is not a scheme; --format chooses the layout of files, and w4a16 is the "
            "int4 that vLLM and transformers read"
        )
    try:
        lazy.get_format(head)
    except FormatError as error:
        near = near_misses(head, (*lazy.PRESETS, *lazy.OF_LAYOUTS, *lazy.CATALOG, *lazy.ALIASES))
        if not near.startswith("did you mean"):
            near = "w4a16 and fp8_dynamic are among the presets; zeropoint formats lists all"
        raise typer.BadParameter(f"scheme {head!r} is unknown; {near}") from error
    return text


def parse_method(text: str) -> str:
    """Return a method's name; raises typer.BadParameter, with near names.

    >>> parse_method("mse")
    'mse'
    """
    if text.lower() in lazy.steps():
        text = text.lower()
    elif text.lower() in lazy.CODECS and text.lower() not in lazy.methods():
        raise typer.BadParameter(
            f"{text} is a layout of files, which --format {text.lower()} writes, and its own method is not "
            "here; --method shift+gptq --calibration TEXT.txt is the closest"
        )
    with usage_errors():
        return str(lazy.method_named(text, of_files=True).name)


def parse_statistic(text: str) -> str:
    """Return a statistic's name; raises typer.BadParameter, with near names.

    >>> parse_statistic("percentile:99.9")
    'percentile:99.9'
    """
    with usage_errors():
        lazy.statistic_named(text)
    return text


def parse_recipe(path: str) -> RecipeText:
    """Return a family's recipe or a file's; raises typer.BadParameter otherwise."""
    with usage_errors():
        return lazy.RecipeText.named(path)


def require_recipe(recipe: RecipeText, codec: Codec) -> None:
    """Raise typer.BadParameter for a recipe that is none for files of ``codec``."""
    with usage_errors("'--recipe'"):
        recipe.parse(codec)


def parse_plan(path: str) -> PlanFile:
    """Return the plan in a file; raises typer.BadParameter otherwise."""
    with usage_errors():
        return lazy.PlanFile.read(path)


def parse_float_dtype(text: str) -> str:
    """Return the name of a dtype; raises typer.BadParameter for any but three.

    >>> parse_float_dtype("bfloat16")
    'bfloat16'
    """
    if text not in lazy.FLOATS:
        raise typer.BadParameter(f"dtype {text!r} must be one of {', '.join(lazy.FLOATS)}")
    return text
