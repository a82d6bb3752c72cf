"""The machine and the versions behind a figure; imports nothing heavy, so that a small process can ask."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any


def machine() -> dict[str, Any]:
    """Return the facts without which a figure means nothing: processor, versions, load."""
    names = ("torch", "numpy", "numba", "llvmlite", "safetensors", "compressed-tensors")
    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "simd": _simd(),
        "caches": _caches(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in names},
        "zeropoint": {"version": _version("zeropoint"), "commit": _commit()},
        "load_average": [round(value, 2) for value in os.getloadavg()],
    }


def describe(facts: dict[str, Any]) -> str:
    """Return the facts in one line."""
    packages = ", ".join(f"{name} {version}" for name, version in facts["packages"].items() if version)
    processor = f"{facts['cpu']}, {facts['cores']} cores, {' '.join(facts['simd'])}"
    load = f"{facts['memory_gib']} GiB, load {facts['load_average'][0]}"
    return f"{processor}, {load}; Python {facts['python']}, {packages}; commit {facts['zeropoint']['commit']}"


def record(path: Path | None, facts: dict[str, Any], **figures: Any) -> None:
    """Write figures from the machine of ``facts``, with its load by now; nothing without a path."""
    if path is not None:
        document = {"machine": facts | {"load_average_after": machine()["load_average"]}, **figures}
        path.write_text(json.dumps(document, indent=1) + "\n")


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _simd() -> list[str]:
    """Return which of the vector extensions that matter here the processor has."""
    info = Path("/proc/cpuinfo")
    flags = set(info.read_text().split()) if info.exists() else set()
    wanted = ("avx2", "avx512f", "avx512bw", "avx512_bf16", "gfni", "asimd", "sve")
    return [flag for flag in wanted if flag in flags]


def _caches() -> dict[str, str]:
    found = {}
    for index in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        level, kind = (index / "level").read_text().strip(), (index / "type").read_text().strip()
        found[f"L{level} {kind.lower()}"] = (index / "size").read_text().strip()
    return found


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """Return the commit of this tree, with ``+`` when tracked files have been changed since."""
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        asked = [*git, "rev-parse", "--short", "HEAD"]
        commit = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
        asked = [*git, "status", "--porcelain", "--untracked-files=no"]
        changed = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
    return commit + ("+" if changed else "")


def fail(message: str) -> None:
    """Print one line to standard error and exit with 1."""
    print(message, file=sys.stderr)
    raise SystemExit(1)
