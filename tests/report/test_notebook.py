"""What a notebook shows says what the text says, whatever is shown; and pictures are files."""

import re
from collections import Counter
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
import torch
from tests.cli.checkpoints import write_llama
from tests.report.screens import as_text

import zeropoint as zp
from zeropoint.report.notebook import nodes_of

HOSTILE = "</style><script>alert(1)</script><img src=x onerror=alert(1)>"


class Words(HTMLParser):
    """The words of HTML outside of pictures, and its tags."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.words: list[str] = []
        self.tags: list[str] = []
        self._outside = 0
        self.feed(re.sub(r"<wbr>", "", html))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:  # noqa: ARG002 (its base)
        self.tags.append(tag)
        self._outside += tag in ("svg", "style")

    def handle_endtag(self, tag: str) -> None:
        self._outside -= tag in ("svg", "style")

    def handle_data(self, data: str) -> None:
        if not self._outside:
            self.words += data.split()


def tensor(scheme: str = "int4:g32:asym") -> zp.QuantizedTensor:
    return zp.quantize(torch.linspace(-1, 1, 512).reshape(4, 128), scheme)


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Callable[[], object]]:
    folder = tmp_path_factory.mktemp("shown")
    model, out = write_llama(folder / "model"), folder / "out"
    result = zp.quantize_checkpoint(model, out, "int4:g32")
    layers = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 2))
    return {
        "tensor": tensor,
        "tensor of a codebook": lambda: tensor("nf4"),
        "tensor of two levels": lambda: tensor("q4_k"),
        "parameters": lambda: tensor("q4_k").params,
        "scheme": lambda: zp.Scheme.parse("nvfp4"),
        **{
            name: lambda name=name: zp.get_format(name) for name in ("e2m1", "int4", "int8", "nf4", "float16")
        },
        "comparison of schemes": lambda: zp.compare(torch.ones(2, 64), ["int4:g32", "mxfp4"]),
        "conversion": lambda: zp.quantize_model(layers, "w8a8"),
        "prepared": lambda: zp.plan("quantize", "int8:channel", (4, 4)),
        "plan": lambda: zp.plan_checkpoint(model, "w4a16"),
        "run": lambda: result,
        "verification": lambda: zp.verify_checkpoint(out, model),
        "comparison": lambda: zp.compare_checkpoints(model, out),
        "inspection": lambda: zp.inspect_checkpoint(out),
        "report": lambda: zp.report_checkpoint(out),
        "overview": lambda: zp.report_checkpoint(out).runs[0],
        "search": lambda: zp.search_checkpoint(model, "6bpw", "int4:g32,int8:g32"),
    }


def test_html_and_text_of_everything_say_the_same(objects: dict[str, Callable[[], object]]) -> None:
    for name, make in objects.items():
        shown = make()
        html = Words(shown._repr_html_())
        said = as_text(nodes_of(shown), whole=True, width=100_000)
        assert Counter(html.words) == Counter(re.sub("\u2500+", " ", said).split()), name
        every = " ".join(html.words)
        for line in repr(shown).splitlines():
            assert " ".join(line.split()) in every, (name, line)
        assert "script" not in html.tags
        assert {"summary", "details"} <= {*html.tags}, name


def test_what_is_shown_is_small_and_folded(objects: dict[str, Callable[[], object]]) -> None:
    for name, make in objects.items():
        html = make()._repr_html_()
        assert len(html) < 60_000, name
        assert "<details open" not in html
        style = html[html.index("<style>") : html.index("</style>")]
        rules = re.findall(r"(?:^|})\s*([^{}]+){", style.removeprefix("<style>"))
        assert rules
        assert all(each.strip().startswith(".zeropoint") for rule in rules for each in rule.split(",")), (
            "ours alone"
        )


def test_names_stay_text() -> None:
    model = torch.nn.ModuleDict({HOSTILE.replace(".", ""): torch.nn.Linear(8, 8)})
    html = zp.quantize_model(model, "w8a8")._repr_html_()
    assert not {"script", "img"} & set(Words(html).tags)
    assert html.count("</style>") == 1


@pytest.mark.parametrize(
    "name",
    ["tensor", "e2m1", "nf4", "comparison of schemes", "run", "comparison", "report", "overview", "search"],
)
def test_pictures_are_files_that_stand_alone(
    objects: dict[str, Callable[[], object]], name: str, tmp_path: Path
) -> None:
    picture = objects[name]().plot()
    path = tmp_path / "picture.svg"
    picture.save(path)
    assert path.read_text() == picture.svg == picture._repr_svg_()
    root = ET.parse(path).getroot()
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert root.get("aria-label") == picture.label
    assert len(list(root.iter())) > 3
    with pytest.raises(zp.CheckpointError, match="exists"):
        tensor("int8:channel").plot().save(path)
    picture.save(path, overwrite=True)
    (tmp_path / "mine.svg").write_text("mine")
    with pytest.raises(zp.CheckpointError, match="no plot of zeropoint"):
        picture.save(tmp_path / "mine.svg", overwrite=True)


@pytest.mark.parametrize("name", ["float16", "verification", "inspection", "plan"])
def test_what_has_no_picture_says_so(objects: dict[str, Callable[[], object]], name: str) -> None:
    with pytest.raises(zp.UnsupportedError, match=r"plot\(\) of"):
        objects[name]().plot()


def test_bars_of_a_tensor_are_its_codes() -> None:
    q = zp.quantize(torch.tensor([[-7.0, 0.0, 0.0, 7.0]]), "int4:channel:narrow")
    heights = re.findall(r"v-([\d.]+)h", q.plot().inline)
    assert [float(height) for height in heights] == pytest.approx([0, 80, *[0] * 6, 160, *[0] * 6, 80])
