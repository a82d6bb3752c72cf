"""Checkpoints whose weights are solved in order: resumed runs, layouts, and what is said of the result."""

from __future__ import annotations

import io
import json
import re
import shutil
import statistics
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from tests.checkpoint.written import digests, tensors_of
from tests.peers import transformers

import zeropoint as zp
from zeropoint.checkpoint.model import solved_weights as door
from zeropoint.checkpoint.model.forward_pass import compared
from zeropoint.checkpoint.model.running_model import running
from zeropoint.checkpoint.plan.limits import Limits
from zeropoint.checkpoint.read.source import open_source
from zeropoint.models import block_rounding
from zeropoint.recipes import Assignment, Recipe, Rule
from zeropoint.report.tables import run_report

pytestmark = pytest.mark.rotating


def ids(windows: int = 8, length: int = 24) -> torch.Tensor:
    return torch.randint(0, 512, (windows, length), generator=torch.Generator().manual_seed(0))


def quantize(source: Path, out: Path, to: str = "int4:g64", **options: object) -> zp.RunResult:
    given = {"method": "shift+gptq", "calibration": ids(), "ignore": "lm_head", **options}
    return zp.quantize_checkpoint(source, out, to, **given)


@pytest.fixture(scope="module")
def golden(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    out = tmp_path_factory.mktemp("golden") / "out"
    quantize(source, out)
    return digests(out)


@pytest.fixture
def stopping(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], AbstractContextManager[None]]:
    """A context in which a command ends as Ctrl-C does once so many weights are solved."""

    @contextmanager
    def stop_after(count: int) -> Iterator[None]:
        add, left = door.SolvedFolder.add, iter(range(count))

        def stop(self: door.SolvedFolder, *given: Any) -> None:
            if next(left, None) is None:
                raise KeyboardInterrupt
            add(self, *given)

        with monkeypatch.context() as patch:
            patch.setattr(door.SolvedFolder, "add", stop)
            try:
                yield
            except KeyboardInterrupt:
                return
        pytest.fail("nothing ended the command")

    return stop_after


Stopping = Callable[[int], AbstractContextManager[None]]


@pytest.mark.parametrize("after", [0, 3, 13])
def test_a_command_that_is_interrupted_anywhere_resumes_to_the_same_bytes(
    source: Path, tmp_path: Path, golden: dict[str, str], after: int, stopping: Stopping
) -> None:
    with stopping(after):
        quantize(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert len(list((tmp_path / ".out.solved").glob("*.safetensors"))) == after
    quantize(source, tmp_path / "out", workers=1)
    assert digests(tmp_path / "out") == golden
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("after", [3, 7])
def test_a_command_with_weights_without_inputs_resumes_to_the_same_bytes(
    tmp_path: Path, after: int, stopping: Stopping
) -> None:
    """Mamba multiplies with the weight of ``dt_proj`` itself."""
    config = transformers.MambaConfig(
        hidden_size=64, state_size=8, num_hidden_layers=2, vocab_size=512, time_step_rank=64
    )
    torch.manual_seed(0)
    transformers.MambaForCausalLM(config).save_pretrained(tmp_path / "in")
    options = {"ignore": (), "fit": True}
    whole = quantize(tmp_path / "in", tmp_path / "whole", **options)
    with stopping(after):
        quantize(tmp_path / "in", tmp_path / "out", **options)
    resumed = quantize(tmp_path / "in", tmp_path / "out", **options)
    assert digests(tmp_path / "out") == digests(tmp_path / "whole")
    for result in (whole, resumed):
        methods = {weight.module.rpartition(".")[2]: weight.method for weight in result.plan.weights}
        assert methods == {**dict.fromkeys(("in_proj", "x_proj", "out_proj"), "shift+gptq"), "dt_proj": "mse"}
        assert sum("falls back on mse for 2 weights" in note for note in result.notes) == 1


def test_what_a_kill_or_a_bad_disk_left_is_solved_again(
    source: Path, tmp_path: Path, golden: dict[str, str], stopping: Stopping
) -> None:
    with stopping(5):
        quantize(source, tmp_path / "out")
    folder = tmp_path / ".out.solved"
    codes, losses = sorted(folder.glob("*.safetensors")), sorted(folder.glob("[0-9]*.json"))
    codes[0].write_bytes(codes[0].read_bytes()[:100])
    losses[1].write_text("{")
    losses[2].unlink()
    (folder / "zeropoint-killed").mkdir()
    (folder / "zeropoint-killed" / "0-0").write_bytes(b"what passed between blocks")
    quantize(source, tmp_path / "out")
    assert digests(tmp_path / "out") == golden
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_what_was_solved_on_other_data_or_another_source_is_not_used(
    source: Path, tmp_path: Path, golden: dict[str, str], stopping: Stopping
) -> None:
    with stopping(2):
        quantize(source, tmp_path / "out", calibration=ids(4))
    with pytest.raises(zp.CheckpointError, match=r"what is solved in .* differs in 'tokens'.* restart"):
        quantize(source, tmp_path / "out")
    quantize(source, tmp_path / "out", restart=True)
    assert digests(tmp_path / "out") == golden
    copy = tmp_path / "copy"
    shutil.copytree(source, copy)
    with stopping(2):
        quantize(copy, tmp_path / "other")
    shard = next(copy.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-2] + b"\x01\x3c")  # the header stays
    with pytest.raises(zp.CheckpointError, match=rf"differs in '{shard.name}'"):
        quantize(copy, tmp_path / "other")


def test_the_manifest_has_the_losses_of_the_run(source: Path, tmp_path: Path) -> None:
    result = quantize(source, tmp_path / "out")
    said = json.loads((tmp_path / "out" / "zeropoint_manifest.json").read_text())["weights"]
    of_run = {weight["module"]: weight["loss"] for weight in result.to_dict()["weights"]}
    names = ("seen", "held_out", "vectors", "own")
    assert {module: record["loss"] for module, record in said.items()} == {
        module: {name: loss[name] for name in names} for module, loss in of_run.items()
    }
    assert all(loss["held_out"] != loss["seen"] for loss in of_run.values())


def test_codes_without_the_record_of_their_run_are_not_used(
    source: Path, tmp_path: Path, golden: dict[str, str], stopping: Stopping
) -> None:
    with stopping(2):
        quantize(source, tmp_path / "out", calibration=ids(4))
    (tmp_path / ".out.solved" / "zeropoint_solved.json").unlink()
    quantize(source, tmp_path / "out")
    assert digests(tmp_path / "out") == golden


def test_nothing_is_solved_for_an_output_that_holds_files_of_others(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door, "solve", lambda *_, **__: pytest.fail("it was solved"))
    for name in ("out", ".new.solved"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine.txt").write_text("keep")
    (tmp_path / ".link.solved").symlink_to(tmp_path / "out")
    with pytest.raises(zp.CheckpointError, match=r"mine\.txt"):
        quantize(source, tmp_path / "out")
    for name in ("new", "link"):
        with pytest.raises(zp.CheckpointError, match=r"is no folder of solved weights.*move it away"):
            quantize(source, tmp_path / name, restart=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".link.solved", ".new.solved", "out"]
    assert (tmp_path / ".new.solved" / "mine.txt").read_text() == "keep"


def test_the_model_in_memory_has_the_codes_of_the_files(source: Path, tmp_path: Path) -> None:
    result = quantize(source, tmp_path / "files")
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype="auto")
    gives = Assignment(weight=result.plan.weights[0].layer.weight, method="shift+gptq")
    recipe = Recipe(rules=(Rule(name="lm_head", gives=None),), default=Rule(gives=gives))
    data = [{"input_ids": window[None]} for window in ids()]
    made = zp.quantize_model(model, recipe, calibration=data)
    zp.save_checkpoint(made, tmp_path / "model")
    files, memory = tensors_of(tmp_path / "files"), tensors_of(tmp_path / "model")
    assert result.plan.solved.keys() <= {name.rpartition(".")[0] for name in files}
    assert files.keys() == memory.keys()
    assert [name for name, tensor in files.items() if not torch.equal(tensor, memory[name])] == []


@pytest.mark.parametrize(
    ("to", "layout"),
    [
        ("nvfp4a16", None),
        ("mxfp4a16", None),
        ("int4:g32", "gptq"),
        ("w8a8", None),
        ("fp8", None),
        ("q4_k", "gguf"),
    ],
)
def test_every_layout_takes_what_is_solved(source: Path, tmp_path: Path, to: str, layout: str | None) -> None:
    result = quantize(source, tmp_path / "out", to, format=layout)
    assert result.plan.solved
    losses = [weight["loss"] for weight in result.to_dict()["weights"]]
    assert all(0 < loss["seen"] < 1 and 0 < loss["held_out"] < 1 and loss["vectors"] for loss in losses)
    assert zp.verify_checkpoint(tmp_path / "out", source).ok
    assert any("of their squares where it was learned" in note for note in result.notes)
    assert result.notes[-1].startswith("KL divergence")
    zp.dequantize_checkpoint(tmp_path / "out", tmp_path / "floats")
    floats = tensors_of(tmp_path / "floats")
    for name, weight in tensors_of(source).items():
        # Rows are in their places: some layouts have those of q and k in another order.
        assert float((floats[name].float() - weight.float()).norm()) < 0.3 * float(weight.float().norm()), (
            name
        )


def test_experts_are_solved_from_few_random_tokens(tmp_path: Path) -> None:
    config = transformers.Qwen3MoeConfig(
        hidden_size=64, intermediate_size=64, moe_intermediate_size=64, num_experts=4, num_experts_per_tok=2,
        num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=32, vocab_size=512,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.Qwen3MoeForCausalLM(config).save_pretrained(tmp_path / "in")
    result = quantize(tmp_path / "in", tmp_path / "out", "int4:g64", calibration=ids(2, 8))
    assert len(result.plan.solved) == len(result.plan.weights) == 2 * (4 + 3 * 4)
    assert zp.verify_checkpoint(tmp_path / "out", tmp_path / "in").ok


def test_a_model_that_changes_all_blocks_before_they_run_is_refused(tmp_path: Path) -> None:
    config = transformers.RwkvConfig(
        vocab_size=512, hidden_size=64, num_hidden_layers=2, context_length=64, rescale_every=1
    )
    transformers.RwkvForCausalLM(config).save_pretrained(tmp_path / "in")
    with pytest.raises(zp.UnsupportedError, match=r"^the model changes its weights when it runs"):
        quantize(tmp_path / "in", tmp_path / "out", "int4:g32", method="gptq", ignore=())


@pytest.mark.parametrize("family", ["Albert", "Flaubert"])
def test_a_model_whose_lists_are_no_chain_is_solved_as_one_block(family: str, tmp_path: Path) -> None:
    # ALBERT runs one layer several times; Flaubert has attention and what follows it in lists of their own.
    sizes = {
        "Albert": {
            "embedding_size": 64,
            "hidden_size": 64,
            "intermediate_size": 64,
            "num_attention_heads": 2,
        },
        "Flaubert": {"emb_dim": 64, "n_layers": 2, "n_heads": 2},
    }
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(vocab_size=512, **sizes[family])
    kind = {"Albert": "AlbertForMaskedLM", "Flaubert": "FlaubertWithLMHeadModel"}[family]
    getattr(transformers, kind)(config).save_pretrained(tmp_path / "in")
    result = quantize(tmp_path / "in", tmp_path / "out", "int4:g32", method="gptq", ignore=())
    assert {weight.method for weight in result.plan.weights} == {"gptq"}
    assert len(result.plan.weights) >= 7
    divergence = re.search(r"KL divergence ([\d.]+) from", result.notes[-1])
    assert divergence is not None
    assert float(divergence[1]) < 0.01


def test_positions_that_are_not_saved_are_computed(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.MarianConfig(
        vocab_size=512, d_model=64, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=64, decoder_ffn_dim=64, max_position_embeddings=64,
        pad_token_id=0, decoder_start_token_id=0,
    )  # fmt: skip
    model = transformers.MarianMTModel(config)
    model.save_pretrained(tmp_path)
    assert "model.decoder.embed_positions.weight" not in load_file(tmp_path / "model.safetensors")
    with running(open_source(tmp_path), ids(2), Limits.default(), remedy="") as found:
        for name in ("model.encoder.embed_positions.weight", "model.decoder.embed_positions.weight"):
            assert torch.equal(found.root.get_parameter(name), model.get_parameter(name))


_FUSED = {
    "hidden_size": 64, "intermediate_size": 64, "num_local_experts": 4, "num_experts_per_tok": 2,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 512,
}  # fmt: skip


@pytest.mark.parametrize(
    ("family", "to", "layout"), [("GraniteMoe", "int4:g64", None), ("GptOss", "q8_0", "gguf")]
)
def test_experts_that_files_have_in_one_tensor_are_solved_one_by_one(
    family: str, to: str, layout: str | None, tmp_path: Path
) -> None:
    config = getattr(transformers, f"{family}Config")(**_FUSED, head_dim=32)
    torch.manual_seed(0)
    getattr(transformers, f"{family}ForCausalLM")(config).save_pretrained(tmp_path / "in")
    result = quantize(tmp_path / "in", tmp_path / "out", to, method="gptq", format=layout)
    assert len(result.plan.solved) == len(result.plan.weights) == 2 * (4 + 3 * 4)
    assert all(weight.loss.seen is not None for weight in result.plan.solved.values())
    assert result.notes[-1].startswith("KL divergence 0.0")  # the biases of experts are two tensors in GGUF


def test_the_report_counts_the_tokens_of_each_expert(tmp_path: Path) -> None:
    config = transformers.MixtralConfig(
        hidden_size=64, intermediate_size=64, num_local_experts=8, num_experts_per_tok=1, vocab_size=512,
        num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=32,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.MixtralForCausalLM(config).eval()
    model.save_pretrained(tmp_path / "in")
    routers = [layer.mlp.gate.weight for layer in model.model.layers]
    seen: list[torch.Tensor] = []
    hooks = [
        layer.mlp.gate.register_forward_pre_hook(lambda _, args: seen.append(args[0].reshape(-1, 64)))
        for layer in model.model.layers
    ]
    with torch.no_grad():
        model(ids(1, 6))
    for hook in hooks:
        hook.remove()
    counts = [
        torch.bincount((x @ router.T).argmax(1), minlength=8).tolist()
        for x, router in zip(seen, routers, strict=True)
    ]
    expected = [
        {
            "layer": f"model.layers.{number}.block_sparse_moe.experts", "experts": 8, "fewest": min(found),
            "median": statistics.median(found), "most": max(found), "without": found.count(0),
        }
        for number, found in enumerate(counts)
    ]  # fmt: skip
    first = counts[0]
    gram = tmp_path / "gram.safetensors"
    zp.gather_statistics(tmp_path / "in", gram, ids(1, 6), gram=True)
    saved = quantize(
        tmp_path / "in", tmp_path / "saved", "int8:g64", method="gptq", calibration=None, statistics=gram
    )
    assert saved.to_dict()["experts"] == expected
    result = quantize(tmp_path / "in", tmp_path / "out", "int8:g64", method="gptq", calibration=ids(1, 6))
    document = result.to_dict()["experts"]
    # The second layer sees what the quantized first one gives, so that its router may choose otherwise.
    assert [each["layer"] for each in document] == [each["layer"] for each in expected]
    assert document[0] == expected[0]
    assert first.count(0) >= 2
    console = Console(file=io.StringIO(), width=120)
    console.print(run_report(result, seconds=1.0))
    assert isinstance(console.file, io.StringIO)
    lines = [line.split() for line in console.file.getvalue().splitlines()]
    at = lines.index(["tokens", "per", "expert", "experts", "fewest", "median", "most", "none"])
    cells = [f"{each:g}" for each in (8, min(first), statistics.median(first), max(first), first.count(0))]
    assert lines[at + 2] == ["model.layers.0.block_sparse_moe.experts", *cells]
    assert lines[at + 3][0] == "model.layers.1.block_sparse_moe.experts"


@pytest.mark.slow  # a model is solved three times, which takes seconds each
def test_blocks_that_are_rounded_together_resume_to_the_same_bytes(
    source: Path, tmp_path: Path, stopping: Stopping, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_rounding, "STEPS", 10)
    given = {"method": "shift+signround", "to": "int3:g64"}
    whole = quantize(source, tmp_path / "whole", **given)
    assert any(re.match(r"outputs of 2 blocks are off by [\d.]+% of their", note) for note in whole.notes)
    assert zp.verify_checkpoint(tmp_path / "whole", source).ok
    with stopping(9):  # two of the seven weights of the second block
        quantize(source, tmp_path / "out", **given)
    resumed = quantize(source, tmp_path / "out", workers=1, **given)
    assert digests(tmp_path / "out") == digests(tmp_path / "whole")
    assert resumed.notes == whole.notes
    losses = [weight["loss"] for weight in resumed.to_dict()["weights"]]
    assert all(0 < loss["together"][1] <= loss["together"][0] < 1 for loss in losses)


def test_blocks_are_rounded_together_in_the_memory_that_a_refusal_names(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_rounding, "STEPS", 2)
    given = {"method": "signround", "calibration": ids(1)}
    with pytest.raises(zp.CheckpointError, match=r"training a block takes .* for one window") as refused:
        quantize(source, tmp_path / "out", max_memory="600M", **given)
    (enough,) = re.findall(r"use max_memory='(\d+)M'", str(refused.value))
    with pytest.raises(zp.CheckpointError, match="for one window"):
        quantize(source, tmp_path / "out", max_memory=f"{int(enough) - 1}M", **given)
    assert quantize(source, tmp_path / "out", max_memory=f"{enough}M", **given).plan.solved


def test_rounding_together_is_refused_without_a_model_that_runs(source: Path, tmp_path: Path) -> None:
    gram = tmp_path / "gram.safetensors"
    zp.gather_statistics(source, gram, ids(1), gram=True)
    for given in ({"statistics": gram}, {}):
        with pytest.raises(zp.CalibrationError, match=r"signround rounds the weights of a block of a model"):
            quantize(source, tmp_path / "out", calibration=None, method="signround", **given)
    assert not (tmp_path / "out").exists()


def test_a_model_without_experts_has_no_tokens_of_any(source: Path, tmp_path: Path) -> None:
    assert quantize(source, tmp_path / "out").to_dict()["experts"] == []


def test_a_result_that_is_another_model_is_said_to_be_one(source: Path, tmp_path: Path) -> None:
    result = quantize(source, tmp_path / "out")
    for head, said in ((1.0, "KL divergence"), (1e4, "THE RESULT IS ANOTHER MODEL: KL divergence")):
        shutil.copytree(source, tmp_path / f"{head}")
        for path in (tmp_path / f"{head}").glob("*.safetensors"):
            tensors = load_file(path)
            save_file({n: t * (head if n == "lm_head.weight" else 1) for n, t in tensors.items()}, path)
        original = open_source(tmp_path / f"{head}")
        assert (
            compared(result, original, {"input_ids": ids(1)}, result.plan.limits).notes[-1].startswith(said)
        )


def test_what_cannot_be_is_refused_before_anything_is_written(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    with pytest.raises(zp.CalibrationError, match="method gptq needs the gram of its inputs; pass"):
        quantize(source, out, method="gptq", calibration=None)
    with pytest.raises(zp.OptionError, match="solves weights on one machine"):
        quantize(source, out, executor="ray")
    with pytest.raises(zp.UnsupportedError, match=r"a search tries weights alone; search by mse_weighted"):
        zp.search_checkpoint(source, "5bpw", method="shift+gptq")
    monkeypatch.setattr(door, "_memory_of", lambda *_: 1 << 40)
    with pytest.raises(zp.CheckpointError, match=r"solving weights takes about .* use max_memory='\d+M'"):
        quantize(source, out)
    assert list(tmp_path.iterdir()) == []
