"""Static int8 inputs of a real ONNX model: a reader of text lines, ours next to onnxruntime's own quantizer.

    pip download --no-deps rapidocr-onnxruntime && unzip rapidocr_onnxruntime*.whl -d ocr
    python benchmarks/onnx_static.py ocr/rapidocr_onnxruntime/models/ch_PP-OCRv4_rec_infer.onnx

renders 96 lines of two words (Pillow, fonts of the system), calibrates on 32 of them, and prints how many of
the others each model reads rightly, and milliseconds for 16 lines.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static
from PIL import Image, ImageDraw, ImageFont

import zeropoint as zp

WORDS = (
    "quick", "brown", "fox", "jumps", "over", "lazy", "dog", "exact", "bytes", "fast", "kernel", "scale",
    "zero", "point", "tensor", "layer", "model", "weight",
)  # fmt: skip
FONTS = Path("/usr/share/fonts/truetype")
SEEN, BATCH, SHAPE = 32, 16, (3, 48, 320)


def lines(count: int) -> tuple[list[str], Any]:
    """Return texts, and their images as the model reads them, (count, 3, 48, 320) float32 from -1 to 1."""
    rng, fonts = random.Random(0), sorted(FONTS.rglob("*.ttf"))[:8]
    texts = [" ".join(rng.choice(WORDS) for _ in range(2)) for _ in range(count)]
    images = np.zeros((count, *SHAPE), np.float32)
    for n, text in enumerate(texts):
        font = ImageFont.truetype(fonts[n % len(fonts)], 32)
        image = Image.new("RGB", (int(font.getlength(text)) + 16, SHAPE[1]), "white")
        ImageDraw.Draw(image).text((8, 6), text, fill="black", font=font)
        image = image.resize((min(SHAPE[2], image.width), SHAPE[1]))
        images[n, :, :, : image.width] = np.asarray(image, np.float32).transpose(2, 0, 1) / 127.5 - 1
    return texts, images


class Reader(CalibrationDataReader):
    """Batches for onnxruntime's quantizer."""

    def __init__(self, name: str, images: Any) -> None:
        self.batches: Iterator[dict[str, Any]] = iter(
            {name: images[n : n + BATCH]} for n in range(0, len(images), BATCH)
        )

    def get_next(self) -> Any:
        """Return the next batch, or None."""
        return next(self.batches, None)


def session(path: Path) -> Any:
    """Return a session of two threads."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 2, 4
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def read(scores: Any, letters: list[str]) -> list[str]:
    """Return the texts of scores (lines, places, letters): letters that follow other ones."""
    best = scores.argmax(-1)
    return [
        "".join(letters[k] for j, k in zip([0, *row], row, strict=False) if k not in (0, j)) for row in best
    ]


def main() -> None:
    """Print a row for each model."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("model", type=Path)
    source = parser.parse_args().model
    texts, images = lines(96)
    first = session(source)
    name = first.get_inputs()[0].name
    letters = ["", *first.get_modelmeta().custom_metadata_map["character"].splitlines(), " "]
    with tempfile.TemporaryDirectory() as folder:
        ours, theirs = Path(folder) / "ours", Path(folder) / "theirs.onnx"
        samples = torch.from_numpy(images[:SEEN])
        zp.quantize_checkpoint(source, ours, "w8a8_static", format="onnx", calibration=samples)
        quantize_static(
            source, theirs, Reader(name, images[:SEEN]), quant_format=QuantFormat.QDQ, per_channel=True,
            weight_type=QuantType.QInt8, activation_type=QuantType.QUInt8,
            op_types_to_quantize=["Conv", "MatMul"],
        )  # fmt: skip
        print("| Model | Lines read | ms |\n|---|---:|---:|")
        for title, path in {
            "float32": source,
            "zeropoint": ours / source.name,
            "onnxruntime": theirs,
        }.items():
            runs = session(path)
            scores = np.concatenate(
                [runs.run(None, {name: images[n : n + BATCH]})[0] for n in range(SEEN, len(images), BATCH)]
            )
            begin = time.perf_counter()
            runs.run(None, {name: images[:BATCH]})
            taken = time.perf_counter() - begin
            found = zip(read(scores, letters), texts[SEEN:], strict=True)
            right = sum(a.replace(" ", "") == b.replace(" ", "") for a, b in found)
            print(f"| {title} | {right} of {len(scores)} | {taken * 1e3:.0f} |")


if __name__ == "__main__":
    main()
