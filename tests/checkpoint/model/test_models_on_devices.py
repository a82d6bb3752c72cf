"""Checkpoints whose model runs on a GPU: what is written, where tensors are, and what is refused.

A stand-in takes the place of the GPU: it refuses to mix its tensors with those of the host, and computes what
the host computes, so that the files are the same, byte for byte. With a GPU the same commands run there.
"""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.checkpoint.written import OF_RUNS, digests
from tests.peers import transformers
from tests.stand_in_device import Elsewhere, standing_in
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import zeropoint as zp
from zeropoint.checkpoint.model import running_model, solved_weights
from zeropoint.checkpoint.model.running_model import parameters_on
from zeropoint.checkpoint.plan import limits
from zeropoint.models import solving
from zeropoint.ops.devices import CPU, device_named

pytestmark = pytest.mark.rotating

SIZES = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": 64, "max_position_embeddings": 128,
}  # fmt: skip
WINDOWS = torch.randint(0, 64, (8, 8), generator=torch.Generator().manual_seed(0))
ALONE = "ZEROPOINT_TEST_ALONE"
"""Set where a test runs in a process of its own."""
NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
CASES = {
    "shift+gptq+bias": {}, "equalize+gptq": {}, "descent": {"calibration": "self", "samples": 8, "length": 8},
    "shift+signround": {}, "mse_weighted": {"to": "w8a8_static"}, "gptq": {"source": "experts"},
}  # fmt: skip
QUICK = ("mse_weighted",)
"""Those that every run tests."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two small models, one with experts, and token ids."""
    folder = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    plain = transformers.LlamaConfig(**SIZES, attention_bias=True)
    experts = transformers.Qwen3MoeConfig(
        **SIZES, head_dim=8, num_experts=2, num_experts_per_tok=1, moe_intermediate_size=16
    )
    made = {
        "plain": transformers.LlamaForCausalLM(plain), "experts": transformers.Qwen3MoeForCausalLM(experts),
    }  # fmt: skip
    for name, model in made.items():
        for parameter in model.parameters():
            parameter.data.mul_(4 if parameter.ndim > 1 else 1)
        model.save_pretrained(folder / name)
    save_file({"input_ids": WINDOWS.reshape(-1)}, folder / "ids.safetensors")
    return folder


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that passes for a GPU with much memory, and attention that is the same on both."""
    monkeypatch.setattr(limits, "device_named", lambda given: given or CPU)
    monkeypatch.setattr(running_model, "free_bytes", lambda _: 8 << 30)


def quantize(models: Path, out: Path, method: str, **options: Any) -> zp.RunResult:
    source, to = options.pop("source", "plain"), options.pop("to", "int4:g16")
    return zp.quantize_checkpoint(
        models / source, out, to, **{"method": method, "calibration": WINDOWS, **options}
    )


def same_files(a: Path, b: Path) -> None:
    """Demand equal files, but for the manifest, which says where the model ran."""
    found, other = digests(a), digests(b)
    for each in (found, other):
        for name in OF_RUNS:
            each.pop(name, None)
    assert found == other


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, which no stand-in takes the place of")
def test_a_model_elsewhere_is_trained_in_a_process_of_its_own() -> None:
    # Autograd counts devices when it first runs, which it has where other tests ran.
    this = test_a_model_elsewhere_is_solved_to_the_same_bytes_without_a_tensor_out_of_place.__name__
    those = [f"{this}[shift+signround]", test_scales_are_trained_elsewhere_to_the_same_values.__name__]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", ""]
    ran = subprocess.run(
        [*command, *(f"{__file__}::{each}" for each in those)],
        env=os.environ | {ALONE: "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "2 passed" in ran.stdout, ran.stdout[-3000:]


@pytest.mark.slow
@pytest.mark.skipif(ALONE not in os.environ, reason="runs in a process of its own, see above")
def test_scales_are_trained_elsewhere_to_the_same_values(
    models: Path, tmp_path: Path, stand_in: None
) -> None:
    with standing_in():
        pass  # the device is known before autograd counts
    with sdpa_kernel(SDPBackend.MATH):
        quantize(models, tmp_path / "q", "nearest", calibration=None)
        given = models / "plain", tmp_path / "q"
        zp.distill_checkpoint(*given, tmp_path / "host", WINDOWS, steps=3, workers=1)
        with standing_in() as device:
            zp.distill_checkpoint(*given, tmp_path / "there", WINDOWS, steps=3, device=device)
    first, host, there = (load_file(tmp_path / name / "model.safetensors") for name in ("q", "host", "there"))
    moved = {name for name, x in host.items() if not torch.equal(x, first[name])}
    assert moved
    assert all(name.endswith("weight_scale") for name in moved)
    # Gradients of the device are added by other functions of torch, in an order of their own.
    for name, x in host.items():
        assert torch.equal(x, there[name]) or (name in moved and torch.allclose(x, there[name], rtol=1e-6))


@pytest.mark.parametrize(
    "method", [pytest.param(m, marks=() if m in QUICK else pytest.mark.slow) for m in CASES]
)
def test_a_model_elsewhere_is_solved_to_the_same_bytes_without_a_tensor_out_of_place(
    models: Path, tmp_path: Path, stand_in: None, method: str
) -> None:
    if "signround" in method and ALONE not in os.environ:
        pytest.skip("runs in a process of its own, see above")
    with standing_in():
        pass  # the device is known before autograd counts
    with sdpa_kernel(SDPBackend.MATH):
        quantize(models, tmp_path / "host", method, **CASES[method])
        with standing_in() as device:
            found = quantize(models, tmp_path / "there", method, device=device, **CASES[method])
    same_files(tmp_path / "host", tmp_path / "there")
    assert found.to_dict()["device"] == device.type
    assert f'"device": "{device.type}"' in (tmp_path / "there" / "zeropoint_manifest.json").read_text()
    assert '"device"' not in (tmp_path / "host" / "zeropoint_manifest.json").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("free", [None, 1 << 19])
def test_what_passes_between_blocks_is_kept_there_or_in_files_where_that_is_too_much(
    models: Path, tmp_path: Path, stand_in: None, monkeypatch: pytest.MonkeyPatch, free: int | None
) -> None:
    folders = []
    solve = solving.solve

    def watched(root: Any, batches: Any, tasks: Any, steps: Any, *rest: Any, **named: Any) -> None:
        folders.append(steps.folder)
        assert steps.workers == 1
        solve(root, batches, tasks, steps, *rest, **named)

    monkeypatch.setattr(solved_weights, "solve", watched)
    if free is not None:
        monkeypatch.setattr(solved_weights, "_passing", lambda *_: 16 << 30)
    with standing_in() as device:
        quantize(models, tmp_path / "out", "gptq", device=device)
    assert [folder is None for folder in folders] == [free is None]


@pytest.mark.slow
def test_a_run_that_was_interrupted_on_another_device_is_not_resumed(
    models: Path, tmp_path: Path, stand_in: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    add, left = solved_weights.SolvedFolder.add, iter(range(3))

    def stop(self: solved_weights.SolvedFolder, *given: Any) -> None:
        if next(left, None) is None:
            raise KeyboardInterrupt
        add(self, *given)

    monkeypatch.setattr(solved_weights.SolvedFolder, "add", stop)
    with pytest.raises(KeyboardInterrupt):
        quantize(models, tmp_path / "out", "gptq")
    monkeypatch.setattr(solved_weights.SolvedFolder, "add", add)
    with standing_in() as device:
        message = "differs in 'device': it has 'absent', now 'elsewhere'"
        with pytest.raises(zp.CheckpointError, match=message):
            quantize(models, tmp_path / "out", "gptq", device=device)
        quantize(models, tmp_path / "out", "gptq", device=device, restart=True)


@pytest.mark.slow
def test_models_elsewhere_are_evaluated_searched_and_observed_to_the_same_numbers(
    models: Path, tmp_path: Path, stand_in: None
) -> None:
    zp.quantize_checkpoint(models / "plain", tmp_path / "w4", "int4:g16")
    ids = models / "ids.safetensors"

    def numbers(device: torch.device | None) -> list[Any]:
        given: dict[str, Any] = {"device": device}
        found = zp.evaluate_checkpoint(
            tmp_path / "w4", models / "plain", ids, context=8, windows=3, continuations=2, **given
        )
        assert found.to_dict()["device"] == ("cpu" if device is None else device.type)
        searched = zp.search_checkpoint(
            models / "plain",
            "8bpw",
            ["int4:g16", "int8:g16"],
            importance="linearity",
            text=WEIGHED,
            refine=1,
            **given,
        )
        file = tmp_path / f"{device}.safetensors"
        zp.gather_statistics(models / "plain", file, WINDOWS, gram=True, **given)
        zp.add_kv_scales(tmp_path / "w4", tmp_path / f"kv {device}", WINDOWS, **given)
        scales = load_file(tmp_path / f"kv {device}" / "model.safetensors")
        return [
            [model.statistics for model in found.models], searched.recipe.text, load_file(file), scales
        ]  # fmt: skip

    WEIGHED = tmp_path / "weighed.safetensors"
    save_file({"input_ids": WINDOWS.repeat(8, 1).reshape(-1)}, WEIGHED)
    with sdpa_kernel(SDPBackend.MATH):
        host = numbers(None)
        with standing_in() as device:
            there = numbers(device)
    assert host[:2] == there[:2]
    for own, other in zip(host[2:], there[2:], strict=True):
        assert own.keys() == other.keys()
        assert all(torch.equal(x, other[name]) for name, x in own.items())


def test_parameters_are_moved_once_and_come_back() -> None:
    one, two = nn.Linear(2, 2), nn.Linear(2, 2)
    two.weight = one.weight
    one.register_buffer("counts", torch.ones(1))
    before = one.weight
    with standing_in() as device:
        with suppress(KeyError), parameters_on(device, [one, two]):
            assert isinstance(one.weight, Elsewhere)
            assert one.weight is two.weight
            assert isinstance(one.counts, Elsewhere)
            raise KeyError
        assert one.weight is before
        assert two.weight is before


def test_a_gpu_without_enough_free_memory_is_refused_in_one_sentence(
    models: Path, tmp_path: Path, stand_in: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(solved_weights, "_memory_of", lambda *_: 16 << 30)
    with standing_in() as device:
        solving_takes = (
            r"solving weights takes about 8.0 GiB more than is free on elsewhere:0: Gram matrices .*"
        )
        with pytest.raises(zp.CheckpointError, match=rf"{solving_takes}; leave device='elsewhere:0' out$"):
            quantize(models, tmp_path / "out", "gptq", device=device)
        monkeypatch.setattr(running_model, "free_bytes", lambda _: 1 << 12)
        with pytest.raises(
            zp.CheckpointError, match=r"the model takes about .* more than is free on elsewhere"
        ):
            quantize(models, tmp_path / "out", "gptq", device=device)


def test_a_device_on_which_no_model_runs_is_refused(models: Path, tmp_path: Path, stand_in: None) -> None:
    with standing_in() as device:
        with pytest.raises(zp.OptionError, match="is where a model runs on data, and none runs here; add"):
            zp.search_checkpoint(models / "plain", "5bpw", device=device)
        with pytest.raises(zp.OptionError, match="is where a model runs on data"):
            zp.gather_statistics(models / "plain", tmp_path / "x.dat", statistics="y", device=device)


@pytest.mark.parametrize("method", ["gptq", pytest.param("shift+gptq+bias", marks=pytest.mark.slow)])
def test_a_model_in_memory_that_lies_elsewhere_gets_the_codes_that_it_gets_on_the_host(method: str) -> None:
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, attention_bias=True)).eval()
    batches = [{"input_ids": window[None], "use_cache": False} for window in WINDOWS]

    def state(device: torch.device) -> dict[str, torch.Tensor]:
        there = [{**batch, "input_ids": batch["input_ids"].to(device)} for batch in batches]
        found = zp.quantize_model(model, "int4:g16", method=method, calibration=there).model
        return {name: x.cpu() for name, x in found.state_dict().items()}

    with sdpa_kernel(SDPBackend.MATH):
        host = state(CPU)
        with standing_in() as device, parameters_on(device, model.modules()):
            found = state(device)
    assert host.keys() == found.keys()
    assert all(torch.equal(x, found[name]) for name, x in host.items())


def _codes(folder: Path) -> torch.Tensor:
    tensors = load_file(folder / "model.safetensors")
    packed = [tensors[name] for name in sorted(tensors) if name.endswith("weight_packed")]
    return torch.cat(
        [(x.reshape(-1, 1) >> torch.arange(0, 32, 4)).bitwise_and(15).reshape(-1) for x in packed]
    )


@NO_GPU
@pytest.mark.parametrize("source", ["plain", "experts"])
def test_a_gpu_and_the_host_choose_the_same_codes_but_for_few(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    # The processor would round factors to bfloat16, the GPU does not.
    monkeypatch.setattr(solving, "narrow_products", nullcontext)
    quantize(models, tmp_path / "host", "gptq", source=source)
    found = quantize(models, tmp_path / "gpu", "gptq", source=source, device="cuda")
    assert found.to_dict()["device"] == "cuda"
    host, there = _codes(tmp_path / "host"), _codes(tmp_path / "gpu")
    # Sums in another order move numbers that lie next to the middle of two codes, and what follows from them.
    assert float((host != there).double().mean()) < 0.02


@NO_GPU
def test_a_gpu_measures_what_the_host_measures(models: Path, tmp_path: Path) -> None:
    zp.quantize_checkpoint(models / "plain", tmp_path / "w4", "int4:g16")
    host, there = (
        zp.evaluate_checkpoint(
            tmp_path / "w4", models / "plain", models / "ids.safetensors", context=8, windows=3,
            continuations=0, device=device,
        ).models[-1].statistics["Mean KLD"].value
        for device in ("cpu", "cuda")
    )  # fmt: skip
    assert there == pytest.approx(host, rel=1e-3)


@NO_GPU
@pytest.mark.parametrize("method", ["gptq", "shift+gptq+bias", "awq+gptq", "shift+signround"])
def test_a_gpu_has_little_memory_of_the_model_at_the_end(models: Path, tmp_path: Path, method: str) -> None:
    device = device_named("cuda")
    before = torch.cuda.memory_allocated(device)
    quantize(models, tmp_path / "out", method, device=device)
    torch._C._cuda_clearCublasWorkspaces()  # each thread that multiplies has one, of 32 MiB
    assert torch.cuda.memory_allocated(device) - before < 1 << 20
