"""What kernels read and write is the memory of their arguments, however that is laid out, and no other."""

import threading
from pathlib import Path

import pytest
import torch

import zeropoint as zp
from zeropoint.kernels.cpu.host.arrays import flat_array

SEED = torch.Generator().manual_seed(5)


def _strided(scale: torch.Tensor) -> list[torch.Tensor]:
    """Return the same scales with other strides: a column of a table, every second row, one expanded."""
    table = torch.cat([scale, scale * 0 + 9], 1)
    rows = torch.cat([scale, scale * 0 + 9], 1).reshape(-1, 1)
    return [table[:, :1], rows[::2], scale[:1].expand(scale.shape)]


@pytest.mark.parametrize("source", ["int8:token", ""])
def test_linear_reads_scales_of_any_stride(source: str) -> None:
    x, w = torch.randn(8, 64, generator=SEED), torch.randn(64, 64, generator=SEED)
    q = zp.quantize(w, "int8:channel")
    for scale in _strided(q.scales[0]):
        reported = (q.data, [scale], None, source, "int8:channel", torch.float32)
        y = torch.ops.zeropoint.linear(x, [], *reported)
        reported = (q.data, [scale.contiguous()], None, source, "int8:channel", torch.float32)
        assert torch.equal(y, torch.ops.zeropoint.linear(x, [], *reported))
        with zp.only_backend("reference"):
            assert torch.allclose(y, torch.ops.zeropoint.linear(x, [], *reported), atol=1e-4)


@pytest.mark.parametrize("preset", ["w8a8", "int8:channel", "fp8_dynamic"])
def test_a_layer_reads_scales_of_any_stride_that_were_put_there(preset: str) -> None:
    converted = zp.quantize_model(torch.nn.Sequential(torch.nn.Linear(256, 128)), preset).model
    x, state = torch.randn(4, 256, generator=SEED), converted.state_dict()
    (key,) = (name for name in state if name.endswith("scale1") and "weight" in name)
    converted(x)
    for scale in _strided(state[key]):
        converted.load_state_dict({**state, key: scale}, assign=True)
        y = converted(x)
        converted.load_state_dict({**state, key: scale.contiguous()}, assign=True)
        assert torch.equal(y, converted(x))


def test_a_layer_sees_that_its_weight_has_fewer_rows_in_the_same_memory() -> None:
    converted = zp.quantize_model(torch.nn.Sequential(torch.nn.Linear(64, 128)), "w8a8").model
    x, state = torch.randn(4, 64, generator=SEED), converted.state_dict()
    before = converted(x)
    packed = next(m for m in converted.modules() if "data" in m._buffers)
    packed.data.data = packed.data.data[:64]
    with pytest.raises(zp.ShapeError):
        converted(x)
    scale = next(name for name in packed._buffers if name.startswith("scale1"))
    packed._buffers[scale].data = packed._buffers[scale].data[:1].expand(64, 1)
    assert torch.equal(packed._buffers["data"], state[next(n for n in state if n.endswith("data"))][:64])
    assert before.shape == (4, 128)


def test_a_packed_weight_of_another_dtype_is_an_error() -> None:
    q = zp.quantize(torch.randn(64, 64, generator=SEED), "int8:channel")
    reported = (list(q.scales), None, "int8:token", "int8:channel", torch.float32)
    with pytest.raises(zp.ShapeError, match=r"weight \(torch.int16 .*\) must be bytes that hold 64 codes"):
        torch.ops.zeropoint.linear(torch.randn(8, 64), [], q.data.to(torch.int16), *reported)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float64, torch.bfloat16])
def test_a_gradient_of_another_dtype_is_an_error(dtype: torch.dtype) -> None:
    x, scale = torch.randn(1 << 12, generator=SEED), torch.ones(1)
    with pytest.raises(zp.DtypeError, match=r"must have the dtype of x, torch\.float32; convert it first"):
        torch.ops.zeropoint.fake_quantize_backward(x.to(dtype), x, [scale], "int8:tensor")


@pytest.mark.crossed
@pytest.mark.parametrize("scheme", ["int8:channel", "mxfp4", "int4:g32:asym", "nvfp4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_tensor_that_was_quantized_can_still_be_resized_and_freed(scheme: str, dtype: torch.dtype) -> None:
    x = torch.randn(64, 64, generator=SEED).to(dtype)
    q = zp.quantize(x, scheme)
    values = q.dequantize()
    zp.fake_quantize(x, scheme)
    for tensor in (x, q.data, *q.scales, values):
        tensor.untyped_storage().resize_(0)
    with pytest.raises(zp.DtypeError, match="has no memory: its storage was freed"):
        flat_array(x)
    x.untyped_storage().resize_(x.numel() * x.itemsize)
    assert zp.quantize(x.fill_(1.0), scheme).shape == (64, 64)


def test_an_array_is_the_memory_of_its_tensor_and_keeps_it() -> None:
    x = torch.arange(8.0)
    array, place = flat_array(x), x.data_ptr()
    x[3] = 30.0
    assert array.ctypes.data == place
    assert array[3] == 30.0
    del x
    torch.ones(8)
    assert array.tolist() == [0, 1, 2, 30, 4, 5, 6, 7]
    assert flat_array(torch._neg_view(torch.ones(3))).tolist() == [-1, -1, -1]


def test_memory_that_is_written_may_not_be_that_of_an_input() -> None:
    x = torch.randn(4, 16, generator=SEED)
    q, wide = zp.quantize(x, "int8:channel"), zp.quantize(x.bfloat16(), "int16")
    with pytest.raises(zp.ShapeError, match="out must not share memory with the input"):
        zp.dequantize(wide, out=wide.data.view(torch.bfloat16))
    inside = zp.QuantizedTensor(
        data=q.data,
        params=zp.QuantizationParams(scheme=q.scheme, shape=q.shape, scales=(x.view(-1)[:4].reshape(4, 1),)),
        shape=q.shape,
        dtype=q.dtype,
    )
    before = x.clone()
    with pytest.raises(zp.ShapeError, match="out must not share memory with the input"):
        zp.quantize(x, "int8:channel", out=inside)
    assert torch.equal(x, before)
    with pytest.raises(zp.ShapeError, match="out must not share memory with the input"):
        zp.plan("quantize", "int8:channel", (4, 16)).run(x, out=inside)
    crossed = zp.QuantizedTensor(
        data=q.data,
        params=zp.QuantizationParams(
            scheme=q.scheme, shape=q.shape, scales=(q.data[0].view(torch.float32).reshape(4, 1),)
        ),
        shape=q.shape,
        dtype=q.dtype,
    )
    with pytest.raises(zp.ShapeError, match="nor its tensors with each other"):
        zp.quantize(x, "int8:channel", out=crossed)


def test_views_that_negate_and_integers_take_no_values() -> None:
    q = zp.quantize(torch.randn(4, 8, generator=SEED), "int8:channel")
    for view in (torch._neg_view(torch.zeros(4, 8)), torch._neg_view(torch.zeros(4, 8).double())):
        with pytest.raises(zp.DtypeError, match="out is a view with torch's negative or conjugate bit"):
            zp.dequantize(q, out=view)
        with pytest.raises(zp.DtypeError, match=r"out is a view|must be a plain dense tensor"):
            zp.plan("dequantize", "int8:channel", (4, 8)).run(q, out=view)
        assert not view.any()
    for dtype in (torch.int8, torch.int64, torch.bool, torch.complex64):
        with pytest.raises(zp.DtypeError, match="must hold floats, as values are; pass one of"):
            zp.dequantize(q, out=torch.zeros(4, 8, dtype=dtype))


def test_parts_of_one_buffer_that_do_not_overlap_may_be_written() -> None:
    buffer, x = torch.zeros(128), torch.randn(64, generator=SEED)
    buffer[:64] = x
    q = zp.quantize(buffer[:64], "int8")
    zp.dequantize(q, out=buffer[64:])
    assert torch.equal(buffer[64:], q.dequantize())
    assert torch.equal(buffer[:64], x)


def test_a_plan_with_a_workspace_refuses_a_second_thread_instead_of_mixing_results() -> None:
    plan, x = zp.plan("quantize", "nvfp4", (512, 1024)), torch.randn(512, 1024, generator=SEED)
    with plan._free, pytest.raises(zp.UnsupportedError, match="make one plan for each thread"):
        plan.run(x)
    right, refused, wrong = zp.quantize(x, "nvfp4"), [], []
    start = threading.Barrier(4)

    def work() -> None:
        start.wait()
        for _ in range(30):
            try:
                got = plan.run(x)
            except zp.UnsupportedError as error:
                refused.append(str(error))
            else:
                wrong.append(not torch.equal(got.data, right.data))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(refused) + len(wrong) == 120
    assert not any(wrong)
    assert all("make one plan for each thread" in text for text in refused)


def test_a_loaded_tensor_is_its_own_and_not_a_view_of_the_file(tmp_path: Path) -> None:
    path, q = tmp_path / "q.safetensors", zp.quantize(torch.randn(64, 64, generator=SEED), "int8:channel")
    q.save(path)
    loaded = zp.QuantizedTensor.load(path)
    path.write_bytes(b"\0" * path.stat().st_size)
    assert torch.equal(loaded.dequantize(), q.dequantize())


def test_codes_are_not_cast(tmp_path: Path) -> None:
    q = zp.quantize(torch.ones(4), "int8")
    with pytest.raises(zp.DtypeError, match=r"use dequantize\(torch.float16\)"):
        q.to(torch.float16)  # type: ignore[arg-type]


@pytest.mark.parametrize("bits", [0, -1, 4.0, True])
def test_packing_takes_a_positive_number_of_bits(bits: int) -> None:
    with pytest.raises(zp.FormatError, match="must be a whole number from 1 on"):
        zp.pack(torch.tensor([1, 2]), bits)
    with pytest.raises(zp.FormatError, match="must be a whole number from 1 on"):
        zp.unpack(torch.tensor([1, 2], dtype=torch.uint8), bits, 2)


def test_unpacking_a_scalar_is_an_error() -> None:
    with pytest.raises(zp.ShapeError, match="must have 1 bytes a row"):
        zp.unpack(torch.tensor(3, dtype=torch.uint8), 4, 2)


def test_a_negative_length_is_an_error() -> None:
    q = zp.quantize(torch.ones(4, 4), "int8")
    wrong = zp.QuantizedTensor(data=q.data, params=q.params, shape=(-4, -4), dtype=q.dtype)
    with pytest.raises(zp.ShapeError, match=r"shape \(=\(-4, -4\)\) must not have a negative length"):
        wrong.dequantize()
