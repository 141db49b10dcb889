"""What the packages ask of a device, by the type of torch's devices. A new one is a class and a row here."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Iterable, Sequence

import torch

from .. import _native, _torch
from . import cuda, cuda_steps
from .bound import Plan, Recordable, Request

__all__ = ["Device", "of", "random_devices"]


class Device:
    """A device without kernels of ours, whose work is done when a call returns."""

    eager_wins_ties = True
    """Whether eager's training step is kept where no other form is more than 3% faster."""
    times_host_apart = False
    """Whether it works while the host queues more, so that a call takes what the slower of both takes."""
    compares_programs = False
    """Whether programs of a graph that only measuring can tell apart are both planned and timed. Packing
    weights twice takes long on a CPU."""
    records = False
    """Whether calls can be recorded once and done again, which spares the host."""
    arranges_results = False
    """Whether a plan returns the outputs that it is asked for, in their order."""
    backward_in_threads = False
    """Whether autograd runs its backward passes in a thread of the device's."""
    elements_at_once = 1 << 17
    """Elements compared at a time: in float64 they stay in a cache."""

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

    def bind(self, request: Request) -> Plan:
        """A plan with its weights."""
        like = request.like if isinstance(request.like, _native.BoundPlan) else None
        return request.plan.bind(
            request.constants,
            request.watched,
            request.calls,
            request.libtorch,
            request.lead,
            request.most,
            request.without,
            like,
        )

    def recordable(self, plan: Plan) -> Recordable | None:
        """The plan, if its steps can be recorded and it does not record them by itself."""
        return None

    def step_times(
        self, plan: Plan, lead: int, inputs: Sequence[torch.Tensor], count: int, repeats: int
    ) -> list[float] | None:
        """Seconds of each step of a plan, the median of several calls; none if that cannot be told."""
        if not isinstance(plan, _native.BoundPlan):
            return None
        calls = [plan.step_times(lead, *inputs) for _ in range(repeats + 1)][1:]
        each = [call for call in calls if call is not None]
        return [statistics.median(step) for step in zip(*each, strict=True)] if each else None

    def allows_tf32(self) -> bool | None:
        """Whether products may round to TF32 now; none where there is no such setting."""
        return None

    def may_round_to_tf32(self) -> bool:
        """Whether products or convolutions may."""
        return False

    def free_memory(self, device: torch.device) -> int | None:
        """Bytes of it that are free, if it has memory of its own."""
        return None

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
        """They are part of the extension."""
        return ""


class Cuda(Device):
    """GPUs of NVIDIA's."""

    eager_wins_ties = False
    times_host_apart = True
    compares_programs = True
    records = True
    arranges_results = True
    backward_in_threads = True
    elements_at_once = 1 << 24  # The host waits for each of these.

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

    def bind(self, request: Request) -> Plan:
        """A plan that launches kernels on a stream."""
        tf32 = self.allows_tf32()
        assert tf32 is not None
        return _native.BoundCudaPlan(
            request.plan,
            request.constants,
            request.watched,
            request.calls,
            request.libtorch,
            request.device.index or 0,
            request.lead,
            tf32,
            None if request.returns is None else [*request.returns],
            request.split,
            request.most,
            request.like if isinstance(request.like, _native.BoundCudaPlan) else None,
        )

    def recordable(self, plan: Plan) -> Recordable | None:
        """One with calls into torch: others are recorded where they are launched."""
        return plan if isinstance(plan, _native.BoundCudaPlan) and not plan.is_native() else None

    def step_times(
        self, plan: Plan, lead: int, inputs: Sequence[torch.Tensor], count: int, repeats: int
    ) -> list[float] | None:
        """As torch's profiler sees their kernels."""
        if not isinstance(plan, _native.BoundCudaPlan):
            return None
        return cuda_steps.step_times(plan, lead, inputs, count, repeats)

    def allows_tf32(self) -> bool:
        """What torch's setting for cuBLAS says."""
        return _torch.cublas_allows_tf32()

    def may_round_to_tf32(self) -> bool:
        """What torch's settings for cuBLAS and cuDNN say."""
        return torch.backends.cudnn.allow_tf32 or torch.backends.cuda.matmul.allow_tf32

    def free_memory(self, device: torch.device) -> int:
        """With what torch holds and nobody uses."""
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)

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


def random_devices(values: Iterable[object]) -> list[torch.device]:
    """Devices of these tensors with random numbers of their own, beside the host's."""
    found = {t.device for t in values if isinstance(t, torch.Tensor)}
    return sorted({d for device in found for d in of(device).random_devices(device)}, key=str)
