"""The command ``zeropoint search``: its recipe, report, documents, picture and errors."""

import json
import os
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from tests.checkpoint.written import digests
from tests.cli.conftest import Call
from tests.oracles import tiny_llama

CANDIDATES = "w4a16,mxfp8a16,w8a16"


def test_a_recipe_is_written_that_quantize_takes(model: Path, tmp_path: Path, call: Call) -> None:
    recipe = tmp_path / "recipe.yaml"
    found = call("search", model, "--budget", "5.5bpw", "--candidates", CANDIDATES, "-o", recipe)
    assert found.status == 0, found.err
    assert "no choice within the budget has less" in found.out
    assert "the mixture" in found.out
    assert found.err == ""
    assert call("quantize", model, tmp_path / "out", "--recipe", recipe, "--strict").status == 0
    assert call("verify", tmp_path / "out", "--against", model).status == 0
    assert (tmp_path / "recipe.yaml.search").exists()


def test_a_document_says_what_each_layer_got_and_what_the_whole_takes(
    model: Path, tmp_path: Path, call: Call
) -> None:
    picture = tmp_path / "curve.svg"
    found = call(
        "search", model, "--budget", "5.5bpw", "--candidates", CANDIDATES, "--json", "--plot", picture
    )
    document = json.loads(found.out)
    assert document["optimal"]
    assert document["bits_per_value"] <= 5.5
    assert document["bytes"] == sum(layer["bytes"] for layer in document["layers"])
    assert document["loss"] == pytest.approx(sum(layer["loss"] for layer in document["layers"]))
    assert {one["candidate"] for one in document["uniform"]} == set(CANDIDATES.split(","))
    losses = [point["loss"] for point in document["curve"]]
    assert losses == sorted(losses, reverse=True)
    names = [e.text for e in ElementTree.parse(picture).iter() if e.tag.endswith("text")]
    assert {"mixture", *CANDIDATES.split(",")} <= set(names)


def test_groups_that_do_not_fit_are_halved_where_that_is_asked_for(
    model: Path, tmp_path: Path, call: Call
) -> None:
    recipe = tmp_path / "recipe.yaml"
    command = ("search", model, "--budget", "5.5bpw", "--candidates", "int4:g512,w8a16", "-o", recipe)
    found = call(*command, "--fit")
    assert found.status == 0, found.err
    assert "in smaller groups than their candidate's, such as " in found.out
    assert "quantize by the recipe with --fit" in found.out
    written = call("quantize", model, tmp_path / "out", "--recipe", recipe, "--fit", "--force")
    assert written.status == 0, written.err


def test_a_recipe_is_not_replaced_unless_that_is_asked_for(model: Path, tmp_path: Path, call: Call) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("mine")
    command = ("search", model, "--budget", "5.5bpw", "-o", recipe, "--candidates", CANDIDATES)
    refused = call(*command)
    assert refused.status == 2
    assert "exists; add --overwrite to replace it" in refused.err
    assert "exists and is no recipe of zeropoint" in call(*command, "--overwrite").err
    assert recipe.read_text() == "mine"
    recipe.unlink()
    assert call(*command).status == 0
    recipe.write_text(recipe.read_text() + "# a word of mine\n")
    assert call(*command, "--overwrite").status == 0
    assert "a word of mine" not in recipe.read_text()


def test_no_file_of_a_search_takes_the_place_of_a_file_of_others(
    model: Path, tmp_path: Path, call: Call
) -> None:
    before, mine = digests(model), tmp_path / "mine"
    mine.write_text("mine")
    (tmp_path / "link").symlink_to(mine)
    refused = [
        ("--plot", mine, "exists; add --overwrite"), ("--plot", mine, "exists and is no plot", "--overwrite"),
        ("--state", mine, "exists and is no state"), ("--state", tmp_path / "link", "exists and is no state"),
        ("-o", tmp_path / "link", "exists and is no recipe", "--overwrite"),
        ("--plot", model / "config.json", "lies in the checkpoint", "--overwrite"),
        ("-o", model / "new.yaml", "lies in the checkpoint"),
        ("--state", model / "new", "lies in the checkpoint"),
        ("--plot", model / ".." / model.name / "new.svg", "lies in the checkpoint"),
        ("-o", tmp_path / ("a" * 300), "File name too long; choose another place"),
    ]  # fmt: skip
    for option, path, message, *more in refused:
        found = call("search", model, "--budget", "5.5bpw", "--candidates", CANDIDATES, option, path, *more)
        assert found.status != 0, (option, path)
        assert message in found.err, found.err
    assert mine.read_text() == "mine"
    assert digests(model) == before
    assert sorted(os.listdir(tmp_path)) == ["link", "mine", model.name]
    found = call("plan", model, "--to", "w4a16", "--out", model / "plan.json")
    assert "lies in the checkpoint" in found.err


def test_a_search_that_ended_between_its_files_is_carried_on(
    model: Path, tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, plot = tmp_path / "recipe.yaml", tmp_path / "curve.svg"
    command = (
        "search",
        model,
        "--budget",
        "5.5bpw",
        "--candidates",
        CANDIDATES,
        "-o",
        recipe,
        "--plot",
        plot,
    )
    assert call(*command).status == 0
    whole = digests(tmp_path)
    assert "exists; add --overwrite" in call(*command).err
    recipe.unlink()  # written last
    assert call(*command).status == 0
    assert digests(tmp_path) == whole
    recipe.unlink()
    assert "exists; name a new file" in call(*command[:3], "6bpw", *command[4:]).err
    assert not recipe.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--budget", "lots"), "budget 'lots' must be bits for each weight or bytes of all files"),
        (
            ("--budget", "4.5"),
            "budget '4.5' has no unit; write 4.5bpw for bits of each weight, or a size such",
        ),
        (("--budget", "5bpw", "--candidates", "w4a61"), "scheme 'w4a61' is unknown; did you mean w4a16"),
        (("--budget", "5bpw", "--format", "awq"), "format awq has no usual candidates; name some"),
        (("--budget", "5bpw", "--format", "gguf", "--candidates", "q4_k_m"), "q4_k_m is a mixture"),
        (("--budget", "2bpw"), "budget 2bpw is less than the smallest choice"),
        ((), "Missing option '--budget'"),
    ],
)
def test_mistakes_are_one_sentence(model: Path, call: Call, arguments: tuple[str, ...], message: str) -> None:
    found = call("search", model, *arguments)
    assert found.status in (1, 2)
    assert message in found.err
    assert found.err.count("\n") == 1
    assert found.out == ""


def test_the_command_weighs_and_refines(tmp_path: Path, call: Call) -> None:
    source, recipe = tmp_path / "model", tmp_path / "recipe.yaml"
    tiny_llama.save(source, torch.float32)
    command = ("search", source, "--budget", "6bpw", "--candidates", "int4:g32,int8:g32", "-o", recipe)
    found = call(*command, "--importance", "linearity", "--refine", "1")
    assert found.status == 0, found.err
    assert "refined in 1 generation: KL divergence" in found.out
    assert "importance linearity" in recipe.read_text()
    before, after = found.out.split("KL divergence ")[1].split(" on ")[0].split(" -> ")
    assert 0 < float(after) <= float(before)
    weighed = ("--importance", "linearity", "--refine", "1")
    assert call("quantize", source, tmp_path / "one", *command[2:-2], *weighed).status == 0
    assert call("quantize", source, tmp_path / "two", "--recipe", recipe).status == 0
    assert digests(tmp_path / "one")["model.safetensors"] == digests(tmp_path / "two")["model.safetensors"]
    refused = call(*command, "--overwrite", "--text", "x.txt")
    assert (
        "--text is what the model runs on; add --importance linearity or divergence, or --refine N"
        in refused.err
    )
