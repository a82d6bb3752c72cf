"""Write every hostile file and directory to a folder, with what is expected of each.

    python -m tests.hostile.write_corpus FOLDER

FOLDER/00000 and so on hold a case each; FOLDER/expected.json says of each its topic, its name,
the path to pass to a command, and words of the refusal, or null for what must be accepted.
"""

import json
import sys
from pathlib import Path

from tests.hostile.case import Case
from tests.hostile.directories import DIRECTORIES
from tests.hostile.files import FILES
from tests.hostile.gguf_files import GGUF_FILES
from tests.hostile.layouts import LAYOUT_CASES
from tests.hostile.quantized import QUANTIZED

CORPUS: tuple[Case, ...] = (*FILES, *DIRECTORIES, *QUANTIZED, *LAYOUT_CASES, *GGUF_FILES)


def write_corpus(root: Path) -> list[dict[str, object]]:
    """Write the corpus to an empty folder and return what expected.json says."""
    expected: list[dict[str, object]] = []
    for number, case in enumerate(CORPUS):
        place = root / f"{number:05d}"
        place.mkdir(parents=True)
        expected.append(
            {
                "topic": case.topic,
                "name": case.name,
                "path": str(case.write(place).relative_to(root)),
                "refusal": case.refusal,
                "library": case.library,
            }
        )
    (root / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")
    return expected


if __name__ == "__main__":
    write_corpus(Path(sys.argv[1]))
