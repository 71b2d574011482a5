"""Checkpoints of training, which need no PyTorch."""
import numpy as np

from ds4mlx.tiny.training import checkpoint


def test_a_checkpoint_comes_back_within_its_rounding(tmp_path):
    rng = np.random.default_rng(1)
    weights = {"norm": rng.standard_normal(64).astype(np.float32),
               "layers.0.ffn.experts_w1": rng.standard_normal((2, 8, 64)).astype(np.float32),
               "layers.0.ffn.gate_tid2eid": rng.integers(0, 16, (10, 4))}
    files = checkpoint.save(tmp_path / "run", weights, {"steps": 3})
    loaded, about = checkpoint.load(files)
    assert about == {"steps": 3} and set(loaded) == set(weights)
    for path, tolerance in (("norm", 2e-3), ("layers.0.ffn.experts_w1", 2e-2), ("layers.0.ffn.gate_tid2eid", 0)):
        np.testing.assert_allclose(loaded[path], weights[path], atol=tolerance)     # half precision; 1/254 of 4.5


def test_a_checkpoint_is_split_into_small_files(tmp_path):
    weights = {f"w{i}": np.zeros((1 << 20,), np.float32) for i in range(9)}        # 2 MiB each in half precision
    files = checkpoint.save(tmp_path / "run", weights, {})
    assert len(files) == 2 and all(file.stat().st_size < checkpoint.PART_BYTES + (1 << 16) for file in files)
