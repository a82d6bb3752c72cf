"""What `zeropoint plan` says of transformers and GGUF files is what transformers does with them."""

from pathlib import Path

import pytest
import torch
from tests.oracles import tiny_families
from tests.peers import transformers

import zeropoint as zp
from zeropoint.checkpoint.plan.verdicts import verdicts
from zeropoint.codecs.engines import TRANSFORMERS, Loads

pytestmark = pytest.mark.filterwarnings("ignore")
QUICK = ("mistral", "gemma3", "mixtral")
READ = (
    "llama", "llama3", "mistral", "qwen2", "qwen3", "gemma3", "qwen3_moe", "phi3", "phi3_long", "gpt2",
    "starcoder2", "stablelm", "gemma2", "qwen3_5", "qwen3_5_moe", "lfm2", "gemma4", "gemma4_shared",
)  # fmt: skip
TOKENS = torch.arange(20, 60)[None]


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[] if n in QUICK else pytest.mark.slow) for n in tiny_families.FAMILIES],
)
def test_the_verdict_is_what_transformers_does(name: str, tmp_path: Path) -> None:
    kind = type(tiny_families.write(tmp_path / "in", name))
    out = tmp_path / "out"
    plan = zp.quantize_checkpoint(tmp_path / "in", out, "q8_0", format="gguf", report=False).plan
    (found,) = (each for each in verdicts(plan) if each.engine == TRANSFORMERS)
    assert (found.loads is Loads.PARTLY) == (name in READ), found
    zp.dequantize_checkpoint(out, tmp_path / "floats", dtype="float32")
    exact = kind.from_pretrained(tmp_path / "floats", dtype=torch.float32).eval()
    config = transformers.AutoConfig.from_pretrained(tmp_path / "in")
    given = {} if found.loads is Loads.PARTLY and "config=" not in found.reason else {"config": config}
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            out, gguf_file="model.gguf", dtype=torch.float32, **given
        )
    except (ValueError, RuntimeError, TypeError):
        assert found.loads is Loads.NO
        return
    with torch.no_grad():
        ours, theirs = exact(TOKENS).logits, model.eval()(TOKENS).logits
    assert (found.loads is Loads.PARTLY) == torch.allclose(ours, theirs, rtol=0, atol=1e-5)
