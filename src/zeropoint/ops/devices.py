"""Compute devices, CPU or CUDA GPU, and their matrix product precision."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ..errors import OptionError, UnsupportedError, option

CPU = torch.device("cpu")
_STREAMS = threading.local()
_USAGE = "use cpu, cuda, or cuda:1 for the second GPU"


def device_named(given: torch.device | str | None) -> torch.device:
    """Return a device by name, GPUs with index; CPU if None.

    Raises OptionError for another word, UnsupportedError for a GPU that torch does not find.

    >>> device_named(None)
    device(type='cpu')
    """
    if given is None:
        return CPU
    said = option("device", str(given))
    try:
        device = torch.device(given)
    except RuntimeError as error:
        raise OptionError(f"{said} is no device of torch; {_USAGE}") from error
    if device.type == "cpu":
        return CPU
    if device.type != "cuda":
        raise OptionError(f"{said} is no device that models run on here; {_USAGE}")
    if not torch.cuda.is_available():
        raise UnsupportedError(
            f"{said} needs a GPU, and torch {torch.__version__} finds none on this machine; leave it out, or "
            "install a driver and a torch for CUDA"
        )
    number, last = device.index or 0, torch.cuda.device_count() - 1
    if number > last:
        raise UnsupportedError(f"{said} is not among the GPUs here, which are cuda:0 to cuda:{last}; use one")
    return torch.device("cuda", number)


def device_of(model: nn.Module) -> torch.device:
    """Return a model's device: its first parameter's off the CPU.

    >>> device_of(nn.Linear(2, 2))
    device(type='cpu')
    """
    return next((x.device for x in model.parameters() if x.device.type not in ("cpu", "meta")), CPU)


def free_bytes(device: torch.device) -> int:
    """Return a GPU's free bytes, torch's cached ones included."""
    free, _ = torch.cuda.mem_get_info(device)
    return int(free) + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


@contextmanager
def pinned(buffer: bytearray, device: torch.device) -> Iterator[None]:
    """Pin host memory for GPU copies, if possible, inside the context."""
    if device.type != "cuda":
        yield
        return
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    place = torch.frombuffer(buffer, dtype=torch.uint8).data_ptr()
    done = int(runtime.cudaHostRegister(place, len(buffer), 0)) == 0
    try:
        yield
    finally:
        if done:
            runtime.cudaHostUnregister(place)


@contextmanager
def own_stream(device: torch.device) -> Iterator[None]:
    """Run the thread's GPU work in its own stream."""
    if device.type != "cuda":
        yield
        return
    streams: dict[str, torch.cuda.Stream] = _STREAMS.__dict__
    if str(device) not in streams:
        streams[str(device)] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(streams[str(device)]):
        yield


@contextmanager
def exact_products(device: torch.device) -> Iterator[None]:
    """Disable TF32 and 16-bit reductions on a GPU inside the context.

    The settings of torch are restored at the end. On the CPU nothing changes.
    """
    if device.type == "cpu":
        yield
        return
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    narrow = [(cudnn, "allow_tf32"), (matmul, "allow_tf32"), *((matmul, name) for name in _REDUCTIONS)]
    # Releases from 2.9 on have another name for the same setting, which the older one overwrites.
    own = [getattr(cudnn, "conv", None), getattr(cudnn, "rnn", None), matmul]
    newer = [(place, "fp32_precision") for place in own if hasattr(place, "fp32_precision")]
    before = [(place, name, _setting(place, name)) for place, name in (*narrow, *newer)]
    try:
        for place, name in narrow:
            setattr(place, name, False)
        yield
    finally:
        for place, name, value in before:
            if value is not None:
                setattr(place, name, value)


_REDUCTIONS = ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction")


def _setting(place: Any, name: str) -> Any:
    """Return a setting, or None where torch rejects its older name."""
    try:
        return getattr(place, name)
    except RuntimeError:
        return None
