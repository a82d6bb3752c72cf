"""What the source of vLLM says of layers without a quantization."""

from pathlib import Path

import pytest
from benchmarks.vllm_architectures import in_floats, place_of

from benchmarks import vllm_architectures

TOWER = """
class Layer:
    def __init__(self, config, quant_config=None):
        self.qkv_proj = QKVParallelLinear(config.hidden_size, 4)
        self.fc1 = ColumnParallelLinear(1, 1, quant_config=quant_config)

class Tower(Layer):
    def __init__(self, config, quant_config=None):
        super().__init__(config, quant_config)
        self.layers = nn.ModuleList([Layer(config, quant_config) for _ in range(2)])
"""
MODEL = """
from transformers import WhisperEncoder as Whisper
from .tower import Tower, Tower as Vision

def projector(config):
    return Projector(config, config.quant_config)

class Projector:
    def __init__(self, config, quant_config):
        self.linear_1 = nn.Linear(1, 1)
        self.linear_2 = RowParallelLinear(1, 1, **config.given)

class Model:
    def __init__(self, *, vllm_config, prefix=""):
        self.vision, self.count = Vision(vllm_config, vllm_config.quant_config), 1
        self.audio_tower = Whisper(vllm_config)
        self.projector = projector(vllm_config)
        self.floats = Tower(vllm_config, quant_config=None)
        self.head = nn.Linear(1, 1, bias=False)
        self.layers = make_layers(lambda prefix: Block(vllm_config.quant_config))

class Block:
    def __init__(self, quant_config):
        self.gate_up_proj = MergedColumnParallelLinear(1, [1, 1], quant_config=quant_config)
"""


def test_layers_without_a_quantization_are_found_by_the_part_that_holds_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tower.py").write_text(TOWER)
    (tmp_path / "model.py").write_text(MODEL)
    monkeypatch.setattr(vllm_architectures, "_root", lambda: tmp_path)
    model = place_of(tmp_path / "model.py", "Model")
    assert model is not None
    assert in_floats(model) == {
        "": ["head"],
        "audio_tower": ["*"],
        "floats": ["fc1", "k_proj", "q_proj", "v_proj"],
        "projector": ["linear_1"],
        "vision": ["k_proj", "q_proj", "v_proj"],
    }
