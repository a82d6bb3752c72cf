"""Random schemes over the whole grammar, and tensors that are hard for them; the same ones for the same seed.

``random_scheme(rng)`` returns a text, which may be one that the library refuses: contradictions are part of
the grammar. ``any_scheme(rng)`` draws every word of the grammar, as ``words_of`` and ``WORDS`` name them.
``random_tensor(rng, scheme)`` returns a small finite tensor for it, and ``hard_tensor`` the same with
elements moved onto midpoints between codes, ends of ranges and their neighbors.
"""

import random
import re
from collections.abc import Callable, Iterator

import torch

from zeropoint.formats import (
    ChoiceFormat,
    CodebookFormat,
    DigitsFormat,
    FloatFormat,
    Format,
    IntFormat,
    Overflow,
    RoundingMode,
    TableFormat,
    VectorFormat,
)
from zeropoint.formats.catalog import ALIASES, CATALOG, get_format
from zeropoint.layout.blocks import reduce_blocks, spread_blocks
from zeropoint.params import QuantizationParams
from zeropoint.schemes import DIALECTS, PRESETS, Scheme
from zeropoint.schemes.scale_rules import RULES, Ceiling, Search
from zeropoint.schemes.text import OPTIONS

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_SPECIALS = ("", "ieee", "fn", "fnuz", "finite")
_ROUNDINGS = (
    "half_even", "half_away", "half_up", "half_down", "floor", "ceil", "toward_zero", "stochastic(0)",
    "stochastic(7)",
)  # fmt: skip
OWN_TESTS = frozenset(("ggml",))
"""A dialect of few schemes, whose tests are in tests/oracle/."""
_RULES = ("floor", "even", "ceil", "rceil")
_WIDE_SCALES = ("float32", "bfloat16", "float16", "input", "float64")
_NARROW_SCALES = ("ue4m3", "ue5m3", "e5m2", "e4m3", "e3m4", "e2m1", "e8m0", "ue3m2", "e4m3fnuz", "ue2m5")
_POWER_TABLES = ("microexponent", "codebook[0.25,0.5,1,2]", "codebook[4,1]", "e3m0fn", "ue5m0b15finitens")


def random_scheme(rng: random.Random) -> str:
    """Return the text of a scheme; about one in six is refused when it is parsed."""
    element = _element(rng)
    options: list[str] = []
    if rng.random() < 0.06:
        options.append("cast")
    else:
        options += _scales(rng)
    integer = element.startswith(("int", "uint")) or rng.random() < 0.03
    if integer and rng.random() < 0.35:
        options.append(rng.choice(["asym", "asym", "asym=real"]))
    if integer and rng.random() < 0.2:
        options.append("narrow")
    if rng.random() < 0.3:
        options.append(f"round={rng.choice(_ROUNDINGS)}")
    if rng.random() < 0.1:
        options.append(f"overflow={rng.choice(['saturate', 'special', 'error'])}")
    if rng.random() < 0.45:
        options.append(f"dialect={rng.choice(sorted(DIALECTS.keys() - OWN_TESTS))}")  # in chained ones
    return ":".join([element, *options])


_CHAINED_SCALES = (
    "uint6", "uint4", "int8", "int6", "uint8", "int6f3", "float16", "bfloat16", "ue4m3", "e4m3", "e2m1",
    "codebook[-1,-0.5,0,0.25,0.5,1]", "codebook[0.25,0.5,1]",
)  # fmt: skip


def random_chained_scheme(rng: random.Random) -> str:
    """Return the text of a scheme with offsets, a center, signed or late scales, or levels in any format.

    Some have zero points in the place of offsets; some levels are powers of two.
    """
    chain = _chain(rng)
    options = [chain[0]]
    depth = rng.choice([1, 1, 2, 2, 2, 3])
    alone = ["", "linear_late/", "signed/", "signed_late/", "linear_up/"]
    first = rng.choice(["", "", "signed/", "linear_late/"] if depth > 1 else alone)
    fine = rng.choice(_CHAINED_SCALES if depth > 1 or rng.random() < 0.2 else _WIDE_SCALES)
    options.append(f"scale={_power(rng) if rng.random() < 0.2 else first + fine}")
    options += _factors(rng, "scale", chain, depth)
    element = _element(rng)
    if element.startswith(("int", "uint")) and rng.random() < 0.5:
        options.append("asym")
        if rng.random() < 0.2:
            options.append("narrow")
    elif rng.random() < (0.1 if "signed" in first else 0.8):
        depth = rng.choice([1, 1, 2, 2, 3])
        late = rng.choice(["", "minimum_late/"])
        fine = rng.choice(_CHAINED_SCALES if depth > 1 else (*_WIDE_SCALES, *_CHAINED_SCALES))
        options.append(f"offset={late}{fine}")
        options += _factors(rng, "offset", chain, depth)
    if rng.random() < 0.15:
        options.append(f"center={rng.choice(_WIDE_SCALES)}@{rng.choice(chain)}")
    if rng.random() < 0.3:
        options.append(f"round={rng.choice(_ROUNDINGS)}")
    if rng.random() < 0.1:
        options.append(f"overflow={rng.choice(['saturate', 'special', 'error'])}")
    if rng.random() < 0.4:
        options.append(f"dialect={rng.choice(['ggml', 'ggml', 'torch', 'onnx', 'burn', 'quark'])}")
    return ":".join([element, *options])


_TABLES_OF_RUNS = (
    "digits5[-1,0,1]", "digits3[-1,-0.5,0,0.5,1]", "digits2[0,0.25,1]", "vector2[higgs16]",
    "vector2[0,0,1,1,-1,1,0.5,-0.25,-1,-1]", "vector3[0,0,0,1,0,0,0,1,0,0,0,1]",
    "vector4[-1,1,0.5,0,0,0,0,0,0.25,0.25,-0.75,0.125,1,-1,1,-1]",
)  # fmt: skip


def random_run_scheme(rng: random.Random) -> str:
    """Return the text of a scheme whose codes represent several values."""
    spell = random_chained_scheme if rng.random() < 0.3 else random_scheme
    _, *options = spell(rng).split(":")
    kept = [each for each in options if not each.startswith(("asym", "narrow", "round", "overflow"))]
    return ":".join([rng.choice(_TABLES_OF_RUNS), *kept])


_BLOCK_TABLES = (
    "table1",
    "table2",
    "table3",
    "table4",
    "choice[e2m1,int4]",
    "choice[e1m2,int4]",
    "if4_element",
)


def random_searched_scheme(rng: random.Random) -> str:
    """Return the text of a scheme whose scales are searched, tables of blocks, or an edge with an offset."""
    kind = rng.random()
    fine = rng.choice([*_WIDE_SCALES, *_NARROW_SCALES])
    blocks = _chain(rng)
    if kind < 0.2:
        options = [blocks[0], f"scale={rng.choice(['float32', 'float16', 'input', 'e4m3', 'bfloat16'])}"]
        return ":".join(
            [rng.choice(_BLOCK_TABLES), *options, *_factors(rng, "scale", blocks, rng.choice([1, 2]))]
        )
    if kind < 0.3:
        late = rng.choice(["", "_late"])
        options = [blocks[0], f"scale=edge{late}/{rng.choice(_WIDE_SCALES)}"]
        return ":".join(
            [f"uint{rng.randrange(2, 9)}", *options, f"offset=minimum{late}/{rng.choice(_WIDE_SCALES)}"]
        )
    if kind < 0.4:
        element = rng.choice(["e2m1", "e4m3", "e2m3", "e5m2", "e3m2", "e3m4"])
        return f"{element}:{blocks[0]}:scale=ceil{float(get_format(element).max) * rng.uniform(0.6, 1.2):.2f}"
    element = rng.choice(_TABLES_OF_RUNS) if kind > 0.9 else _element(rng)
    rule = rng.choice(["search", "search", "search1", "search2.4", "search4", "search8", "four_over_six"])
    if rule == "four_over_six":
        fine = rng.choice(_NARROW_SCALES)
    options = [blocks[0], f"scale={rule}/{fine}"]
    if rng.random() < 0.25:
        options.append(f"scale2={rng.choice(['float32', 'bfloat16', 'floor'])}@{blocks[1]}")
    if rng.random() < 0.3:
        options.append("asym")
    if rng.random() < 0.3:
        options.append(f"dialect={rng.choice(sorted(DIALECTS))}")
    return ":".join([element, *options])


def random_preset(rng: random.Random) -> str:
    """Return the text of a preset, half of the time with options of its own in the place of the preset's."""
    own = rng.choice([
        f"g{rng.choice([1, 3, 4, 16])}", "channel", "tensor", "asym", "asym=none", "narrow", "narrow=no",
        "scale=even", "scale=signed", "scale=search", "scale=bfloat16", f"round={rng.choice(_ROUNDINGS)}",
        f"dialect={rng.choice(sorted(DIALECTS))}", "cast",
    ])  # fmt: skip
    return rng.choice(sorted(PRESETS)) + (f":{own}" if rng.random() < 0.5 else "")


def any_scheme(rng: random.Random) -> str:
    """Return the text of a scheme with any words of the grammar."""
    kind = rng.random()
    spell = (
        random_scheme if kind < 0.35 else random_chained_scheme if kind < 0.6 else random_run_scheme
        if kind < 0.7 else random_preset if kind < 0.82 else random_searched_scheme
    )  # fmt: skip
    text = spell(rng)
    if "center=" not in text and rng.random() < 0.15:
        text += f":center={rng.choice(_WIDE_SCALES)}@{rng.choice(['tensor', 'tensor', 'channel', 'token'])}"
    return text


def words_of(text: str, scheme: Scheme) -> Iterator[str]:
    """Yield the words of the grammar in the text of a scheme, as :data:`WORDS` has them."""
    head, *options = text.split(":")
    yield from (f"preset {head}" for _ in range(head in PRESETS))
    for option in options:
        key = option.partition("=")[0]
        yield from (word for word in (key, option) if word in WORDS)
    yield f"element {scheme.element.kind}"
    yield f"round={scheme.rounding.mode.value}"
    yield f"overflow={scheme.overflow.value}"
    yield f"dialect={scheme.dialect.name}"
    for level in scheme.levels:
        numbered = isinstance(level.rule, Ceiling) or (
            isinstance(level.rule, Search) and level.rule.power != 2
        )
        name = level.rule.text
        yield f"rule {re.sub('[0-9.]+', '<N>', name) if numbered else name}"
        yield f"blocks {re.sub('[0-9,x-]+', '<N>', str(level.granularity))}"


_KINDS_OF_ELEMENTS = (
    ChoiceFormat, CodebookFormat, DigitsFormat, FloatFormat, IntFormat, TableFormat, VectorFormat,
)  # fmt: skip
WORDS = frozenset((
    *OPTIONS, "asym=real", "asym=none", "narrow=no",
    *(f"element {kind.kind}" for kind in _KINDS_OF_ELEMENTS),
    *(f"round={mode.value}" for mode in RoundingMode),
    *(f"overflow={mode.value}" for mode in Overflow),
    *(f"dialect={name}" for name in DIALECTS),
    *(f"preset {name}" for name in PRESETS),
    *(f"rule {name}" for name in (*RULES, "search<N>", "ceil<N>")),
    *(f"blocks {name}" for name in ("tensor", "token", "channel", "channel<N>", "g<N>", "block<N>")),
    *(f"blocks {name}[<N>]rest<N>" for name in ("first", "last")),
))  # fmt: skip
"""Every word of the grammar: options, and what the values of options can be."""


def _factors(rng: random.Random, name: str, chain: list[str], depth: int) -> list[str]:
    """Return the coarser levels of a scale or an offset."""
    formats = ("float32", "float16", "bfloat16", "e4m3", "int8f7", "input")
    return [
        f"{name}{number}={_power(rng) if rng.random() < 0.2 else _factor(rng, formats)}@{chain[number - 1]}"
        for number in range(2, depth + 1)
    ]


def _factor(rng: random.Random, formats: tuple[str, ...]) -> str:
    return rng.choice(["", "signed/", "linear/"]) + rng.choice(formats)


def _power(rng: random.Random) -> str:
    """Return a level of powers of two."""
    rule = rng.choice(_RULES)
    return rule if rng.random() < 0.7 else f"{rule}/{rng.choice(_POWER_TABLES)}"


def _element(rng: random.Random) -> str:
    kind = rng.random()
    if kind < 0.4:
        return rng.choice(sorted({*CATALOG, *ALIASES}))
    if kind < 0.65:
        bits, sign = rng.choice([*range(1, 17), 2, 3, 4, 4, 4, 8, 8, 8, 24, 32]), rng.choice(["", "u"])
        return f"{sign}int{bits}" + (f"f{rng.randrange(bits)}" if rng.random() < 0.2 else "")
    if kind < 0.85:
        exponent, mantissa = rng.randrange(0, 6), rng.randrange(0, 8)
        bias = f"b{rng.randrange(-3, 20)}" if rng.random() < 0.4 else ""
        sign, flat = rng.choice(["", "", "u"]), rng.choice(["", "", "", "ns"])
        return f"{sign}e{exponent}m{mantissa}{bias}{rng.choice(_SPECIALS)}{flat}"
    return f"codebook[{','.join(map(repr, _table(rng)))}]"


def _table(rng: random.Random) -> list[float]:
    """Return the values of a codebook: unsorted, with repeated and one-sided ones."""
    count = rng.choice([2, 3, 4, 5, 8, 15, 16, 16, 17, 40])
    low = rng.choice([-1.0, -1.0, -1.0, 0.0, 0.25])
    values = [round(rng.uniform(low, 1.0), rng.choice([1, 3, 6])) for _ in range(count)]
    if rng.random() < 0.5:
        values[0] = 0.0
    if rng.random() < 0.3:
        values.sort()
    scale = 2.0 ** rng.choice([0, 0, 0, -4, 7])
    return [value * scale for value in values]


def _scales(rng: random.Random) -> list[str]:
    """Return granularity and levels: coarser blocks are unions of finer ones, nearly always."""
    chain = _chain(rng)
    depth = rng.choice([1, 1, 1, 1, 2, 2, 3])
    blocks = [chain[min(level, len(chain) - 1)] for level in range(depth)]
    if rng.random() < 0.03:
        rng.shuffle(blocks)
    levels = [_level(rng, fine=level < depth - 1) for level in range(depth)]
    if depth > 1 and rng.random() < 0.3:
        levels = [rng.choice([*_RULES, "floor/" + rng.choice(_POWER_TABLES)]) for _ in levels]
    texts = [blocks[0]] if rng.random() < 0.95 else []
    if levels[0] != "float32":
        texts.append(f"scale={levels[0]}")
    coarser = zip(levels[1:], blocks[1:], strict=True)
    return texts + [f"scale{number}={level}@{block}" for number, (level, block) in enumerate(coarser, 2)]


def _chain(rng: random.Random) -> list[str]:
    """Return granularities from fine to coarse."""
    fine = rng.choice([1, 2, 3, 4, 7])
    rows = rng.choice([1, 2, 3])
    return rng.choice([
        [f"g{fine}", f"g{fine * rng.choice([2, 4])}", "tensor"],
        [f"g{fine}", "token", "tensor"],
        ["channel", "tensor", "tensor"],
        ["channel1", "tensor", "tensor"],
        ["channel-1", "tensor", "tensor"],
        ["token", "tensor", "tensor"],
        [f"block{rows}x{fine}", f"block{rows * 2}x{fine * 2}", "tensor"],
        [f"g{fine}", f"block{rows}x{fine * 2}", "tensor"],
        [f"first[{rows},0]rest1", "tensor", "tensor"],
        [f"last[{fine},0]rest0", "tensor", "tensor"],
        ["tensor", "tensor", "tensor"],
    ])  # fmt: skip


def _level(rng: random.Random, *, fine: bool) -> str:
    kind = rng.random()
    if kind < 0.2:
        return rng.choice(_RULES)
    if kind < 0.25:
        return f"{rng.choice(_RULES)}/{rng.choice(_POWER_TABLES)}"
    narrow = kind < (0.7 if fine else 0.45)
    fmt = rng.choice(_NARROW_SCALES) if narrow else rng.choice(("float32", *_WIDE_SCALES))
    if rng.random() < 0.02:
        fmt = f"ue{rng.randrange(1, 9)}m{rng.randrange(0, 8)}"
    return f"{rng.choice(['linear', 'linear_up'])}/{fmt}" if rng.random() < 0.2 else fmt


def random_shape(rng: random.Random, scheme: Scheme) -> tuple[int, ...]:
    """Return the shape of a small tensor, of the rank that ``scheme`` needs but for one in fifty."""
    needed = max((len(level.granularity.extents) for level in scheme.scales), default=0)
    rank = rng.choice([1, 2, 2, 2, 2, 3, 4])
    rank = max(rank, needed) if rng.random() < 0.98 else rng.randrange(0, 3)
    return tuple(
        rng.choice([1, 2, 3, 4, 5, 8, 9, 17] if axis == rank - 1 else [1, 2, 3]) for axis in range(rank)
    )


def random_tensor(rng: random.Random, scheme: Scheme, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return finite numbers of one of many kinds, of ``dtype`` or one of four."""
    dtype = dtype or rng.choice(DTYPES)
    shape = random_shape(rng, scheme)
    generator = torch.Generator().manual_seed(rng.randrange(1 << 31))
    x = rng.choice(_KINDS)(rng, shape, generator).to(torch.float64)
    info = torch.finfo(dtype)
    magnitude = rng.random()
    if magnitude < 0.5:
        x = x * 2.0 ** rng.choice([0, 0, 0, 3, -3, 10, -10])
    elif magnitude < 0.7:
        x = x * rng.uniform(0.1, 4)
    elif magnitude < 0.8:
        x = x * info.tiny * 2.0 ** rng.randrange(-8, 24)
    elif magnitude < 0.9 and x.numel():
        x = x / x.abs().max().clamp(min=1e-300) * info.max * rng.choice([1, 0.999, 0.5, 0.06])
    else:
        x = x * 2.0 ** rng.uniform(-100, 100)
    if _is_one_sided(scheme.element) and rng.random() < 0.8:
        x = x.abs()
    x = x.clamp(-info.max, info.max).to(dtype)
    if rng.random() < 0.2:
        x[torch.rand(shape, generator=generator) < 0.5] = 0.0
    if rng.random() < 0.2:
        x[torch.rand(shape, generator=generator) < 0.3] = -0.0
    return x


def _is_one_sided(fmt: Format) -> bool:
    return fmt.min >= 0


_Kind = Callable[[random.Random, tuple[int, ...], torch.Generator], torch.Tensor]


def _normal(rng: random.Random, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def _shifted(rng: random.Random, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    return _normal(rng, shape, generator) + rng.choice([-1000.0, -30.0, -3.0, 3.0, 30.0, 1000.0])


def _outlier(rng: random.Random, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    x = _normal(rng, shape, generator)
    if x.numel():
        x.view(-1)[rng.randrange(x.numel())] *= rng.choice([10.0, 1e3, -1e5])
    return x


def _mixed(rng: random.Random, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    spread = rng.choice([2.0, 8.0, 30.0, 120.0])
    exponents = (torch.rand(shape, generator=generator, dtype=torch.float64) * 2 - 1) * spread
    return _normal(rng, shape, generator) * torch.exp2(exponents)


def _powers(rng: random.Random, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    exponents = torch.randint(-6, 7, shape, generator=generator)
    signs = torch.randint(0, 2, shape, generator=generator) * 2 - 1
    near = torch.randint(-1, 2, shape, generator=generator) * 2.0 ** rng.choice([-52, -23, -10, -8])
    return torch.exp2(exponents.double()) * signs * (1 + near)


def _multiples(rng: random.Random, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Return multiples of half a step, as a grid of codes has them."""
    return torch.randint(-300, 301, shape, generator=generator).double() * rng.choice([0.5, 1 / 3, 0.1])


def _constant(rng: random.Random, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    return torch.full(shape, rng.choice([0.0, -0.0, 1.0, -1.0, 0.1, -1 / 3, 8.4, 127.5]), dtype=torch.float64)


def _rows(rng: random.Random, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Return rows of very different magnitude."""
    lead = (*shape[:-1], 1) if shape else ()
    return _normal(rng, shape, generator) * torch.exp2(torch.randn(lead, generator=generator).double() * 12)


_KINDS: tuple[_Kind, ...] = (
    _normal, _normal, _shifted, _outlier, _mixed, _powers, _multiples, _constant, _rows,
)  # fmt: skip


def hard_tensor(rng: random.Random, x: torch.Tensor, params: QuantizationParams) -> torch.Tensor:
    """Return ``x`` with elements moved to where the codes of ``params``, made from ``x``, err most.

    Those are midpoints between neighbors, ends of the range and numbers one ulp away, clamped to the
    extremes of their block, so that the moved tensor mostly keeps its parameters.
    """
    scale, granularity, shape = params.effective_scale(), params.scheme.granularity, tuple(x.shape)
    if not x.numel() or scale is None:
        return x
    generator = torch.Generator().manual_seed(rng.randrange(1 << 31))
    spread = spread_blocks(scale.double(), granularity, shape).expand(shape)
    places = _places(params.scheme.element)
    steps = places[torch.randint(0, len(places), shape, generator=generator)]
    if params.zero_point is not None:
        zero = spread_blocks(params.zero_point.double(), granularity, shape).expand(shape)
        steps = steps - zero * float(params.scheme.element_step)
    moved = steps * spread
    offset = params.effective_offset()
    if offset is not None:
        moved = moved + spread_blocks(offset.double(), granularity, shape)
    moved = moved.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    low, high = (
        spread_blocks(reduce_blocks(x, granularity, kind, fill), granularity, shape).double()
        for kind, fill in (("amin", torch.inf), ("amax", -torch.inf))
    )
    near = torch.minimum(torch.maximum(moved, low), high).to(x.dtype)
    bump = torch.randint(-1, 2, shape, generator=generator)
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[x.dtype.itemsize]
    nudged = torch.where(near == 0, near, (near.view(bits) + bump.to(bits)).view(x.dtype))
    nudged = torch.minimum(torch.maximum(nudged.double(), low), high).to(x.dtype)
    keep = (torch.rand(shape, generator=generator) < 0.3) | (x == low) | (x == high) | ~torch.isfinite(nudged)
    return torch.where(keep, x, nudged)


def _places(fmt: Format) -> torch.Tensor:
    """Return numbers on, between and next to the values of ``fmt``, at most some hundreds."""
    if isinstance(fmt, ChoiceFormat):
        return torch.cat([_places(fmt.first), _places(fmt.second) * float(fmt.stretch)])
    if isinstance(fmt, VectorFormat):
        return torch.tensor(fmt.rows, dtype=torch.float64).flatten()
    if isinstance(fmt, DigitsFormat):
        return _places(fmt.digit)
    if isinstance(fmt, IntFormat):
        codes = sorted({*range(max(fmt.qmin, -40), min(fmt.qmax, 40) + 1), fmt.qmin, fmt.qmax, fmt.qmax - 1})
        values = torch.tensor(codes, dtype=torch.float64) * float(fmt.step)
        halves = values + float(fmt.step) / 2
        return torch.cat([values, halves, halves])
    if isinstance(fmt, FloatFormat):
        codes = sorted({*range(min(fmt.max_code, 60)), *range(max(0, fmt.max_code - 40), fmt.max_code + 1)})
        positive = torch.tensor([float(fmt.magnitude(code)) for code in codes], dtype=torch.float64)
        values = torch.cat([-positive, positive]) if fmt.signed else positive
    else:
        values = torch.tensor(fmt.values, dtype=torch.float64)
    ordered = values.sort().values
    halves = (ordered[1:] + ordered[:-1]) / 2
    return torch.cat([ordered, halves, halves])
