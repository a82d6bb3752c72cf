"""Records: numbers handed to kernels by name, in one array.

A NamedTuple is the only declaration. Its fields name machine types: ``np.uint64``, an ``Annotated`` type of
:mod:`zeropoint.ops.lowering`, or another record; arrays, of type Any, travel by themselves. The NumPy dtype
follows from it, and :func:`pack`, and with :func:`unpacker` the way back inside a kernel. Formats and rules
are run-time parameters, not specializations: one compiled kernel serves every format, also one just invented.
They travel in one array, as handing over sixty objects takes longer than quantizing thousands of numbers.
"""

import functools
from collections.abc import Callable
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import numpy as np

from .cache import GENERATED
from .intrinsics import inlined


@functools.cache
def record_type(kind: Any) -> np.dtype[Any]:
    """NumPy dtype of a record, from its fields' names and machine types."""
    return np.dtype([(name, *field) for name, field in _fields(kind).items()], align=True)


@functools.cache
def _fields(kind: Any) -> dict[str, tuple[Any, ...]]:
    """Dtype of each field of a record, with its shape if tabular."""
    fields: dict[str, tuple[Any, ...]] = {}
    for name, hint in get_type_hints(kind, include_extras=True).items():
        if get_origin(hint) is Annotated:
            _, *field = get_args(hint)
            fields[name] = tuple(field)
        elif hint is not Any:
            fields[name] = (record_type(hint) if hasattr(hint, "_fields") else hint,)
    return fields


def pack(*records: Any) -> Any:
    """Pack records of one kind as bytes, the fastest array for Numba."""
    kind: Any = type(records[0])
    packed, fields = np.zeros(len(records), record_type(kind)), _fields(kind)
    for n, record in enumerate(records):
        whole = len(fields) == len(record)
        packed[n] = record if whole else tuple(getattr(record, name) for name in fields)
    return packed.view(np.uint8)


def reader(kind: Any) -> Callable[..., Any]:
    """Generate the function that reads record ``index`` of packed bytes.

    It takes arrays of the record, fields of type Any, by their names. All numbers become locals before
    anything else happens: read where they are used, they would be loaded again after each store to an output.
    The source is kept with the function, since the cache of compiled kernels has to tell it from other
    declarations.
    """
    names: dict[str, Any] = {"RECORD": record_type(kind)}
    arrays = [name for name in kind._fields if name not in _fields(kind)]
    signature = ", ".join(["packed", *arrays, "index=0"])
    lines = [f"def unpack_{kind.__name__}({signature}):", "    r = packed.view(RECORD)[index]"]

    def read(kind: Any, record: str) -> str:
        names[kind.__name__] = kind
        hints, found = get_type_hints(kind), [f"{name}={name}" for name in arrays if name in kind._fields]
        for name, (_, *shape) in _fields(kind).items():
            place, own = f'{record}["{name}"]', f"{record}_{name}"
            if shape or hasattr(hints[name], "_fields"):
                lines.append(f"    {own} = {place}")
                place = read(hints[name], own) if not shape else f"({_listed(own, *shape)})"
            found.append(f"{name}={place}")
        return f"{kind.__name__}({', '.join(found)})"

    result = read(kind, "r")
    source = "\n".join([*lines, f"    return {result}"])
    exec(compile(source, f"<reader of {kind.__name__}>", "exec"), names)
    function: Callable[..., Any] = names[f"unpack_{kind.__name__}"]
    function.__module__ = kind.__module__
    setattr(function, GENERATED, f"{source}\n{record_type(kind)}")
    return function


def _listed(table: str, count: int) -> str:
    return "".join(f"{table}[{n}], " for n in range(count))


def unpacker(kind: Any) -> Any:
    """Device function that reads record ``index`` of packed bytes into locals."""
    return inlined(reader(kind))
