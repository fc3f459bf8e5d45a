"""Devices: names, memory, errors for missing devices, and tensors of zeros that are allocated lazily."""

from __future__ import annotations

import resource

import pytest
import torch

from penstock import driver
from penstock.driver import CPU, Accelerator, DeviceSpec, load_devices, scan_available_devices, zeros
from penstock.errors import ConfigError


def test_the_cpu_device_reports_its_label_and_memory() -> None:
    (device,) = load_devices([DeviceSpec.cpu()])
    assert device == CPU()
    assert (device.label, device.id, device.is_host, str(device)) == ("cpu", 0, True, "cpu")
    assert device.torch_device == torch.device("cpu")
    assert 0 < device.stats["free_memory"] <= device.stats["total_memory"]


def test_a_missing_gpu_is_refused() -> None:
    with pytest.raises(ConfigError, match="gpu:9999 does not exist") as error:
        Accelerator(9999)
    assert error.value.field == "devices"


def test_invalid_devices_are_refused() -> None:
    with pytest.raises(ConfigError, match="unknown device type 'tpu'"):
        DeviceSpec(0, "tpu")
    with pytest.raises(ConfigError, match="must not be negative, was -1"):
        DeviceSpec(-1)


def test_the_available_devices_can_be_opened() -> None:
    assert load_devices(scan_available_devices())


def test_buffer_and_tensor_are_torch_tensor_and_an_unknown_name_raises_attribute_error() -> None:
    assert driver.Buffer is torch.Tensor
    assert driver.Tensor is torch.Tensor
    with pytest.raises(AttributeError, match="Grommet"):
        driver.Grommet  # noqa: B018


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_zeros_have_dtype_shape_and_alignment(dtype: torch.dtype) -> None:
    tensor = zeros((3, 5, 7), dtype, torch.device("cpu"))
    assert (tensor.dtype, tuple(tensor.shape), tensor.is_contiguous()) == (dtype, (3, 5, 7), True)
    assert not tensor.any()
    assert tensor.data_ptr() % 64 == 0
    tensor += 1
    assert float(tensor.float().sum()) == 105


def test_zeros_take_no_memory_before_they_are_written() -> None:
    memory_before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KiB
    tensor = zeros((4, 2**28), torch.int8, torch.device("cpu"))  # 1 GiB
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory_before < 2**17
    assert int(tensor[3, -1]) == 0
