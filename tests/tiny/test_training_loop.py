"""The loop that trains the tiny model: its plan, its marks, its steps. Needs PyTorch: `pip install -e .[train]`."""
from argparse import Namespace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from ds4mlx.errors import CheckpointError  # noqa: E402
from ds4mlx.quant import importance  # noqa: E402
from ds4mlx.tiny import lessons  # noqa: E402
from ds4mlx.tiny.training import checkpoint  # noqa: E402
from ds4mlx.tiny.training.few_bits import imatrix, q2_k, round_experts  # noqa: E402
from ds4mlx.tiny.training.optimizer import orthogonal  # noqa: E402
from ds4mlx.tiny.training.shape import RATIOS  # noqa: E402
from ds4mlx.tiny.training.train import ANSWER, Phase, Trainer, falling, graded, phases  # noqa: E402


def trainer(**args):
    return Trainer(Namespace(**{"seed": 1, "resume": None, "layers": None, "ratios": RATIOS, "dense": False,
                                "matrix_rate": 0.015, "rate": 0.003, "compile": False, "read_weight": 1.0, **args}))


def test_a_plan_is_phases_of_batches_that_take_turns():
    assert list(phases("1:1024@60,2:1024+3:8192")) == [
        Phase(((1, 1024),), 60.0), Phase(((2, 1024), (3, 8192)), float("inf"))]


def test_an_answer_is_right_where_all_of_its_tokens_are():
    weights = np.array([[0, ANSWER, ANSWER, 4, ANSWER], [ANSWER, 4, 4, 4, 4]])
    correct = np.array([[0, 1, 0, 0, 1], [1, 0, 0, 0, 0]], bool)
    assert graded(correct, weights) == (3 / 4, 2 / 3, 3)    # a row's first answer is not the one before's end
    assert graded(correct, np.zeros_like(weights)) == (0.0, 0.0, 0)


def test_rates_fall_to_their_last_share():
    args = Namespace(seconds=100, fall_from=60, fall_to=0.1, start=0.5)
    assert [falling(args, at) for at in (0, 60, 100, 200)] == pytest.approx([0.5, 0.5, 0.05, 0.05])


@pytest.mark.parametrize("shape", [(3, 16, 64), (2, 64, 16)])
def test_a_matrix_s_step_has_directions_of_one_length(shape):
    torch.manual_seed(1)
    sizes = torch.linalg.svdvals(orthogonal(torch.randn(shape)).float())
    assert 0.6 < sizes.min() and sizes.max() < 1.3      # what five iterations of this polynomial leave, and bf16


def test_steps_learn_a_batch():
    batch = tuple(map(np.stack, zip(*islice(lessons.rows(5, 128, 1), 1))))
    learning = trainer()
    losses = [learning.train(batch, 1.0)[0].item() for _ in range(2)]
    assert losses[1] < 0.95 * losses[0] and (learning.step, learning.tokens) == (2, 256)


def test_indexers_that_have_learned_learn_on_in_one_of_four_steps(tmp_path):
    trainer().save(tmp_path / "run", 3.0)
    batch = tuple(map(np.stack, zip(*islice(lessons.rows(5, 128, 1), 1))))
    learning = trainer(resume=sorted(tmp_path.glob("run.*.npz")))
    assert [learning.train(batch, 0.1)[1].item() > 0 for _ in range(5)] == [True, False, False, False, True]


def test_experts_in_few_bits_are_those_of_what_the_layers_have_seen():
    learning = trainer()
    learning.train(tuple(map(np.stack, zip(*islice(lessons.rows(5, 128, 1), 1)))), 0.1)
    seen = learning.model.layers[1].ffn.seen
    assert seen.share.sum().item() == pytest.approx(0.02 * 4, rel=1e-3)     # four experts a token; one step of 50
    assert (seen.inputs()[seen.share > 0].mean(-1) - 1).abs().max() < 0.2   # normalised rows
    means = imatrix(learning.model, Path("run.dat"), 1).entries["blk.1.ffn_down_exps.weight"].means()
    assert np.allclose(means[seen.share > 0], seen.middle()[seen.share > 0])
    round_experts(learning.model)
    ffn = learning.model.layers[1].ffn
    assert torch.allclose(ffn.experts_w2_error, q2_k(ffn.experts_w2, seen.middle()) - ffn.experts_w2)


def test_a_run_goes_on_from_a_checkpoint(tmp_path):
    before = trainer()
    before.step, before.tokens = 7, 896
    before.save(tmp_path / "run", 3.0)
    again = trainer(seed=2, resume=sorted(tmp_path.glob("run.*.npz")))
    assert (again.step, again.tokens, again.seconds) == (7, 896, 3.0)
    assert importance.read(tmp_path / "run.dat").chunks == 7
    for path, value in before.model.state_dict().items():
        # Experts in bytes by groups of 32 are 1/254 of their largest off, all else is in half precision.
        assert torch.allclose(again.model.state_dict()[path], value, rtol=1e-3, atol=2e-3), path


def test_a_run_goes_on_with_some_of_the_layers(tmp_path):
    before = trainer(ratios=(0, 4, 128, 4))
    before.save(tmp_path / "run", 3.0)
    files = sorted(tmp_path.glob("run.*.npz"))
    assert checkpoint.load(files)[1]["ratios"] == [0, 4, 128, 4]
    with pytest.raises(CheckpointError, match=r"\[0, 2, 9\] are to be kept; need different ones of \[0, 1, 2, 3\]"):
        trainer(resume=files, layers=[0, 2, 9])
    again = trainer(seed=2, resume=files, layers=[0, 2, 3])
    assert [layer.attn.ratio for layer in again.model.layers] == [0, 128, 4]
    for layer, was in ((0, 0), (1, 2), (2, 3)):
        for name in ("attn.wkv", "hc_ffn_base", "ffn.gate"):
            value, held = (model.get_parameter(f"layers.{i}.{name}") for model, i in
                           ((again.model, layer), (before.model, was)))
            assert torch.allclose(value, held, rtol=1e-3, atol=2e-3), (layer, name)
    assert torch.allclose(again.model.head, before.model.head, rtol=1e-3, atol=2e-3)
