"""The conformance vectors: ours to the byte, complete, and consistent by equations that read them alone."""

import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.tables import each
from tests.vectors.reading import FOLDER, INDEX, cases, parts
from vectors.make_vectors import GROUPS, VERSION, Group, file_name, file_of

from zeropoint.codecs.layer_schemes import preset_layers
from zeropoint.codecs.registry import CODECS
from zeropoint.formats import CATALOG
from zeropoint.schemes import DIALECTS, PRESETS
from zeropoint.schemes.scale_rules import RULES

FORMATS = {case["name"]: case for case in cases("formats")}
SCHEMES = [(group, case) for group in ("presets", "dialects") for case in cases(group)]
Array = np.ndarray[Any, np.dtype[Any]]


@pytest.mark.parametrize("group", GROUPS, ids=file_name)
def test_a_file_on_disk_is_the_one_that_is_made(group: Callable[[], Group]) -> None:
    """Where this fails, `make vectors` writes it; a byte of an existing case that changes is a version."""
    content, entry = file_of(group)
    assert (FOLDER / file_name(group)).read_bytes() == content
    assert entry in (FOLDER / "index.json").read_text()


def test_the_set_on_disk_is_these_files_and_their_index() -> None:
    found = {path.name for path in FOLDER.iterdir() if path.is_file() and path.suffix not in (".md", ".py")}
    assert found == {"index.json", *map(file_name, GROUPS)}
    assert list(INDEX["files"]) == [file_name(group) for group in GROUPS]


def test_the_index_has_the_version_and_the_hash_of_each_file() -> None:
    assert INDEX["version"] == VERSION
    for name, entry in INDEX["files"].items():
        assert entry["sha256"] == hashlib.sha256((FOLDER / name).read_bytes()).hexdigest()
        assert len({case["name"] for case in entry["cases"]}) == len(entry["cases"])


def test_every_format_preset_dialect_rule_and_layout_has_a_case() -> None:
    left_out = {"if4_element", "int32", "uint32", "float32", "float64"}
    assert FORMATS.keys() == CATALOG.keys() - left_out
    assert {case["name"].partition("/")[0] for case in cases("presets")} == set(PRESETS)
    assert {case["dialect"] for case in cases("dialects")} == set(DIALECTS)
    levels = [level for _, case in SCHEMES for level in case["levels"].values()]
    assert {level["rule"] for level in levels} == set(RULES)
    names = {tuple(case["name"].split("/")[:2]) for case in cases("layouts")}
    assert names == {
        (name, layer.name)
        for name, codec in CODECS.items()
        if codec.container != "onnx" and not codec.model_format.prefix
        for layer in preset_layers(codec)
    }


def test_inputs_have_ties_zeros_of_both_signs_subnormals_outliers_and_large_numbers() -> None:
    found = {case["name"]: parts("dialects", case)["inputs"] for case in cases("dialects")}
    x, ends = found["int4:g32:dialect=zeropoint/ordinary"], found["int4:g32:dialect=zeropoint/extreme"]
    zeros = x[x == 0]
    assert bool(torch.signbit(zeros).any())
    assert not bool(torch.signbit(zeros).all())
    blocks = x.reshape(-1, 32).abs()
    assert bool((blocks.amax(1) > 1000 * blocks.median(1).values).any())
    assert bool((x.reshape(-1, 32) == 0).all(1).any())
    assert float(ends.abs().max()) > 8e37
    assert bool(((ends != 0) & (ends.abs() < 2.0**-126)).any())
    assert {1.0, 1 - 2.0**-24, -1 - 2.0**-23} <= set(ends.flatten().tolist())


def values_of(name: str, codes: torch.Tensor) -> Array:
    """Return the values of stored codes or numbers of a format, as formats.safetensors has them."""
    patterns = codes.dtype == torch.uint8 and not name.startswith("uint")
    if codes.is_floating_point() or not (patterns or name == "int8_mx"):
        return np.asarray(codes.to(torch.float32))
    table = parts("formats", FORMATS[name])
    return np.asarray(table["values"])[np.asarray(codes.view(torch.uint8)).astype(np.int64)]


def spread(x: Array, block: list[int], shape: torch.Size) -> Array:
    """Return a number for each value from one for each block of rows and columns; the last may be short."""
    for axis in (0, 1):
        x = (
            np.repeat(x, block[axis], axis)[: shape[0]]
            if axis == 0
            else np.repeat(x, block[1], 1)[:, : shape[1]]
        )
    return x


@each("group, case", SCHEMES)
def test_values_follow_from_codes_and_parameters_by_the_equations_of_the_page(group: str, case: Any) -> None:
    tensors = parts(group, case)
    shape, levels = tensors["values"].shape, case["levels"]

    def product(kind: str) -> Array | None:
        found: Array | None = None
        inverse = case["dialect"].startswith("compressed-tensors")
        for name in sorted((name for name in levels if name.startswith(kind)), reverse=True):
            level = levels[name]
            number = spread(values_of(level["format"], tensors[name]), level["block"], shape)
            found = number if found is None else number / found if inverse else found * number
        return found

    with np.errstate(over="ignore", invalid="ignore"):
        scale, offset = product("scale"), product("offset")
        if scale is not None and "center" in tensors:
            scale = scale + np.asarray(tensors["center"])
        element = case["element"]
        if element == "if4_element":
            assert scale is not None
            codes = np.asarray(tensors["codes"]).astype(np.int64)
            whole = (np.where(codes > 7, codes - 16, codes) * -(6 / 7)).astype(np.float32)
            values = np.where(np.signbit(scale), whole, values_of("float4_e2m1fn", tensors["codes"]))
        elif element == "digits5[-1.0,0.0,1.0]":
            codes = np.asarray(tensors["codes"]).astype(np.int64)[..., None] // 3 ** np.arange(4, -1, -1) % 3
            block = case["block"][1]
            runs = codes.reshape(shape[0], shape[1] // block, -1)[..., :block]
            values = (runs.reshape(shape) - 1).astype(np.float32)
        else:
            values = values_of(element, tensors["codes"])
        if "zero_point" in tensors:
            values = values - spread(np.asarray(tensors["zero_point"].float()), case["block"], shape)
        values = values if scale is None else values * scale
        values = values if offset is None else values + offset
    wanted = np.asarray(tensors["values"])
    assert values.dtype == wanted.dtype == np.float32
    assert np.array_equal(values.view(np.uint32), wanted.view(np.uint32)), case["scheme"]


@each("name", FORMATS)
def test_each_code_is_one_of_the_nearest_to_its_input(name: str) -> None:
    table = parts("formats", FORMATS[name])
    values, codes = table["values"].double(), table["codes"].int()
    inputs, encoded = table["inputs"].double(), table["encoded"].int()
    finite = values[torch.isfinite(values)]
    known = {int(code): float(value) for code, value in zip(codes, values, strict=True)}
    if FORMATS[name]["bits"] > 8:
        return  # whose codes are given in part; other programs look at them
    # Boundaries of a codebook are float32 numbers, as its values are.
    ulp = inputs.abs() * 2.0**-23 if FORMATS[name]["format"].startswith("codebook") else 0.0
    distances = (inputs[:, None] - finite[None]).abs().amin(1)
    found = torch.tensor([known[int(code)] for code in encoded], dtype=torch.float64)
    saturated = inputs.clamp(finite.min(), finite.max())
    assert bool(((found - inputs).abs() <= distances + ulp).all())
    assert bool((found[inputs != saturated] == saturated[inputs != saturated]).all())
