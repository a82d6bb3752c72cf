"""Importance matrices of llama.cpp: both layouts, names, and files that are none."""

import json
import struct
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.torch import save_file
from tests.oracles import synthetic_llama
from typer.testing import CliRunner

from zeropoint import quantize_checkpoint
from zeropoint.checkpoint.model.importance import name_in_llama_cpp
from zeropoint.checkpoint.read.imatrix_file import read_imatrix
from zeropoint.cli.app import app
from zeropoint.codecs.gguf import BLOCKS
from zeropoint.errors import CalibrationError, CheckpointError, OptionError
from zeropoint.methods import LayerData, method_named
from zeropoint.schemes import Scheme
from zeropoint.stats import MeanSquare, Statistics

Floats = npt.NDArray[np.float32]
MODULE, NAME = "model.layers.0.self_attn.q_proj", "blk.0.attn_q.weight"


def squares(count: int = 256) -> Floats:
    return (np.random.RandomState(0).standard_normal(count) ** 2).astype(np.float32)


def dat(entries: dict[str, Floats], calls: int = 3) -> bytes:
    data = struct.pack("<i", len(entries))
    for name, values in entries.items():
        data += struct.pack("<i", len(name)) + name.encode() + struct.pack("<ii", calls, len(values))
        data += values.astype("<f4").tobytes()
    return data + struct.pack("<ii", 10, 4) + b"text"


def write_gguf(path: Path, sums: dict[str, Floats], counts: Floats) -> None:
    writer = gguf.GGUFWriter(path, "")
    writer.add_type("imatrix")
    for name, values in sums.items():
        writer.add_tensor(f"{name}.in_sum2", values.reshape(len(counts), -1))
        writer.add_tensor(f"{name}.counts", counts.reshape(-1, 1))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def checkpoint(folder: Path, rows: int = 8) -> Floats:
    weight = np.random.RandomState(1).standard_normal((rows, 256)).astype(np.float32)
    folder.mkdir()
    tensors = {f"{MODULE}.weight": torch.from_numpy(weight)}
    tensors["model.layers.0.self_attn.k_proj.weight"] = torch.from_numpy(weight[:4].copy())
    save_file(tensors, folder / "model.safetensors")
    return weight


def expected(weight: Floats, values: Floats) -> npt.NDArray[np.uint8]:
    state = {"squares": torch.from_numpy(values).double()}
    state |= {"vectors": torch.tensor(1), "seen": torch.tensor(1), "left_out": torch.tensor(0)}
    data = LayerData(
        statistics={"mean_square": Statistics(accumulator=MeanSquare(features=len(values)), state=state)}
    )
    q = method_named("ggml").quantize(torch.from_numpy(weight), Scheme.parse("q4_k"), data).q
    return BLOCKS["Q4_K"].encode(q).numpy()


def test_a_sum_is_divided_by_its_count_in_float32(tmp_path: Path) -> None:
    values = squares()
    (tmp_path / "old.dat").write_bytes(dat({NAME: values, "other": values[:7]}, calls=3))
    found = read_imatrix(tmp_path / "old.dat")
    assert np.array_equal(found[NAME], values / np.float32(3))
    assert found["other"].shape == (7,)
    write_gguf(tmp_path / "new.gguf", {NAME: values}, np.array([7, 0], np.float32))
    first, second = read_imatrix(tmp_path / "new.gguf")[NAME].reshape(2, -1)
    assert np.array_equal(first, values[:128] / np.float32(7))
    assert (second == 1).all()


@pytest.mark.parametrize("layout", ["dat", "gguf"])
def test_files_are_read_as_libgguf_reads_them(layout: str, tmp_path: Path) -> None:
    libgguf = pytest.importorskip("libgguf")
    path = tmp_path / f"imatrix.{layout}"
    if layout == "dat":
        path.write_bytes(dat({NAME: squares(), "output.weight": squares(64)}))
    else:
        write_gguf(path, {NAME: squares(), "output.weight": squares(64)}, np.array([5, 0], np.float32))
    theirs, ours = libgguf.load_imatrix(path), read_imatrix(path)
    assert ours.keys() == theirs.keys()
    assert all(np.array_equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("name", [NAME, f"{MODULE}.weight", MODULE])
def test_weights_are_found_under_the_names_of_llama_cpp_and_their_own(name: str, tmp_path: Path) -> None:
    weight, values = checkpoint(tmp_path / "source"), squares()
    (tmp_path / "imatrix.dat").write_bytes(dat({name: values}, calls=1))
    out = tmp_path / "out"
    quantize_checkpoint(
        tmp_path / "source", out, "q4_k", format="gguf", method="ggml", imatrix=tmp_path / "imatrix.dat"
    )
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(next(out.glob("*.gguf"))).tensors}
    assert np.array_equal(tensors[f"{MODULE}.weight"].data, expected(weight, values))


def test_the_command_says_which_weights_have_no_importance(tmp_path: Path) -> None:
    checkpoint(tmp_path / "source")
    (tmp_path / "imatrix.dat").write_bytes(dat({NAME: squares()}))
    source, out, file = (str(tmp_path / name) for name in ("source", "out", "imatrix.dat"))
    options = ["--format", "gguf", "--to", "q4_k", "--method", "ggml", "--imatrix", file]
    result = CliRunner().invoke(app, ["quantize", source, out, *options])
    assert result.exit_code == 0, result.output
    assert "note: 1 of 2 weights have no importance in" in result.stdout
    assert "model.layers.0.self_attn.k_proj the first" in result.stdout


def test_calibration_gives_k_quants_the_importance_that_an_imatrix_of_the_same_tokens_has(
    tmp_path: Path,
) -> None:
    pytest.importorskip("transformers")
    source = synthetic_llama.write(tmp_path / "in")
    options = {"format": "gguf", "method": "ggml"}
    found = quantize_checkpoint(source, tmp_path / "random", "q4_k_m", calibration="random", **options)
    means = {
        str(name_in_llama_cpp(module)): need["mean_square"].accumulator.mean(need["mean_square"].state)
        for module, need in found.plan.statistics.items()
    }
    assert len(means) == len(found.plan.weights) - 1
    assert "1 of 16 weights have no importance, 'model.embed_tokens' the first" in str(found.notes)
    imatrix = tmp_path / "imatrix.dat"
    imatrix.write_bytes(dat({name: mean.float().numpy() for name, mean in means.items()}, calls=1))
    quantize_checkpoint(source, tmp_path / "file", "q4_k_m", imatrix=imatrix, **options)
    quantize_checkpoint(source, tmp_path / "plain", "q4_k_m", **options)
    random, file, plain = (
        (tmp_path / name / "model.gguf").read_bytes() for name in ("random", "file", "plain")
    )
    assert random == file != plain


def test_an_imatrix_that_nothing_takes_or_that_fits_nothing_is_refused(tmp_path: Path) -> None:
    checkpoint(tmp_path / "source")
    path = tmp_path / "imatrix.dat"

    def run(method: str | None = "ggml", calibration: str | None = None) -> None:
        quantize_checkpoint(
            tmp_path / "source", tmp_path / "out", "q4_k", format="gguf", method=method, imatrix=path,
            calibration=calibration,
        )  # fmt: skip

    path.write_bytes(dat({NAME: squares()}))
    with pytest.raises(CalibrationError, match="no method of this plan takes an importance matrix; use"):
        run(None)
    with pytest.raises(OptionError, match="calibration= and imatrix= both say what inputs are"):
        run(calibration="text.txt")
    path.write_bytes(dat({NAME: squares(128)}))
    with pytest.raises(
        CalibrationError, match=r"q_proj. has 256 inputs, and .* has 128 numbers for it; use the"
    ):
        run()
    path.write_bytes(dat({"blk.0.attn_qq.weight": squares()}))
    with pytest.raises(
        CalibrationError, match=r"names no weight of this checkpoint, .*did you mean blk.0.attn"
    ):
        run()


def llama(folder: Path) -> None:
    """Write a checkpoint of eight layers with one weight each, and its importance."""
    checkpoint(folder / "source")
    weight = torch.from_numpy(np.random.RandomState(2).standard_normal((4, 256)).astype(np.float32))
    tensors = {f"model.layers.{n}.mlp.down_proj.weight": weight.clone() for n in range(8)}
    save_file(tensors, folder / "source" / "model.safetensors")
    sizes = ("num_hidden_layers", "num_attention_heads", "hidden_size", "intermediate_size")
    config = {"model_type": "llama", **dict(zip(sizes, (8, 4, 256, 256), strict=True)), "vocab_size": 8}
    (folder / "source" / "config.json").write_text(json.dumps(config))
    importance = {f"blk.{n}.ffn_down.weight": squares() for n in range(8)}
    (folder / "imatrix.dat").write_bytes(dat(importance))


def test_a_mixture_is_that_of_llama_cpp_with_importance(tmp_path: Path) -> None:
    llama(tmp_path)
    found = {}
    for name, imatrix in (("plain", None), ("weighted", tmp_path / "imatrix.dat")):
        quantize_checkpoint(
            tmp_path / "source", tmp_path / name, "mostly_q4_0", format="gguf", imatrix=imatrix
        )
        reader = gguf.GGUFReader(tmp_path / name / "model.gguf")
        assert reader.fields["general.file_type"].contents() == 2
        found[name] = {t.name: t for t in reader.tensors}
    kinds = [found["weighted"][f"blk.{n}.ffn_down.weight"].tensor_type.name for n in range(8)]
    assert kinds == ["Q4_1"] + ["Q4_0"] * 7
    assert {t.tensor_type.name for t in found["plain"].values()} == {"Q4_0"}
    last = (found[name]["blk.7.ffn_down.weight"].data for name in ("plain", "weighted"))
    assert not np.array_equal(*last)


@pytest.mark.parametrize("mixture", ["q2_k_s", "q4_k_m+imatrix"])
def test_a_mixture_that_needs_importance_says_so(mixture: str, tmp_path: Path) -> None:
    llama(tmp_path)
    with pytest.raises(CalibrationError, match=r"needs to know which inputs are large; pass imatrix=FILE"):
        quantize_checkpoint(tmp_path / "source", tmp_path / "out", mixture, format="gguf")
    quantize_checkpoint(
        tmp_path / "source", tmp_path / "out", mixture, format="gguf", imatrix=tmp_path / "imatrix.dat"
    )


GOOD = dat({NAME: squares(8)})
BAD = {
    "an empty file": b"",
    "no weights": struct.pack("<i", 0),
    "a negative number of weights": struct.pack("<i", -1),
    "more weights than there are": struct.pack("<i", 1 << 30) + GOOD[4:],
    "a cut file": GOOD[:40],
    "a name of two gigabytes": struct.pack("<ii", 1, (1 << 31) - 1),
    "a negative name": struct.pack("<ii", 1, -5) + bytes(64),
    "a name that is no text": struct.pack("<ii", 1, 2) + b"\xff\xfe" + struct.pack("<iif", 1, 1, 1.0),
    "a negative size": struct.pack("<ii", 1, 1) + b"a" + struct.pack("<ii", 1, -4),
    "NaN": dat({NAME: np.array([1, np.nan], np.float32)}),
    "negative squares": dat({NAME: np.array([1, -1], np.float32)}),
    "a name twice": struct.pack("<i", 2) + 2 * (struct.pack("<i", 1) + b"a" + struct.pack("<iif", 1, 1, 1.0)),
    "GGUF that ends at once": b"GGUF",
    "GGUF of many tensors": b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 0),
    "text": b"this is text, and no importance matrix at all, which is longer than a head",
}  # fmt: skip


@pytest.mark.parametrize("raw", BAD.values(), ids=BAD)
def test_a_file_that_is_none_is_one_sentence(raw: bytes, tmp_path: Path) -> None:
    path = tmp_path / "imatrix.dat"
    path.write_bytes(raw)
    with pytest.raises(
        CheckpointError, match=r"is not read as an importance matrix of llama.cpp: .*"
    ) as error:
        read_imatrix(path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("case", ["no counts", "a count too many", "a negative count", "float16 sums"])
def test_gguf_without_what_an_imatrix_has_is_one_sentence(case: str, tmp_path: Path) -> None:
    path, counts = tmp_path / "imatrix.gguf", np.array([1.0], np.float32)
    writer = gguf.GGUFWriter(path, "")
    sums = squares(8)
    writer.add_tensor(f"{NAME}.in_sum2", sums.astype(np.float16) if case == "float16 sums" else sums)
    if case == "a count too many":
        counts = np.ones(3, np.float32)
    if case != "no counts":
        writer.add_tensor(f"{NAME}.counts", -counts if case == "a negative count" else counts)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match=r"is not read as an importance matrix of llama.cpp"):
        read_imatrix(path)
