"""Races that are found whatever order threads happen to run in."""
import numpy as np
import pytest

from ds4mlx.metal_kernels.emulator import RaceError, checking

RING = "threadgroup float t[64];\nt[i] = x[i];\nBARRIER\ny[i] = t[(i + DISTANCE) % 64];"
GROUP_BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"
SIMD_BARRIER = "simdgroup_barrier(mem_flags::mem_threadgroup);"


def ring(barrier, distance):
    return RING.replace("BARRIER", barrier).replace("DISTANCE", str(distance))


@pytest.mark.parametrize("barrier, distance", [
    ("", 1), ("", 32), (SIMD_BARRIER, 32), ("threadgroup_barrier(mem_flags::mem_none);", 32),
    ("threadgroup_barrier(mem_flags::mem_device);", 1)])
def test_threads_that_share_memory_with_no_barrier_for_it_are_a_race(emulate, barrier, distance):
    with checking(races=True), pytest.raises(RaceError, match=r"small\.source:[35], the other at small\.source:[35]"):
        emulate(ring(barrier, distance))


@pytest.mark.parametrize("barrier, distance", [(GROUP_BARRIER, 1), (GROUP_BARRIER, 32), ("", 0)])
def test_a_barrier_or_memory_of_ones_own_is_no_race(emulate, barrier, distance):
    assert (emulate(ring(barrier, distance), check_races=True) == 1).all()


def test_a_simdgroup_barrier_orders_the_lanes_of_one_simdgroup(emulate):
    body = f"threadgroup float t[64];\nt[i] = x[i];\n{SIMD_BARRIER}\ny[i] = t[i ^ 1];"
    assert (emulate(body, check_races=True) == 1).all()


def test_two_writers_of_one_value_are_a_race(emulate):
    with pytest.raises(RaceError, match="written, and written before .* buffer 'y'"):
        emulate("y[i / 2] = x[i];", check_races=True)


def test_reusing_memory_in_a_loop_needs_a_second_barrier(emulate):
    body = """threadgroup float t[64];
    float sum = 0;
    for (uint k = 0; k < 2; ++k) {
        t[i] = x[i] + k;
        threadgroup_barrier(mem_flags::mem_threadgroup);
        sum += t[63 - i];
        AGAIN
    }
    y[i] = sum;"""
    with pytest.raises(RaceError, match=r"no barrier between .*small\.source:[57], the other at small\.source:[57]"):
        emulate(body.replace("AGAIN", ""), check_races=True)
    assert (emulate(body.replace("AGAIN", GROUP_BARRIER), check_races=True) == 3).all()


def test_threadgroups_share_device_memory_only_through_atomics(emulate):
    with pytest.raises(RaceError, match="in another threadgroup by thread 0; buffer 'y'"):
        emulate("y[i] = x[i];\nif (i == 40) { y[0] = 2; }", group=32, check_races=True)
    with pytest.raises(RaceError, match="read, and written in another threadgroup"):
        emulate("y[i] = i < 32 ? x[i] : y[i - 32];", group=32, check_races=True)


def test_an_answer_that_depends_on_the_order_of_threads_is_an_error(emulate):
    body = """device atomic<float>* sum = (device atomic<float>*)y;
    if (i == 0) { atomic_store_explicit(sum, 0, memory_order_relaxed); }
    simdgroup_barrier(mem_flags::mem_device);
    atomic_fetch_add_explicit(sum, x[i], memory_order_relaxed);"""
    with pytest.raises(RaceError, match="differs between threads run forward and"):
        emulate(body, n=32, shape=(1,), x=np.geomspace(1, 1e9, 32, dtype=np.float32), check_races=True)
