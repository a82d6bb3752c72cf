"""Plans on a device write the bytes of the reference, hold what they need, and say later what they met."""

from typing import Any

import pytest
import torch
from tests.contract.test_backends import sample_for
from tests.kernels.triton.interpreter import DEVICE
from tests.tensors import same_bytes
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import zeropoint as zp
from zeropoint.kernels.triton import starts

pytestmark = pytest.mark.rotating

SCHEMES = (
    "int8:channel", "int8:tensor", "float8_e4m3fn:tensor", "int4:g128", "uint4:g32:asym", "mxfp8_e4m3",
    "mxfp4", "nvfp4", "nvfp4:dialect=modelopt", "nf4:g64",
)  # fmt: skip
SHAPE = (4, 256)
NO_GPU = pytest.mark.skipif(DEVICE != "cuda", reason="no GPU")


def planned(op: str, scheme: str | zp.QuantizationParams, dtype: torch.dtype) -> zp.prepared.Plan:
    made = zp.plan(op, scheme, SHAPE, dtype, device=DEVICE, backend="triton")
    assert made.allocates is None
    return made


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_plans_on_a_device_write_the_bytes_of_the_reference(
    interpreted: None, scheme: str, dtype: torch.dtype
) -> None:
    x = sample_for(scheme, SHAPE, dtype)
    with zp.only_backend("reference"):
        expected = zp.quantize(x, scheme)
        values, rounded = expected.dequantize(), zp.fake_quantize(x, expected.params)
    here, params = x.to(DEVICE), expected.params.to(DEVICE)
    choose = planned("quantize", scheme, dtype)
    q = choose.empty()
    for each in (x, x / 4):  # the second run finds what the first one left in the workspace
        with zp.only_backend("reference"):
            wanted = zp.quantize(each, scheme)
        choose.run(each.to(DEVICE), out=q)
        choose.synchronize()
        assert same_bytes(q.data.cpu(), wanted.data)
        assert all(same_bytes(a.cpu(), b) for a, b in zip(q.scales, wanted.scales, strict=True))
    assert same_bytes(planned("quantize", params, dtype).run(here).data.cpu(), expected.data)
    assert same_bytes(planned("dequantize", params, dtype).run(expected.to(DEVICE)).cpu(), values)
    assert same_bytes(planned("fake_quantize", params, dtype).run(here).cpu(), rounded)
    slope = planned("fake_quantize_backward", params, dtype).run(torch.ones_like(here), here)
    on_host = zp.plan("fake_quantize_backward", expected.params, SHAPE, dtype, backend="reference")
    assert same_bytes(slope.cpu(), on_host.run(torch.ones_like(x), x))


@pytest.mark.parametrize("scheme", ["int8:channel", "int8:tensor", "mxfp4", "nvfp4"])
@pytest.mark.parametrize("given", [False, True], ids=["chosen", "given"])
def test_a_run_that_met_nan_is_said_when_the_device_is_done(
    interpreted: None, scheme: str, given: bool
) -> None:
    x = torch.ones(SHAPE, device=DEVICE)
    params = zp.quantize(x, scheme).params
    plan = planned("quantize", params if given else scheme, torch.float32)
    out = plan.empty()
    bad = x.clone()
    bad[2, 3] = torch.nan
    plan.run(bad, out=out)
    plan.run(x, out=out)
    with pytest.raises(zp.NonFiniteError, match=r"since the last call of synchronize"):
        plan.synchronize()
    plan.run(x, out=out)
    plan.synchronize()
    assert same_bytes(out.data.cpu(), zp.quantize(x, params).data.cpu())


class _Made(TorchDispatchMode):
    """Notes the operators that make memory."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found, given = func(*args, **(kwargs or {})), tree_leaves((args, kwargs))
        own = {x.untyped_storage().data_ptr() for x in given if isinstance(x, torch.Tensor)}
        made = [x for x in tree_leaves(found) if isinstance(x, torch.Tensor)]
        self.seen += [str(func)] * any(x.untyped_storage().data_ptr() not in own for x in made)
        return found


@pytest.mark.parametrize("op", ["quantize", "dequantize", "fake_quantize", "fake_quantize_backward"])
@pytest.mark.parametrize("given", [False, True], ids=["chosen", "given"])
@pytest.mark.parametrize("scheme", [*SCHEMES, "uint8:channel:asym=real"])
def test_a_run_makes_no_tensor_or_the_plan_says_so(
    monkeypatch: pytest.MonkeyPatch, scheme: str, given: bool, op: str
) -> None:
    x = sample_for(scheme, SHAPE, torch.bfloat16).to(DEVICE)
    q = zp.quantize(x, scheme)
    source = q.params if given else scheme
    plan = zp.plan(op, source, SHAPE, x.dtype, device=DEVICE, backend="triton")
    inputs = {"dequantize": (q,), "fake_quantize_backward": (x, x)}.get(op, (x,))
    out = plan.empty()
    plan.run(*inputs, out=out)
    # What the interpreter makes for itself is none of the plan's.
    monkeypatch.setattr(starts.Start, "__call__", lambda *_, **__: None)
    with _Made() as made:
        plan.run(*inputs, out=out)
    assert made.seen == [] or plan.allocates is not None


@pytest.mark.parametrize(
    "scheme", ["mxfp4:scale=search", pytest.param("nvfp4:scale=search", marks=pytest.mark.slow)]
)
def test_a_plan_searches_in_memory_of_its_own(monkeypatch: pytest.MonkeyPatch, scheme: str) -> None:
    x = sample_for(scheme, (2, 64), torch.bfloat16)
    plan = zp.plan("quantize", scheme, (2, 64), x.dtype, device=DEVICE, backend="triton")
    out = plan.empty()
    for each in (x, x * 0.75):
        plan.run(each.to(DEVICE), out=out)
        plan.synchronize()
        with zp.only_backend("reference"):
            expected = zp.quantize(each, scheme)
        assert same_bytes(out.data.cpu(), expected.data)
        assert all(same_bytes(a.cpu(), b) for a, b in zip(out.scales, expected.scales, strict=True))
    monkeypatch.setattr(starts.Start, "__call__", lambda *_, **__: None)
    with _Made() as made:
        plan.run(x.to(DEVICE), out=out)
    assert (made.seen, plan.allocates) == ([], None)


def test_a_plan_says_what_it_holds() -> None:
    params = zp.quantize(torch.ones(SHAPE, device=DEVICE), "nvfp4").params
    notes, tables, scales = 16, 3 * 256 * 4, 4 * 256 // 16 + 4
    assert planned("quantize", "nvfp4", torch.float32).workspace_bytes == notes + tables
    assert planned("dequantize", "nvfp4", torch.float32).workspace_bytes == tables
    given = planned("quantize", params, torch.float32)
    assert (given.workspace_bytes, given.parameter_bytes) == (notes, tables + scales)


def test_a_plan_on_a_device_answers_as_one_on_the_host() -> None:
    there, host = planned("quantize", "nvfp4", torch.float32), zp.plan("quantize", "nvfp4", SHAPE)
    assert there.identity == f"triton/{host.identity.partition('/')[2]}"
    assert there.guarantee == host.guarantee
    with pytest.raises(zp.ShapeError, match="make a plan for it"):
        there.check(torch.zeros(SHAPE[::-1], device=DEVICE))


@NO_GPU
@pytest.mark.parametrize("scheme", ["int8:channel", "int8:tensor", "mxfp4", "nvfp4"])
def test_a_graph_replays_a_plan_on_new_numbers_without_memory(scheme: str) -> None:
    x = torch.randn(SHAPE, device=DEVICE, dtype=torch.bfloat16)
    plan = planned("quantize", scheme, torch.bfloat16)
    out = plan.empty()
    plan.run(x, out=out)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    plan.run(x, out=out)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan.run(x, out=out)
    x.copy_(torch.randn(SHAPE))
    graph.replay()
    expected = zp.quantize(x, scheme)
    assert same_bytes(out.data.cpu(), expected.data.cpu())
    assert all(same_bytes(a.cpu(), b.cpu()) for a, b in zip(out.scales, expected.scales, strict=True))
