"""The oracle of methods that feed errors back, against the textbook and against brute force."""

import itertools

import pytest
import torch
from tests.oracles.independent_gptq import feedback, nearest, quantize_llama, quantized

LEVELS = torch.arange(-4.0, 4.0)


@pytest.fixture
def layer() -> dict[str, torch.Tensor]:
    """A weight, correlated inputs, those of a float model, scales of groups of 8, and a generator's all."""
    own = torch.Generator().manual_seed(0)
    mix = torch.randn(40, 40, generator=own)
    X = torch.randn(400, 40, generator=own) @ mix
    D = 0.1 * torch.randn(400, 40, generator=own) @ mix
    X[:, 7] = D[:, 7] = 0
    weight = torch.randn(12, 40, generator=own)
    scale = (weight.reshape(12, 5, 8).abs().amax(-1, keepdim=True) / 4).expand(12, 5, 8).reshape(12, 40)
    return {
        "weight": weight,
        "scale": scale,
        "H": (X.T @ X / 400).double(),
        "cross": (D.T @ X / 400).double(),
    }


def loss(e: torch.Tensor, H: torch.Tensor) -> float:
    return float(torch.einsum("ri,ij,rj->", e.double(), H, e.double()))


def textbook(layer: dict[str, torch.Tensor], alpha: float) -> torch.Tensor:
    """GPTQ by the inverse itself: a column is rounded, and taken out by an elimination (OBQ, fixed order)."""
    H = layer["H"].clone()
    H.diagonal()[H.diagonal() == 0] = 1
    order = H.diagonal().argsort(descending=True, stable=True)
    H.diagonal().add_(0.01 * H.diagonal().mean())
    inverse, W = torch.linalg.inv(H[order][:, order]), layer["weight"].double()[:, order]
    P = torch.zeros_like(H)
    if alpha:
        upper = torch.linalg.cholesky(inverse, upper=True)
        P = alpha * torch.triu(layer["cross"][order][:, order] @ upper.T, 1) @ upper
    S, Q = layer["scale"].double()[:, order], torch.empty_like(W)
    for i in range(W.shape[1]):
        w = W[:, i].clone()
        Q[:, i] = (w / S[:, i]).round().clamp(-4, 3) * S[:, i]
        W -= torch.outer((w - Q[:, i]) / inverse[i, i], inverse[i])
        W[:, i + 1 :] += torch.outer(w, P[i, i + 1 :])
        inverse = inverse - torch.outer(inverse[:, i], inverse[i]) / inverse[i, i]
    return Q[:, order.argsort()]


@pytest.mark.parametrize("alpha", [0.0, 0.25])
@pytest.mark.parametrize("block", [1, 7, 16, 128])
def test_blocks_give_what_the_textbook_gives(
    layer: dict[str, torch.Tensor], alpha: float, block: int
) -> None:
    by = feedback(layer["H"], layer["cross"] if alpha else None, alpha=alpha)
    found = quantized(layer["weight"], layer["scale"], LEVELS, by, block)
    # Both round the same reals; only the order of float64 sums differs.
    torch.testing.assert_close(found, textbook(layer, alpha), rtol=1e-12, atol=0)


def test_the_loss_is_far_below_that_of_the_closest_codes(layer: dict[str, torch.Tensor]) -> None:
    weight, scale, H = layer["weight"], layer["scale"], layer["H"]
    found = quantized(weight, scale, LEVELS, feedback(H))
    assert loss(found - weight, H) < 0.7 * loss(nearest(weight, scale, LEVELS) - weight, H)


def test_the_loss_is_between_the_best_of_all_codes_and_the_closest() -> None:
    own = torch.Generator().manual_seed(1)
    X = torch.randn(50, 4, generator=own) @ torch.randn(4, 4, generator=own)
    H, scale, total = (X.T @ X / 50).double(), torch.full((1, 4), 0.5), [0.0, 0.0, 0.0]
    every = torch.tensor(list(itertools.product(LEVELS.tolist(), repeat=4))) * 0.5
    for weight in torch.randn(64, 1, 4, generator=own):
        found = quantized(weight, scale, LEVELS, feedback(H, damping=0.0))
        errors = every.double() - weight.double()
        best = float(torch.einsum("ri,ij,rj->r", errors, H, errors).min())
        own_loss = loss(found - weight.double(), H)
        assert own_loss >= best - 1e-9
        near = loss(nearest(weight, scale, LEVELS) - weight, H)
        total = [sum(pair) for pair in zip(total, (best, own_loss, near), strict=True)]
    assert total[0] <= total[1] < total[2]


def test_a_correction_is_the_least_squares_answer_of_the_columns_to_come() -> None:
    own = torch.Generator().manual_seed(2)
    X, D = (torch.randn(60, 9, generator=own, dtype=torch.float64) for _ in range(2))
    by = feedback(X.T @ X / 60, D.T @ X / 60, alpha=0.25, damping=0.0)
    assert by.correction is not None
    X, D = X[:, by.order], D[:, by.order]
    expected = torch.zeros(9, 9, dtype=torch.float64)
    for i in range(8):
        expected[i, i + 1 :] = 0.25 * torch.linalg.lstsq(X[:, i + 1 :], D[:, i]).solution
    torch.testing.assert_close(by.correction, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("alpha", [0.0, 0.25])
def test_streams_are_those_of_the_model_with_its_new_weights(alpha: float) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=60, max_position_embeddings=64, rope_theta=100.0,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    ids, before = torch.randint(0, 60, (5, 16)), model.model.layers[1].mlp.up_proj.weight.detach().clone()

    def scales(weight: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return weight.abs().amax(-1, keepdim=True).expand_as(weight) / 4, LEVELS

    stream = quantize_llama(model, ids, scales, alpha)
    after = model.model.layers[1].mlp.up_proj.weight.detach()
    codes = after / (before.abs().amax(-1, keepdim=True) / 4)
    torch.testing.assert_close(codes, codes.round(), rtol=0, atol=1e-5)  # float32 of a product and a quotient
    with torch.no_grad():
        last = model.model.norm(stream)
        expected = model.model(input_ids=ids).last_hidden_state
    torch.testing.assert_close(last, expected, rtol=1e-4, atol=1e-5)
