"""Block Hadamard rotations: scipy's matrix, compressed-tensors' transforms and plain loops as oracles."""

import numpy as np
import pytest
import torch
from tests.peers import Peer

from zeropoint.errors import SchemeError, ShapeError
from zeropoint.ops import rotation as module
from zeropoint.ops.rotation import Rotation

transform = Peer("compressed_tensors.transform")
hadamards = Peer("compressed_tensors.transform.utils.hadamard")
matrices = Peer("compressed_tensors.transform.utils.matrix")
linalg = Peer("scipy.linalg")


def numbers(rows: int, columns: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return numbers of many magnitudes."""
    generator = torch.Generator().manual_seed(columns)
    return (torch.randn(rows, columns, generator=generator) ** 5).to(dtype)


def by_loops(x: torch.Tensor, rotation: Rotation) -> np.ndarray:
    """Return the rotation of float32 rows, a number at a time, in the order that the module states."""
    wide = x.float().numpy() * rotation.signs(x.shape[1]).numpy().astype(np.float32)
    for row in wide:
        for start in range(0, len(row), rotation.size):
            block = row[start : start + rotation.size]
            step = 1
            while step < rotation.size:
                for i in range(rotation.size):
                    if not i & step:
                        block[i], block[i + step] = block[i] + block[i + step], block[i] - block[i + step]
                step *= 2
            block *= np.float32(1 / np.sqrt(rotation.size))
    return wide


@pytest.mark.parametrize("size", [1, 2, 4, 16, 64, 256])
def test_it_is_the_product_with_the_matrix_of_scipy(size: int) -> None:
    rotation = Rotation(size=size, seed=size)
    x = torch.randint(-50, 50, (6, 512), generator=torch.Generator().manual_seed(size)).float()
    signed = (x * rotation.signs(512)).reshape(6, -1, size).double()
    product = signed @ torch.from_numpy(linalg.hadamard(size, dtype=np.float64))
    root = size**0.5
    if root == int(root):  # sums of whole numbers, over a power of two, are exact
        assert torch.equal(rotation.rotate(x).double(), (product / root).reshape(6, 512))
    assert torch.allclose(rotation.rotate(x).double(), (product / root).reshape(6, 512), rtol=1e-6)
    assert torch.allclose(rotation.rotate(x.double()), (product / root).reshape(6, 512), rtol=1e-14)


def test_it_is_the_transform_of_compressed_tensors_but_for_signs() -> None:
    rotation, x = Rotation(size=64, seed=3), numbers(5, 192)
    matrix = hadamards.deterministic_hadamard_matrix(64, torch.float64)
    signed = (x * rotation.signs(192)).double()
    theirs = (
        matrices.apply_transform_weight(
            matrix, signed, transform.TransformLocation.WEIGHT_INPUT, torch.nn.Linear
        )
        / 8
    )
    assert torch.allclose(rotation.rotate(x).double(), theirs, rtol=1e-4, atol=1e-6)
    back = (
        matrices.apply_transform_weight(
            matrix, x.double(), transform.TransformLocation.INPUT, torch.nn.Linear
        )
        / 8
    )
    assert torch.allclose(rotation.unrotate(x).double(), back * rotation.signs(192), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("size", [2, 32, 128])
def test_every_byte_is_that_of_additions_in_the_order_that_is_stated(size: int, dtype: torch.dtype) -> None:
    rotation, x = Rotation(size=size, seed=9), numbers(3, 256, dtype).clamp(-1e3, 1e3)
    assert torch.equal(rotation.rotate(x), torch.from_numpy(by_loops(x, rotation)).to(dtype))


def test_neither_threads_nor_tiles_nor_strides_change_a_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    rotation, x = Rotation(size=32), numbers(300, 160)
    whole, before = rotation.rotate(x), torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert torch.equal(rotation.rotate(x), whole)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(torch.cat([rotation.rotate(part) for part in x.split(7)]), whole)
    assert torch.equal(rotation.rotate(x.t().contiguous().t()), whole)
    assert torch.equal(rotation.rotate(x.reshape(10, 30, 160)).reshape(300, 160), whole)
    monkeypatch.setattr(module, "_TILE", 1)
    assert torch.equal(rotation.rotate(x), whole)
    assert torch.equal(rotation.rotate(x.requires_grad_()), whole)


def test_undoing_it_gives_the_numbers_again_and_keeps_products() -> None:
    rotation, x, w = Rotation(size=128, seed=5), numbers(4, 384).double(), numbers(6, 384).double()
    assert torch.allclose(rotation.unrotate(rotation.rotate(x)), x, rtol=1e-12, atol=1e-9)
    assert torch.allclose(rotation.rotate(x) @ rotation.rotate(w).T, x @ w.T, rtol=1e-9)
    assert not torch.equal(rotation.rotate(x), Rotation(size=128, seed=6).rotate(x))


def test_its_gradient_is_that_of_a_product() -> None:
    rotation = Rotation(size=8)
    x = numbers(2, 16).double().clamp(-9, 9).requires_grad_()
    assert torch.autograd.gradcheck(rotation.rotate, (x,))
    assert torch.autograd.gradcheck(rotation.unrotate, (x,))


def test_signs_are_the_bits_of_splitmix64() -> None:
    # The first numbers from 1234567 that the author's C program prints (prng.di.unimi.it/splitmix64.c).
    words = (
        6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431,
        16408922859458223821,
    )  # fmt: skip
    bits = [word >> place & 1 for word in words for place in range(64)]
    assert Rotation(size=2, seed=1234567).signs(320).tolist() == [1 - 2 * bit for bit in bits]
    assert torch.equal(Rotation(size=4, seed=1234567).signs(70), Rotation(size=2, seed=1234567).signs(70))


def test_its_text_is_read_again() -> None:
    for rotation in (Rotation(size=128), Rotation(size=2, seed=(1 << 64) - 1)):
        assert Rotation.parse(str(rotation)) == rotation
    with pytest.raises(SchemeError, match=r"rotation 'hadamard' must be hadamard<SIZE> or"):
        Rotation.parse("hadamard")


def test_other_sizes_seeds_and_shapes_are_refused() -> None:
    for size in (0, 3, -2, 1 << 17):
        with pytest.raises(SchemeError, match=rf"size \(={size}\) of a rotation must be a power of two"):
            Rotation(size=size)
    with pytest.raises(SchemeError, match=r"seed \(=-1\) of a rotation must be at least 0"):
        Rotation(size=2, seed=-1)
    for shape in ((2, 36), ()):
        with pytest.raises(ShapeError, match=r"size \(=8\) of the rotation must divide the last axis"):
            Rotation(size=8).rotate(torch.ones(shape))
