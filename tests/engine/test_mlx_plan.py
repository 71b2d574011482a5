from dataclasses import replace

import pytest

from ds4mlx.engine import mlx_plan
from ds4mlx.models.deepseek_v4.config import FLASH, PRO

Q2, Q4 = (mlx_plan.published_kinds(FLASH, recipe) for recipe in ("q2", "q4"))
SCORING = 451_465_728 - 88_134_144   # of the indexers, where nothing has to be chosen


@pytest.fixture(scope="module")
def small_plan():
    """Flash with a fraction of its width, so that counting takes a moment."""
    config = replace(FLASH, hidden_size=512, moe_intermediate_size=256, q_lora_rank=256, num_attention_heads=16,
                     o_lora_rank=256, vocab_size=2048, num_hidden_layers=6, compress_ratios=(0, 0, 4, 128, 4, 128))
    return mlx_plan.decode_plan(config, mlx_plan.published_kinds(config, "q2"), 2560)


@pytest.mark.parametrize("kinds, context, size", [
    (Q2, 4096, 9_559_118_244), (Q4, 4096, 11_385_213_348), (Q2, 1024, 9_559_118_244 - SCORING)])
def test_a_flash_token_needs_the_published_bytes_of_weights(kinds, context, size):
    assert mlx_plan.weight_bytes(FLASH, kinds, context) == size


@pytest.mark.parametrize("context, size", [(102_400, 0.055e9), (1_048_576, 0.480e9)])
def test_a_flash_token_needs_the_published_bytes_of_rows(context, size):
    assert mlx_plan.cache_bytes(FLASH, context) == pytest.approx(size, rel=0.01)


def test_each_kind_of_layer_is_counted_as_often_as_it_occurs(small_plan):
    assert {layer.name: layer.count for layer in small_plan.layers} == {
        "window only, hashed": 2, "ratio 4, hashed": 1, "ratio 128": 2, "ratio 4": 1, "embedding and output": 1}


def test_no_layer_takes_more_than_24_launches(small_plan):
    assert all(layer.launches <= 24 for layer in small_plan.layers)


def test_products_read_their_weights_once(small_plan):
    products = [cost for layer in small_plan.layers for cost in layer.costs if "matmul" in cost.name]
    assert products and all(cost.read_bytes + cost.written_bytes <= 1.05 * cost.least_bytes for cost in products)


def test_nothing_is_counted_below_what_it_needs(small_plan):
    """A compressor needs parts of its frontier only, by the place in the group, a ring all places but the one that is
    overwritten, and a table some of the logits."""
    parts = ("compress_token", "latent_latent_ring1", "route_hashed")
    costs = [cost for layer in small_plan.layers for cost in layer.costs
             if cost.least_bytes and cost.name not in parts]
    assert [cost.name for cost in costs if cost.read_bytes + cost.written_bytes < cost.least_bytes] == []


@pytest.mark.sweep
@pytest.mark.parametrize("config, kinds, context", [
    (FLASH, Q2, 2048), (FLASH, Q4, 2048), (FLASH, Q2, 131_072), (PRO, mlx_plan.published_kinds(PRO, "q2"), 2048)],
    ids=["q2", "q4", "long", "pro"])
def test_a_token_moves_at_most_a_tenth_more_than_it_needs(config, kinds, context):
    assert mlx_plan.decode_plan(config, kinds, context).ratio <= 1.10
