"""vLLM on a CPU, in this process: logits and embeddings of a checkpoint, and its parameters as they are loaded."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

os.environ |= {
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING",
}  # fmt: skip

import torch
from safetensors.torch import load_file

LONGEST = 600
_CHOICES = re.compile(r"(?:init|choose|select)_\w*(?:kernel|backend)")
"""What functions of vLLM that choose a kernel are called."""


def engine(folder: Path, **options: Any) -> Any:
    """Return vLLM with a checkpoint."""
    from vllm import LLM

    usual = {
        "dtype": "bfloat16", "enforce_eager": True, "max_model_len": LONGEST, "max_num_seqs": 1,
        "enable_prefix_caching": False, "disable_log_stats": True, "seed": 0,
    }  # fmt: skip
    return LLM(model=str(folder), **(usual | options))


def logits_of(folder: Path, windows: torch.Tensor, *, cache: str = "auto") -> torch.Tensor:
    """Return the float32 logits of windows of tokens.

    cache: dtype of keys and values in the cache. vLLM computes logits of the last token first, to sample from
    them, and then those of the other tokens, to return their probabilities.
    """
    from vllm import SamplingParams

    found: list[torch.Tensor] = []

    def watch(model: torch.nn.Module) -> None:
        compute = model.compute_logits
        model.compute_logits = lambda *given: found.append(compute(*given)) or found[-1]

    llm = engine(folder, kv_cache_dtype=cache)
    llm.apply_model(watch)
    asked = SamplingParams(max_tokens=1, prompt_logprobs=1, temperature=0)
    both = []
    for window in windows:
        found.clear()
        llm.generate({"prompt_token_ids": window.tolist()}, asked, use_tqdm=False)
        last, rest = found
        both.append(torch.cat([rest, last]).float())
    return torch.stack(both)


def embeddings_of(folder: Path, texts: Sequence[Sequence[int]]) -> torch.Tensor:
    """Return the embeddings of texts as tokens."""
    llm = engine(folder, runner="pooling", max_model_len=256)
    prompts = [{"prompt_token_ids": list(tokens)} for tokens in texts]
    return torch.tensor([found.outputs.embedding for found in llm.embed(prompts, use_tqdm=False)])


class _NoKernel:
    """Stands where vLLM has no kernel for a CPU, until the weights are loaded."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return _NoKernel()

    def __call__(self, *_: Any, **__: Any) -> Any:
        return _NoKernel()


def _without_kernels() -> None:
    """Let vLLM make layers for which it has no kernel here."""

    def instead(choose: Callable[..., Any]) -> Callable[..., Any]:
        def chosen(*given: Any, **named: Any) -> Any:
            try:
                return choose(*given, **named)
            except (ValueError, NotImplementedError, RuntimeError):
                if choose.__name__.startswith("select"):
                    return next(iter(sys.modules[choose.__module__].__dict__.values())), _NoKernel
                return _NoKernel if choose.__name__.startswith("choose") else _NoKernel()

        return chosen

    for module in [module for name, module in sys.modules.items() if name.startswith("vllm.model_executor")]:
        for name, value in list(vars(module).items()):
            if _CHOICES.fullmatch(name) and callable(value):
                setattr(module, name, instead(value))


class _LoadedError(Exception):
    """Ends the start of vLLM once weights are loaded."""


def loaded(folder: Path, **options: Any) -> torch.nn.Module:
    """Return the model of vLLM with weights as they are loaded, before they are laid out for a kernel."""
    import vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors  # noqa: F401
    from vllm.model_executor.model_loader import base_loader

    found: list[torch.nn.Module] = []

    def stop(model: torch.nn.Module, *_: Any) -> None:
        found.append(model)
        raise _LoadedError

    base_loader.process_weights_after_loading = stop
    _without_kernels()
    try:
        engine(folder, **options)
    except _LoadedError:
        return found[0]
    raise SystemExit("vLLM loaded no weights")
