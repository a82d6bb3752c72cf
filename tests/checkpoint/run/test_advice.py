"""A scheme that fits a part of a model, or keeps little of it, is no silent success."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.checkpoint.written import quantize, save
from tests.cli.checkpoints import write_llama

from zeropoint.checkpoint.plan.checkpoint_plan import make_plan
from zeropoint.checkpoint.read.source import open_source
from zeropoint.checkpoint.run.advice import error_warnings, misfit_warnings
from zeropoint.checkpoint.run.loop import run


def with_outliers(folder: Path) -> Path:
    """A Llama one of whose numbers in each matrix is far from the others, as in models that were trained."""
    model = write_llama(folder)
    tensors = load_file(model / "model.safetensors")
    for tensor in tensors.values():
        if tensor.dim() == 2:
            tensor[0, 0] = 5.0
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    return model


@pytest.mark.parametrize(("to", "finer"), [("int4", "w4a16"), ("int3:tensor", "w4a16")])
def test_an_output_that_keeps_little_of_the_weights_names_a_scheme_that_keeps_more(
    tmp_path: Path, to: str, finer: str
) -> None:
    result = quantize(with_outliers(tmp_path / "model"), tmp_path / "out", to)
    (said,) = error_warnings(result)
    assert said.startswith("the relative error of all weights is above 0.5, that of 'model.layers.")
    assert said.endswith(f"to='{finer}' has less error")


def test_an_output_like_others_of_its_bits_is_not_warned_of(tmp_path: Path) -> None:
    for to in ("w4a16", "mxfp4", "int3:g64"):
        plan = make_plan(open_source(write_llama(tmp_path / to)), to)
        assert error_warnings(run(plan, tmp_path / f"{to}-out")) == []


def narrow(folder: Path, columns: int) -> Path:
    """Two linear weights of which one has so many columns."""
    tensors = {"a.up.weight": torch.randn(64, columns), "a.down.weight": torch.randn(64, 256)}
    return save(folder, tensors, {"architectures": ["X"]})


@pytest.mark.parametrize(
    ("to", "columns", "fitting"),
    [
        ("w4a16", 192, "int4:g64"), ("w4a16", 96, "int4:g32"), ("w4a16", 40, "int4:channel"),
        ("w8a16", 48, "int8:g16"), ("mxfp4", 48, "int4:g16|nvfp4a16|w8a8|fp8_dynamic"),
    ],
)  # fmt: skip
def test_a_scheme_that_fits_a_part_says_how_much_stays_and_which_fits_all(
    tmp_path: Path, to: str, columns: int, fitting: str
) -> None:
    source = open_source(narrow(tmp_path / "model", columns))
    (said,) = misfit_warnings(make_plan(source, to))
    kept, whole = 64 * columns * 4 / 1024, 64 * (columns + 256) * 4 / 1024
    assert said.startswith(
        f"{kept:.0f} KiB of {whole:.0f} KiB of linear weights stay in F32: {to} does not fit 1 "
    )
    name = said.partition("to='")[2].removesuffix("' fits all of them")
    assert name in fitting.split("|")
    assert misfit_warnings(make_plan(source, name)) == []
    assert len(make_plan(source, name).weights) == 2
