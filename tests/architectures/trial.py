"""One model under one scheme: written, loaded by transformers, and compared with what its codes represent."""

import json
import logging
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tests.architectures.zoo import Animal
from tests.checkpoint.written import ONE, tensors_of
from tests.peers import Peer
from tests.peers import transformers as tf
from torch import nn

import zeropoint as zp
from zeropoint.architectures import is_expert, splits_experts
from zeropoint.checkpoint.plan.checkpoint_plan import CheckpointPlan, make_plan
from zeropoint.checkpoint.plan.recipe import KEEP, RecipeText
from zeropoint.checkpoint.plan.selection import DequantizePolicy, Selection
from zeropoint.checkpoint.plan.verdicts import Verdict, refusal, verdicts
from zeropoint.checkpoint.read.source import open_source
from zeropoint.checkpoint.run.loop import run
from zeropoint.codecs.compressed_tensors import CODEC
from zeropoint.codecs.compressed_tensors.layout import SMALL
from zeropoint.codecs.compressed_tensors.tested import SEVERAL
from zeropoint.codecs.engines import Loads
from zeropoint.codecs.layer_schemes import layer_scheme

lifecycle = Peer("compressed_tensors.quantization.lifecycle.forward")

COLUMNS = (
    "w4a16", "w8a16", "w8a8", "fp8_dynamic", "mxfp4a16", "nvfp4a16", "w4a16_asym", "mxfp4", "mxfp8",
    "mxfp8a16",
    "float8_e4m3fn:channel", SEVERAL,
)  # fmt: skip
# Dynamic inputs move the outputs of two layers by some hundredths of their norm, of 4 bits by some tenths.
NEAR = {"w8a8": 0.08, "fp8_dynamic": 0.15, "mxfp8": 0.25, "mxfp4": 0.7}
"""Largest distance of outputs, relative to their norm, where experts one by one round inputs, and joined ones
do not."""
BFLOAT16 = 2.0**-7
"""What two roundings to bfloat16 change, which is how transformers decodes nvfp4 in every model."""
SUMMED_OTHERWISE = 2.0**-10
"""What products of experts in one tensor and one by one differ by in float16."""
SAME_INPUTS = 2.0**-16
"""What outputs differ by where both round inputs alike."""
_NAMES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What happened to a model.

    problem: the first thing that is wrong, or None. verdict: what the table of engines says of transformers.
    refused: whether `quantize` would not have written it. option: whether it was loaded as bfloat16, which
    the original is not. kept: why linear weights stay floats. experts: the tensors that its experts come
    from.
    """

    problem: str | None
    verdict: Verdict
    refused: bool
    option: bool
    kept: tuple[str, ...]
    experts: tuple[str, ...]

    @property
    def answer(self) -> str:
        """What the table says of it."""
        if self.problem is not None:
            known = self.verdict.loads is Loads.NO
            word = "refused" if self.refused else "no"
            return f"{word}: {self.verdict.reason if known else self.problem}"
        if self.option:
            return "yes: with dtype=torch.bfloat16"
        return "yes" + (f": but some are kept ({'; '.join(self.kept)})" if self.kept else "")

    @property
    def as_said(self) -> bool:
        """Whether it loads where the verdict says so, and does not where the verdict says that."""
        said = self.verdict.loads in (Loads.YES, Loads.PARTLY)
        partly = self.option and self.problem is None
        return said == (self.problem is None) and partly == (self.verdict.loads is Loads.PARTLY)


@contextmanager
def quiet() -> Iterator[None]:
    """Keep what transformers and compressed-tensors say while they load to themselves."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        before = tf.logging.get_verbosity()
        tf.logging.set_verbosity(logging.CRITICAL)
        tf.logging.disable_progress_bar()
        try:
            yield
        finally:
            tf.logging.set_verbosity(before)
            tf.logging.enable_progress_bar()


def save(animal: Animal, folder: Path, dtype: torch.dtype, *, sharded: bool = False) -> Path:
    """Write a model as its users would find it, and return the folder."""
    with quiet():
        animal.build(dtype).save_pretrained(folder, max_shard_size="400KB" if sharded else "5GB")
    return folder


def tried(animal: Animal, source: Path, column: str, folder: Path) -> Trial:
    """Quantize ``source``, load what was written and what it represents, and compare the two."""
    plan = planned(animal, source, column)
    run(plan, folder / "codes")
    (verdict,) = (v for v in verdicts(plan) if v.engine == "transformers")
    dtype = torch.bfloat16 if _is_lazy(plan) else None
    problem = problem_of(animal, folder, column, dtype)
    if problem is not None and dtype is not None and not _runs(animal, source, dtype):
        problem = f"its code does not run in bfloat16, to which {column} is decoded"
    option = dtype is not None and any(weight.dtype != dtype for weight in plan.weights)
    return Trial(
        problem=problem, verdict=verdict,
        refused=refusal(plan) is not None, option=option,
        kept=tuple(dict.fromkeys(d.reason for d in plan.unfit)),
        experts=experts_of(plan),
    )  # fmt: skip


def experts_of(plan: CheckpointPlan) -> tuple[str, ...]:
    """Return the tensors that quantized experts come from."""
    return tuple(dict.fromkeys(w.reader.entry.name for w in plan.weights if is_expert(w.module)))


def _runs(animal: Animal, source: Path, dtype: torch.dtype) -> bool:
    """Return whether the floats that a model comes from run in a dtype."""
    if animal.inputs():
        try:
            forward(animal, loaded(animal, source, dtype)[0])
        except _LOADING:
            return False
    return True


def _is_lazy(plan: CheckpointPlan) -> bool:
    """Return whether weights are decoded at the first forward, and to bfloat16 in every model."""
    section = json.loads(str(plan.texts["config.json"]))["quantization_config"]
    small = any(layer.layout in SMALL for layer in plan.layers)
    return small and not section.get("dequantize", False)


def planned(animal: Animal, source: Path, column: str) -> CheckpointPlan:
    """Return the plan for a model; of several schemes, one layer has another than the others."""
    opened = open_source(source)
    selection = Selection(include=animal.include, ignore=animal.ignore)
    if column != SEVERAL:
        return make_plan(opened, column, selection=selection, limits=ONE)
    weights = make_plan(opened, "w4a16", selection=selection, limits=ONE).weights
    last = next(weight.module for weight in reversed(weights) if not is_expert(weight.module))
    recipe = RecipeText(text=f"default: w4a16\nrules: [{{name: {last}, preset: w8a16}}]")
    return make_plan(opened, recipe, selection=selection, limits=ONE)


# What model code raises of a weight that is not there, or is not what it expects.
_LOADING = (RuntimeError, AttributeError, ValueError, KeyError, TypeError, IndexError)


def problem_of(animal: Animal, folder: Path, column: str, dtype: torch.dtype | None = None) -> str | None:
    """Return the first thing that is wrong with the model in ``folder / "codes"``, or None."""
    try:
        codes, found = loaded(animal, folder / "codes", dtype)
    except _LOADING as error:
        return _first(error)
    if found:
        return found
    silent = not animal.inputs()
    try:
        outputs = _decoded(codes) if silent else forward(animal, codes)
    except _LOADING as error:
        return f"in its forward, {_first(error)}"
    floats = Selection(dequantize=DequantizePolicy.EVERY, floats=_NAMES[codes.dtype])
    run(make_plan(open_source(folder / "codes"), KEEP, selection=floats, limits=ONE), folder / "floats")
    _join_experts(folder / "floats")
    plain, found = loaded(animal, folder / "floats", dtype)
    assert not found, found
    small = BFLOAT16 if column == "nvfp4a16" and plain.dtype is not torch.bfloat16 else 0.0
    wrong = _differing(plain, codes, small)
    if wrong:
        return f"has other weights: {wrong}"
    if silent:
        return None
    _as_wide(plain, codes)
    with _rounded_inputs(plain, codes, column):
        expected = forward(animal, plain)
    distance = float((outputs - expected).norm() / expected.norm())
    split = splits_experts(codes.config.to_dict())
    near = max(SUMMED_OTHERWISE, NEAR.get(column, 0.0)) if split else SAME_INPUTS
    if not distance <= max(near, 2 * small):
        return f"gives other outputs: they differ by {distance:.3g} of their norm"
    return None


@contextmanager
def _rounded_inputs(plain: Any, codes: Any, column: str) -> Iterator[None]:
    """Give layers of ``plain`` the inputs that those of ``codes`` round theirs to."""
    if hasattr(codes.config, "_is_quantized"):  # by which Mamba chooses how it computes
        plain.config._is_quantized = True
    given = None if column == SEVERAL else layer_scheme(column, CODEC).input
    quantized = {n: module for n, module in codes.named_modules() if hasattr(module, "quantization_scheme")}

    def rounded_as(module: Any, x: torch.Tensor) -> torch.Tensor:
        if given is None or x.dtype is torch.float32:
            return x if given is None else _rounded(x, given.scheme)
        # Scales in 16 bits are its own.
        return lifecycle.forward_quantize(module, x, "input", module.quantization_scheme.input_activations)

    rounded = [
        module.register_forward_pre_hook(
            lambda _, inputs, of=quantized[name]: (rounded_as(of, inputs[0]), *inputs[1:])
        )
        for name, module in plain.named_modules()
        if given is not None and name in quantized
    ]
    try:
        yield
    finally:
        for hook in rounded:
            hook.remove()


def _rounded(values: torch.Tensor, scheme: zp.Scheme) -> torch.Tensor:
    """Return inputs as compressed-tensors rounds them: a token is what the first two axes count."""
    tokens = values.shape[0] * values.shape[1] if values.dim() > 2 else 1
    flat = values if "group" in str(scheme.granularity) else values.reshape(tokens, -1)
    return zp.fake_quantize(flat, scheme).reshape(values.shape)


def _join_experts(folder: Path) -> None:
    """Put experts of floats into one tensor, where the loader takes apart those of codes alone."""
    if splits_experts(json.loads((folder / "config.json").read_text())):
        joined = _joined(tensors_of(folder))
        for path in folder.glob("*.safetensors*"):
            path.unlink()
        save_file(
            {n: t.contiguous() for n, t in joined.items()}, folder / "model.safetensors", {"format": "pt"}
        )


def _joined(found: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors with all experts of a layer in one, transposed as Llama 4 has them."""
    holders = {f"{name.partition('.experts.')[0]}.experts" for name in found if is_expert(name)}
    for holder in holders:
        last = ".down_proj.weight"
        numbers = range(sum(name.startswith(f"{holder}.") and name.endswith(last) for name in found))
        gate, up, down = (
            torch.stack([found.pop(f"{holder}.{n}.{part}_proj.weight").t() for n in numbers])
            for part in ("gate", "up", "down")
        )
        found |= {f"{holder}.gate_up_proj": torch.cat([gate, up], -1), f"{holder}.down_proj": down}
    return found


def _first(error: Exception) -> str:
    if re.search("object has no attribute 'weight'", str(error)):
        return "its code asks packed layers for a weight"
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:120]


def loaded(animal: Animal, folder: Path, dtype: torch.dtype | None) -> tuple[Any, str | None]:
    """Return a model as transformers makes it, and what is missing or too much."""
    with quiet():
        model, info = getattr(tf, animal.loader).from_pretrained(
            folder, output_loading_info=True, **({} if dtype is None else {"dtype": dtype})
        )
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        if info.get(kind):
            names = sorted(map(str, info[kind]))
            return model, f"{kind.replace('_', ' ')}: {', '.join(names[:2])} ({len(names)} in all)"
    return model.eval(), None


def _as_wide(plain: nn.Module, codes: nn.Module) -> None:
    """Give parameters of ``plain`` the dtypes of ``codes``: experts of 4-bit floats stay bfloat16."""
    dtypes = {name: parameter.dtype for name, parameter in codes.named_parameters()}
    for name, parameter in plain.named_parameters():
        parameter.data = parameter.data.to(dtypes.get(name, parameter.dtype))


def _decoded(model: Any) -> torch.Tensor:
    """Decode the weights of a model of which no forward is run, and return nothing."""
    with quiet():
        if getattr(model, "hf_quantizer", None) is not None:
            model.hf_quantizer.compressor.decompress_model(model)
    return torch.empty(0)


def forward(animal: Animal, model: nn.Module) -> torch.Tensor:
    floats = model.dtype
    inputs = {k: v.to(floats) if v.is_floating_point() else v for k, v in animal.inputs().items()}
    torch.manual_seed(0)  # some models draw masks or noise
    with quiet(), torch.no_grad():
        found = model(**inputs)
    return next(v for v in found.values() if isinstance(v, torch.Tensor) and v.numel() > 1).float().flatten()


def _differing(plain: nn.Module, codes: nn.Module, small: float) -> str | None:
    """Return the first parameter of ``plain`` that ``codes`` has not, or has with other values."""
    found = dict(codes.named_parameters()) | dict(codes.named_buffers())
    if splits_experts(codes.config.to_dict()):
        found = _joined(found)
    for name, value in plain.named_parameters():
        other = found.get(name)
        if other is None:
            return f"{name} is not there"
        if not torch.allclose(other.float(), value.float(), rtol=small, atol=0.0):
            return f"{name} differs"
    return None
