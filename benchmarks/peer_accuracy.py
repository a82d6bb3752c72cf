"""Squared errors of data-free searches: ModelOpt's, auto-round's, llm-compressor's and HQQ's, and ours.

    PYTHONPATH=../src .peers-search/bin/python peer_accuracy.py [--weights FILE=NAME ...] [--json FILE]

in the environment of peers.sh.

Every search gets the same float32 numbers: 256 rows of 1,536 from a normal distribution, Laplace's and
Student's t (5 degrees of freedom), and the weights that are named. Peers run through the code that their
quantization of models calls, with its defaults, on a CPU: ModelOpt's algorithm ``mse`` (for NVFP4 its sweep
of all FP8 scales, with our rounding to e2m1: its own needs a GPU), auto-round's optimized RTN (iters=0),
llm-compressor's observers ``memoryless_mse`` and, for NVFP4, ``nvfp4_expanded_mse``, HQQ's optimizer.
Printed is the squared error over the squares, times 1000; scales stay in float32 where a peer's file would
round them.

With ``--rewrite SOURCE OUT --names FILE --scheme SCHEME --search NAME``, the model in SOURCE is written to
OUT with the weights that FILE names, one a line, as the codes of that search decode to in float32, and
nothing is printed: quality.py evaluates such models.
"""

from __future__ import annotations

import argparse
import copy
import re
import shutil
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import torch
from facts import machine, record
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import zeropoint as zp
from zeropoint.methods import method_named

ROWS, COLUMNS = 256, 1536
INTEGERS = ("int4:g32", "int4:g64", "int4:g128", "int3:g32", "int3:g64", "int3:g128")
MANIFEST = "zeropoint_manifest.json"
"""What zeropoint says of files that it wrote, which is not true of the model that is written."""
Search = Callable[[torch.Tensor], torch.Tensor]


def samples() -> dict[str, torch.Tensor]:
    """Return numbers of three distributions."""
    torch.manual_seed(0)
    shape = (ROWS, COLUMNS)
    laplace = torch.distributions.Laplace(0.0, 1.0).sample(shape)
    student = torch.distributions.StudentT(5.0).sample(shape)
    return {"normal": torch.randn(shape), "Laplace": laplace, "t(5)": student}


def weights(given: list[str]) -> dict[str, torch.Tensor]:
    """Return the tensors that ``FILE=NAME`` names, by name."""
    found = {}
    for text in given:
        path, _, name = text.partition("=")
        with safe_open(path, "pt") as file:
            found[name] = file.get_tensor(name).float()
    return found


def ours(scheme: str, method: str = "nearest") -> Search:
    """Return a method of zeropoint."""
    parsed = zp.Scheme.parse(scheme)
    return lambda x: method_named(method).quantize(x, parsed).q.dequantize()


def llm_compressor(scheme: str, observer: str = "memoryless_mse") -> Search:
    """Return an observer of llm-compressor, which compressed-tensors rounds under."""
    from compressed_tensors.quantization import QuantizationArgs, preset_name_to_scheme
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize
    from llmcompressor.observers import Observer

    preset = {"nvfp4": "NVFP4A16", "mxfp4": "MXFP4A16"}.get(scheme, "W4A16")
    args = preset_name_to_scheme(preset, ["Linear"]).weights
    if preset == "W4A16":
        bits, size = width(scheme)
        args = args.model_copy(update={"num_bits": bits, "group_size": size})
    args = QuantizationArgs(**{**args.model_dump(), "observer": observer})

    def run(x: torch.Tensor) -> torch.Tensor:
        layer = torch.nn.Linear(x.shape[1], x.shape[0], bias=False)
        layer.weight = torch.nn.Parameter(x.clone(), requires_grad=False)
        found = Observer.load_from_registry(observer, base_name="weight", args=args, module=layer)
        given = found(x).get_qparams()
        scale, zero, whole = given["scale"], given["zero_point"], given["global_scale"]
        return fake_quantize(x, scale, zero, args, global_scale=whole)

    return run


def width(scheme: str) -> tuple[int, int]:
    """Return bits and group size of an integer scheme."""
    found = re.fullmatch(r"u?int(\d):g(\d+)(:asym=real)?", scheme)
    if found is None:
        raise SystemExit(f"scheme {scheme!r} is no integer in groups")
    return int(found[1]), int(found[2])


def auto_round(scheme: str) -> Search:
    """Return the optimized RTN of auto-round."""
    from auto_round.data_type import QUANT_FUNC_WITH_DTYPE

    if scheme == "nvfp4":
        return lambda x: QUANT_FUNC_WITH_DTYPE["opt_rtn_nv_fp4"](x.clone(), bits=4, group_size=16)[0]
    if scheme == "mxfp4":
        call = QUANT_FUNC_WITH_DTYPE["opt_rtn_mx_fp4"]
        return lambda x: call(x.clone(), bits=4, group_size=32, data_type="mx_fp4")[0]
    bits, size = width(scheme)
    call = QUANT_FUNC_WITH_DTYPE["opt_rtn_int_sym"]
    return lambda x: call(x.clone(), bits=bits, group_size=size)[0]


def modelopt(scheme: str) -> Search:
    """Return the algorithm ``mse`` of ModelOpt on a linear layer."""
    import modelopt.torch.quantization as mtq

    config = copy.deepcopy(mtq.INT4_BLOCKWISE_WEIGHT_ONLY_CFG)
    config["algorithm"] = {"method": "mse"}
    bits, size = width(scheme)
    for entry in config["quant_cfg"]:
        if entry.get("quantizer_name") == "*weight_quantizer" and entry.get("cfg"):
            entry["cfg"] |= {"num_bits": bits, "block_sizes": {-1: size}}

    def run(x: torch.Tensor) -> torch.Tensor:
        layer = torch.nn.Linear(x.shape[1], x.shape[0], bias=False)
        layer.weight = torch.nn.Parameter(x.clone(), requires_grad=False)
        model = mtq.quantize(torch.nn.Sequential(layer), config, forward_loop=lambda _: None)
        return model[0].weight_quantizer(model[0].weight).detach()

    return run


def modelopt_sweep(x: torch.Tensor) -> torch.Tensor:
    """Return NVFP4 by ModelOpt's sweep of FP8 scales; e2m1 is rounded here, as its kernels need a GPU."""
    from modelopt.torch.quantization.calib.mse import NVFP4MSECalibrator

    blocks = x.reshape(-1, 16)

    def rounded(values: torch.Tensor, amax: torch.Tensor) -> torch.Tensor:
        scale = amax.reshape(-1, 1) / 6
        return zp.quantize((values / scale).clamp(-6, 6), "float4_e2m1fn:cast").dequantize() * scale

    search = NVFP4MSECalibrator(
        amax=blocks.abs().amax(1), global_amax=x.abs().max(), axis=0, quant_func=rounded
    )
    search.collect(blocks)
    return rounded(blocks, search.compute_amax()).reshape(x.shape)


def hqq(scheme: str) -> Search:
    """Return HQQ's quantizer: real zero points."""
    from hqq.core.quantize import Quantizer

    bits, size = width(scheme)

    def run(x: torch.Tensor) -> torch.Tensor:
        codes, meta = Quantizer.quantize(
            x, nbits=bits, group_size=size, axis=1, device="cpu", compute_dtype=torch.float32
        )
        return Quantizer.dequantize(codes, meta).reshape(x.shape)

    return run


def searches() -> dict[str, dict[str, Search]]:
    """Return all searches, by scheme and name."""
    found: dict[str, dict[str, Search]] = {}
    for scheme in INTEGERS:
        bits, size = width(scheme)
        real = f"uint{bits}:g{size}:asym=real"
        found[scheme] = {
            "nearest": ours(scheme), "search": ours(f"{scheme}:scale=search"),
            "mse, signed": ours(f"{scheme}:scale=signed/float32", "mse"),
            "llm-compressor": llm_compressor(scheme), "ModelOpt": modelopt(scheme),
            "auto-round (signed)": auto_round(scheme),
        }  # fmt: skip
        found[real] = {
            "nearest": ours(real), "hqq": ours(real, "hqq"), "mse": ours(real, "mse"), "HQQ": hqq(scheme),
        }  # fmt: skip
    found["nvfp4"] = {
        "nearest": ours("nvfp4"), "four_over_six": ours("nvfp4:scale=four_over_six"),
        "search": ours("nvfp4:scale=search"), "llm-compressor": llm_compressor("nvfp4"),
        "llm-compressor, expanded": llm_compressor("nvfp4", "nvfp4_expanded_mse"),
        "ModelOpt": modelopt_sweep, "auto-round": auto_round("nvfp4"),
    }  # fmt: skip
    found["mxfp4"] = {
        "nearest": ours("mxfp4"), "ceil7.25": ours("mxfp4:scale=ceil7.25"),
        "search": ours("mxfp4:scale=search"), "llm-compressor": llm_compressor("mxfp4"),
        "auto-round": auto_round("mxfp4"),
    }  # fmt: skip
    return found


def search_named(scheme: str, name: str) -> Search:
    """Return a search of a peer.

    Args:
        scheme: ``int4:g64``, ``uint4:g64:asym=real``, ``nvfp4`` and their like.
        name: llm-compressor, "llm-compressor, expanded", ModelOpt, auto-round or HQQ.

    Raises:
        SystemExit: for another name or scheme.
    """
    peers: dict[str, Callable[[], Search]] = {
        "llm-compressor": lambda: llm_compressor(scheme), "auto-round": lambda: auto_round(scheme),
        "llm-compressor, expanded": lambda: llm_compressor(scheme, "nvfp4_expanded_mse"),
        "ModelOpt": lambda: modelopt_sweep if scheme == "nvfp4" else modelopt(scheme),
        "HQQ": lambda: hqq(scheme),
    }  # fmt: skip
    if name not in peers:
        raise SystemExit(f"search {name!r} is none of {', '.join(peers)}")
    return peers[name]()


def rewrite(source: Path, out: Path, names: Collection[str], run: Search) -> None:
    """Write a model whose weights are what a search makes of them.

    Args:
        source: folder with safetensors files, as Hugging Face stores models.
        out: folder, which must not exist.
        names: of the weights, (rows, columns) each; all others stay as they are.
        run: the search.

    Raises:
        SystemExit: for a name that the model has not; nothing is left out silently.
    """
    shutil.copytree(source, out, ignore=shutil.ignore_patterns("*.safetensors", "*.py", MANIFEST))
    left = set(names)
    for path in sorted(source.glob("*.safetensors")):
        tensors = load_file(path)
        for name in sorted(left & tensors.keys()):
            tensors[name] = run(tensors[name].float()).detach().float().contiguous()
        left -= tensors.keys()
        save_file(tensors, out / path.name, {"format": "pt"})
    if left:
        raise SystemExit(f"{source} has no weights {sorted(left)}")


def relative_error(x: torch.Tensor, values: torch.Tensor) -> float:
    """Return the squared error over the squares, times 1000."""
    wide = x.double()
    return float((values.double() - wide).square().sum() / wide.square().sum()) * 1000


def markdown(found: Mapping[str, Mapping[str, Mapping[str, float | str]]], names: list[str]) -> str:
    """Return errors as a table, a row for each scheme and search."""
    lines = [f"| scheme | search | {' | '.join(names)} |", "|---|---|" + "---:|" * len(names)]
    for scheme, of in found.items():
        for search, errors in of.items():
            cells = [e if isinstance(e, str) else f"{e:.4g}" for e in (errors[name] for name in names)]
            lines.append(f"| `{scheme}` | {search} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Measure, print the table, and record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--weights", action="append", default=[], help="FILE.safetensors=NAME of a tensor")
    parser.add_argument("--only", default="", help="schemes with this in their names")
    parser.add_argument("--rewrite", nargs=2, type=Path, default=None, metavar=("SOURCE", "OUT"))
    parser.add_argument("--names", type=Path, default=None, help="file of names of weights, for --rewrite")
    parser.add_argument("--scheme", default="", help="of --rewrite")
    parser.add_argument("--search", default="", help="of --rewrite")
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    if args.rewrite is not None:
        rewrite(*args.rewrite, args.names.read_text().split(), search_named(args.scheme, args.search))
        return
    data = samples() | weights(args.weights)
    found: dict[str, dict[str, dict[str, float | str]]] = {}
    for scheme, of in searches().items():
        if args.only not in scheme:
            continue
        for search, run in of.items():
            row = found.setdefault(scheme, {}).setdefault(search, {})
            for name, x in data.items():
                size = zp.Scheme.parse(scheme).granularity.block_shape(tuple(x.shape))[-1]
                row[name] = relative_error(x, run(x)) if x.shape[1] % size == 0 else ""
            print(scheme, search, row, flush=True)
    print(markdown(found, list(data)))
    record(args.json, machine(), errors=found)


if __name__ == "__main__":
    main()
