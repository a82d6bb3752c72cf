"""Modules of transformers that multiply with their weights themselves: GPT-2's Conv1D and fused experts."""

import copy
import functools
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.peers import transformers
from torch import nn

import zeropoint as zp
from zeropoint.errors import CalibrationError, UnsupportedError
from zeropoint.models import (
    QuantizedLinear,
    calibrate,
    calibrate_sequential,
    convert,
    prepare,
    quantize_model,
)
from zeropoint.models.experts import SplitExperts
from zeropoint.models.graph import quantize_graph
from zeropoint.models.linear_paths import FEW_ROWS
from zeropoint.models.unfuse import unfused
from zeropoint.recipes import Recipe, Rule, model_preset, parse_recipe

pytestmark = pytest.mark.rotating

SIZES: dict[str, Any] = {
    "vocab_size": 90, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0,
}  # fmt: skip
IDS = torch.randint(0, 90, (3, 12), generator=torch.Generator().manual_seed(0))
ROUTED = (
    torch.randn(5, 64, generator=torch.Generator().manual_seed(2)),
    torch.tensor([[0, 1], [3, 1], [2, 0], [1, 3], [0, 2]]),
    torch.rand(5, 2, generator=torch.Generator().manual_seed(3)),
)
"""Hidden states of tokens, their experts, and the weights of these."""


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=90, n_embd=64, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2LMHeadModel(config)


def mixtral() -> nn.Module:
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**SIZES, num_local_experts=4))


def gpt_oss() -> nn.Module:
    """Experts with biases, weights (in, out) and gates of their own."""
    config = transformers.GptOssConfig(**SIZES, head_dim=16, num_local_experts=4, num_experts_per_tok=2)
    model = transformers.GptOssForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("proj_bias"):
                parameter.normal_(generator=torch.Generator().manual_seed(1))
    return model


def nemotron() -> nn.Module:
    """Experts without gates."""
    config = transformers.NemotronHConfig(
        **{**SIZES, "num_hidden_layers": 4}, head_dim=16, hybrid_override_pattern="*E*E", n_routed_experts=4,
        num_experts_per_tok=2, moe_intermediate_size=64, moe_shared_expert_intermediate_size=64,
    )  # fmt: skip
    return transformers.NemotronHForCausalLM(config)


def llama4() -> nn.Module:
    """Experts (in, out), multiplied as one stack, with rows of zeros for tokens of others."""
    config = transformers.Llama4TextConfig(
        **SIZES, intermediate_size_mlp=96, head_dim=16, num_local_experts=4, moe_layers=[1]
    )
    model = transformers.Llama4ForCausalLM(config)
    for name, parameter in model.named_parameters():
        if ".experts." in name:
            nn.init.normal_(parameter, std=0.1)  # the model leaves them empty
    return model


def jetmoe() -> nn.Module:
    """Experts of projections of attention as well, of a size of their own."""
    config = transformers.JetMoeConfig(
        **SIZES, kv_channels=16, num_local_experts=4, tie_word_embeddings=False
    )
    return transformers.JetMoeForCausalLM(config)


EXPERTS = {
    "mixtral": mixtral, "gpt_oss": gpt_oss, "nemotron": nemotron, "llama4": llama4, "jetmoe": jetmoe,
}  # fmt: skip
ALL = {"gpt2": gpt2, **EXPERTS}
FUSED = {
    "Conv1D", "MixtralExperts", "GptOssExperts", "NemotronHExperts", "Llama4TextExperts",
    "JetMoeParallelExperts",
}  # fmt: skip


@pytest.fixture(params=ALL)
def model(request: pytest.FixtureRequest) -> nn.Module:
    return made(ALL[request.param])


def made(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return make().eval()


def run(model: nn.Module) -> torch.Tensor:
    result: torch.Tensor = model(input_ids=IDS).logits
    return result


def linears(model: nn.Module, kind: type[nn.Module] = nn.Linear) -> dict[str, nn.Module]:
    return {name: module for name, module in model.named_modules() if type(module) is kind}


def test_open_modules_compute_the_same_and_close_again(model: nn.Module) -> None:
    before, expected = list(model.modules()), run(model)
    with unfused(model) as root:
        assert root is model
        torch.testing.assert_close(run(model), expected, rtol=1e-5, atol=1e-6)
        assert len(linears(model)) > sum(type(module) is nn.Linear for module in before)
        assert FUSED.isdisjoint(type(module).__name__ for module in model.modules())
    assert list(model.modules()) == before
    assert torch.equal(run(model), expected)


def dequantized(model: nn.Module, scheme: str) -> nn.Module:
    """Return a model whose matrices, but those of embeddings and routers, are those of their codes."""
    model = copy.deepcopy(model)
    for module in model.modules():
        kind = type(module).__name__
        in_out = kind in ("Conv1D", "Llama4TextExperts") or bool(vars(module).get("is_transposed"))
        for name, weight in module.named_parameters(recurse=False):
            if (kind == "Linear" or kind in FUSED) and "bias" not in name:
                data = weight.data.transpose(-1, -2) if in_out else weight.data
                rows = data.reshape(-1, data.shape[-1])
                codes = zp.quantize(rows, scheme).dequantize().reshape(data.shape)
                weight.data = codes.transpose(-1, -2) if in_out else codes
    return model


def test_each_layer_has_the_codes_of_its_own_matrix(model: nn.Module) -> None:
    conversion = quantize_model(model, "w4a16")
    assert FUSED.isdisjoint(layer.type for layer in conversion.layers)
    with unfused(model):
        names = {name for name in linears(model) if name != "lm_head" or not model.config.tie_word_embeddings}
    assert set(linears(conversion.model, QuantizedLinear)) == names
    expected = dequantized(model, "int4:g128")
    if model.config.tie_word_embeddings:
        expected.load_state_dict({**expected.state_dict(), "lm_head.weight": model.lm_head.weight})
    torch.testing.assert_close(run(conversion.model), run(expected), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(run(model), run(expected), rtol=1e-3, atol=1e-3)


def test_memory_drops(model: nn.Module) -> None:
    conversion = quantize_model(model, "w8a8", inplace=True)
    layers = [layer for layer in conversion.layers if layer.gives is not None]
    assert len(layers) >= 8
    state = conversion.model.state_dict().values()
    held = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in state}
    assert sum(held.values()) <= 1.1 * sum(layer.nbytes[1] for layer in conversion.layers)


def test_what_was_prepared_trains_and_converts(model: nn.Module, tmp_path: Path) -> None:
    with torch.no_grad():
        prepared = prepare(model, "w4a8", qat="lsq").train()
    run(prepared).square().mean().backward()
    weights = {name: p for name, p in prepared.named_parameters() if ".layer.weight" in name}
    assert len(weights) >= 8
    assert sum(p.grad is not None and bool(p.grad.any()) for p in weights.values()) > len(weights) / 2
    assert all(p.is_contiguous() and p.requires_grad for p in weights.values())
    torch.optim.SGD(prepared.parameters(), 0.1).step()
    save_file({name: p.detach() for name, p in weights.items()}, tmp_path / "weights.safetensors")
    assert all(torch.equal(load_file(tmp_path / "weights.safetensors")[n], p) for n, p in weights.items())
    converted = convert(prepared.eval()).model
    # Codes of inputs that are rounded otherwise by a product before may be the neighboring ones.
    torch.testing.assert_close(run(converted), run(prepared), rtol=2e-2, atol=2e-3)
    file = io.BytesIO()
    torch.save(converted, file)
    file.seek(0)
    assert torch.equal(run(torch.load(file, weights_only=False)), run(converted))


def test_experts_next_to_one_that_a_rule_names_own_their_memory() -> None:
    model = made(mixtral)
    expected, place = run(model), "model.layers.0.mlp.experts"
    rules = Recipe(
        rules=(Rule(name=f"{place}.down_proj.2", gives=model_preset("w8a16")),), default=Rule(gives=None)
    )
    conversion = quantize_model(model, rules, inplace=True)
    experts = conversion.model.get_submodule(place)
    assert type(experts) is SplitExperts
    assert type(experts.get_submodule("down_proj.2")) is QuantizedLinear
    other = experts.get_submodule("down_proj.1").get_parameter("weight")
    assert other.untyped_storage().nbytes() == other.nbytes
    assert type(conversion.model.get_submodule("model.layers.1.mlp.experts")).__name__ == "MixtralExperts"
    torch.testing.assert_close(run(conversion.model), expected, rtol=1e-2, atol=1e-2)  # 8 bits of one matrix


@pytest.mark.parametrize("make", EXPERTS.values(), ids=EXPERTS)
def test_calibration_sees_what_each_expert_reads(make: Callable[[], nn.Module]) -> None:
    model, data = made(make), [{"input_ids": row} for row in IDS.split(1)]
    found = calibrate(model, "w8a8_static", data)
    seen: dict[str, list[torch.Tensor]] = {}
    with unfused(model), torch.no_grad():
        for name, module in linears(model).items():
            module.register_forward_pre_hook(
                lambda _, args, name=name: seen.setdefault(name, []).append(args[0])
            )
        for batch in data:
            model(**batch)
    assert {f"{name}.input" for name in seen} == set(found.params)
    for name, inputs in seen.items():
        whole = torch.cat([x.reshape(-1) for x in inputs])
        params = found.params[f"{name}.input"]
        assert params.scales[0].item() == zp.choose_params(whole, str(params.scheme)).scales[0].item(), name
    model = made(make)
    if make is not nemotron:  # whose layers take what is no tensor
        assert calibrate_sequential(model, "w8a8_static", data) == found


def test_an_expert_that_no_token_reaches_has_the_largest_inputs_of_the_others() -> None:
    found = calibrate(made(mixtral), "w8a8_static", [{"input_ids": IDS[:1, :1]}])
    assert found.borrowed
    for layer in found.borrowed:
        stem = layer.rpartition(".")[0]
        scales = {
            name: params.scales[0].item()
            for name, params in found.params.items()
            if name.startswith(f"{stem}.")
        }
        reached = [
            scale for name, scale in scales.items() if name.removesuffix(".input") not in found.borrowed
        ]
        assert scales[f"{layer}.input"] == max(reached)
    assert calibrate(made(mixtral), "w8a8_static", [{"input_ids": IDS}]).borrowed == ()


def test_an_expert_that_no_token_reaches_has_the_statistics_of_the_others_together() -> None:
    recipe = parse_recipe("default: 'int4:g32'\nmethod: mse_weighted")
    found = calibrate(made(mixtral), recipe, [{"input_ids": IDS[:1, :1]}])
    assert found.borrowed
    counts = {name: int(known["mean_square"]["vectors"]) for name, known in found.statistics.items()}
    for layer in found.borrowed:
        stem = layer.rpartition(".")[0]
        others = [name for name in counts if name.startswith(f"{stem}.") and name not in found.borrowed]
        assert counts[layer] == sum(counts[name] for name in others) > 0


@pytest.fixture
def lonely() -> Iterator[nn.Module]:
    model = made(mixtral)
    yield model
    assert not linears(model, SplitExperts)


def test_experts_with_hooks_stay_and_say_so(lonely: nn.Module) -> None:
    lonely.get_submodule("model.layers.0.mlp.experts").register_forward_hook(lambda *_: None)
    reported = {layer.name: layer.reason for layer in quantize_model(lonely, "w8a8").layers}
    assert "hooks" in reported["model.layers.0.mlp.experts"]
    assert "model.layers.1.mlp.experts.down_proj.3" in reported


@pytest.mark.parametrize("change", ["parallel", "more"])
def test_experts_of_another_build_stay_and_say_so(lonely: nn.Module, change: str) -> None:
    experts = lonely.get_submodule("model.layers.0.mlp.experts")
    if change == "parallel":
        vars(experts)["_is_expert_parallel"] = True
    else:
        experts.register_parameter("scale", nn.Parameter(torch.ones(4)))
    reported = {layer.name: layer.reason for layer in quantize_model(lonely, "w8a8").layers}
    assert reported["model.layers.0.mlp.experts"] == "MixtralExperts has no quantized form"
    assert "model.layers.1.mlp.experts.down_proj.3" in reported


class Stacked(nn.Module):
    """A module that multiplies with a stack of matrices of as many experts."""

    forward: Callable[..., torch.Tensor]

    def __init__(self, forward: Callable[..., torch.Tensor], experts: int = 3) -> None:
        super().__init__()
        self.num_experts = experts
        self.weight = nn.Parameter(torch.randn(3, 4, 4, generator=torch.Generator().manual_seed(1)))
        self.bias = nn.Parameter(torch.ones(3, 4))
        type(self).forward = forward


def one_by_one(self: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.stack([nn.functional.linear(x[n], self.weight[n], self.bias[n]) for n in range(3)])


def flipped(self: Any, x: torch.Tensor) -> torch.Tensor:
    assert self.weight.transpose(1, 2).shape == (3, 4, 4)
    return torch.bmm(x, self.weight.transpose(1, 2)) + self.bias[:, None]


def by_operators(self: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.stack([x[n] @ self.weight[n].t() + self.bias[n] for n in range(3)])


def as_methods(self: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.stack([x[n].matmul(self.weight.mT[n]) for n in range(3)])


def some(self: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.cat([x[:2] @ self.weight[:2], x[2:] @ self.weight[2:].mT])


def scaled(self: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.bmm(x, self.weight * 2)


def gathered(self: Any, x: torch.Tensor) -> torch.Tensor:
    chosen = self.weight
    return torch.bmm(x, chosen[torch.tensor([2, 1, 0])])


@functools.wraps(flipped)
def decorated(self: Any, x: torch.Tensor) -> torch.Tensor:
    return scaled(self, x)


@pytest.mark.parametrize("forward", [one_by_one, flipped, by_operators])
def test_a_stack_of_matrices_is_unfused_where_the_source_says_how_it_multiplies(
    forward: Callable[..., torch.Tensor],
) -> None:
    module, x = Stacked(forward), torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(2))
    x[1, 2:] = 0
    expected, seen = module(x), list[int]()
    with unfused(module) as root:
        for name, layer in linears(root).items():
            assert torch.equal(layer.get_parameter("weight"), module.weight[int(name[-1])])
            layer.register_forward_pre_hook(lambda _, args: seen.append(len(args[0])))
        torch.testing.assert_close(root(x), expected)
    assert seen == ([5, 2, 5] if forward is flipped else [5, 5, 5])
    assert torch.equal(module(x), expected)


def test_a_quantized_stack_of_matrices_is_compiled_and_exported() -> None:
    x = torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(2))
    x[1, 2:] = 0
    model = quantize_model(nn.Sequential(Stacked(flipped)), "int8:channel").model
    expected = model(x)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x), expected)
    torch.testing.assert_close(torch.export.export(model, (x,)).module()(x), expected)


@pytest.mark.parametrize("forward", [as_methods, some, scaled, gathered, decorated])
def test_a_stack_of_matrices_that_is_used_otherwise_stays(forward: Callable[..., torch.Tensor]) -> None:
    with unfused(Stacked(forward)) as root:
        assert not linears(root)


def test_a_stack_of_matrices_of_no_experts_stays() -> None:
    with unfused(Stacked(flipped, experts=2)) as root:
        assert not linears(root)


def test_what_lies_next_to_the_layers_keeps_its_name_and_is_moved_and_copied_with_them() -> None:
    whole = made(gpt_oss).get_submodule("model.layers.0.mlp.experts")
    vars(whole)["has_post_expert_norm"] = True
    whole.add_module("post_expert_norm", nn.LayerNorm(64))
    split, expected = SplitExperts(whole), whole(*ROUTED)
    torch.testing.assert_close(split(*ROUTED), expected)
    assert [name for name, _ in split.named_children()] == ["post_expert_norm", "gate_up_proj", "down_proj"]
    other = copy.deepcopy(split).double()
    split.post_expert_norm = nn.Identity()
    assert (split(*ROUTED) - expected).abs().max() > 0.1
    x, chosen, weights = ROUTED
    found = other(x.double(), chosen, weights.double())
    torch.testing.assert_close(found, expected.double(), atol=1e-5, rtol=1e-5)


def test_arguments_may_be_named() -> None:
    x, chosen, weights = ROUTED
    split = SplitExperts(made(gpt_oss).get_submodule("model.layers.0.mlp.experts"))
    expected = split(*ROUTED)
    assert torch.equal(split(x, routing_weights=weights, router_indices=chosen), expected)
    none = torch.tensor([[4, 1], [3, 1], [2, 0], [1, 3], [0, 2]])
    found = split(x, none, weights)
    torch.testing.assert_close(found[1:], expected[1:])
    assert (found[0] - expected[0]).abs().max() > 0.01


@pytest.mark.parametrize("preset", ["w4a16", "mxfp4"])
def test_graphs_take_the_same_layers_of_conv1d(preset: str) -> None:
    layer = transformers.pytorch_utils.Conv1D
    net = nn.Sequential(layer(48, 32), nn.ReLU(), layer(64, 48)).eval()
    x = torch.randn(FEW_ROWS + 1, 32)
    eager, program = quantize_model(net, preset), torch.export.export(net, (x,))
    graph = quantize_graph(program, preset)
    reported = [
        [(layer.name, layer.type, layer.shape, layer.nbytes) for layer in r.layers] for r in (graph, eager)
    ]
    assert reported[0] == [layer for layer in reported[1] if layer[1] != "ReLU"]
    with torch.no_grad():
        assert torch.equal(graph.model(x), eager.model(x))


class Past(nn.Module):
    """A model that multiplies with the weight of its layer itself."""

    def __init__(self, multiply: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layer, self.multiply = nn.Linear(16, 4), multiply

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.multiply(self.layer.weight, x)


@pytest.mark.parametrize(
    "multiply",
    [
        lambda weight, x: weight @ x.t(),
        lambda weight, x: x.t() * weight,
        lambda weight, x: nn.functional.linear(x, weight),
        lambda weight, x: torch.matmul(input=weight, other=x.t()),
    ],
)
def test_a_model_that_uses_a_weight_itself_is_refused_with_what_to_do(
    multiply: Callable[[Any, torch.Tensor], torch.Tensor],
) -> None:
    model = quantize_model(Past(multiply), "w8a16").model
    assert model.layer.weight.device == torch.device("cpu")
    reported = r"packed weight \(int8:g128:\S+, shape=\(4, 16\)\) is not a tensor.*leave that layer out by"
    with pytest.raises(UnsupportedError, match=reported):
        model(torch.ones(4, 16))
    with pytest.raises(
        CalibrationError, match=r"layer.input received no calibration data.*keep the layer by a rule"
    ):
        calibrate(Past(lambda weight, x: x @ weight.t()), "w8a8_static", [torch.ones(2, 16)])
