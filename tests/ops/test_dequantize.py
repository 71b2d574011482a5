from io import StringIO

import mlx.core as mx
import numpy as np
import pytest

from ds4mlx import ops
from ds4mlx.gguf.dequant import dequantize

KINDS = ["F32", "F16", "BF16", "Q8_0", "Q2_K", "Q4_K", "IQ2_XXS", "MXFP4"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_device_decodes_what_numpy_decodes(kind, random_blocks, implementation):
    raw = random_blocks(kind, 3, 5, 512)
    np.testing.assert_array_equal(np.array(ops.dequantize(mx.array(raw), kind)), dequantize(raw, kind))


def test_every_exponent_of_mxfp4(implementation):
    raw = np.arange(256, dtype=np.uint8)[:, None].repeat(17, axis=1)
    # Exactly, but for weights below 2^-120: a GPU may take their scale, a subnormal float, for 0.
    np.testing.assert_allclose(ops.dequantize(mx.array(raw), "MXFP4"), dequantize(raw, "MXFP4"), rtol=0,
                               atol=2.0 ** -120)


def test_an_unknown_type_is_named():
    with pytest.raises(ValueError, match="no decoder for Q3_K"):
        ops.dequantize(mx.zeros((1, 110), mx.uint8), "Q3_K")


def test_rows_that_are_on_the_device_are_not_copied(random_blocks):
    raw, graph = random_blocks("Q8_0", 4, 64), StringIO()
    mx.export_to_dot(graph, ops.Blocks(mx.array(raw), "Q8_0").rows(slice(0, 4)))
    assert "label" not in graph.getvalue()      # there is no operation in it
    np.testing.assert_array_equal(ops.Blocks(raw, "Q8_0").rows(slice(1, 3)), raw[1:3])
