"""Architectures of transformers run on data here, block by block, and their weights are solved."""

import csv
import re
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from tests.architectures.sweep import built
from tests.architectures.trial import quiet, save

import zeropoint as zp
from zeropoint.checkpoint.run.loop import RunResult
from zeropoint.codecs.compressed_tensors.tested import swept

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]

ON_DATA = Path(__file__).with_name("on_data.csv")
"""Whether an architecture learns from tokens or from samples, and what is said where it is not solved."""
IDS = torch.randint(3, 50, (8, 16), generator=torch.Generator().manual_seed(0))


def answers() -> dict[str, tuple[str, str]]:
    with ON_DATA.open(encoding="utf-8", newline="") as lines:
        return {row["model_type"]: (row["data"], row["refused"]) for row in csv.DictReader(lines)}


def samples(inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return eight samples like some inputs, whose floats differ, by number."""

    def like(x: torch.Tensor, number: int) -> torch.Tensor:
        if not x.is_floating_point():
            return x
        random = torch.Generator().manual_seed(number)
        scale = 1 + 0.3 * torch.rand(x.shape, generator=random)
        return (x * scale + 0.3 * torch.randn(x.shape, generator=random)).to(x.dtype)

    return {f"{number}.{name}": like(x, number) for number in range(8) for name, x in inputs.items()}


def test_every_architecture_whose_outputs_were_compared_has_an_answer() -> None:
    assert answers().keys() == {row["model_type"] for row in swept() if row["compared"] == "outputs"}


@pytest.mark.parametrize(("model_type", "answer"), answers().items())
def test_a_model_is_solved_on_data_or_says_why_not(
    model_type: str, answer: tuple[str, str], tmp_path: Path
) -> None:
    data, refused = answer
    found = built(model_type)
    assert not isinstance(found, str), found
    with quiet():
        source = save(found.animal, tmp_path / "in", torch.float32)
    calibration = {"tokens": IDS, "samples": samples(found.animal.inputs())}[data]

    def solved() -> RunResult:
        return zp.quantize_checkpoint(
            source, tmp_path / "out", "int4:g16", quality="good", calibration=calibration, max_memory="6G",
            force=True, include=found.animal.include,
        )  # fmt: skip

    if refused:
        with pytest.raises(zp.ZeropointError, match=re.escape(refused)):
            solved()
        return
    result = solved()
    assert result.plan.solved
    fell = [weight for weight in result.plan.weights if weight.method != "shift+gptq"]
    assert bool(fell) == any("falls back on" in note for note in result.notes)
    assert zp.verify_checkpoint(tmp_path / "out", source).ok
    # Codes of another weight are off by as much as the weight itself.
    errors = {about["module"]: about["error"]["relative"] for about in result.to_dict()["weights"]}
    assert max(errors.values()) < 0.6, errors
