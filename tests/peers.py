"""Packages that take long to import, which collection need not wait for: a test imports them at first use."""

import importlib
import warnings
from functools import cached_property
from types import ModuleType
from typing import Any


class Peer:
    """A module that is imported at its first use, with whatever it warns of then left out.

    >>> statistics = Peer("statistics")
    >>> statistics.mean([1, 2, 6])
    3
    """

    def __init__(self, name: str) -> None:
        self._name = name

    @cached_property
    def _module(self) -> ModuleType:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module(self._name)

    def __getattr__(self, name: str) -> Any:
        # What pytest asks of everything at the top of a file, by names like `_pytestfixturefunction`.
        if name.startswith(("_", "pytest")) and name != "__version__":
            raise AttributeError(name)
        return getattr(self._module, name)


transformers = Peer("transformers")
