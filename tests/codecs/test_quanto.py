"""Files of Quanto: its packing by its formula, models that it saves and loads itself, and wrong files."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.checkpoint.written import dequantized, quantize, save
from tests.codecs.problems import assert_wrong
from tests.oracles import tiny_models
from tests.peers import transformers

import zeropoint as zp
from zeropoint.checkpoint.plan.checkpoint_plan import conversion_plan, make_plan
from zeropoint.checkpoint.read.source import open_source
from zeropoint.checkpoint.run.loop import run
from zeropoint.codecs.distant_groups import codes_of, words_of
from zeropoint.codecs.layer_schemes import layer_scheme
from zeropoint.codecs.quanto import CODEC, group_of
from zeropoint.codecs.registry import get_codec

M = "model.layers.0.self_attn.q_proj"
FILE = "quanto_qmap.json"
Tensors = dict[str, torch.Tensor]


def x(rows: int = 20, columns: int = 256) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(4)) * 0.1 + 0.02


@pytest.mark.parametrize("bits", [4, 2])
@pytest.mark.parametrize("groups", [1, 5, 8, 11])
def test_codes_far_apart_share_a_byte_the_first_in_its_low_bits(bits: int, groups: int) -> None:
    codes = (torch.arange(groups) % 2**bits).byte().view(groups, 1)
    count = 8 // bits
    step = -(-groups // count)
    wanted = [
        sum(int(codes[i + at * step]) << (bits * at) for at in range(count) if i + at * step < groups)
        for i in range(step)
    ]
    lines = words_of(codes, bits, high_first=False)
    assert lines.flatten().tolist() == wanted
    assert torch.equal(codes_of(lines, bits, groups, high_first=False), codes)


def written(folder: Path, text: str, weight: torch.Tensor) -> Tensors:
    config = {"model_type": "llama", "dtype": "float32", "hidden_size": weight.shape[1]}
    save(folder / "in", {f"{M}.weight": weight}, config)
    quantize(folder / "in", folder / "out", text, codec=CODEC)
    return load_file(folder / "out" / "model.safetensors")


def decoded(folder: Path, out: Path) -> torch.Tensor:
    return dequantized(folder, out)[f"{M}.weight"]


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("quanto_int8", "qint8"), ("quanto_float8", "qfloat8_e4m3fn"), ("quanto_int4", "qint4"),
        ("quanto_int2", "qint2"), ("uint4:g128:asym", "qint4"),
    ],
)  # fmt: skip
def test_what_is_written_is_read_with_the_same_values(text: str, kind: str, tmp_path: Path) -> None:
    found = written(tmp_path, text, x())
    scale = found[f"{M}.weight._scale"]
    if f"{M}.weight._data" in found:
        values = found[f"{M}.weight._data"].float() * scale
    else:
        codes = codes_of(found[f"{M}.weight._data._data"], int(kind[-1]), 40, high_first=False).float()
        shift = found[f"{M}.weight._shift"]
        whole = shift.dtype == torch.uint8
        values = ((codes - shift) * scale if whole else codes * scale - shift).view(20, 256)
    assert torch.allclose(decoded(tmp_path / "out", tmp_path / "floats"), values, atol=1e-7)
    assert json.loads((tmp_path / "out" / FILE).read_text()) == {M: {"weights": kind, "activations": "none"}}
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    assert not zp.verify_checkpoint(tmp_path / "out", tmp_path / "in").problems


def test_awq_becomes_quanto_with_the_same_values(tmp_path: Path) -> None:
    save(tmp_path / "in", {f"{M}.weight": x(16).half()}, {"model_type": "llama", "dtype": "float16"})
    plan = make_plan(open_source(tmp_path / "in"), "int4:g128:asym", codec=get_codec("awq"))
    run(plan, tmp_path / "awq")
    run(conversion_plan(open_source(tmp_path / "awq"), None, CODEC), tmp_path / "out")
    values = [decoded(tmp_path / name, tmp_path / f"{name}-floats") for name in ("awq", "out")]
    assert torch.equal(*values)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["qint8", "qint4", "qint2", "qfloat8_e4m3fn", "qfloat8_e5m2"])
@pytest.mark.parametrize("columns", [256, 192, 100])
def test_layers_of_quanto_load_what_is_written_and_save_what_is_read(
    kind: str, columns: int, tmp_path: Path
) -> None:
    quanto = pytest.importorskip("optimum.quanto", reason="tests/oracles/more_peers.sh")
    place = f"g{group_of(columns)}" if group_of(columns) else "channel"
    shifted = {"qint4": f"uint4:{place}:scale=input:offset=input", "qint2": f"uint2:{place}:offset=input"}
    plain = {"qint8": "int8:channel:narrow", "qfloat8_e4m3fn": "float8_e4m3fn:channel"}
    text = {**shifted, **plain, "qfloat8_e5m2": "float8_e5m2:channel"}[kind]
    found = written(tmp_path, text, x(columns=columns))
    model = torch.nn.ModuleDict({"layer": torch.nn.Linear(columns, 20, bias=False)})
    model["layer"].weight.data = x(columns=columns)
    quanto.quantize(model, weights=getattr(quanto, kind))
    quanto.freeze(model)
    theirs = {f"{M}.{name.removeprefix('layer.')}": t.contiguous() for name, t in model.state_dict().items()}
    ours = {name: tensor for name, tensor in found.items() if not name.endswith("._size")}
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert (ours[name].dtype, ours[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(*(t.reshape(-1).view(torch.uint8) for t in (ours[name], tensor))), name
    again = torch.nn.ModuleDict({"layer": torch.nn.Linear(columns, 20, bias=False)})
    state = {name.replace(M, "layer"): tensor for name, tensor in found.items()}
    quanto.requantize(again, state, {"layer": {"weights": kind, "activations": "none"}})
    assert torch.equal(again["layer"].weight.dequantize(), model["layer"].weight.dequantize())
    values = decoded(quanto_files(tmp_path / "theirs", theirs, kind, columns), tmp_path / "floats")
    assert torch.equal(values, decoded(tmp_path / "out", tmp_path / "our-floats"))
    assert torch.allclose(values, model["layer"].weight.dequantize(), atol=1e-6)


WIDE = {
    "quanto_int8": "qint8", "quanto_float8": "qfloat8_e4m3fn", "quanto_int4": "qint4", "quanto_int2": "qint2",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("to", WIDE)
def test_whole_models_of_quanto_have_the_logits_of_our_values_both_ways(to: str, tmp_path: Path) -> None:
    quanto = pytest.importorskip("optimum.quanto", reason="tests/oracles/more_peers.sh")
    model = tiny_models.llama(layers=2, hidden_size=256, intermediate_size=512, vocab_size=128)
    model.save_pretrained(tmp_path / "in")
    quantize(tmp_path / "in", tmp_path / "ours", to, codec=CODEC)
    own = quanto.QuantizedModelForCausalLM.quantize(model, weights=WIDE[to], exclude="lm_head")
    own.save_pretrained(tmp_path / "theirs")
    ids = torch.arange(60).view(2, 30)
    for folder in (tmp_path / "ours", tmp_path / "theirs"):
        assert not zp.verify_checkpoint(folder).problems
        dequantized(folder, tmp_path / f"{folder.name}-floats")
        again = quanto.QuantizedModelForCausalLM.from_pretrained(str(folder))
        linears = [m for m in again._wrapped.modules() if isinstance(m, quanto.QLinear)]
        assert len(linears) == 14
        floats = transformers.LlamaForCausalLM.from_pretrained(
            tmp_path / f"{folder.name}-floats", dtype=torch.float32
        ).eval()
        with torch.no_grad():
            assert torch.allclose(again(ids).logits, floats(ids).logits, atol=1e-5)
    found = [load_file(tmp_path / f"{name}-floats" / "model.safetensors") for name in ("ours", "theirs")]
    assert all(torch.equal(found[0][name], tensor) for name, tensor in found[1].items())


def quanto_files(folder: Path, tensors: Tensors, kind: Any = "qint4", width: int = 256, **more: Any) -> Path:
    config = {"model_type": "llama", "dtype": "float32", "hidden_size": width}
    save(folder, tensors, config)
    (folder / FILE).write_text(json.dumps({M: {"weights": kind, "activations": "none", **more}}))
    return folder


def stored(**changes: Any) -> Tensors:
    """Return a layer of 4 rows in 4 bits, with other tensors, as Quanto saves it."""
    layer = layer_scheme("quanto_int4", CODEC)
    q = zp.quantize(x(4), layer.weight)
    found = CODEC.encode(layer, q) | CODEC.constants(layer, q.params, q.shape)
    found |= {name.replace("__", "."): tensor for name, tensor in changes.items()}
    if "weight___size" not in changes:
        del found["weight._size"]
    return {f"{M}.{name}": tensor for name, tensor in found.items() if tensor is not None}


def test_the_inputs_of_a_layer_follow_from_the_model(tmp_path: Path) -> None:
    values = decoded(quanto_files(tmp_path / "in", stored()), tmp_path / "out")
    assert torch.equal(values, zp.quantize(x(4), "uint4:g128:offset=float32").dequantize())


WRONG: tuple[tuple[Mapping[str, Any], Mapping[str, Any], str], ...] = (
    ({"kind": "qint3"}, {}, "says 'qint3' of its weight, which is not read; known are qint8"),
    ({"kind": None}, {}, "says None of its weight, which is not read"),
    ({"activations": "qint8"}, {}, "says that its inputs and outputs are 'qint8', which is not read, as no"),
    ({"kind": "qint8"}, {}, "weight._data is missing, which qint8 needs"),
    ({"width": 384}, {}, "are not those of a weight with rows of 384, as the model says"),
    ({"width": None}, {}, "its number of inputs is neither in the file nor known"),
    ({}, {"weight___size": torch.tensor([4, 200])}, "of a weight with rows of 200, as its size"),
    ({}, {"weight___size": torch.tensor([4])}, r"weight._size is I64 of .*\[1\], but must be I64 of"),
    ({}, {"weight___scale": None}, "weight._scale is missing, which Quanto needs"),
    ({}, {"weight___shift": None}, "weight._shift is missing, which qint4 needs"),
    ({}, {"weight___scale": torch.ones(8, 1).int()}, "_scale is I32 of .*, but must be a column"),
    ({}, {"weight___scale": torch.full((8, 1), float("nan"))}, "must be finite"),
    ({}, {"weight___shift": torch.full((8, 1), 16, dtype=torch.uint8)}, "a zero point of 16, above the"),
    ({}, {"weight___data___data": torch.ones(3, 128).byte()}, r"U8 of shape \[3, 128\], but must be U8"),
)  # fmt: skip


@pytest.mark.parametrize(("said", "changes", "rule"), WRONG)
def test_what_is_wrong_with_a_file_is_one_sentence(
    said: dict[str, Any], changes: dict[str, Any], rule: str, tmp_path: Path
) -> None:
    assert_wrong(quanto_files(tmp_path / "in", stored(**changes), **said), M, rule)


def test_groups_are_those_that_quanto_takes() -> None:
    layer = layer_scheme("quanto_int4", CODEC)
    assert CODEC.refusal(layer, (4, 384)) is None
    assert CODEC.refusal(layer, (4, 64)) == "Quanto has one group a row for 64 inputs"
    assert CODEC.refusal(layer, (4, 128)) == "Quanto has one group a row for 128 inputs"
    wide = layer_scheme("uint4:g64:offset=input", CODEC)
    assert CODEC.refusal(wide, (4, 576)) == "Quanto has groups of 96 for 576 inputs"
