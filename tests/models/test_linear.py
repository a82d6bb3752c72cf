"""QuantizedLinear: the ways in which it computes agree, say why they are taken, and are seen by compilers."""

import copy
import pickle

import pytest
import torch
from torch import nn

import zeropoint as zp
from zeropoint.errors import DtypeError, RecipeError, ShapeError
from zeropoint.models import (
    DynamicQuantize,
    QuantizedLinear,
    calibrate,
    integer_product,
    linear_paths,
    quantize_model,
)
from zeropoint.models.linear_paths import FEW_ROWS, MANY_ROWS, PATHS
from zeropoint.recipes import Assignment, Recipe, Rule

BY_NAME = {path.name: path for path in PATHS}
STATIC = Assignment.of(weight="int8:channel", input="uint8:tensor:asym static")


def converted(
    weight: str,
    source: str | None = None,
    *,
    shape: tuple[int, int] = (32, 64),
    dtype: torch.dtype = torch.float32,
) -> QuantizedLinear:
    """Return a random layer under two schemes; static inputs are calibrated on a random batch."""
    torch.manual_seed(0)
    recipe = Recipe(default=Rule(gives=Assignment.of(weight=weight, input=source)))
    layer = nn.Sequential(nn.Linear(shape[1], shape[0]).to(dtype))
    known = (
        calibrate(layer, recipe, [torch.randn(64, shape[1]).to(dtype)])
        if "static" in (source or "")
        else None
    )
    found = quantize_model(layer, recipe, calibration=known).model[0]
    assert isinstance(found, QuantizedLinear)
    return found


@pytest.mark.crossed
@pytest.mark.parametrize(
    ("weight", "source"),
    [
        ("int8:channel:narrow", "int8:token"),
        ("int8:channel", "uint8:token:asym"),
        ("int8:channel", "uint8:tensor:asym static"),
        ("int8:channel", "int8:tensor:narrow:scale=ceil static"),
        ("int4:g32", "int8:token"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_all_ways_that_are_open_give_the_same(weight: str, source: str, dtype: torch.dtype) -> None:
    layer, x = converted(weight, source, dtype=dtype), torch.randn(3, 20, 64).to(dtype)
    values = layer.weight.quantized().dequantize(torch.float32).double()
    quantizer, bias = layer.input_quantizer, layer.bias
    assert quantizer is not None
    assert bias is not None
    with torch.no_grad():
        # Half-precision values of codes are rounded before torch's product; in ours the codes are exact.
        wide = quantizer(x).double() if dtype == torch.float32 else None
        for name, path in BY_NAME.items():
            if path.refusal(layer) is None and path.takes(layer, x):
                found = path.prepare(layer)(x)
                assert (found.dtype, found.shape) == (dtype, (3, 20, 32)), name
                if wide is not None:
                    expected = wide @ values.t() + bias.double()
                    assert float((found - expected).abs().max()) < 1e-5, name
        tiles, taken = BY_NAME["dequantized tiles"].prepare(layer)(x), layer(x)
    # Half precision: 8 or 11 bits of values near 1, of the quantized input and of the output.
    near = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    assert float((tiles.double() - taken.double()).abs().max()) < near


def test_torchs_product_gives_what_ours_gives_bit_for_bit() -> None:
    layer, x = converted("int8:channel:narrow", "int8:token"), torch.randn(40, 64)
    with torch.no_grad():
        theirs = BY_NAME["torch._int_mm"].prepare(layer)(x)
        ours = BY_NAME["integer codes"].prepare(layer)(x)
    # Their sums are multiplied by the weight's scale first, as ours are.
    assert torch.equal(theirs, ours)


def test_a_product_that_saturates_is_found_out() -> None:
    def saturating(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        moved, wide = (
            nn.functional.pad(a.int() + 128, (0, a.shape[1] % 2)),
            nn.functional.pad(b.int(), (0, b.shape[1] % 2)),
        )
        pairs = moved.reshape(a.shape[0], 1, -1, 2) * wide.reshape(1, b.shape[0], -1, 2)
        return pairs.sum(3).clamp(-32768, 32767).sum(2) - 128 * wide.sum(1)

    def wrong_at_the_end(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        whole = a.shape[1] - a.shape[1] % 4
        return a[:, :whole].long() @ b[:, :whole].long().t()

    def absent(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    assert not any(map(integer_product.is_exact, (saturating, wrong_at_the_end, absent)))
    assert integer_product.is_exact(lambda a, b: a.long() @ b.long().t())
    assert integer_product.is_exact(integer_product.int_mm)


@pytest.mark.parametrize(
    ("vnni", "amx", "cols", "reason"),
    [
        (False, False, 96, "slow without VNNI"),
        (True, False, 96, None),
        (True, False, 64, "no faster without AMX"),
        (True, True, 64, None),
    ],
)
def test_torchs_product_is_used_only_where_it_is_fast(
    vnni: bool, amx: bool, cols: int, reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: vnni)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    integer_product.refusal.cache_clear()
    layer = converted("int8:channel:narrow", "int8:token", shape=(32, cols))
    assert BY_NAME["torch._int_mm"].refusal(layer) == reason
    assert layer.explain().startswith("inputs are multiplied by torch._int_mm") is (reason is None)
    monkeypatch.undo()
    integer_product.refusal.cache_clear()


def test_torchs_product_is_used_only_for_many_tokens() -> None:
    layer = converted("int8:channel:narrow", "int8:token")
    takes = BY_NAME["torch._int_mm"].takes
    assert takes(layer, torch.randn(2, MANY_ROWS // 2, 64))
    assert not takes(layer, torch.randn(MANY_ROWS - 1, 64))


@pytest.mark.parametrize(
    ("weight", "source", "reason"),
    [
        ("int3:channel", None, "the input is not quantized; not by weight codes: int3:channel is not int8"),
        ("int3:channel", "int8:token", "int3:channel is not int8 or int4"),
        ("int8:channel", "int8:tensor dynamic", "int8:tensor does not have one scale a token"),
        ("int8:channel", "int8:channel1 static", "int8:channel1 does not have one scale for the tensor"),
        ("float8_e4m3fn:channel", "float8_e4m3fn:token", "float8_e4m3fn:channel is not int8 or int4"),
    ],
)
def test_explanations_say_why_a_weight_is_dequantized(weight: str, source: str | None, reason: str) -> None:
    layer = converted(weight, source)
    reported = (
        "inputs are multiplied by dequantized panels for float32, otherwise by dequantized tiles; not by "
    )
    assert layer.explain().startswith(reported)
    assert reason in layer.explain()
    assert layer(torch.randn(3, 64)).shape == (3, 32)


def test_ways_of_the_host_are_refused_where_the_weight_is_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(integer_product, "refusal", lambda: None)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    layer = converted("int8:channel:narrow", "int8:token")
    path = BY_NAME["torch._int_mm"]
    assert path.refusal(layer) is None
    assert not path.takes(layer, torch.empty(MANY_ROWS, 64, device="meta"))
    assert "not by torch._int_mm" not in layer.explain()
    assert "not by torch._int_mm" in layer.to("meta").explain()
    assert "the data is on meta" in layer.explain()


def test_tiles_of_rows_give_what_the_whole_weight_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = converted("int8:channel", shape=(37, 64)), torch.randn(3, 64)
    run = BY_NAME["dequantized tiles"].prepare(layer)
    whole = run(x)
    monkeypatch.setattr(linear_paths, "TILE_VALUES", 5 * 64)
    torch.testing.assert_close(run(x), whole, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("weight", ["int8:channel", "int4:g32", "int4:tensor"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_few_float_tokens_are_multiplied_by_codes_of_the_weight(weight: str, dtype: torch.dtype) -> None:
    layer, x = converted(weight, dtype=dtype, shape=(33, 64)), torch.randn(6, 64).to(dtype)
    reported = (
        f"inputs are multiplied by weight codes up to {FEW_ROWS} tokens, otherwise by dequantized panels "
    )
    assert layer.explain().startswith(reported)
    takes, bias = BY_NAME["weight codes"].takes, layer.bias
    assert [takes(layer, torch.randn(rows, 64)) for rows in (0, 1, FEW_ROWS, FEW_ROWS + 1)] == [
        True,
        True,
        True,
        False,
    ]
    assert not takes(layer, torch.randn(1, 64, requires_grad=True))
    assert bias is not None
    with torch.no_grad():
        found = layer(x)
    values = layer.weight.quantized().dequantize(torch.float32).double()
    expected = x.double() @ values.t() + bias.double()
    # Sums of 64 products in float32, then one rounding to the dtype.
    allowed = 1e-6 + torch.finfo(dtype).eps * expected.abs()
    assert (found.dtype, found.shape) == (dtype, (6, 33))
    assert bool(((found.double() - expected).abs() <= allowed + 1e-6).all())


def test_inputs_that_integers_do_not_serve_take_the_tiles() -> None:
    layer = converted("int8:channel", "int8:token")
    takes = BY_NAME["integer codes"].takes
    assert takes(layer, torch.randn(2, 64))
    assert not takes(layer, torch.randn(2, 64, dtype=torch.float64))
    assert not takes(layer, torch.randn(2, 64, requires_grad=True))
    assert not takes(layer, torch.empty(2, 64, device="meta"))
    static = converted("int8:channel", "uint8:tensor:asym static")
    assert takes(static, torch.randn(2, 64))
    assert not takes(static, torch.randn(2, 64).bfloat16())
    assert isinstance(static.input_quantizer, zp.FakeQuantize)
    static.input_quantizer.enabled = False
    assert not takes(static, torch.randn(2, 64))


def test_gradients_reach_the_input_through_the_straight_through_estimator() -> None:
    layer = converted("int8:channel", "uint8:tensor:asym static")
    x = torch.randn(5, 64)
    x[0, 0] = 1e3
    with torch.no_grad():
        expected = layer(x)
    x.requires_grad_()
    y = layer(x)
    torch.testing.assert_close(y.detach(), expected, rtol=1e-5, atol=1e-5)
    y.sum().backward()
    assert x.grad is not None
    slope = layer.weight.quantized().dequantize().sum(0).expand(5, 64).clone()
    slope[0, 0] = 0.0
    torch.testing.assert_close(x.grad, slope, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("source", ["int8:token", "uint8:tensor:asym static"])
def test_exported_and_compiled_layers_run_one_operator(source: str) -> None:
    layer, x = converted("int8:channel", source), torch.randn(5, 64)
    with torch.no_grad():
        expected = layer(x)
        compiled = torch.compile(layer, backend="eager", fullgraph=True)
        assert torch.equal(compiled(x), expected)
        program = torch.export.export(
            layer, (x,), dynamic_shapes=({0: torch.export.Dim("rows", min=2, max=99)},)
        )
        called = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
        assert "zeropoint.linear.default" in called
        assert not any("fake_quantize" in target for target in called)
        more = torch.randn(8, 64)
        assert torch.equal(program.module()(more), layer(more))


def test_the_operator_passes_torchs_own_checks() -> None:
    weight = zp.quantize(torch.randn(6, 32), "int8:channel")
    args = (
        torch.randn(3, 32), [], weight.data, list(weight.scales), torch.randn(6),
        "int8:token", "int8:channel", torch.float32,
    )  # fmt: skip
    found = torch.library.opcheck(
        torch.ops.zeropoint.linear.default, args, test_utils=("test_schema", "test_faketensor")
    )
    assert found == {"test_schema": "SUCCESS", "test_faketensor": "SUCCESS"}


@pytest.mark.parametrize("source", [None, "int8:token", "uint8:tensor:asym static"])
@pytest.mark.parametrize("tokens", [2, 64])
def test_an_input_of_other_features_is_refused_in_every_way(source: str | None, tokens: int) -> None:
    layer = converted("int8:channel", source)
    for shape in ((tokens, 48), (tokens, 80), (tokens, 0)):
        message = (
            rf"^input \(shape \({tokens}, {shape[1]}\)\) must have 64 numbers along its last axis, as many as"
        )
        with pytest.raises(ShapeError, match=message):
            layer(torch.randn(shape))
    with pytest.raises(ShapeError, match=r"^input \(shape \(\)\) must have 64 numbers"):
        layer(torch.tensor(1.0))
    with pytest.raises(
        DtypeError, match=r"^input \(torch\.int64\) must be a tensor of floats; convert it first"
    ):
        layer(torch.ones(tokens, 64, dtype=torch.int64))


def test_the_operator_reads_no_further_than_the_weight() -> None:
    weight = zp.quantize(torch.randn(6, 32), "int4:g16")
    for columns in (16, 48):
        with pytest.raises(
            ShapeError, match=rf"^weight \(.*\) must be bytes that hold {columns} codes of int4:g16"
        ):
            torch.ops.zeropoint.linear(
                torch.randn(3, columns), [], weight.data, list(weight.scales), None,
                "int8:token", "int4:g16", torch.float32,
            )  # fmt: skip


def test_a_layer_takes_a_bias_of_its_rows_and_quantizers_alone() -> None:
    weight = converted("int8:channel").weight
    for length in (31, 33):
        with pytest.raises(
            ShapeError, match=rf"^bias \(shape \({length},\)\) must have shape \(32,\), a number for"
        ):
            QuantizedLinear(weight, torch.zeros(length))
    for make in (
        lambda: QuantizedLinear(weight, None, "int8:token"),  # type: ignore[arg-type]
        lambda: QuantizedLinear(weight, None, output_quantizer="int8:token"),  # type: ignore[arg-type]
        lambda: DynamicQuantize("int8:token"),  # type: ignore[arg-type]
    ):
        with pytest.raises(
            RecipeError, match=r"^activation \(='int8:token'\) must be an Activation; write Activ"
        ):
            make()


def test_copies_and_loaded_layers_choose_for_the_machine_they_are_on(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = converted("int8:channel", "int8:token"), torch.randn(5, 64)
    saved = pickle.dumps(layer)
    monkeypatch.setattr(linear_paths, "PATHS", (BY_NAME["dequantized tiles"],))
    for other in (pickle.loads(saved), copy.deepcopy(layer)):
        assert other.explain() == "inputs are multiplied by dequantized tiles"
        with torch.no_grad():
            torch.testing.assert_close(other(x), layer(x), rtol=1e-5, atol=1e-5)


def test_a_cast_model_still_multiplies_its_codes() -> None:
    layer = converted("int8:channel", "int8:token").bfloat16()
    x = torch.randn(5, 64).bfloat16()
    with torch.no_grad():
        found = layer(x)
        tiles = BY_NAME["dequantized tiles"].prepare(layer)(x)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, tiles, rtol=0.02, atol=0.02)


def test_nothing_of_the_size_of_the_weight_is_kept_next_to_it() -> None:
    layer = converted("int8:channel", "int8:token", shape=(512, 1024))
    with torch.no_grad():
        layer(torch.randn(33, 1024))
    held = sum(t.nbytes for t in (*layer.buffers(), *layer.parameters()))
    assert held < 0.26 * 512 * 1024 * 4
    tensors = [value for value in vars(layer).values() if isinstance(value, torch.Tensor)]
    assert not tensors


def moved(t: torch.Tensor) -> torch.Tensor:
    """Return other numbers of the same kind: those of the next row, or somewhat larger ones."""
    larger = t * 1.5 if t.is_floating_point() else t + 1
    return t.roll(1, 0) if t.ndim and len(t) > 1 else larger


def _replace_memory(t: torch.Tensor) -> None:
    """Give ``t`` other memory with other numbers."""
    t.data = moved(t.data)


@pytest.mark.crossed
@pytest.mark.parametrize(
    "weight", ["int8:channel", "int4:g32", "int8:tensor", "float8_e4m3fn:channel", "nvfp4", "uint4:g32:asym"]
)
@pytest.mark.parametrize("source", ["int8:token", "uint8:tensor:asym static", None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_calls_see_what_happened_to_the_layer_since_the_last_one(
    weight: str, source: str | None, dtype: torch.dtype
) -> None:
    layer, x = converted(weight, source, dtype=dtype), torch.randn(5, 64).to(dtype)
    held = {name: t for name, t in layer.state_dict().items() if "extra" not in name}
    other = {name: moved(t) for name, t in held.items()}
    third = {name: moved(t) for name, t in other.items()}
    assert layer.bias is not None
    data, scale, bias = layer.weight.get_buffer("data"), layer.weight.get_buffer("scale1"), layer.bias
    changes = [
        lambda: scale.copy_(moved(scale)),
        lambda: data.copy_(moved(data)),
        lambda: bias.add_(1),
        lambda: _replace_memory(bias),
        lambda: _replace_memory(data),
        lambda: _replace_memory(scale),
        lambda: layer.load_state_dict(other, strict=False),
        lambda: layer.load_state_dict(third, strict=False, assign=True),
        lambda: setattr(layer, "bias", None),
    ]
    with torch.no_grad():
        for number, change in enumerate(changes):
            before = layer(x)
            change()
            found = layer(x)
            assert not torch.equal(found, before), number
            assert torch.equal(found, copy.deepcopy(layer)(x)), number


def test_a_call_that_names_a_backend_gets_it() -> None:
    layer, x = converted("int8:channel", "int8:token", shape=(256, 512)), torch.randn(64, 512)
    with torch.no_grad():
        found = layer(x)
        with zp.only_backend("reference"):
            exact = layer(x)
        again = layer(x)
    assert torch.equal(found, again)
    assert not torch.equal(found, exact)
