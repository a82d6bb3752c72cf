"""Numba compilers that optimize device functions as part of their kernels.

Numba by itself optimizes each function with all that it calls and emits machine code for it, so that a
function below n others is compiled n + 1 times. Gain that keeps this module: kernels compile in 0.6 of the
processor time (int8:channel, q4_k and mx9 in one process), and take 0.7 of the space on disk.
"""

from typing import Any

from llvmlite import binding
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import Compiler, CompileResult
from numba.core.registry import cpu_target

ROUNDS = 2
"""Times that the passes run over a kernel.

Gain that keeps the second: linear layers from values, the backward pass of fake quantization and the search
of scales of nf4 took 1.1 to 1.6 times as long when Numba's own passes ran once.
"""
_Library: Any = JITCodeLibrary  # none of these has types
_Compiler: Any = Compiler
_CompileResult: Any = CompileResult


def x86_features() -> list[str] | None:
    """Features of the x86-64 processor compiled for; None for other machines."""
    triple, _, features = cpu_target.target_context.codegen().magic_tuple()
    return features.split(",") if triple.startswith("x86_64") else None


def x86_has(feature: str) -> bool:
    """Whether kernels are compiled for an x86-64 processor with ``feature``."""
    return f"+{feature}" in (x86_features() or ())


class _NoMachineCode:
    """Stub where Numba would write a function's environment into machine code."""

    @staticmethod
    def set_env(name: str, environment: Any) -> None:
        """Do nothing: environments hold Python objects, which no kernel reads."""


class DeviceLibrary(_Library):
    """Unoptimized LLVM IR of a device function and its callees, for linking."""

    @property
    def codegen(self) -> Any:
        """What Numba asks to write the environment."""
        return _NoMachineCode

    def _optimize_final_module(self) -> None:
        """Leave this to the kernels."""

    def _finalize_final_module(self) -> None:
        self._finalize_dynamic_globals()
        self._verify_declare_only_symbols()
        self._finalized = True

    def serialize_using_object_code(self) -> tuple[str, str, bytes]:
        """Serialize as bitcode: there is no object code."""
        kept: tuple[str, str, bytes] = self.serialize_using_bitcode()
        return kept


class KernelLibrary(_Library):
    """Machine code of a kernel."""

    def _optimize_final_module(self) -> None:
        """Run the passes but for reference-count pruning: kernels count no references."""
        for _ in range(ROUNDS):
            passes, builder = self._codegen._module_pass_manager()
            passes.run(self._final_module, builder)


class _DeviceTarget:
    """Numba target whose libraries are device libraries, for functions from disk."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    def codegen(self) -> Any:
        """Library factory."""
        return self

    def unserialize_library(self, kept: tuple[str, str, bytes]) -> Any:
        """Return the library of a function that was kept."""
        name, _, bitcode = kept
        library = DeviceLibrary(self._target.codegen(), name)
        library._final_module = binding.parse_bitcode(bitcode)
        library._finalize_final_module()
        return library


def rebuilt_kernel(target: Any, kept: tuple[Any, ...]) -> Any:
    """Return Numba's compile result of a kernel from what its cache keeps."""
    return _CompileResult._rebuild(target, *kept)


def rebuilt_device(target: Any, kept: tuple[Any, ...]) -> Any:
    """Return the compile result of a device function."""
    return _CompileResult._rebuild(_DeviceTarget(target), *kept)._replace(target_context=target)


class DeviceCompiler(_Compiler):
    """A compiler of device functions."""

    def __init__(self, typing: Any, target: Any, library: Any, *others: Any) -> None:
        own = library or DeviceLibrary(target.codegen(), "device")
        super().__init__(typing, target, own, *others)


class KernelCompiler(_Compiler):
    """A compiler of kernels."""

    def __init__(self, typing: Any, target: Any, library: Any, *others: Any) -> None:
        own = library or KernelLibrary(target.codegen(), "kernel")
        own.enable_object_caching()
        super().__init__(typing, target, own, *others)
