"""What compilers take as a constant instead of tracing through it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from ..schemes import Scheme

F = TypeVar("F", bound=Callable[..., Any])


def traced_as_constant(function: F) -> F:
    """Let torch.compile evaluate a function while tracing, as a constant.

    For Python on strings and values. This sets what ``torch.compiler.assume_constant_result`` sets (torch
    2.13), whose call alone imports all of dynamo: 2 seconds, which a program that does not compile need not
    pay.

    >>> @traced_as_constant
    ... def text(number: int) -> str:
    ...     return str(number)
    >>> text(3)
    '3'
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@traced_as_constant
def scheme_text(scheme: Scheme) -> str:
    """Return ``str(scheme)``, a constant to torch.compile."""
    return str(scheme)
