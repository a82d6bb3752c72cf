"""Sessions of onnxruntime, where it is installed: whether it loads a model, and what the model gives."""

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


def opened_beside(model: bytes, folder: Path) -> Any:
    """Return a session for the bytes of a model whose numbers lie in files of a folder."""
    return opened(model, **{_FOLDER: str(folder)})


def opened(model: bytes | str, **entries: str) -> Any:
    """Return a session on the host for a graph as it is: the bytes of a model, or its file.

    entries: of onnxruntime's session configuration.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    for key, value in entries.items():
        options.add_session_config_entry(key, value)
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def session_error(file: Path) -> str | None:
    """Return why onnxruntime does not load the model of a file, or None."""
    if not has_runtime():
        return None
    try:
        with reading("onnxruntime does not load it", "quantize the original again"):
            opened(str(file))
    except CheckpointError as error:
        return str(error)
    return None
