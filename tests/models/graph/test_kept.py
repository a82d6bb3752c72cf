"""What graph mode leaves as it is, it says, with the reason; what it cannot take it refuses by name."""

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from zeropoint.errors import RecipeError, UnsupportedError
from zeropoint.models import quantize_model
from zeropoint.models.graph import calibrate_graph, convert_graph, prepare_graph, quantize_graph, to_program
from zeropoint.recipes import parse_recipe

NORM = "0.parametrizations.weight.0"


@pytest.mark.filterwarnings("ignore:The tensor attributes:UserWarning")  # torch's own LSTM (2.13)
def test_what_has_no_quantized_form_is_listed_with_the_reason() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.norm, self.lstm = nn.Linear(8, 8), nn.LayerNorm(8), nn.LSTM(8, 8, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.lstm(self.norm(self.up(x)))[0]
            return result

    model, x = Mixed(), torch.randn(3, 5, 8)
    found, wanted = quantize_graph(torch.export.export(model, (x,)), "w8a16"), quantize_model(model, "w8a16")
    kept = {layer.name: (layer.type, layer.reason) for layer in found.layers if layer.gives is None}
    assert kept == {
        "norm": ("LayerNorm", "layer_norm of weight and bias has no quantized form"),
        "lstm": ("LSTM", "the default is for Linear layers"),
    }
    assert found.nbytes == wanted.nbytes


def test_a_type_that_graphs_do_not_quantize_points_to_what_does() -> None:
    layer, args = nn.EmbeddingBag(8, 16), (torch.ones(2, 3, dtype=torch.int64),)
    recipe = parse_recipe("{rules: [{name: '*', weight: 'int8:channel'}]}")
    (reported,) = quantize_graph(torch.export.export(layer, args), recipe).layers
    assert (reported.type, reported.gives) == ("EmbeddingBag", None)
    assert reported.reason.startswith("EmbeddingBag is the operator ")
    assert reported.reason.endswith(" here, which has no quantized form; quantize_model has one")
    assert quantize_model(layer, recipe).layers[0].gives is not None
    named = parse_recipe("{rules: [{type: EmbeddingBag, weight: 'int8:channel'}]}")
    with pytest.raises(UnsupportedError, match=r"^layer : EmbeddingBag is .* has one; keep it$"):
        quantize_graph(torch.export.export(layer, args), named)


class Experts(nn.Module):
    """Products of three matrices at once."""

    def __init__(self, *, batched: bool) -> None:
        super().__init__()
        self.batched, self.experts = batched, nn.Parameter(torch.randn(3, 8, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.bmm(x, self.experts) if self.batched else x @ self.experts


@pytest.mark.parametrize(
    ("model", "x", "kept"),
    [
        (Experts(batched=True), (3, 2, 8), {"": "bmm of experts has no quantized form"}),
        (Experts(batched=False), (3, 2, 8), {"": "its weight (shape 3x8x4) is not a matrix"}),
        (
            nn.Sequential(weight_norm(nn.Linear(8, 4, bias=False))),
            (2, 8),
            {
                NORM: "_weight_norm of original1 and original0 has no quantized form",
                "0": "its weight is computed in the graph",
            },
        ),
        (
            nn.MultiheadAttention(8, 2, add_bias_kv=True, batch_first=True),
            (2, 3, 8),
            {"": "repeat of bias_k has no quantized form"},
        ),
    ],
)
def test_what_is_left_is_said_with_what_it_does(
    model: nn.Module, x: tuple[int, ...], kept: dict[str, str]
) -> None:
    args = (torch.randn(x),) * (3 if isinstance(model, nn.MultiheadAttention) else 1)
    found = quantize_graph(torch.export.export(model.eval(), args), "w8a16")
    assert {layer.name: layer.reason for layer in found.layers if layer.gives is None} == kept


def test_a_graph_that_is_quantized_already_says_so() -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8, bias=False)), torch.randn(2, 8)
    once = quantize_graph(torch.export.export(model, (x,)), "w8a16").model
    twice = quantize_graph(once, "w8a16")
    assert [str(layer) for layer in twice.layers] == [
        "0 (Linear): kept, its weight is quantized already",
        "2 (Linear): kept, its weight is quantized already",
    ]
    assert torch.equal(twice.model(x), once(x))


def test_projections_of_attention_are_two_layers_here_and_four_in_eager_mode() -> None:
    model, x = nn.MultiheadAttention(32, 4, batch_first=True).eval(), torch.randn(2, 5, 32)
    program = torch.export.export(model, (x, x, x))
    reported = [str(layer).partition(":")[0] for layer in quantize_graph(program, "w8a16").layers]
    assert reported == ["in_proj (Linear 96x32)", "out_proj (Linear 32x32)"]
    recipe = parse_recipe("{rules: [{name: q_proj, preset: w8a16}]}")
    assert quantize_model(model, recipe).layers[0].name == "q_proj"
    with pytest.raises(RecipeError, match=r"matches no module by name; did you mean in_proj or out_proj\?$"):
        quantize_graph(program, recipe)


def test_what_graph_mode_cannot_take_is_said() -> None:
    model, x = nn.Sequential(nn.Linear(256, 8), nn.ReLU()), torch.randn(3, 256)
    program = torch.export.export(model, (x,))
    prepared = prepare_graph(program, "w8a16")
    for again in (
        lambda: prepare_graph(prepared, "w8a16"),
        lambda: quantize_graph(prepared, "w8a16"),
        lambda: calibrate_graph(prepared, "w8a8_static", [x]),
    ):
        with pytest.raises(UnsupportedError, match=r"^program is prepared already; convert it or pass the"):
            again()
    for other, kind in ((5, "int"), (model, "Sequential"), (quantize_graph(program, "w8a16").model, "Graph")):
        with pytest.raises(UnsupportedError, match=rf"^prepared \(a {kind}.* without quantizers\) must be a"):
            convert_graph(other)
    with pytest.raises(UnsupportedError, match=r"^like \(a int\) must be the exported program that module"):
        to_program(prepared, 5)  # type: ignore[arg-type]
