"""What the packages ask of a device, by the type of torch's devices. A new one is a class and a row here."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from .. import _torch
from . import cuda

__all__ = ["Device", "of"]


class Device:
    """A device without kernels of ours, whose work is done when a call returns."""

    def no_kernels(self, device: torch.device, kind: str) -> str:
        """Why no graph of this kind has a plan, if none has."""
        return f"there are no kernels for {device.type}"

    def rewrites_training(self) -> bool:
        """Whether graphs of training steps are written otherwise, for the kernels of this device."""
        return False

    def target(self, device: torch.device) -> str:
        """The cost model that fits it best."""
        return "cpu"

    def lead(self, device: torch.device) -> Callable[[], int]:
        """What a plan is given first at each call."""
        return torch.get_num_threads

    def wait(self, device: torch.device) -> None:
        """Waits until its work is done."""

    def is_recording(self) -> bool:
        """Whether somebody records the work of this thread, to do it again later."""
        return False

    def random_devices(self, device: torch.device) -> list[torch.device]:
        """Devices with random numbers of their own, beside the host's."""
        return []


class Cpu(Device):
    """The host."""

    def no_kernels(self, device: torch.device, kind: str) -> str:
        """In training, weights change at every step: kernels would pack them each time."""
        return (
            "" if kind == "inference" else "a CPU's plans pack weights, which change at every training step"
        )


class Cuda(Device):
    """GPUs of NVIDIA's."""

    def no_kernels(self, device: torch.device, kind: str) -> str:
        """The libraries that are missing."""
        return cuda.available() or ""

    def rewrites_training(self) -> bool:
        """As regions of a plan, and channels last."""
        return True

    def target(self, device: torch.device) -> str:
        """That of its name, if there is one."""
        known = torch.cuda.is_available() and "H200" in torch.cuda.get_device_name(device)
        return "h200" if known else "gpu"

    def lead(self, device: torch.device) -> Callable[[], int]:
        """The stream."""
        return functools.partial(_torch.cuda_stream, device.index or 0)

    def wait(self, device: torch.device) -> None:
        """For all of its streams."""
        torch.cuda.synchronize(device)

    def is_recording(self) -> bool:
        """As a CUDA graph."""
        return torch.cuda.is_current_stream_capturing()

    def random_devices(self, device: torch.device) -> list[torch.device]:
        """This one."""
        return [device]


_DEVICES = {"cpu": Cpu(), "cuda": Cuda()}
_OTHER = Device()


def of(device: torch.device) -> Device:
    """What is known of a device of torch's."""
    return _DEVICES.get(device.type, _OTHER)
