"""Every causal architecture of transformers runs on data here, block by block, and its weights are solved."""

from pathlib import Path

import pytest
import torch
from tests.architectures.sweep import built
from tests.architectures.trial import quiet, save

import zeropoint as zp
from zeropoint.checkpoint.run.loop import RunResult
from zeropoint.codecs.compressed_tensors.tested import swept

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]

CAUSAL = [
    row["model_type"]
    for row in swept()
    if row["compared"] == "outputs" and ("ForCausalLM" in row["class"] or "LMHead" in row["class"])
]
_OTHERS = "is no Linear layer of the model"
_PAST = "received no calibration data"
_WIDE = "more than the process may take"  # their sizes are not made small
REFUSED = {
    "cpmant": _WIDE,
    "deepseek_v4": _OTHERS,
    "falcon_mamba": _PAST,
    "flaubert": "received no finite number",  # its layers are in several lists, none of which is a chain
    "gemma3n_text": _WIDE,
    "git": "name blocks that run once each",  # the longest list is of images
    "gpt-sw3": "a transposed Conv1D weight",
    "gpt2": "a transposed Conv1D weight",
    "gpt_neo": "does not build",  # its kinds of layers are spelled otherwise in memory
    "inkling2_text": "together with others, or transposed",
    "inkling_text": _OTHERS,
    "jetmoe": _OTHERS,
    "llama4_text": _OTHERS,
    "longcat_flash": _OTHERS,
    "mamba": _PAST,
    "openai-gpt": "a transposed Conv1D weight",
    "phi4_multimodal": _WIDE,
    "rwkv": "reads weights of blocks before these run",
    "trocr": _PAST,  # a decoder that looks at no image
    "xlm": "received no finite number",
    "zamba": "not in the files under the name",
}
"""What is said of a model that is not solved."""


@pytest.mark.parametrize("model_type", CAUSAL)
def test_a_causal_model_is_solved_on_data(model_type: str, tmp_path: Path) -> None:
    found = built(model_type)
    assert not isinstance(found, str), found
    with quiet():
        source = save(found.animal, tmp_path / "in", torch.float32)
    ids = torch.randint(3, 50, (8, 16), generator=torch.Generator().manual_seed(0))

    def solved() -> RunResult:
        return zp.quantize_checkpoint(
            source, tmp_path / "out", "int4:g16", method="gptq", calibration=ids, max_memory="6G", force=True
        )

    if model_type in REFUSED:
        with pytest.raises(zp.ZeropointError, match=REFUSED[model_type]):
            solved()
        return
    result = solved()
    assert len(result.plan.solved) == len(result.plan.weights) > 0
    assert result.notes[-1].startswith("KL divergence")
