"""Sessions of onnxruntime, if installed: load checks and outputs."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from ...errors import CheckpointError
from ...libraries import reading


def has_runtime() -> bool:
    """Return whether onnxruntime is installed."""
    return importlib.util.find_spec("onnxruntime") is not None


_FOLDER = "session.model_external_initializers_file_folder_path"


def opened(model: bytes | str, folder: Path | None = None) -> Any:
    """Return a host session for an unoptimized model.

    model: its bytes or file. folder: of the files with its numbers, if the bytes have none.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    if folder is not None:
        options.add_session_config_entry(_FOLDER, str(folder))
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def session_error(file: Path) -> str | None:
    """Return why onnxruntime does not load a model file, or None."""
    if not has_runtime():
        return None
    try:
        with reading("onnxruntime does not load it", "quantize the original again"):
            opened(str(file))
    except CheckpointError as error:
        return str(error)
    return None
