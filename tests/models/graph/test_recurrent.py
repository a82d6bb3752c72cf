"""Recurrent layers of graphs compute what those of eager mode do, bit for bit, under the same rules."""

import pytest
import torch
from torch import nn
from torch.export import Dim

from zeropoint.models import calibrate, quantize_model
from zeropoint.models.graph import calibrate_graph, convert_graph, prepare_graph, quantize_graph, to_program
from zeropoint.recipes import Recipe, parse_recipe

pytestmark = [
    pytest.mark.filterwarnings("ignore:The tensor attributes:UserWarning"),  # torch's own LSTM (2.13)
    pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN:UserWarning"),
]


class Steps(nn.Module):
    """A cell over the steps of a sequence."""

    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell, self.head = cell, nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None
        for step in x:
            state = self.cell(step, state)
        assert state is not None
        result: torch.Tensor = self.head(state[0] if isinstance(state, tuple) else state)
        return result


LAYERS = [
    nn.LSTM(8, 16, 2, batch_first=True, dropout=0.5),
    nn.LSTM(8, 16, proj_size=4),
    nn.LSTM(8, 16, bias=False, bidirectional=True),
    nn.GRU(8, 16, 2, bidirectional=True),
    nn.RNN(8, 16, nonlinearity="relu"),
    Steps(nn.LSTMCell(8, 16)),
    Steps(nn.GRUCell(8, 16)),
    Steps(nn.RNNCell(8, 16)),
]
X = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(0))
SIDES = ("", "input: 'int8:token'", "input: 'uint8:tensor:asym static', output: 'uint8:tensor:asym static'")


def recipe(sides: str) -> Recipe:
    kinds = "LSTM, GRU, RNN, LSTMCell, GRUCell, RNNCell"
    return parse_recipe(f"{{rules: [{{type: [{kinds}], weight: 'int4:g8', {sides}}}]}}")


def flat(value: object) -> list[torch.Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


@pytest.mark.crossed
@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: str(layer)[:40])
@pytest.mark.parametrize("sides", SIDES)
def test_graphs_compute_what_the_eager_layers_do(layer: nn.Module, sides: str) -> None:
    layer, rules = layer.eval(), recipe(sides)
    program = torch.export.export(layer, (X,))
    learned = calibrate(layer, rules, [X, X / 2]) if rules.needs_calibration else None
    assert learned is None or learned == calibrate_graph(program, rules, [X, X / 2])
    wanted = quantize_model(layer, rules, calibration=learned)
    found = quantize_graph(program, rules, calibration=learned)
    assert found.layers == wanted.layers
    assert found.layers[0].gives is not None
    with torch.no_grad():
        results, others = flat(found.model(X)), flat(wanted.model(X))
        assert len(results) == len(others) > 0
        assert all(torch.equal(a, b) for a, b in zip(results, others, strict=True))
        assert not torch.equal(results[0], flat(layer(X))[0])


def test_a_prepared_layer_trains_and_converts_to_what_it_computed() -> None:
    layer = nn.GRU(8, 16, batch_first=True)
    prepared = prepare_graph(torch.export.export(layer.train(), (X,)), recipe(""), qat="lsq")
    names = [name for name, _ in prepared.named_parameters() if name.endswith("scale")]
    assert len(names) == 2
    prepared(X)[0].square().mean().backward()
    for name, parameter in prepared.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name
    with torch.no_grad():
        assert torch.equal(convert_graph(prepared).model(X)[0], prepared(X)[0])


def test_a_converted_program_runs_for_other_batches() -> None:
    layer = nn.LSTM(8, 16, batch_first=True).eval()
    program = torch.export.export(layer, (X,), dynamic_shapes=({0: Dim.AUTO},))
    converted = to_program(quantize_graph(program, recipe(SIDES[1])).model, program).module()
    other = torch.randn(7, 5, 8)
    with torch.no_grad():
        eager = quantize_model(layer, recipe(SIDES[1])).model(other)
        assert torch.equal(converted(other)[0], eager[0])
