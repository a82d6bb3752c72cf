"""Prepared graphs train, and are deployed as what they trained."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.export import Dim, ExportedProgram

from zeropoint.errors import CalibrationError, RecipeError, UnsupportedError
from zeropoint.models.graph import calibrate_graph, convert_graph, prepare_graph, quantize_graph, to_program
from zeropoint.models.qat_config import QAT_CONFIGS
from zeropoint.recipes import parse_recipe
from zeropoint.training import LearnedScale

RECIPE = parse_recipe("""
rules:
  - type: [Conv1d, Linear]
    weight: int4:channel
    input: int8:tensor static
""")


def net() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv1d(4, 16, 3), nn.BatchNorm1d(16), nn.ReLU(), nn.Flatten(), nn.Dropout(0.1), nn.Linear(96, 3)
    )
    model[1].running_mean.uniform_(-1, 1)
    model[1].running_var.uniform_(0.5, 2)
    return model.train()


def data() -> tuple[torch.Tensor, torch.Tensor]:
    """Return samples that a small net can learn to tell apart."""
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(0, 3, (64,), generator=generator)
    centers = torch.randn(3, 4, 8, generator=generator)
    return centers[labels] + 0.3 * torch.randn(64, 4, 8, generator=generator), labels


def program_of(model: nn.Module) -> ExportedProgram:
    return torch.export.export(model, (data()[0],), dynamic_shapes=({0: Dim.AUTO},))


def train(model: nn.Module, steps: int) -> list[float]:
    x, labels = data()
    optimizer, losses = torch.optim.Adam(model.parameters(), lr=0.01), []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), labels)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("qat", ["minmax", "fixed", "lsq"])
def test_a_prepared_graph_learns_and_deploys_what_it_learned(qat: str) -> None:
    torch.manual_seed(2)
    model, (x, _) = net(), data()
    before = copy.deepcopy(model.state_dict())
    program = program_of(model)
    calibration = calibrate_graph(program, RECIPE, [x])
    prepared = prepare_graph(program, RECIPE, calibration=calibration, qat=qat)
    losses = train(prepared, 40)
    assert losses[-1] < losses[0] / 4
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    conversion = convert_graph(prepared)
    evaluated = without_dropout(prepared)
    with torch.no_grad():
        assert torch.equal(conversion.model(x), evaluated(x))
        again = to_program(conversion.model, program).module()
        assert torch.equal(again(x[:5]), conversion.model(x[:5]))
    held = sum(tensor.nbytes for tensor in conversion.model.state_dict().values())
    assert held < 0.4 * sum(tensor.nbytes for tensor in prepared.parameters())


def without_dropout(prepared: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Take dropout out of a prepared graph."""
    (dropout,) = [n for n in prepared.graph.nodes if n.target is torch.ops.aten.dropout.default]
    dropout.replace_all_uses_with(dropout.args[0])
    prepared.graph.erase_node(dropout)
    prepared.recompile()
    return prepared


def test_a_prepared_graph_that_did_not_train_converts_to_the_quantized_one() -> None:
    model, (x, _) = net().eval(), data()
    program = program_of(model)
    calibration = calibrate_graph(program, RECIPE, [x])
    one = quantize_graph(program, RECIPE, calibration=calibration)
    two = convert_graph(prepare_graph(program, RECIPE, calibration=calibration))
    assert str(one) == str(two)
    ours, theirs = one.model.state_dict(), two.model.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    with torch.no_grad():
        assert torch.equal(one.model(x), two.model(x))


def test_gradients_pass_straight_through_to_the_weights() -> None:
    layer, x = nn.Linear(8, 3, bias=False), torch.randn(5, 8)
    prepared = prepare_graph(torch.export.export(layer, (x,)), "int8:channel:narrow")
    prepared(x).sum().backward()
    # The loss is linear in the weight, and no code of a min-max scale is clipped.
    assert torch.allclose(prepared.weight.grad, x.sum(0).expand(3, 8))
    assert layer.weight.grad is None


def test_learned_scales_are_parameters_and_tied_weights_have_one() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.head = nn.Embedding(20, 8), nn.Linear(8, 20, bias=False)
            self.head.weight = self.words.weight

        def forward(self, index: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.head(self.words(index))
            return result

    index = torch.arange(6)
    recipe = parse_recipe("{rules: [{type: [Embedding, Linear], weight: 'int4:token'}]}")
    prepared = prepare_graph(torch.export.export(Tied(), (index,)), recipe, qat="lsq")
    learned = [module for module in prepared.modules() if isinstance(module, LearnedScale)]
    assert len(learned) == 1
    prepared(index).sum().backward()
    assert all(parameter.grad is not None for parameter in learned[0].parameters())
    assert len(list(prepared.parameters())) == 2
    conversion = convert_graph(prepared)
    with torch.no_grad():
        assert torch.equal(conversion.model(index), prepared(index))


def test_a_qat_config_of_ones_own_makes_the_quantizers() -> None:
    x = torch.randn(5, 8)
    qat = replace(QAT_CONFIGS["minmax"], weight=LearnedScale.from_tensor)
    prepared = prepare_graph(torch.export.export(nn.Linear(8, 3), (x,)), "w8a16", qat=qat)
    assert any(isinstance(module, LearnedScale) for module in prepared.modules())
    with pytest.raises(RecipeError, match="qat 'lsqq' is unknown; did you mean lsq"):
        prepare_graph(torch.export.export(nn.Linear(8, 3), (x,)), "w8a16", qat="lsqq")


def test_what_was_not_prepared_or_calibrated_is_an_error() -> None:
    x = torch.randn(5, 8)
    program = torch.export.export(nn.Linear(8, 3), (x,))
    with pytest.raises(UnsupportedError, match="must be a result of prepare_graph"):
        convert_graph(program.module())
    with pytest.raises(CalibrationError, match=r"input needs calibration"):
        prepare_graph(program, "w8a8_static")


@pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec:FutureWarning")  # torch's own (2.13)
def test_prepared_graphs_are_copied_and_their_states_loaded() -> None:
    x = torch.randn(5, 8)
    program = torch.export.export(nn.Linear(8, 3), (x,))
    calibration = calibrate_graph(program, "w8a8_static", [x])
    first = prepare_graph(program, "w8a8_static", calibration=calibration, qat="lsq")
    other = calibrate_graph(program, "w8a8_static", [3 * x])
    second = prepare_graph(program, "w8a8_static", calibration=other, qat="lsq")
    assert not torch.equal(first(x), second(x))
    second.load_state_dict(first.state_dict(), strict=True)
    assert torch.equal(first(x), second(x))
    copied = convert_graph(copy.deepcopy(first)).model
    with torch.no_grad():
        assert torch.equal(copied(x), first(x))
