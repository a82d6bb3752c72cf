"""Every architecture of transformers, made tiny, quantized, loaded and compared: a row each."""

import itertools
import json
import math
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from huggingface_hub.errors import StrictDataclassError
from tests.architectures.made_inputs import candidates
from tests.architectures.shrunk import SIZES, Sizes, class_of, tiny
from tests.architectures.special import SPECIAL
from tests.architectures.trial import Trial, experts_of, forward, loaded, quiet, save, tried
from tests.architectures.zoo import Animal
from tests.checkpoint.written import ONE
from tests.peers import Peer
from tests.peers import transformers as tf
from torch import nn

from zeropoint.architectures import is_transposed
from zeropoint.checkpoint.plan.checkpoint_plan import CheckpointPlan, make_plan
from zeropoint.checkpoint.plan.selection import Selection
from zeropoint.checkpoint.plan.verdicts import verdicts
from zeropoint.checkpoint.read.source import open_source
from zeropoint.checkpoint.run.loop import run
from zeropoint.checkpoint.verify.verification import verify
from zeropoint.codecs.compressed_tensors import tested
from zeropoint.codecs.compressed_tensors.tested import ASKED_LATE, NO_LINEAR, TEXT_ALONE, YES
from zeropoint.codecs.engines import Loads
from zeropoint.codecs.gptq import CODEC as GPTQ
from zeropoint.errors import ZeropointError
from zeropoint.loaded_names import transformers_names

pytorch_utils = Peer("transformers.pytorch_utils")

RAISED = (
    RuntimeError, AttributeError, ValueError, LookupError, TypeError, ImportError, AssertionError, OSError,
    StopIteration, ArithmeticError, StrictDataclassError,
)  # fmt: skip
"""What code of models raises of sizes and inputs that it does not take."""
MOST = 40_000_000
"""Weights of the largest model that is tried."""
INTEGERS = ("w4a16", "int4:g64", "int4:g32", "int4:g16")
"""Schemes of the column w4a16, the largest group first: the first that keeps no weight is taken."""
ROWS = "int4:channel"
CHANNELS = "float8_e4m3fn:channel"
BLOCKS = (
    "transformer.h", "model.decoder.layers", "gpt_neox.layers", "model.layers", "model.language_model.layers",
    "h", "decoder.layers", "layers",
)  # fmt: skip
"""Where optimum 2.3 looks for layers of GPTQ that nobody names."""
SWEPT = ("w4a16", "fp8_dynamic", "mxfp4a16", "gptq")


@dataclass(frozen=True, kw_only=True)
class Built:
    """A model that was made.

    animal: what is tried. size: how many weights it has. silent: why it has no outputs, or nothing.
    """

    animal: Animal
    size: int
    silent: str = ""


FIELDS = ("model_type", "class", "weights", "compared", *SWEPT)
"""Columns of the table."""


def row_of(model_type: str, folder: Path) -> dict[str, str]:
    """Return the row of an architecture."""
    row = dict.fromkeys(FIELDS, "") | {"model_type": model_type, "class": class_of(model_type)}
    found = built(model_type)
    if isinstance(found, str):
        return row | {"compared": f"not built: {found}"}
    with _unrecorded(model_type):
        given = answers(found, folder)
    if isinstance(given, str):
        return row | {"compared": f"not tried: {given}"}
    compared = f"weights: {found.silent}" if found.silent else "outputs"
    return row | {"weights": str(found.size), "compared": compared, **given}


@contextmanager
def _unrecorded(model_type: str) -> Iterator[None]:
    """Let plans know nothing of what was recorded of an architecture."""
    others = [row for row in tested.swept() if row["model_type"] != model_type]
    try:
        with mock.patch.object(tested, "swept", return_value=others):
            _forget()
            yield
    finally:
        _forget()


def _forget() -> None:
    """Read the table again where it is asked."""
    tested.recorded.cache_clear()
    tested.of_gptq.cache_clear()


def built(model_type: str) -> Built | str:
    """Return a tiny model of an architecture, or why there is none."""
    name, problem = class_of(model_type), "no sizes fit"
    silent: Built | None = None
    for sizes in SIZES:
        try:
            found = _built(model_type, name, sizes)
        except RAISED as error:
            problem = said(error)
            continue
        if isinstance(found, str):
            problem = found
        elif not found.silent:
            return found
        elif silent is not None:
            return silent
        else:
            silent = found
    return silent or problem


def _built(model_type: str, name: str, sizes: Sizes) -> Built | str:
    special = SPECIAL.get(model_type, {})
    animal = Animal(
        name=model_type, kind="", model=name, loader=name, inputs=dict,
        config=lambda: tiny(model_type, sizes, special),
    )  # fmt: skip
    with quiet():
        config, kind = animal.config(), getattr(tf, name)
        with torch.device("meta"):
            size = sum(parameter.numel() for parameter in kind(config).parameters())
        if size > MOST:
            return f"{size / 1e6:.0f} million weights after all sizes were made small"
        inputs, problem = _inputs(animal.build(torch.float32))
    return Built(animal=replace(animal, inputs=lambda: inputs), size=size, silent="" if inputs else problem)


def _inputs(model: Any) -> tuple[Mapping[str, torch.Tensor], str]:
    """Return inputs that the forward of a model takes, or none and why."""
    problem = ""
    for inputs in candidates(model):
        try:
            with torch.no_grad():
                found = model(**inputs)
            first = next(v for v in found.values() if isinstance(v, torch.Tensor) and v.numel() > 1)
        except RAISED as error:
            problem = problem or f"{' and '.join(inputs)}: {said(error)}"
            continue
        if first.is_floating_point() and 0 < float(first.float().norm()) < math.inf:
            return inputs, ""
        problem = problem or "its outputs are not finite, or zero"
    return {}, problem or "no inputs are known by the names of its parameters"


def said(error: Exception) -> str:
    """Return the message of an error in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:160]


def answers(found: Built, folder: Path) -> dict[str, str] | str:
    """Return the answer of each column for a model that is written into ``folder``, or why there are none."""
    source = save(found.animal, folder / "in", found.animal.config().dtype or torch.float32)
    problem = _alone(found.animal, source)
    if problem is not None:
        return f"transformers does not load its own floats: {problem}"
    animal = found.animal
    try:
        fitting = _fitting(source, animal)
    except ZeropointError as error:
        if not _has_transposed(source):
            return f"{error}".partition(";")[0]
        fitting = ROWS
    made = {}
    for column in SWEPT:
        out = folder / column
        if column == "gptq":
            made[column] = _of_gptq(animal, source, out)
        else:
            made[column] = _of_trial(animal, source, fitting if column == INTEGERS[0] else column, out)
        shutil.rmtree(out, ignore_errors=True)
    return made


def _alone(animal: Animal, source: Path) -> str | None:
    """Return what is wrong with a model of floats that is loaded from where it was saved, or None."""
    try:
        model, found = loaded(animal, source, None)
        if found is None and animal.inputs():
            forward(animal, model)
    except RAISED as error:
        return said(error)
    return found


def _has_transposed(source: Path) -> bool:
    """Return whether weights lie transposed in their files, which some layouts hold."""
    opened = open_source(source)
    return any(is_transposed(name.removesuffix(".weight"), opened.config or {}) for name in opened.entries)


def _fitting(source: Path, animal: Animal) -> str:
    """Return the scheme of int4 that keeps the fewest weights, of these the one with the largest group.

    One scale for each row where no group fits.

    Raises CheckpointError where a checkpoint has no weight of a linear layer.
    """
    opened, kept = open_source(source), dict[str, int]()
    chosen = Selection(include=animal.include)
    for scheme in INTEGERS:
        try:
            kept[scheme] = len(make_plan(opened, scheme, selection=chosen, limits=ONE).unfit)
        except ZeropointError:
            continue
        if not kept[scheme]:
            return scheme
    if not kept:
        make_plan(opened, CHANNELS, selection=chosen, limits=ONE)  # raises where there is no linear layer
    return min(kept, key=lambda scheme: kept[scheme], default=ROWS)


def _of_trial(animal: Animal, source: Path, column: str, folder: Path) -> str:
    """Return whether a scheme works, or ``wrong`` where `verify` or the plan says otherwise."""
    try:
        found: Trial = tried(animal, source, column, folder)
    except ZeropointError as error:
        return f"nothing written: {error}"
    wrong = verify(folder / "codes", source, limits=ONE).problems
    if wrong:
        return f"wrong: verify says {wrong[0]}"
    if found.problem is None and found.verdict.loads is Loads.NO:
        return f"wrong: it loads, and the plan says no: {found.verdict.reason}"
    if found.problem is not None and found.experts and not animal.ignore:
        kept = replace(animal, ignore=found.experts)
        if _of_trial(kept, source, column, folder / "kept").startswith(YES):
            return f"{YES}: where --ignore names its experts; otherwise {found.verdict.reason}"
    return found.answer


def _of_gptq(animal: Animal, source: Path, folder: Path) -> str:
    """Return whether transformers finds the layers of the layout of GPTQ, by name and shape."""
    given = getattr(tf, animal.model).main_input_name
    if given != "input_ids":
        return f"no: it {TEXT_ALONE}, and the main input here is {given}"
    answer, experts = _of_layout(animal, source, folder / "codes")
    if experts and not animal.ignore:
        kept, _ = _of_layout(replace(animal, ignore=experts), source, folder / "kept")
        if kept == Loads.PARTLY.value:
            return f"{kept}: where --ignore names its experts; otherwise {answer.partition(': ')[2]}"
    return answer


def _of_layout(animal: Animal, source: Path, folder: Path) -> tuple[str, tuple[str, ...]]:
    """Return an answer, and the tensors that experts come from where these are why it is no yes."""
    chosen = Selection(include=animal.include, ignore=animal.ignore)
    try:
        plan = make_plan(open_source(source), "int4:g32", selection=chosen, codec=GPTQ, limits=ONE)
        run(plan, folder)
    except ZeropointError as error:
        return f"nothing written: {error}", ()
    wrong = verify(folder, source, limits=ONE).problems
    if wrong:
        return f"wrong: verify says {wrong[0]}", ()
    (verdict,) = (v for v in verdicts(plan) if v.engine == "transformers")
    if verdict.loads is Loads.NO:
        return f"{verdict.loads.value}: {verdict.reason}", experts_of(plan)
    section = json.loads((folder / "config.json").read_text())["quantization_config"]
    problem = _misplaced(animal, plan, section) or _asked_late(animal, plan)
    return verdict.loads.value if problem is None else f"no: {problem}", ()


def _misplaced(animal: Animal, plan: CheckpointPlan, section: Mapping[str, Any]) -> str | None:
    """Return the first layer in which a plan and what transformers takes for quantized differ, or None."""
    with quiet(), torch.device("meta"):
        model: Any = getattr(tf, animal.model)(animal.config())
    taken, ours = _taken(model, section), set[str]()
    for weight in plan.weights:
        name = transformers_names(weight.module, plan.source.config or {})[-1]
        ours.add(name)
        if name not in taken or sorted(taken[name]) != sorted(weight.shape):  # Conv1D has (in, out)
            return f"{name} {NO_LINEAR} of shape {list(weight.shape)}"
    more = next((name for name in taken if name not in ours), None)
    return None if more is None else f"it takes {more} for a quantized layer"


class _Packed(nn.Module):
    """A layer that has codes in place of a weight."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.forward = layer.forward


def _asked_late(animal: Animal, plan: CheckpointPlan) -> str | None:
    """Return what is wrong where a forward asks quantized layers for their weight, or None."""
    with quiet():
        model = animal.build(torch.float32)
    for weight in plan.weights:
        name = transformers_names(weight.module, plan.source.config or {})[-1]
        model.set_submodule(name, _Packed(model.get_submodule(name)))
    try:
        if animal.inputs():
            forward(animal, model)
    except AttributeError as error:
        return f"its code {ASKED_LATE}" if "'weight'" in str(error) else None
    except RAISED:
        return None  # other layers than linear ones are asked for more
    return None


def _taken(model: nn.Module, section: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the layers that optimum 2.3 replaces, GPTQQuantizer.convert_model, with their shapes."""
    names = [name for name, _ in model.named_modules()]
    start = section.get("block_name_to_quantize")
    if start is None:
        start = next((block for block in BLOCKS if any(name.startswith(block) for name in names)), None)
    ends = tuple(itertools.chain.from_iterable(section.get("modules_in_block_to_quantize", [[""]])))
    return {
        name: tuple(module.weight.shape)
        for name, module in model.named_modules()
        if (type(module) is nn.Linear or isinstance(module, (nn.Conv2d, pytorch_utils.Conv1D)))
        and start is not None and name.startswith(start) and name.endswith(ends)
        and not name.rpartition(".")[2].isdecimal()  # dir(module), by which it looks, has no numbers
    }  # fmt: skip
