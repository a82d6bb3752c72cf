"""Records of options: one parameter, an option for each field."""

from __future__ import annotations

import enum
import functools
import inspect
from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields
from typing import Annotated, Any, get_args, get_origin, get_type_hints


@dataclass(frozen=True, kw_only=True)
class OptionRecord:
    """Base of the records, whose fields are annotated as command parameters."""


def given(*records: OptionRecord) -> dict[str, Any]:
    """Return the given options as keyword arguments of a ``zeropoint`` function."""
    return {
        each.name: value.value if isinstance(value, enum.Enum) else value
        for record in records
        for each in fields(record)
        if (value := getattr(record, each.name)) != each.default
    }


@dataclass(frozen=True)
class Fields:
    """Annotation of a record: offered fields, and required ones."""

    offered: tuple[str, ...]
    required: tuple[str, ...] = field(default=())


def only(*offered: str, required: tuple[str, ...] = ()) -> Fields:
    """Return the annotation for some fields of a record."""
    return Fields((*offered, *required), required)


def with_records(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command whose signature has its records' fields, for typer."""
    parameters: list[inspect.Parameter] = []
    records: dict[str, tuple[type[OptionRecord], list[str]]] = {}
    hints = get_type_hints(command, include_extras=True)
    for parameter in inspect.signature(command).parameters.values():
        hint = hints[parameter.name]
        record, chosen = get_args(hint) if _is_record(hint) else (hint, None)
        if not (isinstance(record, type) and issubclass(record, OptionRecord)):
            parameters.append(parameter.replace(annotation=hint, kind=parameter.KEYWORD_ONLY))
            continue
        offered = [each for each in fields(record) if chosen is None or each.name in chosen.offered]
        records[parameter.name] = record, [each.name for each in offered]
        types = get_type_hints(record, include_extras=True)
        for each in offered:
            is_required = each.default is MISSING or (chosen is not None and each.name in chosen.required)
            default = parameter.empty if is_required else each.default
            parameters.append(
                inspect.Parameter(
                    each.name, parameter.KEYWORD_ONLY, default=default, annotation=types[each.name]
                )
            )

    @functools.wraps(command)
    def called(**options: Any) -> None:
        for name, (record, names) in records.items():
            options[name] = record(**{each: options.pop(each) for each in names})
        command(**options)

    called.__dict__["__signature__"] = inspect.Signature(parameters)
    return called


def _is_record(hint: object) -> bool:
    return get_origin(hint) is Annotated and isinstance(get_args(hint)[1], Fields)
