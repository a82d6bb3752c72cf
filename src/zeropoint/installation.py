"""The installation: versions, processor, and programs that read results.

Nothing here imports torch.
"""

from __future__ import annotations

import os
import platform
import shutil
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = (
    "torch", "numpy", "numba", "llvmlite", "safetensors", "typer", "rich", "PyYAML", "xxhash", "triton",
    "s3fs", "gcsfs", "ray",
)  # fmt: skip
"""What zeropoint computes with."""
ENGINES = (
    "transformers", "compressed-tensors", "vllm", "sglang", "llama-cpp-python", "gguf", "onnxruntime",
    "torchao", "bitsandbytes", "gptqmodel", "mlx-lm",
)  # fmt: skip
"""Packages that load what zeropoint writes."""
PROGRAMS = ("llama-cli", "llama-server", "llama-quantize", "ollama")
"""Programs that do, or that people compare with."""
_EXTENSIONS = ("avx2", "avx512f", "avx512bw", "avx512_bf16", "gfni", "asimd", "sve")


def machine() -> dict[str, Any]:
    """Return the facts behind a measurement: processor, memory, versions, load."""
    names = ("torch", "numpy", "numba", "llvmlite", "safetensors", "compressed-tensors")
    return {
        "cpu": processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "simd": extensions(),
        "caches": _caches(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "packages": {name: version_of(name) for name in names},
        "load_average": [round(value, 2) for value in os.getloadavg()],
    }


def processor() -> str:
    """Return the name of the processor."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def extensions() -> list[str]:
    """Return which of the vector extensions that matter here the processor has."""
    info = Path("/proc/cpuinfo")
    flags = set(info.read_text().split()) if info.exists() else set()
    return [flag for flag in _EXTENSIONS if flag in flags]


def _caches() -> dict[str, str]:
    found = {}
    for index in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        level, kind = (index / "level").read_text().strip(), (index / "type").read_text().strip()
        found[f"L{level} {kind.lower()}"] = (index / "size").read_text().strip()
    return found


def version_of(name: str) -> str | None:
    """Return the version of an installed package, or None.

    >>> version_of("no-such-package")
    """
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def versions(names: tuple[str, ...]) -> dict[str, str]:
    """Return the versions of those packages that are installed."""
    return {name: version for name in names if (version := version_of(name)) is not None}


def programs() -> dict[str, str]:
    """Return the paths of installed :data:`PROGRAMS`."""
    return {name: path for name in PROGRAMS if (path := shutil.which(name)) is not None}
