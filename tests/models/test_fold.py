"""Normalizations fold into the layer before them where nothing else changes, or say why they stay."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.utils.fusion import fuse_conv_bn_eval, fuse_linear_bn_eval

from zeropoint.errors import ShapeError
from zeropoint.models import fold, quantize_model
from zeropoint.recipes import Assignment, Recipe, Rule

PAIRS: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module], tuple[int, ...]]] = {
    "conv1d": (lambda: nn.Conv1d(3, 4, 3), lambda: nn.BatchNorm1d(4), (2, 3, 9)),
    "conv2d": (lambda: nn.Conv2d(4, 6, 3, groups=2, bias=False), lambda: nn.BatchNorm2d(6), (2, 4, 7, 7)),
    "conv3d": (lambda: nn.Conv3d(2, 3, 2), lambda: nn.BatchNorm3d(3, affine=False), (1, 2, 4, 4, 4)),
    "transposed 1d": (lambda: nn.ConvTranspose1d(3, 4, 3), lambda: nn.BatchNorm1d(4), (2, 3, 9)),
    "transposed 2d": (
        lambda: nn.ConvTranspose2d(4, 3, 3, stride=2), lambda: nn.BatchNorm2d(3, eps=0.1), (2, 4, 5, 5)
    ),
    "transposed 2d in groups": (
        lambda: nn.ConvTranspose2d(4, 6, 3, groups=2), lambda: nn.BatchNorm2d(6), (2, 4, 5, 5)
    ),
    "transposed 3d": (lambda: nn.ConvTranspose3d(2, 3, 2), lambda: nn.BatchNorm3d(3), (1, 2, 4, 4, 4)),
    "linear": (lambda: nn.Linear(7, 5), lambda: nn.BatchNorm1d(5), (4, 7)),
    "linear without bias": (lambda: nn.Linear(7, 5, bias=False), lambda: nn.BatchNorm1d(5), (4, 7)),
}  # fmt: skip


def used(norm: nn.Module) -> nn.Module:
    """Return the normalization with statistics and weights as after training."""
    for tensor in (*norm.parameters(), norm.running_mean, norm.running_var):
        with torch.no_grad():
            tensor.copy_(torch.rand_like(tensor) + 0.5)
    return norm.eval()


@pytest.mark.parametrize("name", PAIRS)
def test_a_folded_layer_computes_what_both_computed(name: str) -> None:
    torch.manual_seed(0)
    layer, norm, shape = PAIRS[name][0]().eval(), used(PAIRS[name][1]()), PAIRS[name][2]
    model = nn.Sequential(layer, norm)
    folding = fold(model)
    x = torch.randn(shape)
    torch.testing.assert_close(folding.model(x), model(x), rtol=1e-5, atol=1e-5)
    assert str(folding) == "1: folded into 0"
    assert not isinstance(folding.model[1], type(norm))
    assert isinstance(model[1], type(norm))


@pytest.mark.parametrize("name", [name for name in PAIRS if "groups" not in name])
def test_weights_are_those_that_torch_folds_bit_for_bit(name: str) -> None:
    torch.manual_seed(0)
    layer, norm = PAIRS[name][0]().eval(), used(PAIRS[name][1]())
    if isinstance(layer, nn.Linear):
        expected = fuse_linear_bn_eval(layer, norm)
    else:
        expected = fuse_conv_bn_eval(layer, norm, transpose="transposed" in name)
    found = fold(nn.Sequential(layer, norm)).model[0]
    assert torch.equal(found.weight, expected.weight)
    assert torch.equal(found.bias, expected.bias)


class Residual(nn.Module):
    """Normalizations that follow a layer, a sum, an input, and a layer that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.after_sum, self.first = nn.BatchNorm2d(4), nn.BatchNorm2d(4)
        self.twice, self.of_twice = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)
        self.left, self.right = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)
        self.right.weight = self.left.weight
        self.of_left, self.idle = nn.BatchNorm2d(4), nn.BatchNorm2d(4)
        self.pool, self.of_pool = nn.MaxPool2d(1), nn.BatchNorm2d(4)
        self.often = nn.BatchNorm2d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.after_sum(self.norm(self.conv(self.first(x))) + x)
        x = self.of_twice(self.twice(self.twice(x)))
        y = self.of_left(self.left(x)) + self.right(x)
        result: torch.Tensor = self.often(self.often(self.of_pool(self.pool(y))))
        return result


def test_what_cannot_be_folded_stays_and_says_why() -> None:
    torch.manual_seed(0)
    model = Residual()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            used(module)
    model.eval()
    folding = fold(model)
    assert dict(folding.folded) == {"norm": "conv"}
    assert dict(folding.kept) == {
        "after_sum": "it does not follow a layer",
        "first": "it does not follow a layer",
        "of_twice": "what twice gives is used elsewhere too",
        "of_left": "its layer shares its weight with another",
        "idle": "it is not called once",
        "of_pool": "it follows a MaxPool2d, not a convolution or linear layer",
        "often": "it is not called once",
    }
    x = torch.randn(2, 4, 5, 5)
    torch.testing.assert_close(folding.model(x), model(x), rtol=1e-5, atol=1e-5)
    assert "norm: folded into conv" in str(folding)
    assert "idle: kept, it is not called once" in str(folding)


def test_normalizations_that_train_or_have_no_statistics_stay() -> None:
    model = nn.Sequential(nn.Conv1d(2, 2, 1), nn.BatchNorm1d(2))
    assert dict(fold(model).kept) == {"1": "it is in training mode; call eval() first"}
    bare = nn.Sequential(nn.Conv1d(2, 2, 1), nn.BatchNorm1d(2, track_running_stats=False)).eval()
    assert dict(fold(bare).kept) == {"1": "it has no running statistics"}


class Branching(nn.Module):
    """A model that no tracer follows, since it looks at its data."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv1d(2, 3, 1), nn.BatchNorm1d(3), nn.ReLU())
        self.conv, self.norm = nn.Conv1d(3, 3, 1), nn.BatchNorm1d(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.body(x)
        result: torch.Tensor = self.norm(self.conv(x)) if bool((x > 0).any()) else x
        return result


@pytest.mark.parametrize("place", ["0", "1", "weight"])
def test_what_has_hooks_stays_and_says_so(place: str) -> None:
    model = nn.Sequential(nn.Conv2d(2, 3, 3), used(nn.BatchNorm2d(3))).eval()
    if place == "weight":
        nn.utils.spectral_norm(model[0]).eval()
    else:
        model.get_submodule(place).register_forward_hook(lambda *call: call[-1] * 2)
    folding, x = fold(model), torch.randn(1, 2, 5, 5)
    assert str(folding) == (
        "1: kept, it or its layer has hooks, which would see other numbers; remove them first"
    )
    assert torch.equal(folding.model(x), model(x))


def test_of_a_model_that_cannot_be_traced_neighbors_are_folded() -> None:
    torch.manual_seed(0)
    model = Branching().eval()
    used(model.body[1])
    folding = fold(model)
    assert dict(folding.folded) == {"body.1": "body.0"}
    assert list(folding.kept) == ["norm"]
    assert "cannot be traced" in folding.kept["norm"]
    assert "not next to a layer in an nn.Sequential" in folding.kept["norm"]
    x = torch.randn(2, 2, 5)
    torch.testing.assert_close(folding.model(x), model(x), rtol=1e-5, atol=1e-5)


def test_a_folded_linear_layer_refuses_a_third_axis() -> None:
    model = nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5)).eval()
    folded = fold(model).model
    assert folded(torch.ones(2, 5)).shape == (2, 5)
    with pytest.raises(ShapeError, match=r"x \(shape \(2, 5, 5\)\) must have two axes where a normalization"):
        folded(torch.ones(2, 5, 5))


def test_in_place_means_the_model_itself() -> None:
    model = nn.Sequential(nn.Conv1d(2, 2, 1), nn.BatchNorm1d(2)).eval()
    assert fold(model, inplace=True).model is model
    assert isinstance(model[1], nn.Identity)


def test_a_folded_model_is_quantized_with_its_new_weights() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(4, 6, 3), used(nn.BatchNorm2d(6)), nn.ReLU()).eval()
    recipe = Recipe(rules=(Rule(types=("Conv2d",), gives=Assignment.of(weight="int8:channel")),))
    folded = fold(model).model
    conversion = quantize_model(folded, recipe)
    x = torch.randn(2, 4, 8, 8)
    drift = (conversion.model(x) - model(x)).norm() / model(x).norm()
    assert 0 < float(drift.detach()) < 0.02
    assert conversion.layers[0].shape == (6, 4, 3, 3)
