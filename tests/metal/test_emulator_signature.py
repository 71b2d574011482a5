"""The text that the emulator compiles is the one that MLX writes around a kernel's body."""
import re

import mlx.core as mx
import numpy as np
import pytest

from ds4mlx.metal_kernels.emulator.arrays import dtype_name, to_host
from ds4mlx.metal_kernels.emulator.source import KernelText, instance, metal_source

LARGE, SEVEN = mx.zeros((2, 4)), mx.zeros(7, mx.int32)
USES = "y[thread_position_in_grid.x] = x[0] + {};"


def by_mlx(tmp_path, text, inputs, dtypes, template):
    """What MLX records of the launch when a function is exported, which needs no GPU; one name for all variants."""
    kernel = mx.fast.metal_kernel(name=text.name, input_names=list(text.inputs), output_names=list(text.outputs),
                                  source=text.source, header=text.header, atomic_outputs=text.atomic_outputs)

    def launch(*arrays):
        return kernel(inputs=[*arrays, *inputs[len(arrays):]], template=template, grid=(8, 1, 1),
                      threadgroup=(8, 1, 1), output_shapes=[(8,)] * len(dtypes), output_dtypes=dtypes)
    mx.export_function(str(tmp_path / "launch.mlxfn"), launch, *(a for a in inputs if isinstance(a, mx.array)))
    recorded = (tmp_path / "launch.mlxfn").read_bytes().decode("latin-1")
    start = recorded.index(text.header + ("template <" if template else "[[kernel]]"))
    return re.sub(r"custom_kernel_\w+", "custom_kernel_small", recorded[start:recorded.index("\n}\n", start) + 3])


@pytest.mark.parametrize("inputs, template, body", [
    ([LARGE], [], "1"),
    ([LARGE, SEVEN], [], "n[6]"),
    ([LARGE, mx.zeros(8, mx.int32)], [], "n[7]"),
    ([LARGE, 3], [], "n"), ([LARGE, 0.5], [], "n"), ([LARGE, True], [], "n"),
    ([LARGE, SEVEN], [("T", mx.float16), ("W", mx.uint16), ("K", -4), ("FLAG", True)], "T(K)"),
    ([LARGE.astype(mx.bfloat16), SEVEN], [("N", 2)], "x_shape[1] * x_strides[0] + x_ndim + n_shape[0]"),
    ([LARGE, 3], [], "n_shape_of_a_number + n"),
    ([LARGE.astype(mx.uint8), 1], [], "simdgroup_index_in_threadgroup + my_threads_per_threadgroup_x"),
], ids=["one input", "seven", "eight", "int", "float", "bool", "templates", "shapes", "shape of a number",
        "attributes"])
@pytest.mark.parametrize("atomic", [False, True])
def test_the_signature_is_the_one_that_mlx_writes(tmp_path, inputs, template, body, atomic):
    names = ("x", "n")[:len(inputs)]
    text = KernelText("small", names, ("y", "z"), USES.format(body), "// above\n", atomic)
    arrays, types = zip(*map(to_host, inputs), strict=True)
    dtypes = [mx.float32, mx.int32]
    made = instance(text, list(map(np.asarray, arrays)), types, [dtype_name(d) for d in dtypes], template)
    assert metal_source(text, made) == by_mlx(tmp_path, text, inputs, dtypes, template)
