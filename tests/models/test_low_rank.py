"""Low-rank weights that train around a quantized layer, as peft wraps one."""

import pytest
import torch
from torch import nn

from zeropoint.models import QuantizedLinear, quantize_model


class LowRank(nn.Module):
    """What peft's LoRA layer does and reads: sizes, device and dtype of the layer that it wraps."""

    def __init__(self, base_layer: nn.Module, rank: int) -> None:
        super().__init__()
        self.base_layer = base_layer
        weight = base_layer.weight
        assert weight.dtype.is_floating_point  # peft gives its own weights the dtype of such layers alone
        like = {"device": weight.device, "dtype": weight.dtype}
        self.lora_A = nn.Linear(base_layer.in_features, rank, bias=False, **like)
        self.lora_B = nn.Linear(rank, base_layer.out_features, bias=False, **like)
        nn.init.zeros_(self.lora_B.weight)
        for parameter in base_layer.parameters():
            parameter.requires_grad = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.base_layer(x)
        return result + self.lora_B(self.lora_A(x))


def wrapped(preset: str) -> tuple[nn.Sequential, nn.Sequential]:
    """Return a quantized model, and another one of its layers with low-rank weights."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 32))
    quantized = quantize_model(model, preset).model
    assert isinstance(quantized, nn.Sequential)
    return quantized, nn.Sequential(LowRank(quantized[0], 4), nn.ReLU(), LowRank(quantized[2], 4))


@pytest.mark.parametrize("preset", ["w4a16", "w8a8", "mxfp4"])
def test_low_rank_weights_train_around_layers_whose_codes_stay(preset: str) -> None:
    quantized, model = wrapped(preset)
    x, target = torch.randn(8, 64), torch.randn(8, 32)
    torch.testing.assert_close(model(x), quantized(x), rtol=1e-5, atol=1e-5)  # sums of floats, not of codes
    before = {name: value.clone() for name, value in quantized.state_dict().items()}
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert {name.split(".")[1] for name in trained} == {"lora_A", "lora_B"}
    optimizer, losses = torch.optim.Adam(trained.values(), 0.02), []
    for _ in range(20):
        optimizer.zero_grad()
        loss = (model(x) - target).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    # Those of the first layer are reached through the second, whose input may be quantized.
    assert all(p.grad is not None and bool(p.grad.any()) for p in trained.values())
    assert all(torch.equal(before[name], value) for name, value in quantized.state_dict().items())


def test_low_rank_weights_are_not_added_to_codes() -> None:
    """Merging adds to ``weight.data`` in place, which for a packed weight are codes."""
    _, model = wrapped("w8a8")
    base = model[0].base_layer
    assert isinstance(base, QuantizedLinear)
    before = base.weight.get_buffer("data").clone()
    with pytest.raises(RuntimeError, match="can't be cast to the desired output type Byte"):
        base.weight.data += model[0].lora_B.weight @ model[0].lora_A.weight
    assert torch.equal(base.weight.get_buffer("data"), before)
