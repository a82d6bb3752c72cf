"""Targets name exactly the modules they are for, judged by compressed-tensors' own matching."""

import pytest
from tests.peers import Peer

from zeropoint.codecs.compressed_tensors.config import matches
from zeropoint.codecs.compressed_tensors.config_groups import targets

match = Peer("compressed_tensors.utils.match")


LAYERS = [
    f"model.layers.{layer}.{name}" for layer in range(12) for name in ("self_attn.q_proj", "mlp.up_proj")
]
EXPERTS = [f"model.layers.{layer}.mlp.experts.{e}.up_proj" for layer in range(3) for e in range(11)]
SPLITS = {
    "by name": [[n for n in LAYERS if "attn" in n], [n for n in LAYERS if "mlp" in n]],
    "by layer": [[n for n in LAYERS if ".1." in n or ".11." in n], [n for n in LAYERS if ".1" not in n]],
    "by expert": [EXPERTS[:13], EXPERTS[13:], LAYERS],
    "by nothing": [LAYERS[::3], LAYERS[1::3], LAYERS[2::3]],
    "without numbers": [["pooler.dense", "lm_head"], ["classifier"]],
    "numbers at the ends": [["0.auto.layers.1", "0.auto.layers.10"], ["1.auto.layers.1", "0.auto.layers.2"]],
    "odd signs": [["m.layers.0.a-b+c", "m.layers.0.a(b", "m.(x.0.a"], ["m.layers.0.a.b", "m.(x.1.a"]],
    "a tail inside of another": [["stem.stage.0.up"], ["conv.0.stage.0.up", "conv.1.stage.0.up"]],
    "one tail twice": [
        ["vision.layers.0.up", "text.layers.1.up"],
        ["text.layers.0.up", "vision.layers.1.up"],
    ],
}


@pytest.mark.parametrize("split", SPLITS)
def test_each_module_is_named_by_its_own_group_alone(split: str) -> None:
    groups = SPLITS[split]
    found = targets(groups)
    for number, modules in enumerate(groups):
        for module in modules:
            named = [n for n, names in enumerate(found) if any(match.match_name(module, t) for t in names)]
            assert named == [number], module
            assert matches(module, found[number])


def test_numbers_share_an_expression() -> None:
    found = targets(SPLITS["by name"])
    assert found == [(r"re:.*\blayers\.\d+\.self_attn\.q_proj$",), (r"re:.*\blayers\.\d+\.mlp\.up_proj$",)]
    assert len(targets([EXPERTS[:13], EXPERTS[13:]])[0]) == 2


def test_a_module_of_the_same_tail_elsewhere_is_not_named() -> None:
    ((target,), _) = targets([["text.layers.0.up"], ["head"]], ["vision.layers.0.up"])
    assert match.match_name("text.layers.5.up", target)
    assert not match.match_name("vision.layers.0.up", target)


def test_the_way_to_the_layers_is_open_where_nothing_else_is_called_so() -> None:
    ((target,),) = targets([["model.layers.0.up"]])
    assert match.match_name("model.language_model.layers.7.up", target)
    assert match.match_name("layers.7.up", target)
    assert not match.match_name("model.players.7.up", target)
    assert not match.match_name("model.layers.7.up.inner", target)
