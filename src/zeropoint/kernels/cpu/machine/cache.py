"""Disk cache of kernels, and the notice that they are compiled.

A folder per source state has files per kernel:

    32 bytes  SHA-256 of what follows
    the rest  Numba's compiled function, pickled

Numba's own cache renews a kernel when its own file changes, not when a file it calls into does; after an
upgrade it would continue running machine code of the old version. A folder named by the hash of all kernel
sources cannot go stale. Nor does Numba's check what it reads, which a power loss may have cut: here a file
that is missing, damaged or cannot be written means that the kernel is compiled, no more.

Machine code is run as it is read, so that a folder is taken only where nobody else can write.

Compiling takes seconds for each kernel, at its first call on a machine, and looks like a program that hangs.
Numba tells us of a function that is not in its cache, and the first time we write a line; kernels that are
found there are loaded in silence.
"""

import contextlib
import functools
import hashlib
import io
import os
import pickle
import platform
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llvmlite
import numba
from numba.core import event
from numba.core.caching import FunctionCache
from numba.core.environment import Environment, _rebuild_env
from numba.core.runtime.nrt import rtsys
from numba.core.serialize import dumps

# Numba ships no types.
_dumps: Any = dumps
_Environment: Any = Environment
_OTHERS_WRITE = 0o022
GENERATED = "__generated_source__"
"""Attribute of a function without a file: the source that its kept machine code must have been made of."""


def compiled_sources(package: Path) -> list[Path]:
    """Return the files of ``package`` that machine code is made of.

    These are all of the kernels but their host side, and the constants that are compiled into them.
    """
    kernels = package / "kernels/cpu"
    rooms = (path for path in kernels.rglob("*.py") if path.relative_to(kernels).parts[0] != "host")
    return [package / "ops/lowering.py", *sorted(rooms)]


def source_hash(package: Path = Path(__file__).parents[3]) -> str:
    """Hash of the sources that are compiled and of their compiler versions."""
    digest = hashlib.sha256(
        repr((numba.__version__, llvmlite.__version__, platform.python_version())).encode()
    )
    for path in compiled_sources(package):
        digest.update(str(path.relative_to(package)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


@functools.cache
def cache_directory() -> Path | None:
    """Kernel folder that only this user can write, or None.

    Below NUMBA_CACHE_DIR, else below the user's cache.
    """
    asked = os.environ.get("NUMBA_CACHE_DIR")
    users = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    for base in (asked, os.path.join(users, "zeropoint")):
        if base:
            folder = Path(base) / f"kernels-{source_hash()}"
            with contextlib.suppress(OSError):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                if os.access(folder, os.W_OK) and _is_ours(folder):
                    return folder
    return None


def _is_ours(folder: Path) -> bool:
    """Whether ``folder`` is this user's, and nobody else may write there."""
    found = folder.stat()
    return not hasattr(os, "geteuid") or (found.st_uid == os.geteuid() and not found.st_mode & _OTHERS_WRITE)


def _environment(module: str, constants: list[Any], name: str) -> Any:
    """Python objects of a compiled function, without importing its module.

    Numba keeps the globals of the module there for code that handles Python objects, which no kernel does;
    modules of Numba's own would take a tenth of a second.
    """
    found = _Environment._memo.get(name)
    if found is None:
        found = _Environment(vars(sys.modules[module]) if module in sys.modules else {})
        found.consts[:], found.env_name = constants, name
        _Environment._memo[name] = found
    return found


class _Unpickler(pickle.Unpickler):
    """Reads a compiled function; see :func:`_environment`."""

    def find_class(self, module: str, name: str) -> Any:
        if name == _rebuild_env.__name__ and module == _rebuild_env.__module__:
            return _environment
        return super().find_class(module, name)


class KernelCache(FunctionCache):
    """Numba's cache of one function, in files verified before use.

    folder: where they are, or None to keep nothing. rebuild: returns Numba's compile result for a target and
    what was kept.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        folder: Path | None,
        rebuild: Callable[[Any, tuple[Any, ...]], Any],
    ) -> None:
        self._py_func, self._folder, self._rebuild = function, folder, rebuild
        self._stem = f"{function.__module__}.{function.__qualname__}"
        self._generated: str = getattr(function, GENERATED, "")

    def __repr__(self) -> str:
        return f"KernelCache({self._stem}, {self._folder})"

    @property
    def cache_path(self) -> str:
        """The folder, as Numba asks for it."""
        return str(self._folder)

    def flush(self) -> None:
        """Forget what is kept of this function."""
        for path in self._folder.glob(f"{self._stem}-*") if self._folder else ():
            path.unlink(missing_ok=True)

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Load the compiled function for ``sig``; None if missing or damaged."""
        # Machine code needs Numba's runtime alone. What refresh() imports besides, for a quarter of a second,
        # only compiling needs, which calls it.
        rtsys.initialize(target_context)
        path = self._path(sig, target_context.codegen())
        if path is None:
            return None
        try:
            content = path.read_bytes()
        except OSError:
            return None
        seal, payload = content[:32], content[32:]
        if hashlib.sha256(payload).digest() != seal:
            return None
        return self._rebuild(target_context, _Unpickler(io.BytesIO(payload)).load())

    def save_overload(self, sig: Any, data: Any) -> None:
        """Save a compiled function for ``sig``, if disk and permissions allow."""
        path = self._path(sig, data.codegen)
        if path is None or data.library.has_dynamic_globals:
            return
        payload = _dumps(data._reduce())
        with contextlib.suppress(OSError):
            handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
            try:
                with open(handle, "wb") as file:
                    file.write(hashlib.sha256(payload).digest() + payload)
                os.replace(name, path)
            except OSError:
                os.unlink(name)

    def _path(self, sig: Any, codegen: Any) -> Path | None:
        if self._folder is None:
            return None
        own: Any = self
        # Numba's key of a function in a closure is another one in each process.
        code = (sig, codegen.magic_tuple()) if self._generated else own._index_key(sig, codegen)
        key = repr((code, self._generated)).encode()
        return self._folder / f"{self._stem}-{hashlib.sha256(key).hexdigest()[:24]}"


QUIET = "ZEROPOINT_QUIET"
"""The variable of the environment that keeps the line back, where it is set to anything."""
_OURS = __name__.rpartition(".machine.")[0]
_ONCE = (
    "zeropoint: compiling kernels for this machine, once; this takes up to a minute "
    "(`zeropoint warmup` does it ahead of time)\n"
)
_EACH_RUN = (
    "zeropoint: compiling kernels, which takes up to a minute in each run, since no folder can be written "
    "that would keep them; set NUMBA_CACHE_DIR to one that you alone can write\n"
)


class _Compiling(event.Listener):
    """Says that kernels are compiled, once."""

    def __init__(self) -> None:
        self.said = False

    def on_start(self, event: Any) -> None:
        """Handle the begin of a compilation; other packages' are ignored."""
        if self.said or not event.data["dispatcher"].py_func.__module__.startswith(_OURS):
            return
        self.said = True
        if not os.environ.get(QUIET):
            sys.stderr.write(_ONCE if cache_directory() is not None else _EACH_RUN)

    def on_end(self, event: Any) -> None:
        """Do nothing: the next kernel may be compiled at any time."""


_register: Any = event.register  # which has no types
_register("numba:compile", _Compiling())
