import numpy as np
import pytest
from oracle.weights import CONFIG

from ds4mlx.errors import CheckpointError
from ds4mlx.models.deepseek_v4 import schema
from ds4mlx.models.deepseek_v4.config import FLASH, Config

TINY = Config.from_official(CONFIG)


@pytest.mark.parametrize("tokens, size, packed", [
    (102_400, 0.363e9, True), (1_048_576, 3.688e9, True), (102_400, 1.420e9, False), (1_048_576, 14.440e9, False)])
def test_size_of_a_flash_state(tokens, size, packed):
    frontiers = 11_479_040 + 129_280 * 4 + tokens * 4 + 21 * 2 * 4 * 4 * (512 + 128)
    assert schema.session_bytes(FLASH, tokens, packed) == pytest.approx(size, abs=frontiers)


def test_a_packed_row_of_flash_takes_584_bytes_and_its_indexer_row_68():
    assert (schema.attention_row(FLASH, True).width, schema.index_row(FLASH, True).width) == (584, 68)


def test_a_mark_of_a_flash_state_does_not_depend_on_its_length():
    window, frontiers, logits = 3.21e6, 11_479_040, 129_280 * 4
    assert schema.mark_bytes(FLASH, True) == pytest.approx(window + frontiers + logits, rel=0.05)  # unread slots


@pytest.mark.parametrize("tokens", [0, 3, 4, 7, 8, 127, 128, 130])
def test_a_frontier_comes_back_from_its_stored_shape(tokens, rng):
    held = (4 if tokens >= 4 else 0) + tokens % 4
    a = rng.normal(size=(held, 16)).astype(np.float32)
    stored = schema.pack_frontier(a, tokens, 4, -np.inf)
    back = schema.unpack_frontier(stored, tokens, 4)
    assert stored.shape == (8, 16) and back.shape == a.shape
    np.testing.assert_array_equal(back[:, :8], a[:, :8])
    np.testing.assert_array_equal(back[held - tokens % 4:], a[held - tokens % 4:])


@pytest.mark.parametrize("damage, complaint", [
    (lambda s: s.pop("tokens"), "no list of tokens"),
    (lambda s: s.pop("L2.comp"), "L2.comp"),
    (lambda s: s.update({"L0.raw": s["L0.raw"][:, :5]}), r"L0.raw is float32 \[9, 5\], need float32 \[9, 128\]"),
    (lambda s: s.update({"L0.raw": s["L0.raw"].astype(np.float16)}), "L0.raw is float16"),
    (lambda s: s["tokens"].fill(512), "token 512, vocabulary has 512"),
])
def test_arrays_that_are_not_a_state_of_this_model_are_refused(damage, complaint):
    state = {name: np.zeros(a.shape, a.dtype) for name, a in schema.arrays(TINY, 9, packed=False).items()}
    assert schema.check(TINY, state, packed=False) == 9
    damage(state)
    with pytest.raises(CheckpointError, match=complaint):
        schema.check(TINY, state, packed=False)
