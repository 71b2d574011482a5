"""Counted bytes against bytes known from how a kernel is made. x has 64 float32 unless said, threads are 64."""
import numpy as np
import pytest

from ds4mlx.metal_kernels.emulator import EmulatorError, Moved, counting
from ds4mlx.metal_kernels.emulator.instrument import instrument, size_bytes

NOTHING = Moved(0, 0, 0)


@pytest.fixture
def count(emulate):
    """count(body, …): the traffic of one launch, with the options of `emulate`."""
    def run(body, **options):
        with counting() as launches:
            emulate(body, **options)
        (traffic,) = launches
        return traffic
    return run


def test_a_copy_reads_and_writes_each_byte_once(count):
    traffic = count("y[i] = x[i];", group=16)
    assert traffic.buffers["x"].reads == traffic.buffers["y"].writes == Moved(256, 256, 256)
    assert traffic.buffers["x"].writes == traffic.buffers["y"].reads == NOTHING
    assert (traffic.read_bytes, traffic.written_bytes) == (256, 256)
    assert (traffic.threadgroups, traffic.threads_per_threadgroup, traffic.threadgroup_memory_bytes) == (4, 16, 0)


@pytest.mark.parametrize("kind, nbytes", [
    ("uchar", 1), ("half", 2), ("float", 4), ("ulong", 8), ("uchar4", 4), ("half4", 8), ("packed_half4", 8),
    ("float4", 16), ("uint4", 16), ("ulong4", 32)])
def test_accesses_of_every_width_count_their_bytes(count, kind, nbytes):
    traffic = count(f"*(device {kind}*)y = *(const device {kind}*)x;", n=1)
    assert traffic.buffers["x"].reads == traffic.buffers["y"].writes == Moved(nbytes, 32, 32)


def test_a_sector_counts_once_a_threadgroup_and_once_a_launch(count):
    assert count("y[i] = x[0];", group=16).buffers["x"].reads == Moved(64 * 4, 4 * 32, 32)
    assert count("y[i] = x[i / 16 * 8];", group=16).buffers["x"].reads == Moved(64 * 4, 4 * 32, 4 * 32)


def test_strided_reads_touch_more_than_they_ask_for(count):
    assert count("y[i] = x[i * 8];", x=np.ones(512, np.float32)).buffers["x"].reads == Moved(256, 2048, 2048)


def test_a_row_read_twice_is_requested_twice_and_delivered_once(count):
    body = "float s = 0;\nfor (uint k = 0; k < N; ++k) { s += x[k]; }\n" \
           "for (uint k = 0; k < N; ++k) { y[k] = x[k] / s; }"
    traffic = count(body, n=1, template=[("N", 64)])
    assert traffic.buffers["x"].reads == Moved(512, 256, 256)
    assert traffic.buffers["y"].writes == Moved(256, 256, 256)


def test_a_copying_loop_counts_even_as_a_single_copy(count):
    body = "float own[64];\nfor (uint k = 0; k < 64; ++k) { own[k] = x[k]; }\n" \
           "for (uint k = 0; k < 64; ++k) { y[k] = own[63 - k]; }"
    traffic = count(body, n=1)
    assert traffic.buffers["x"].reads == traffic.buffers["y"].writes == Moved(256, 256, 256)
    assert count("for (uint k = 0; k < 64; ++k) { y[k] = 0; }", n=1).buffers["y"].writes == Moved(256, 256, 256)


def test_a_mat_vec_reads_its_weights_once_and_its_vector_once_a_threadgroup(count):
    body = "float s = 0;\nfor (uint k = i % 32; k < K; k += 32) { s += x[(i / 32 + 1) * K + k] * x[k]; }\n" \
           "s = simd_sum(s);\nif (i % 32 == 0) { y[i / 32] = s; }"
    x = np.ones((9, 256), np.float32)  # the vector, then 8 rows
    traffic = count(body, x=x, n=8 * 32, group=64, template=[("K", 256)], shape=(8,))
    assert traffic.buffers["x"].reads == Moved(8 * 2 * 1024, 8 * 1024 + 4 * 1024, 9 * 1024)
    assert traffic.buffers["y"].writes == Moved(32, 4 * 32, 32)


def test_matrix_loads_and_stores_count_their_elements(count):
    body = "simdgroup_matrix<float, 8, 8> m;\nsimdgroup_load(m, x, 8);\nsimdgroup_store(m, y, 8);"
    traffic = count(body, n=32)
    assert traffic.buffers["x"].reads == traffic.buffers["y"].writes == Moved(256, 256, 256)


def test_threadgroup_memory_counts_apart(count):
    traffic = count("threadgroup float t[64];\nt[i] = x[i];\nthreadgroup_barrier(mem_flags::mem_threadgroup);\n"
                    "y[i] = t[63 - i] + t[0];")
    assert (traffic.threadgroup_written_bytes, traffic.threadgroup_read_bytes) == (256, 512)
    assert traffic.threadgroup_memory_bytes == 256
    assert set(traffic.buffers) == {"x", "y"}


def test_tables_of_the_kernel_itself_count_apart(count):
    traffic = count("y[i] = table[uint(x[i]) + i % 8];", header=f"constant float table[9] = {{{'1, ' * 8} 2}};")
    assert traffic.buffers["(tables)"].reads.requested_bytes == 256
    assert traffic.buffers["x"].reads == Moved(256, 256, 256)


def test_atomics_read_and_write(count):
    body = "atomic_fetch_add_explicit((device atomic<float>*)y, x[i], memory_order_relaxed);"
    y = count(body, init_value=0).buffers["y"]
    assert y.reads == y.writes == Moved(256, 32, 32)


def test_shapes_and_small_inputs_are_buffers_too(count):
    traffic = count("y[i] = x[i % uint(x_shape[0])];", x=np.ones(4, np.float32))
    assert traffic.buffers["x"].buffer_bytes == 16
    assert traffic.buffers["x"].reads == Moved(256, 16, 16)
    assert traffic.buffers["x_shape"].reads.distinct_bytes == 4


def test_workers_share_what_a_launch_has_touched(count):
    x = np.ones(1 << 16, np.float32)
    alone, together = (count("y[i % 64] = x[i];", x=x, n=x.size, group=64, workers=workers) for workers in (1, 3))
    assert alone == together and alone.buffers["x"].reads == Moved(x.nbytes, x.nbytes, x.nbytes)


def test_every_launch_of_a_block_is_a_record(emulate):
    with counting() as outer:
        emulate("y[i] = x[i];")
        with counting() as inner:
            emulate("y[i] = 0;", check_races=True)
    assert [len(outer), len(inner)] == [2, 1] and outer[1] == inner[0]
    assert inner[0].read_bytes == 0


def test_sizes_of_the_types_that_are_loaded():
    sizes = {"i1": 1, "i24": 3, "half": 2, "<3 x i8>": 3, "<4 x i64>": 32, "[2 x <4 x float>]": 32, "ptr": 8}
    assert {kind: size_bytes(kind) for kind in sizes} == sizes


@pytest.mark.parametrize("line", [
    "  %1 = load { i32, i32 }, ptr addrspace(1) %0, align 4",
    "  %1 = atomicrmw add ptr addrspace(1) %0, i32 1 monotonic, align 4",
    "  %1 = call <4 x i8> @llvm.masked.load.v4i8.p1(ptr addrspace(1) %0, i32 1, <4 x i1> %m, <4 x i8> poison)",
])
def test_an_access_that_cannot_be_counted_is_an_error(line):
    with pytest.raises(EmulatorError, match="cannot be counted"):
        instrument(line)
