"""What every method promises, for every kind of scheme."""

import ast
import pkgutil
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.contract.test_random_schemes import by_default, same
from tests.property.random_schemes import any_scheme

from zeropoint import methods as package
from zeropoint.errors import NonFiniteError, RecipeError, UnsupportedError, ZeropointError
from zeropoint.layout.blocks import pairwise_sums
from zeropoint.methods import OF_CODES, OF_TABLES, LayerData, Method, Scope, method_named, methods
from zeropoint.methods.nearest import with_params
from zeropoint.methods.registry import steps
from zeropoint.schemes import Granularity, Scheme
from zeropoint.stats import Statistics
from zeropoint.tensor import QuantizedTensor

SCHEMES = (
    "int8:channel:narrow", "int4:g32", "int2:g16", "int4:g24", "uint4:g32:asym", "int4:g32:asym=real",
    "int4:tensor", "uint8:tensor:asym", "float8_e4m3fn:channel", "float8_e4m3fn:block16x16", "nf4:g32",
    "mxfp4", "mxfp4:scale=ceil", "mxint8", "nvfp4", "mx9", "ternary:channel", "bfloat16:cast",
    "int4:g32:scale=input:dialect=compressed-tensors", "q4_k", "q6_k", "q8_0",
    "table3:g32:scale=float16", "table4:channel",
)  # fmt: skip
"""One scheme of each kind: uniform, float, table; powers of two, two levels, zero points; a cast."""


SCHEME = Scheme.parse("int4:g32")
ALONE = {name: each for name, each in methods().items() if each.scope(SCHEME) is not Scope.BLOCK}
"""Methods that quantize a weight alone."""
QUANTIZERS = [method for name, method in ALONE.items() if name not in OF_CODES]
"""Of these, methods that take a weight in floats."""


def weight(dtype: torch.dtype = torch.float32, *, seed: int = 0, columns: int = 96) -> torch.Tensor:
    """Return 48 rows of numbers with heavy tails, a row of zeros and one constant block."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(48, columns, generator=generator) ** 3
    x[5] = 0.0
    x[7, :32] = 0.3
    return x.to(dtype)


def data_for(method: Method, columns: int = 96, **given: Any) -> LayerData:
    """Return statistics of inputs whose features differ in size, as the method needs them."""
    inputs = torch.randn(200, columns, generator=torch.Generator().manual_seed(9)) ** 3
    made = {name: accumulator(columns) for name, accumulator in method.needs.items() if columns}
    statistics = {
        name: Statistics(accumulator=accumulator, state=accumulator.update(accumulator.start(), inputs))
        for name, accumulator in made.items()
    }
    return LayerData(statistics=statistics, **given)


def pairs() -> list[object]:
    return [
        pytest.param(method, Scheme.parse(scheme), id=f"{name}-{scheme}")
        for name, method in ALONE.items()
        for scheme in SCHEMES
        if method.refusal(Scheme.parse(scheme)) is None
    ]


def columns_for(method: Method, scheme: Scheme) -> int:
    """Return the columns of a weight: llama.cpp has no partial blocks."""
    return 256 if method.name == "ggml" and len(scheme.scales) > 1 else 96


def block_errors(x: torch.Tensor, q: QuantizedTensor, blocks: Granularity) -> torch.Tensor:
    """Return the squared error of each block, summed by plain numbers of float64."""
    off = (q.dequantize(torch.float32).double() - x.double()).square()
    total = torch.zeros(blocks.grid(tuple(x.shape)), dtype=torch.float64)
    height, width = blocks.block_shape(tuple(x.shape))
    for i in range(total.shape[0]):
        for j in range(total.shape[1]):
            total[i, j] = off[i * height : (i + 1) * height, j * width : (j + 1) * width].sum()
    return total


@pytest.mark.crossed
@pytest.mark.parametrize(("method", "scheme"), pairs())
def test_a_result_is_a_weight_in_codes_within_the_error_that_it_reports(
    method: Method, scheme: Scheme
) -> None:
    x = weight(columns=columns_for(method, scheme))
    before = x.clone()
    result = method.quantize(x, scheme, data_for(method, x.shape[1]))
    assert torch.equal(x, before)
    found = replace(result.q.scheme, element=scheme.element) if method.name in OF_TABLES else result.q.scheme
    assert (found, result.q.shape, result.q.dtype) == (scheme, tuple(x.shape), x.dtype)
    result.q.params.validate()
    report, decoded = result.report(x), result.q.dequantize(torch.float32).double()
    coded = (x if result.rotation is None else result.rotation.rotate(x)).double()
    # Kernels compute errors in float32.
    assert float((decoded - coded).abs().max()) <= report.largest * (1 + 1e-6)
    assert float((decoded - coded).square().sum()) == pytest.approx(report.squared_error, rel=1e-6)
    assert report.squares == pytest.approx(float(coded.square().sum()), rel=1e-6)
    off = float((result.dequantize(torch.float32).double() - x.double()).square().sum())
    assert off == pytest.approx(report.squared_error, rel=1e-3 if report.squared_error > 1e-4 else 1.0)


@pytest.mark.crossed
@pytest.mark.parametrize(("method", "scheme"), pairs())
def test_a_method_gives_the_same_result_twice_and_into_given_memory(method: Method, scheme: Scheme) -> None:
    columns = columns_for(method, scheme)
    x, y = (weight(torch.bfloat16, seed=seed, columns=columns) for seed in (0, 1))
    first = method.quantize(x, scheme, data_for(method, columns)).q
    other = method.quantize(y, scheme, data_for(method, columns)).q
    again = method.quantize(x, scheme, data_for(method, columns, out=other)).q
    assert torch.equal(first.data, again.data)
    assert same_params(first, again)


def same_params(a: QuantizedTensor, b: QuantizedTensor) -> bool:
    both = [(x.view(torch.uint8), y.view(torch.uint8)) for x, y in zip(a.scales, b.scales, strict=True)]
    if a.zero_point is not None and b.zero_point is not None:
        both.append((a.zero_point, b.zero_point))
    return all(torch.equal(x, y) for x, y in both)


@pytest.mark.parametrize(("method", "scheme"), pairs())
def test_a_part_of_a_weight_gets_the_codes_of_the_whole_where_the_scope_is_blocks_or_rows(
    method: Method, scheme: Scheme
) -> None:
    if method.scope(scheme) not in (Scope.BLOCKS, Scope.ROWS):
        return
    x = weight(columns=columns_for(method, scheme))
    whole = method.quantize(x, scheme, data_for(method, x.shape[1])).q
    shared = any(level.granularity == Granularity.tensor() for level in scheme.scales)
    extremes = (float(x.min()), float(x.max())) if shared else None
    data = data_for(method, x.shape[1], extremes=extremes)
    parts = [method.quantize(part, scheme, data).q for part in x.split(16)]
    assert torch.equal(torch.cat([part.data for part in parts]), whole.data)
    for index, level in enumerate(scheme.levels):
        numbers = [part.params.levels[index] for part in parts]
        found = numbers[0] if level.granularity == Granularity.tensor() else torch.cat(numbers)
        assert torch.equal(found.view(torch.uint8), whole.params.levels[index].view(torch.uint8))


@pytest.mark.crossed
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_mse_is_in_no_block_worse_than_nearest(scheme: str, dtype: torch.dtype) -> None:
    mse, nearest, parsed = method_named("mse"), method_named("nearest"), Scheme.parse(scheme)
    if mse.refusal(parsed) is not None:
        return
    x = weight(dtype)
    fixed = len(parsed.scales) > 1 and parsed.scales[-1].granularity == Granularity.tensor()
    blocks = parsed.scales[-2 if fixed else -1].granularity
    best, plain = (block_errors(x, m.quantize(x, parsed).q, blocks) for m in (mse, nearest))
    assert bool((best <= plain * (1 + 1e-6)).all())


def test_mse_finds_the_best_of_all_scales_that_nvfp4_can_store() -> None:
    x = weight()[:8, :32]
    x[5] = 1.0
    scheme = Scheme.parse("nvfp4")
    found = method_named("mse").quantize(x, scheme).q
    start = method_named("nearest").quantize(x, scheme).q
    best = block_errors(x, found, scheme.granularity)
    for code in range(1, 127):
        scales = torch.full(start.scales[0].shape, code, dtype=torch.uint8).view(start.scales[0].dtype)
        params = type(start.params)(
            scheme=scheme, shape=start.shape, scales=(scales, start.scales[1]), dtype=start.dtype
        )
        tried = block_errors(x, with_params(x, params), scheme.granularity)
        assert bool((best <= tried * (1 + 1e-9)).all()), code


@pytest.mark.parametrize(
    ("scheme", "nearest", "mse"),
    [
        ("nvfp4", 9.06, 6.60),
        ("mxfp4_e2m1", 13.22, 12.45),
        ("int4:g128", 12.36, 10.21),
        ("int2:g64", 260.0, 143.0),
    ],
)
def test_errors_on_a_gaussian_are_those_that_others_measured(scheme: str, nearest: float, mse: float) -> None:
    x = torch.randn(128, 512, generator=torch.Generator().manual_seed(0))
    found = {
        name: 1000 * method_named(name).quantize(x, Scheme.parse(scheme)).report(x).relative ** 2
        for name in ("nearest", "mse")
    }
    assert found["nearest"] == pytest.approx(nearest, rel=0.02)
    assert found["mse"] == pytest.approx(mse, rel=0.02)


@pytest.mark.parametrize("method", QUANTIZERS, ids=str)
def test_a_weight_with_nan_is_named_by_its_index(method: Method) -> None:
    x = weight()
    x[40, 3] = torch.nan
    scheme = next(s for s in map(Scheme.parse, SCHEMES) if method.refusal(s) is None)
    with pytest.raises(NonFiniteError, match=r"\(40, 3\)"):
        method.quantize(x, scheme, data_for(method))


@pytest.mark.parametrize("shape", [(0, 32), (3, 0), (32,), (2, 3, 32), (1, 1)], ids=str)
@pytest.mark.parametrize("method", ALONE.values(), ids=str)
def test_weights_of_any_shape_are_quantized(method: Method, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    schemes = map(Scheme.parse, ("int4:g32", "nvfp4", "uint4:channel:asym", "uint4:channel:asym=real"))
    for scheme in [scheme for scheme in schemes if method.refusal(scheme) is None]:
        data = data_for(method, shape[-1])
        assert method.quantize(x, scheme, data).q.dequantize().shape == shape


def test_mse_refuses_what_has_no_scale_and_what_is_drawn_at_random() -> None:
    mse = method_named("mse")
    with pytest.raises(
        UnsupportedError, match=r"method mse chooses scales, and bfloat16.* has none; use method"
    ):
        mse.quantize(weight(), Scheme.parse("bfloat16:cast"))
    with pytest.raises(
        UnsupportedError, match=r"mse encodes with stored scales, and int8.* rounds them later"
    ):
        mse.quantize(weight(), Scheme.parse("q8_0"))
    with pytest.raises(UnsupportedError, match="draws at random; use half_even"):
        mse.quantize(weight(), Scheme.parse("int4:g32:round=stochastic(7)"))


def test_each_method_has_the_name_of_its_module_and_says_what_it_computes() -> None:
    modules = {found.name for found in pkgutil.iter_modules(package.__path__)}
    assert set(methods()) < modules
    for name, method in methods().items():
        assert name == method.name
        assert method.formula
        assert method.source
    with pytest.raises(RecipeError, match="method 'msw' is unknown; did you mean mse"):
        method_named("msw")


def test_each_method_and_step_has_a_page_that_says_what_it_computes() -> None:
    folder = Path(__file__).parents[2] / "docs" / "methods"
    text = "".join(page.read_text(encoding="utf-8") for page in folder.glob("*.md"))
    table = (folder / "README.md").read_text(encoding="utf-8")
    for name, part in {**methods(), **steps()}.items():
        assert f"| `{name}` | {part.formula.replace('|', chr(92) + '|')} |" in table
        assert name.startswith("lossless") or re.search(rf"^# .*\b{name}\b|`{name}` ", text, re.MULTILINE), (
            name
        )


ROUND_OTHER_THINGS = {
    "models/dynamic_quantize.py": "inputs and outputs",
    "models/linear_paths.py": "inputs",
    "models/kv_cache.py": "keys and values",
    "warmup.py": "compiles kernels",
    "bench/cases.py": "times kernels",
}


def test_nothing_but_methods_rounds_weights_by_name() -> None:
    root = Path(package.__file__).parents[1]
    found = {}
    for path in root.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").endswith("functional"):
                names = {alias.name for alias in node.names} & {"quantize", "quantize_part"}
                if names and path.parent.name != "methods":
                    found[str(path.relative_to(root))] = names
    assert found.keys() == ROUND_OTHER_THINGS.keys()


def test_blocks_are_summed_in_one_order_whatever_is_next_to_them() -> None:
    x = torch.randn(64, 1000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rows = Granularity.channel(0)
    whole = pairwise_sums(x, rows)
    assert torch.equal(whole, torch.cat([pairwise_sums(part, rows) for part in x.split(1)]))
    assert torch.allclose(whole, x.sum(1, keepdim=True))


@pytest.mark.rotating
@pytest.mark.parametrize("method", [m for m in QUANTIZERS if not m.needs], ids=lambda method: method.name)
def test_any_scheme_has_the_same_codes_on_kernels_and_on_the_reference(method: Method) -> None:
    rng, compared = random.Random(0), 0
    while compared < 40:
        try:
            scheme = Scheme.parse(re.sub(r"\bg(\d+)", lambda size: f"g{int(size[1]) * 16}", any_scheme(rng)))
            if method.refusal(scheme) is not None:
                scheme = Scheme.parse(rng.choice(SCHEMES))
        except ZeropointError:
            continue
        x = weight(rng.choice([torch.float32, torch.bfloat16]), columns=256)[: rng.choice([1, 8])]
        expected, found = by_default(lambda x=x, scheme=scheme: method.quantize(x, scheme).q)
        compared += 1
        if isinstance(expected, type) or isinstance(found, type):
            assert expected is found, (str(scheme), expected, found)
            continue
        parts = zip([expected.data, *expected.params.stored], [found.data, *found.params.stored], strict=True)
        assert all(same(a, b) for a, b in parts), str(scheme)
