"""What devices compute at most: the published peaks, and a CPU's own."""

import types

import numpy as np
import pytest

from notepad_jax.planner import peak


def devices(kind, hosts, platform="tpu"):
    return [types.SimpleNamespace(device_kind=kind, platform=platform, process_index=i)
            for i in hosts]  # fmt: skip


def test_devices_add_up_and_a_v5p_has_both_of_its_cores():
    one = peak.of(devices("TPU v5p", [0]))
    many = peak.of(devices("TPU v5p", [0, 0, 1, 1]))
    assert many.flops == 4 * one.flops == 4 * 459e12
    assert str(many) == "1,836.00 TFLOP/s (4 x TPU v5p, bfloat16, published)"
    assert peak.of(devices("TPU7x", [0])).flops == 2307e12 / 2  # a device is one of two cores
    assert peak.of(devices("NVIDIA H200", [0], "gpu")).flops == 989e12


def test_what_nobody_knows_has_no_peak():
    assert peak.of(devices("TPU v99", [0])) is None
    assert peak.of(devices("NVIDIA Other", [0], "gpu")) is None


def test_the_devices_of_a_cpu_are_one_machine(monkeypatch):
    monkeypatch.setattr(peak, "measured", lambda: 1e11)
    found = peak.of(devices("cpu", [0] * 8 + [1] * 8, "cpu"))
    assert found.flops == 2e11 and str(found) == "0.20 TFLOP/s (2 x CPU, float32, measured)"


def test_a_product_is_counted_by_hand_and_the_fastest_counts(monkeypatch):
    clock = iter([0.0, 4.0, 4.0, 6.0, 6.0, 9.0])
    monkeypatch.setattr(peak.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(peak.np, "matmul", lambda a, b, out: np.copyto(out, a))
    assert peak.measured() == pytest.approx(2 * 512**3 / 2.0)
