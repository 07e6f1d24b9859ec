"""Peaks of devices, and the share of them that a run reaches."""

import pytest
import torch

from stepgraph.costs import hardware


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("NVIDIA H100 80GB HBM3", 989.5),
        ("NVIDIA H100 PCIe", 756.5),
        ("NVIDIA H200", 989.5),
        ("NVIDIA B200", 2250),
        ("NVIDIA L40S", 362.05),
        ("NVIDIA GeForce RTX 4090", 165.2),
    ],
)
def test_peaks_of_known_devices(name, tflops):
    assert hardware.peak_flops(name, torch.bfloat16) == tflops * 1e12
    assert hardware.peak_flops(name, torch.float32) is None


@pytest.mark.parametrize(
    "name",
    [
        *(
            "NVIDIA H20",
            "NVIDIA GB200",
            "NVIDIA L40",
            "NVIDIA GeForce RTX 4090 Laptop GPU",
            "NVIDIA GeForce RTX 4090 D",
        ),
        *("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA A100-SXM4-40GB MIG 1g.5gb", "cpu", ""),
    ],
)
def test_a_device_that_only_resembles_a_known_one_has_no_peak(name):
    assert hardware.peak_flops(name, torch.bfloat16) is None


def test_mfu_is_the_share_of_the_peak():
    assert hardware.mfu(10_000.0, 6 * 8e9, 989.5e12) == pytest.approx(0.4851, abs=1e-4)
    assert hardware.mfu(10_000.0, 6 * 8e9, None) is None
