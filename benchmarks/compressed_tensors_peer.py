"""compressed-tensors as llm-compressor drives it, one weight at a time: statistics, scales, compressor."""

from __future__ import annotations

from typing import Any

import torch
from cases import same_bytes
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.format import infer_module_format
from compressed_tensors.quantization import QuantizationScheme, preset_name_to_scheme
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

import zeropoint as zp

State = dict[str, torch.Tensor]


class Preset:
    """One preset: ``compress`` and ``decompress`` do what happens to a linear layer's weight."""

    def __init__(self, name: str) -> None:
        self._scheme: QuantizationScheme = preset_name_to_scheme(name.upper(), ["Linear"])
        kind = infer_module_format(torch.nn.Linear, self._scheme)
        self._compressor: Any = BaseCompressor.get_value_from_registry(kind.value)

    def compress(self, weight: torch.Tensor) -> State:
        """Return the tensors that a file would hold for a two-dimensional ``weight``."""
        args = self._scheme.weights
        group = args.group_size or weight.shape[-1]
        low, high = torch.aminmax(weight.unflatten(-1, (-1, group)), dim=-1)
        state: State = {"weight": weight}
        if str(args.strategy).endswith("tensor_group"):
            largest = torch.maximum(high.amax(), -low.amin()).reshape(1)
            state["weight_global_scale"] = generate_gparam(-largest, largest)
        scale, _ = calculate_qparams(low, high, args, global_scale=state.get("weight_global_scale"))
        state["weight_scale"] = scale.to(weight.dtype)
        return dict(self._compressor.compress(state, self._scheme))

    def decompress(self, state: State) -> torch.Tensor:
        """Return the weight that a file's tensors represent."""
        values: torch.Tensor = self._compressor.decompress(state, self._scheme)["weight"]
        return values


def disagreements(name: str, part: torch.Tensor, text: str) -> list[str]:
    """Return where our bytes for ``part`` under the scheme ``text`` differ from those of preset ``name``."""
    theirs, ours = Preset(name).compress(part), zp.quantize(part, text)
    codes = theirs.get("weight_packed", theirs.get("weight"))
    assert codes is not None
    # Packed integers are written as code + 8 there and as two's complement here: one bit of each nibble.
    mine = ours.data ^ 0x88 if codes.dtype == torch.int32 else ours.data
    pairs = {"codes": (codes, mine), "scales": (theirs["weight_scale"], ours.scales[0])}
    if "weight_global_scale" in theirs:
        pairs["global scale"] = (theirs["weight_global_scale"], ours.scales[1])
    return [what for what, (a, b) in pairs.items() if not same_bytes(_flat_bytes(a), _flat_bytes(b))]


def _flat_bytes(x: torch.Tensor) -> torch.Tensor:
    return x.detach().contiguous().reshape(-1).view(torch.uint8)
