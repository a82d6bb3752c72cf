"""Reports of ``zeropoint doctor`` and ``bench``: machine and kernel speeds."""

from __future__ import annotations

from typing import Any

import torch
from rich.console import Group, RenderableType
from rich.text import Text

from .. import installation
from ..bench.speeds import KernelSpeeds
from ..functional import explain
from .table_layout import keyed, plain

_TRIED = ("int4:g128", "float8_e4m3fn:channel", "mxfp4", "nvfp4", "q4_k")
"""Schemes of which the kernel is named."""


def checkup() -> dict[str, Any]:
    """Return packages, hardware, and the backends of some schemes."""
    return {
        **installation.machine(),
        "packages": installation.versions(installation.PACKAGES),
        "engines": installation.versions(installation.ENGINES),
        "programs": installation.programs(),
        "gpus": [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())],
        "kernels": {at: _kernels(at) for at in ("cpu", "cuda")[: 1 + torch.cuda.is_available()]},
    }


def _kernels(device: str) -> dict[str, str]:
    """Return each scheme's backend on a device, and others' refusals."""
    x = torch.ones(4, 256, dtype=torch.bfloat16, device=device)
    return {scheme: str(explain(x, scheme)) for scheme in _TRIED}


def checkup_table(found: dict[str, Any]) -> RenderableType:
    """Return the lines of what :func:`checkup` found, with the version under ``zeropoint``."""
    cores, caches = found["cores"], ", ".join(f"{name} {size}" for name, size in found["caches"].items())
    rows = [
        ("zeropoint", f"{found['zeropoint']}, Python {found['python']}, {found['system']}"),
        ("processor", f"{found['cpu']}, cores: {cores}, {' '.join(found['simd'])}"),
        ("memory", f"{found['memory_gib']} GiB, {caches}"),
        ("GPUs", ", ".join(found["gpus"]) or "none that torch sees"),
        ("packages", _listed(found["packages"])),
        ("engines", _listed(found["engines"]) or "none; pip install 'zeropoint[hf]' brings transformers"),
        ("programs", _listed(found["programs"]) or f"none of {', '.join(installation.PROGRAMS)}"),
    ]
    for device, kernels in found["kernels"].items():
        rows += [(f"on {device}", f"{scheme}: {said}") for scheme, said in kernels.items()]
    return keyed(rows)


def _listed(found: dict[str, str]) -> str:
    return ", ".join(f"{name} {what}" for name, what in found.items())


def speed_table(found: KernelSpeeds) -> RenderableType:
    """Return the bandwidth of each kernel, next to a copy's."""
    table = plain("kernel", "GB/s", "copy", "of a copy", numbers=(1, 2, 3))
    for each in found.speeds:
        rates = (f"{each.gigabytes:.1f}", f"{each.copy_gigabytes:.1f}", f"{each.of_copy:.2f}")
        table.add_row(each.label, *rates)
    return Group(table, Text(), Text(f"{installation.processor()}, threads: {found.threads}"))
