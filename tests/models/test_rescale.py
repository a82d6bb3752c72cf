"""Channels that are rescaled: what absorbs them, and that models stay what they are."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from tests.oracles import tiny_models
from tests.peers import transformers
from torch import nn

import zeropoint as zp
from zeropoint.methods import method_named
from zeropoint.methods.channels import numbers_of
from zeropoint.models import Steps
from zeropoint.models.absorbers import Absorber, BlockProbe, absorber_of
from zeropoint.models.rescale import ChannelFold, folded, rescalable, two_sided
from zeropoint.models.sites import sites_of
from zeropoint.models.solutions import Solved, WeightTask
from zeropoint.models.solving import solve
from zeropoint.models.unfuse import unfused
from zeropoint.schemes import Scheme

pytestmark = pytest.mark.rotating

SMALL: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "vocab_size": 64, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
GROUPED = {**SMALL, "num_key_value_heads": 2, "bos_token_id": 0, "eos_token_id": 1}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", GROUPED),
    "gemma3": ("Gemma3TextConfig", {**GROUPED, "head_dim": 16}),
    "phi3": ("Phi3Config", GROUPED),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        {**GROUPED, **EXPERTS, "shared_expert_intermediate_size": 32, "decoder_sparse_step": 1},
    ),
    "opt": (
        "OPTConfig",
        {**SMALL, "ffn_dim": 96, "word_embed_proj_dim": 64, "bos_token_id": 0, "eos_token_id": 1},
    ),
    "qwen3_next": (
        "Qwen3NextConfig",
        {
            **GROUPED, **EXPERTS, "head_dim": 16, "shared_expert_intermediate_size": 32,
            "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16,
            "linear_value_head_dim": 16, "layer_types": ["full_attention", "linear_attention"],
        },
    ),
    "bert": ("BertConfig", SMALL),
}  # fmt: skip


def model_of(name: str) -> nn.Module:
    """A model whose norms and biases are not those of a fresh one, with experts that differ."""
    torch.manual_seed(0)
    kind, options = CONFIGS[name]
    auto = transformers.AutoModel if name == "bert" else transformers.AutoModelForCausalLM
    model: nn.Module = auto.from_config(getattr(transformers, kind)(**options)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
            else:
                parameter.mul_(4)
    return model


def tokens(windows: int = 1, seed: int = 0) -> torch.Tensor:
    return torch.randint(2, 64, (windows, 48), generator=torch.Generator().manual_seed(seed))


def absorbers(model: nn.Module, block: str) -> dict[str, Absorber | None]:
    """The absorber of each site of a block, by the last parts of the names of its first reader."""
    given: dict[str, Any] = {}
    with unfused(model) as root, torch.no_grad():
        own = root.get_submodule(block)

        def keep(module: nn.Module, args: Any, named: Any) -> None:
            given.update(args=args, named=named)

        handle = own.register_forward_pre_hook(keep, with_kwargs=True)
        root.config.use_cache = False
        root(input_ids=tokens())
        handle.remove()

        def run() -> Any:
            return own(*given["args"], **given["named"])

        probe = BlockProbe(run, rescalable(own))
        readers = {name: probe.modules[name] for name in two_sided(probe.modules)}
        return {site.readers[0]: absorber_of(site, probe) for site in sites_of(run, readers, ())}


def test_norms_values_and_gated_products_absorb() -> None:
    found = absorbers(model_of("llama"), "model.layers.1")
    named = {name: (own.name, own.one, own.readers) for name, own in found.items() if own is not None}
    assert named == {
        "self_attn.q_proj": (
            "input_layernorm",
            0.0,
            ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        ),
        "self_attn.o_proj": ("self_attn.v_proj", 0.0, ("self_attn.o_proj",)),
        "mlp.gate_proj": ("post_attention_layernorm", 0.0, ("mlp.gate_proj", "mlp.up_proj")),
        "mlp.down_proj": ("mlp.up_proj", 0.0, ("mlp.down_proj",)),
    }
    values = found["self_attn.o_proj"]
    assert values is not None
    head = torch.arange(16)
    assert torch.equal(values.place, torch.cat([head, head, head + 16, head + 16]))  # two heads read one


def test_a_norm_that_adds_one_is_found_by_what_it_does() -> None:
    found = absorbers(model_of("gemma3"), "model.layers.1")
    ones = {own.name: own.one for own in found.values() if own is not None}
    assert ones == {
        "input_layernorm": 1.0, "self_attn.v_proj": 0.0, "pre_feedforward_layernorm": 1.0, "mlp.up_proj": 0.0,
    }  # fmt: skip


def test_the_last_rows_of_fused_projections_absorb() -> None:
    found = absorbers(model_of("phi3"), "model.layers.0")
    rows = {own.name: own.first for own in found.values() if own is not None}
    assert rows == {
        "input_layernorm": 0, "self_attn.qkv_proj": 96, "post_attention_layernorm": 0, "mlp.gate_up_proj": 96,
    }  # fmt: skip


def test_routers_gates_and_experts_read_what_a_norm_gives() -> None:
    found = absorbers(model_of("qwen2_moe"), "model.layers.0")
    own = found["mlp.shared_expert.gate_proj"]
    assert own is not None
    assert own.name == "post_attention_layernorm"
    experts = {f"mlp.experts.gate_up_proj.{n}" for n in range(4)}
    assert {"mlp.gate", "mlp.shared_expert_gate", "mlp.shared_expert.up_proj", *experts} < set(own.readers)
    each = found["mlp.experts.down_proj.2"]
    assert each is not None
    assert (each.name, each.first, each.readers) == (
        "mlp.experts.gate_up_proj.2",
        32,
        ("mlp.experts.down_proj.2",),
    )


def test_a_function_that_does_not_pass_a_factor_on_absorbs_nothing() -> None:
    found = absorbers(model_of("bert"), "encoder.layer.0")
    assert found["output.dense"] is None  # behind a GELU
    assert found["attention.self.query"] is None  # of a norm in the block before
    assert found["attention.output.dense"] is not None


class Block(nn.Module):
    """A block that adds little to what it is given, of which a part reads a norm without a weight."""

    def __init__(self, share: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.up, self.share = nn.RMSNorm(16), nn.Linear(16, 16), share

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        return x + 1e-5 * (self.up(y) + self.share * y.roll(1, -1))


@pytest.mark.parametrize("share", [0.0, 0.01])
def test_a_reader_without_a_weight_counts_however_little_the_block_adds(share: float) -> None:
    block, x = Block(share).double(), torch.randn(32, 16, dtype=torch.float64) * 100
    with torch.no_grad():
        probe = BlockProbe(lambda: block(x), rescalable(block))
        (site,) = sites_of(lambda: block(x), {"up": block.up}, ())
        found = absorber_of(site, probe)
    assert (found is None) == (share > 0)


def test_a_weight_that_two_modules_share_absorbs_nothing() -> None:
    model = nn.Sequential(nn.RMSNorm(4), nn.Linear(4, 4), nn.RMSNorm(4))
    assert list(rescalable(model)) == ["0", "1", "2"]
    model[2].weight = model[0].weight
    assert list(rescalable(model)) == ["1"]


def rescaled(model: nn.Module, method: str, steps: Steps | None = None) -> dict[str, ChannelFold]:
    """What a method folds into a model."""
    into, made = Solved(), method_named(method)
    with unfused(model) as root:
        tasks = [
            WeightTask(name=name, layer=name, scheme=Scheme.parse("int3:g32"), method=made)
            for name, module in root.named_modules()
            if type(module) is nn.Linear and name != "lm_head"
        ]
        solve(root, [{"input_ids": tokens(2, n)} for n in range(8)], tasks, steps or Steps(), into)
    return {name: fold for block in into.rescaled.values() for name, fold in block.folds.items()}


def test_channels_without_a_place_in_files_keep_their_scale_and_others_do_not() -> None:
    model = uneven()
    every = rescaled(model, "smooth+mse")

    def storable(folds: Mapping[str, ChannelFold]) -> bool:
        return not any("input_layernorm" in name for name in folds)

    some = rescaled(model, "smooth+mse", Steps(storable=storable))
    assert any("input_layernorm" in name for name in every)
    assert some
    assert not any("input_layernorm" in name for name in some)
    assert {name for name in every if ".mlp." in name} <= some.keys()


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_a_model_with_rescaled_channels_gives_the_same_outputs(name: str) -> None:
    model = model_of(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    folds = rescaled(model, "equalize+awq+mse_weighted")
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert folds
    unseen = tokens(4, 99)
    with torch.no_grad(), unfused(model) as root:
        wanted = root(input_ids=unseen)[0]
        with folded(root, folds):
            assert any(not torch.equal(root.get_parameter(key), before.get(key, wanted)) for key in folds)
            found = root(input_ids=unseen)[0]
    assert float((found - wanted).norm() / wanted.norm()) < 1e-4


def uneven() -> nn.Module:
    """A model in which the inputs of layers have sizes that differ, and the columns that read them, too."""
    model = tiny_models.llama(layers=3, initializer_range=0.15)
    torch.manual_seed(1)
    with torch.no_grad():
        for layer in model.model.layers:
            attention, mlp = layer.self_attn, layer.mlp
            for norm, readers in (
                (layer.input_layernorm, (attention.q_proj, attention.k_proj, attention.v_proj)),
                (layer.post_attention_layernorm, (mlp.gate_proj, mlp.up_proj)),
            ):
                factor = torch.exp(torch.randn(norm.weight.shape) * 1.2)
                norm.weight.mul_(factor)
                for reader in readers:
                    reader.weight.div_(factor.sqrt())
    return model


def divergence(model: nn.Module, scheme: str, method: str) -> float:
    vocabulary = model.config.vocab_size
    draw = torch.Generator().manual_seed(9)
    batches = [torch.randint(0, vocabulary, (2, 32), generator=draw) for _ in range(8)]
    unseen = torch.randint(0, vocabulary, (8, 32), generator=draw)
    conversion = zp.quantize_model(model, scheme, method=method, ignore="lm_head", calibration=batches)
    with torch.no_grad():
        p, q = (each(unseen).logits.double().log_softmax(-1) for each in (model, conversion.model))
    return float((p.exp() * (p - q)).sum(-1).mean())


@pytest.mark.parametrize(("step", "scheme"), [("awq", "int4:g32"), ("smooth", "w8a8"), ("equalize", "w4a8")])
def test_each_step_brings_the_outputs_of_an_uneven_model_closer(step: str, scheme: str) -> None:
    model = uneven()
    assert divergence(model, scheme, f"{step}+gptq") < 0.9 * divergence(model, scheme, "gptq")


def test_steps_are_numbers_of_the_one_grid() -> None:
    assert numbers_of(torch.tensor([-8, 0, 4, 16])).tolist() == [0.5, 1.0, 2**0.5, 4.0]
    one = ChannelFold(rows=torch.tensor([8]), one=1.0)
    assert one.of(torch.tensor([0.5])).tolist() == [2.0]  # (1 + w) 2 - 1
    both = one.then(ChannelFold(rows=torch.tensor([-8]), columns=torch.tensor([0])))
    assert both.of(torch.tensor([[0.5]])).tolist() == [[0.5]]


def test_a_parameter_that_overflows_is_refused_and_nothing_changes() -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False)).half()
    model[0].weight.data.fill_(60000.0)
    fold = {"0.weight": ChannelFold(columns=torch.tensor([0, 8]))}
    with pytest.raises(zp.CalibrationError, match=r"0\.weight overflows"), folded(model, fold):
        pass
    assert bool((model[0].weight == 60000.0).all())


def test_a_single_weight_cannot_be_rescaled() -> None:
    with pytest.raises(zp.CalibrationError, match=r"rescales channels .* pass calibration"):
        zp.quantize_model(nn.Sequential(nn.Linear(64, 64)), "w8a8", method="smooth+nearest")
