"""Quantizers survive what is done to modules: states, copies, pickling, dtypes, processes, compilers."""

import copy
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.processes import run_two
from tests.training import ddp_run

import zeropoint as zp
from zeropoint.training import FakeQuantize, LearnedScale, LearnedThreshold, Pact, Quantizer, ThresholdRule

pytestmark = pytest.mark.rotating

SHAPE = (4, 32)


def sample(dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed)).to(dtype)


MAKERS = {
    "fixed int8": lambda x: FakeQuantize.from_tensor(x, "int8:channel"),
    "fixed uint4": lambda x: FakeQuantize.from_tensor(x, "uint4:g8:asym"),
    "fixed mxfp4": lambda x: FakeQuantize.from_tensor(x, "mxfp4"),
    "fixed nvfp4": lambda x: FakeQuantize.from_tensor(x, "nvfp4"),
    "fixed mx9": lambda x: FakeQuantize.from_tensor(x, "mx9"),
    "fixed stochastic": lambda x: FakeQuantize.from_tensor(x, "int4:tensor:round=stochastic(3)"),
    "stochastic scale": lambda x: LearnedScale.from_tensor(x, "int4:channel:round=stochastic(3)"),
    "scale": lambda x: LearnedScale.from_tensor(x, "int4:channel"),
    "scale and zero point": lambda x: LearnedScale.from_tensor(x, "uint4:g8:asym"),
    "scale and offset": lambda x: LearnedScale.from_tensor(x, "uint4:channel:asym=real"),
    "narrow scale": lambda x: LearnedScale.from_tensor(x, "int4:channel:scale=bfloat16"),
    "threshold": lambda x: LearnedThreshold.from_tensor(x, "int4:channel", ThresholdRule.THREE_SD),
    "e8m0 threshold": lambda x: LearnedThreshold.from_tensor(x, "int4:tensor:scale=ceil"),
    "clip": lambda x: Pact("uint4", x.abs().max().item()),
}


@pytest.fixture(params=MAKERS)
def made(request: pytest.FixtureRequest) -> tuple[str, Quantizer]:
    return request.param, MAKERS[request.param](sample())


def trained(quantizer: Quantizer, x: torch.Tensor) -> list[torch.Tensor]:
    """Return the result and every gradient of one step."""
    leaf = x.clone().requires_grad_()
    quantizer.zero_grad()
    y = quantizer(leaf)
    y.square().sum().backward()
    return [y.detach(), leaf.grad, *(parameter.grad.clone() for parameter in quantizer.parameters())]


def assert_alike(one: Quantizer, other: Quantizer) -> None:
    assert one.params == other.params
    for mine, theirs in zip(trained(one, sample(seed=1)), trained(other, sample(seed=1)), strict=True):
        assert torch.equal(mine, theirs)


def test_a_state_restores_the_exact_parameters(made: tuple[str, Quantizer], tmp_path: Path) -> None:
    name, quantizer = made
    other = MAKERS[name](sample(seed=5) * 3)
    assert other.params != quantizer.params
    save_file({key: value.contiguous() for key, value in quantizer.state_dict().items()}, tmp_path / "state")
    other.load_state_dict(load_file(tmp_path / "state"))
    assert_alike(quantizer, other)


@pytest.mark.parametrize("name", ["fixed stochastic", "stochastic scale"])
def test_a_state_restores_the_seed_of_stochastic_rounding(name: str) -> None:
    one, other = (MAKERS[name](sample()) for _ in range(2))
    one.reseed(77)
    assert not torch.equal(one(sample()), other(sample()))
    assert torch.equal(one(sample()), zp.quantize(sample(), one.params).dequantize())
    other.load_state_dict(one.state_dict())
    assert_alike(one, other)
    assert other.scheme.rounding.seed == 77


def test_a_deep_copy_is_alike_and_of_its_own(made: tuple[str, Quantizer]) -> None:
    _, quantizer = made
    other = copy.deepcopy(quantizer)
    assert_alike(quantizer, other)
    with torch.no_grad():
        for tensor in (*other.parameters(), *other.buffers()):
            tensor.zero_()
    assert other.params != quantizer.params


def test_pickling_keeps_everything(made: tuple[str, Quantizer]) -> None:
    _, quantizer = made
    quantizer.enabled = False
    other = pickle.loads(pickle.dumps(quantizer))
    assert not other.enabled
    quantizer.enabled = other.enabled = True
    assert_alike(quantizer, other)


@pytest.mark.crossed
@pytest.mark.parametrize("convert", [torch.nn.Module.half, torch.nn.Module.bfloat16, torch.nn.Module.double])
def test_a_model_of_another_dtype_keeps_the_exact_parameters(
    made: tuple[str, Quantizer], convert: object
) -> None:
    """Scales stay what they are, and 16-bit data is quantized with them."""
    _, quantizer = made
    model = torch.nn.Sequential(torch.nn.Linear(32, 32), copy.deepcopy(quantizer))
    convert(model)
    assert model[0].weight.dtype != torch.float32
    assert model[1].params == quantizer.params
    x = sample(model[0].weight.dtype)
    assert torch.equal(model[1](x), quantizer(x))
    assert model[1](x).dtype == x.dtype


def test_a_state_is_loaded_strictly() -> None:
    """Another scheme, dtype, shape or value, and names missing or unknown, are all refused."""
    model = torch.nn.ModuleDict({"inner": MAKERS["fixed uint4"](sample())})
    state = model.state_dict()
    wrong = {
        r"quantizer inner: scheme of the state \(uint4:g16:asym\) must be that of the module, uint4": {
            "inner._extra_state": FakeQuantize.from_tensor(sample(), "uint4:g16:asym").get_extra_state()
        },
        r"quantizer inner: scale1 \(dtype torch.float64\) must be torch.float32 to be loaded": {
            "inner.scale1": state["inner.scale1"].double()
        },
        r"quantizer inner: scale 1 \(=-1.0\) of block \(0, 0\) must be finite and at least": {
            "inner.scale1": -torch.ones(4, 4)
        },
        r"quantizer inner: zero_point \(=99\) of block \(0, 0\) must lie in 0..15": {
            "inner.zero_point": torch.full((4, 4), 99, dtype=torch.int32)
        },
        r"quantizer inner: scale 1 \(shape \(4, 3\)\) must have shape \(4, 4\)": {
            "inner.scale1": torch.ones(4, 3)
        },
        r"Unexpected key.*inner.scale2": {"inner.scale2": torch.ones(4, 4)},
    }
    before = {key: value.clone() for key, value in state.items()}
    for message, change in wrong.items():
        with pytest.raises(RuntimeError, match=message):
            model.load_state_dict({**state, **change})
    for key in state:
        with pytest.raises(RuntimeError, match=f"Missing key.*{key}"):
            model.load_state_dict({k: v for k, v in state.items() if k != key})
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    model.load_state_dict(state)


@pytest.mark.parametrize("name", ["scale", "threshold", "clip"])
def test_a_learned_parameter_of_another_dtype_or_shape_is_refused(name: str) -> None:
    quantizer = MAKERS[name](sample())
    key = next(iter(dict(quantizer.named_parameters())))
    state = quantizer.state_dict()
    with pytest.raises(
        RuntimeError, match=rf"quantizer \(the module itself\): {key} \(dtype torch.float64\) must be"
    ):
        quantizer.load_state_dict({**state, key: state[key].double()})
    with pytest.raises(RuntimeError, match="size mismatch for"):
        quantizer.load_state_dict({**state, key: torch.ones(3, 3)})


# Tracing an autograd function, dynamo makes an instance of its class, of which torch itself warns (2.13).
DYNAMO = pytest.mark.filterwarnings("ignore:<class 'torch.autograd.function.Function'> should not be instan")


@DYNAMO
# inductor itself needs a C++ compiler; aot_eager runs the same traced graphs without one.
def test_a_compiled_step_is_the_eager_one_without_graph_breaks(made: tuple[str, Quantizer]) -> None:
    _, quantizer = made
    torch.compiler.reset()
    eager = trained(quantizer, sample(seed=1))
    compiled = torch.compile(quantizer, fullgraph=True, backend="aot_eager")
    for mine, theirs in zip(trained(compiled, sample(seed=1)), eager, strict=True):
        assert torch.equal(mine, theirs)


def test_a_compiled_quantizer_follows_the_switch_and_new_parameters() -> None:
    torch.compiler.reset()
    quantizer = FakeQuantize.from_bits(4)
    compiled = torch.compile(quantizer, fullgraph=True, backend="aot_eager")
    x = torch.tensor([0.3, 5.2])
    assert compiled(x).tolist() == [0.0, 5.0]
    quantizer.update_params(2.0)
    assert compiled(x).tolist() == [0.0, 6.0]
    quantizer.enabled = False
    assert torch.equal(compiled(x), x)


@DYNAMO
@pytest.mark.parametrize("name", ["fixed stochastic", "stochastic scale"])
def test_a_compiled_quantizer_follows_new_seeds(name: str) -> None:
    torch.compiler.reset()
    quantizer = MAKERS[name](sample())
    compiled = torch.compile(quantizer, fullgraph=True, backend="aot_eager")
    results = []
    for seed in (1, 2, 1):
        quantizer.reseed(seed)
        results.append(compiled(sample()))
        assert torch.equal(results[-1], quantizer(sample()))
    assert not torch.equal(results[0], results[1])


def test_export_keeps_the_quantizer_in_the_graph() -> None:
    quantizer = FakeQuantize.from_tensor(sample(), "int4:channel")
    program = torch.export.export(quantizer, (sample(),), strict=True)
    assert "zeropoint.fake_quantize" in str(program.graph)
    assert torch.equal(program.module()(sample()), quantizer(sample()))


@pytest.mark.crossed
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_changes_no_number_of_a_quantizer(made: tuple[str, Quantizer], dtype: torch.dtype) -> None:
    """16-bit outputs of autocast layers are quantized as such, float32 inputs as float32."""
    _, quantizer = made
    layer = torch.nn.Linear(32, 32)
    with torch.autocast("cpu", dtype=dtype):
        hidden = layer(sample())
        inside = [quantizer(hidden), quantizer(sample())]
        gradients = trained(quantizer, sample(seed=1))
    assert hidden.dtype == dtype
    assert torch.equal(inside[0], zp.quantize(hidden, quantizer.params).dequantize())
    assert torch.equal(inside[1], quantizer(sample()))
    for mine, theirs in zip(gradients, trained(quantizer, sample(seed=1)), strict=True):
        assert torch.equal(mine, theirs)


def test_a_second_derivative_is_refused(made: tuple[str, Quantizer]) -> None:
    """Double backward is an error, not a silent zero."""
    _, quantizer = made
    leaf = sample().requires_grad_()
    inputs = [leaf, *quantizer.parameters()]
    gradients = torch.autograd.grad(quantizer(leaf).square().sum(), inputs, create_graph=True)
    for gradient in gradients:
        with pytest.raises(RuntimeError, match=r"once_differentiable|no autograd formula was registered"):
            gradient.sum().backward(retain_graph=True)


@pytest.fixture(scope="module")
def learned_by_two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which two processes left the states of what they trained together."""
    folder = tmp_path_factory.mktemp("two")
    run_two(ddp_run.run_process, 2, str(folder))
    return folder


def states_of(folder: Path, network: type[torch.nn.Module]) -> list[dict[str, torch.Tensor]]:
    """Return the state of a network in each of the two processes."""
    return [torch.load(folder / f"{network.__name__}{rank}.pt", weights_only=True) for rank in range(2)]


def test_two_processes_learn_what_one_learns_from_the_same_data(learned_by_two: Path) -> None:
    """Gradients are averaged, and the state of the first process reaches the other."""
    states = states_of(learned_by_two, ddp_run.Network)
    alone = ddp_run.Network(seed=0)
    start = {key: value.clone() for key, value in alone.state_dict().items()}
    ddp_run.train(alone, slice(None))
    for key, value in alone.state_dict().items():
        first, second = (state[key] for state in states)
        assert torch.equal(first, second), key
        if value.dtype == torch.float64:
            # Sums of gradients in another order, over four steps.
            assert torch.allclose(first, value, rtol=1e-11, atol=1e-13), key
        else:
            assert torch.equal(first, value), key
    moved = [key for key, value in alone.named_parameters() if not torch.equal(value, start[key])]
    assert len(moved) == len(dict(alone.named_parameters())) == 7


def test_two_processes_learn_exactly_what_one_learns_where_sums_are_exact(learned_by_two: Path) -> None:
    """The order of sums is all that can set them apart."""
    alone = ddp_run.DyadicNetwork(seed=0)
    start = {key: value.clone() for key, value in alone.state_dict().items()}
    ddp_run.train_dyadic(alone, slice(None))
    states = states_of(learned_by_two, ddp_run.DyadicNetwork)
    for key, value in alone.state_dict().items():
        assert all(torch.equal(state[key], value) for state in states), key
    moved = [key for key, value in alone.named_parameters() if not torch.equal(value, start[key])]
    assert len(moved) == len(dict(alone.named_parameters())) == 6
