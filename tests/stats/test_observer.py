import copy
import io
import pickle
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.peers import Peer
from tests.stats.every_statistic import ALL, CHANNELS, name_of
from tests.stats.states import assert_same
from tests.tensors import normal

from zeropoint import UnsupportedError, choose_params, fake_quantize
from zeropoint.errors import CalibrationError
from zeropoint.stats import MinMax, MovingAverage, Observer, Statistic, name_observers
from zeropoint.stats.observer import update_together

pytestmark = pytest.mark.rotating

dynamo = Peer("torch._dynamo.utils")

EVERY = pytest.mark.parametrize("statistic", [*ALL, *CHANNELS], ids=name_of)


def observed(statistic: Statistic, *batches: torch.Tensor) -> Observer:
    observer = Observer(statistic)
    for batch in batches:
        observer(batch)
    return observer


@EVERY
def test_the_input_passes_as_it_is(statistic: Statistic) -> None:
    x = normal(4, 6).requires_grad_()
    observer = Observer(statistic)
    assert observer(x) is x
    observer(x).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.ones(4, 6))
    assert_same(observer.state(), statistic.update(statistic.update(statistic.start(), x), x))


@EVERY
def test_several_batches_are_taken_at_once(statistic: Statistic) -> None:
    batches = [normal(4, 6).requires_grad_(), normal(0, 6), normal(1, 6), normal(7, 6, seed=1)]
    one_by_one = observed(statistic, *batches)
    observer = Observer(statistic)
    observer.update_all(batches[:1])
    observer.update_all([])
    observer.update_all(batches[1:])
    assert_same(observer.state(), one_by_one.state())
    assert not any(tensor.requires_grad for tensor in observer.state().values())


@EVERY
def test_observers_that_see_the_same_take_it_in_together(
    monkeypatch: pytest.MonkeyPatch, statistic: Statistic
) -> None:
    before, batches = normal(2, 6, seed=2), [normal(4, 6), normal(1, 6, seed=1)]
    observers = [observed(statistic), observed(statistic, before), observed(statistic)]
    reported = []
    update_all = Observer.update_all

    def watched(self: Observer, batches: Sequence[torch.Tensor]) -> None:
        reported.append(self)
        update_all(self, batches)

    monkeypatch.setattr(Observer, "update_all", watched)
    update_together(observers, batches)
    assert reported == observers[:2]  # the last one's state was that of the first
    for observer, seen in zip(observers, ([], [before], []), strict=True):
        assert_same(observer.state(), observed(statistic, *seen, *batches).state())
    observers[0].update(before)
    assert_same(observers[2].state(), observed(statistic, *batches).state())


@EVERY
def test_a_disabled_observer_is_frozen(statistic: Statistic) -> None:
    observer = observed(statistic, normal(4, 6))
    before = {name: tensor.clone() for name, tensor in observer.state().items()}
    observer.disable()
    observer(normal(4, 6, seed=1) * 100)
    assert_same(observer.state(), before)
    assert repr(observer).endswith("disabled)")
    observer.enable()
    observer(normal(4, 6, seed=1) * 100)
    assert int(observer.state()["seen"]) == 48


@EVERY
def test_a_state_dict_fits_a_new_observer_strictly(statistic: Statistic, tmp_path: Path) -> None:
    observer = observed(statistic, normal(9, 6), normal(9, 6, seed=1))
    save_file(observer.state_dict(), tmp_path / "state.safetensors")
    other = Observer(statistic)
    other.load_state_dict(load_file(tmp_path / "state.safetensors"), strict=True)
    assert_same(other.state(), observer.state())


@EVERY
def test_copies_go_their_own_ways(statistic: Statistic) -> None:
    observer = observed(statistic, normal(9, 6))
    before = {name: tensor.clone() for name, tensor in observer.state().items()}
    file = io.BytesIO()
    torch.save(observer, file)
    file.seek(0)
    for other in (
        copy.deepcopy(observer),
        pickle.loads(pickle.dumps(observer)),
        torch.load(file, weights_only=False),
    ):
        assert_same(other.state(), before)
        other(normal(9, 6, seed=1) * 100)
        assert int(other.state()["seen"]) == 108
        assert_same(observer.state(), before)


@EVERY
def test_casting_a_model_leaves_statistics_exact(statistic: Statistic) -> None:
    observer = observed(statistic, normal(9, 6))
    before = {name: tensor.clone() for name, tensor in observer.state().items()}
    model = torch.nn.Sequential(torch.nn.Linear(6, 6), observer)
    for cast in (model.half, model.bfloat16, model.float, model.double):
        cast()
        assert_same(observer.state(), before)


def test_parameters_are_those_of_the_data_and_name_the_observer_without_data() -> None:
    x = normal(50).bfloat16()
    observer = observed(MinMax(), x)
    params = observer.params("uint8:tensor:asym", dtype=torch.bfloat16)
    assert_same(params.tensors(), choose_params(x, "uint8:tensor:asym").tensors())
    assert torch.equal(fake_quantize(x, params), fake_quantize(x, "uint8:tensor:asym"))
    observer.reset()
    observer.name = "model.layers.0.mlp"
    with pytest.raises(CalibrationError, match=r"^model\.layers\.0\.mlp received no calibration data"):
        observer.params("int8")


def test_errors_name_the_place_in_the_model() -> None:
    model = torch.nn.ModuleDict({"q_proj": torch.nn.Sequential(Observer(MinMax()))})
    model["k_proj"] = Observer(MinMax(), name="keys")
    found = name_observers(model)
    assert found == {"q_proj.0": model["q_proj"][0], "k_proj": model["k_proj"]}
    with pytest.raises(CalibrationError, match=r"^q_proj\.0 received no calibration data"):
        found["q_proj.0"].params("int8")
    assert model["k_proj"].name == "keys"


def test_merging_observers_leaves_the_other_as_it_is() -> None:
    a, b = observed(MinMax(), normal(5)), observed(MinMax(), normal(5, seed=1))
    kept = {name: tensor.clone() for name, tensor in b.state().items()}
    a.merge(b)
    assert_same(b.state(), kept)
    assert_same(a.state(), observed(MinMax(), torch.cat([normal(5), normal(5, seed=1)])).state())


def test_one_process_alone_gathers_what_it_has() -> None:
    observer = Observer(MovingAverage(), shared=False)
    observer(normal(5))
    assert_same(observer.gathered().state(), observer.state())


def test_what_is_shared_already_is_not_gathered_again() -> None:
    with pytest.raises(UnsupportedError, match=r"^lm_head \(shared=True\) holds the state of all processes"):
        Observer(MinMax(), name="lm_head").gathered()


@EVERY
def test_inference_mode_and_autocast_change_nothing(statistic: Statistic) -> None:
    observer, x = Observer(statistic), normal(9, 6)
    with torch.inference_mode():
        observer(x)
    with torch.autocast("cpu", torch.bfloat16):
        observer(x)
    assert_same(observer.state(), observed(statistic, x, x).state())


@EVERY
def test_a_compiled_model_breaks_its_graph_once_and_learns_the_same(statistic: Statistic) -> None:
    torch._dynamo.reset()
    dynamo.counters.clear()
    observer = Observer(statistic)
    model = torch.nn.Sequential(torch.nn.Linear(6, 6), observer, torch.nn.ReLU())
    compiled, x = torch.compile(model, backend="eager"), normal(9, 6)
    with torch.no_grad():
        outputs = [compiled(x) for _ in range(3)]
        plain = Observer(statistic)
        expected = [plain(model[0](x)).relu() for _ in range(3)]
    assert all(torch.equal(a, b) for a, b in zip(outputs, expected, strict=True))
    assert_same(observer.state(), plain.state())
    assert [
        reason for reason in dynamo.counters["graph_break"] if "torch.compiler.disable" not in reason
    ] == []
    assert dynamo.counters["graph_break"]


def test_a_disabled_observer_leaves_the_graph_whole() -> None:
    torch._dynamo.reset()
    observer = Observer(MinMax())
    observer.disable()
    model = torch.nn.Sequential(torch.nn.Linear(6, 6), observer)
    x = normal(3, 6)
    whole = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.equal(whole(x), model(x))


def test_observing_without_a_compiler_does_not_import_one() -> None:
    code = (
        "import sys, torch; from zeropoint.stats import MinMax, Observer; "
        "Observer(MinMax())(torch.ones(3)); print('torch._dynamo' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
