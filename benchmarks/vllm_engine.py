"""vLLM on a CPU, in this process: logits and embeddings of a checkpoint, and how its weights are loaded.

This is a program of its own, because vLLM 0.32 ends with an AttributeError where llvmlite was imported
before it. benchmarks/vllm_runs.py starts it and writes a line of JSON for each request to its stdin:

    {"arguments": ["logits", "FOLDER", "OUT", "--tokens=FILE"], "said": "FILE", "limit": SECONDS}

"embeddings" and "weights" are the others; each is done in a process of its own, whose output is in "said".
"""

from __future__ import annotations

import argparse
import enum
import importlib
import json
import os
import pkgutil
import re
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

os.environ |= {
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING",
}  # fmt: skip

import torch
from safetensors.torch import load_file, save_file

LONGEST = 600
_CHOICES = re.compile(r"(?:init|choose|select)_\w*(?:kernel|backend)")
"""What functions of vLLM that choose a kernel are called."""


def engine(folder: Path, **options: Any) -> Any:
    """Return vLLM with a checkpoint: a folder, or the file of GGUF in it."""
    from vllm import LLM

    usual = {
        "dtype": "bfloat16", "enforce_eager": True, "max_model_len": LONGEST, "max_num_seqs": 1,
        "enable_prefix_caching": False, "disable_log_stats": True, "seed": 0,
        "allow_deprecated_quantization": True,
    }  # fmt: skip
    blocks = next(folder.glob("*.gguf"), None)
    if blocks is not None:
        _decoded_blocks()
    return LLM(model=str(blocks or folder), tokenizer=str(folder), **(usual | options))


def _decoded_blocks() -> None:
    """Let the plugin for GGUF, whose kernels need a GPU, multiply with what the package gguf decodes."""
    from gguf import GGMLQuantizationType, quants
    from vllm_gguf_plugin import ops
    from vllm_gguf_plugin.quantization import fused_moe, linear

    def decoded(blocks: torch.Tensor, kind: int, *_: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.from_numpy(quants.dequantize(blocks.numpy(), GGMLQuantizationType(kind))).to(dtype)

    ops.ggml_dequantize = lambda *given: decoded(*given[:-1], dtype=given[-1])
    for module in (linear, fused_moe):
        module.MMQ_QUANT_TYPES = module.MMVQ_QUANT_TYPES = frozenset()


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
        if name.startswith("__"):
            raise AttributeError(name)
        return _NoKernel()

    def __call__(self, *_: Any, **__: Any) -> Any:
        return _NoKernel()


def _marlin(module: ModuleType) -> Any:
    """Return what a module of vLLM calls Marlin, which is what runs experts on most GPUs, or nothing."""
    kinds = (kind for kind in vars(module).values() if isinstance(kind, type) and issubclass(kind, enum.Enum))
    return next((kind["MARLIN"] for kind in kinds if "MARLIN" in kind.__members__), _NoKernel())


def _without_kernels() -> None:
    """Let vLLM make layers for which it has no kernel here."""

    def instead(choose: Callable[..., Any]) -> Callable[..., Any]:
        def chosen(*given: Any, **named: Any) -> Any:
            try:
                return choose(*given, **named)
            except (ValueError, NotImplementedError, RuntimeError):
                if choose.__name__.startswith("select"):
                    return _marlin(sys.modules[choose.__module__]), _NoKernel
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
    from vllm.model_executor.layers.fused_moe import oracle
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS, get_quantization_config
    from vllm.model_executor.model_loader import base_loader

    # What chooses kernels is replaced in modules that are there.
    for method in QUANTIZATION_METHODS:
        get_quantization_config(method)
    for module in pkgutil.iter_modules(oracle.__path__, f"{oracle.__name__}."):
        importlib.import_module(module.name)
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


_FUSED = re.compile(r"(.*\.)(\w+)(\.\w+)")
_EXPERT = re.compile(r"(.*\.experts\.)(\d+)\.(\w+)\.(\w+)")
_CODED = re.compile(r"(weight|input)\w*_(packed|scale|zero_point)$")
_OF_EXPERTS = {
    "gate_proj": ("w13_", 0), "up_proj": ("w13_", 1), "down_proj": ("w2_", 0),
    "w1": ("w13_", 0), "w3": ("w13_", 1), "w2": ("w2_", 0),
}  # fmt: skip


def places_in(model: torch.nn.Module, names: Sequence[str]) -> Iterator[tuple[str, str, int | None, int]]:
    """Yield where each tensor of a file goes in a model of vLLM.

    That is the tensor, the parameter, the expert or None, and the place among those that vLLM joins.
    """
    fused = {
        part: (whole, place)
        for whole, parts in getattr(model, "packed_modules_mapping", {}).items()
        for place, part in enumerate(parts)
    }
    from vllm.model_executor.model_loader.weight_utils import maybe_remap_kv_scale_name

    mapper, parameters = getattr(model, "hf_to_vllm_mapper", None), dict(model.named_parameters())
    for name in names:
        target, expert, place = name, None, 0
        if match := _EXPERT.fullmatch(name):
            prefix, place = _OF_EXPERTS[match[3]]
            target, expert = f"{match[1]}{prefix}{match[4]}", int(match[2])
        elif (match := _FUSED.fullmatch(name)) and match[2] in fused:
            whole, place = fused[match[2]]
            target = f"{match[1]}{whole}{match[3]}"
        mapped = target if mapper is None else mapper._map_name(target)
        if mapped is not None:
            yield name, maybe_remap_kv_scale_name(mapped, parameters) or mapped, expert, place


def compared(model: torch.nn.Module, folder: Path) -> dict[str, Any]:
    """Return how the parameters of a model of vLLM are those of the files of a folder.

    tensors: of the files. equal: how many of them a parameter holds, bit for bit, in its place among the
    tensors that vLLM joins. rounded: those of them whose float16 became bfloat16. differ: the others, and
    why. unfilled: quantized parameters that no file has, those of inputs where files have some.
    """
    files: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        files |= load_file(path)
    parameters = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
    # Experts lie in a module of their own below that which checkpoints name.
    short = {name.replace(".routed_experts", ""): name for name in parameters}
    taken: dict[tuple[str, int | None], dict[int, str]] = {}
    for name, target, expert, place in places_in(model, sorted(files)):
        taken.setdefault((short.get(target, target), expert), {})[place] = name
    equal, rounded, differ = 0, 0, dict[str, str]()
    for (target, expert), members in taken.items():
        if target not in parameters:
            # Of inputs in order nobody needs the places.
            equal += len(members) if target.endswith("g_idx") else 0
            if not target.endswith("g_idx"):
                differ |= dict.fromkeys(members.values(), f"no parameter {target}")
            continue
        held = parameters[target].detach()
        parts = [files[name] for _, name in sorted(members.items())]
        problem = _unequal(held if expert is None else held[expert], parts)
        if problem is None:
            equal += len(parts)
            rounded += sum(part.dtype is torch.float16 and held.dtype is torch.bfloat16 for part in parts)
        else:
            differ |= dict.fromkeys(members.values(), f"{target}: {problem}")
    # Some have two names.
    filled = {id(parameters[target]) for target, _ in taken if target in parameters}
    with_inputs = any(re.search(r"input\w*_scale", name) for name in files)
    unfilled = sorted(
        name
        for name in parameters
        if parameters[name].numel()  # others are made later
        and id(parameters[name]) not in filled
        and _CODED.search(name)
        and (with_inputs or "input" not in name)
    )
    return {"tensors": len(files), "equal": equal, "rounded": rounded, "differ": differ, "unfilled": unfilled}


def _unequal(held: torch.Tensor, parts: Sequence[torch.Tensor]) -> str | None:
    """Return why a parameter is not its parts, joined along an axis or stacked, or None."""
    # Of the shapes of layers that it joins, vLLM keeps the last.
    parts = parts[-1:] if parts[0].dtype is torch.int64 else parts
    casts = [part.to(held.dtype) for part in parts]
    # What is float16 in a layout becomes bfloat16 in a model of bfloat16; all else keeps its value.
    exact = [
        torch.equal(cast.double(), part.double()) or part.dtype is torch.float16
        for cast, part in zip(casts, parts, strict=True)
    ]
    parts = [cast if same else part for cast, part, same in zip(casts, parts, exact, strict=True)]
    shapes = {part.shape for part in parts}
    joined = [torch.cat(parts)] if parts[0].ndim and len({shape[1:] for shape in shapes}) == 1 else []
    if parts[0].ndim == 2 and len({shape[0] for shape in shapes}) == 1:
        joined.append(torch.cat(parts, 1))
    stacked = [torch.stack(parts)] if len(shapes) == 1 else []
    # Layers that files join have one scale, which vLLM repeats.
    alike = [parts[0].expand_as(held)] if len(parts) == 1 and parts[0].numel() == 1 and held.ndim == 1 else []
    for whole in (*joined, *stacked, *alike):
        # Experts in packed integers lie the other way round, and vocabularies are padded.
        rows = held[: len(whole)] if whole.ndim == 2 and whole.shape[1:] == held.shape[1:] else held
        for laid in (whole, whole.transpose(-1, -2)) if whole.ndim > 1 else (whole,):
            if laid.numel() == rows.numel() and torch.equal(_bits(laid.reshape(rows.shape)), _bits(rows)):
                return None
    listed = " and ".join(str(list(part.shape)) for part in parts)
    return f"{list(held.shape)} {held.dtype} does not hold {listed} {parts[0].dtype}"


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8) if tensor.ndim else tensor.reshape(1).view(torch.uint8)


def serve() -> None:
    """Fork a process for each request on stdin, so that vLLM is imported once, and write how it ended."""
    for name in (
        "entrypoints.llm",
        "v1.engine.llm_engine",
        "v1.worker.cpu_worker",
        "v1.executor.uniproc_executor",
    ):
        importlib.import_module(f"vllm.{name}")
    for line in sys.stdin:
        request = json.loads(line)
        child = os.fork()
        if child == 0:
            said = os.open(request["said"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(said, 1)
            os.dup2(said, 2)
            signal.alarm(request["limit"])
            try:
                main(request["arguments"])
            except BaseException:  # noqa: BLE001 (which ends the process)
                traceback.print_exc()
                sys.stderr.flush()
                os._exit(1)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        sys.stdout.write(f"ended {os.waitstatus_to_exitcode(status)}\n")
        sys.stdout.flush()


def main(arguments: Sequence[str]) -> None:
    """Do one of the three, and write what came out."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("logits", "embeddings", "weights"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tokens", type=Path, help="JSON: lists of token ids")
    parser.add_argument("--cache", default="auto")
    args = parser.parse_args(arguments)
    if args.what == "weights":
        args.out.write_text(json.dumps(compared(loaded(args.folder), args.folder)))
        return
    tokens = json.loads(args.tokens.read_text())
    if args.what == "logits":
        found = logits_of(args.folder, torch.tensor(tokens), cache=args.cache)
    else:
        found = embeddings_of(args.folder, tokens)
    save_file({"values": found}, args.out)


if __name__ == "__main__":
    serve()
