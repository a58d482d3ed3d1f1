# SPDX-License-Identifier: Apache-2.0
"""Eager training steps that wait for the host: they run a module's original forward.

In a step that is neither captured nor compiled PyTorch launches kernels one by one, and with small tensors the GPU waits for
them.  The derivatives of a pair take the host longer than those of PyTorch's two operators.  So a module whose pairs save the
GPU less than that is left alone in such a step.  Steps on another stream than the default one run the plan: so do, as PyTorch's
manual asks, those before a capture, which make ready what it needs.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from convpool.torch.eager import pooled_conv
from convpool.torch.rewrite.sizes import values_of

HOST = 250e-6
"""Seconds that a pair's forward and backward pass take the host longer; 200 to 450 on the hosts measured."""
HOST_OF_A_PENALTY = 140e-6
"""What a pair must save where the input needs a gradient itself: a gradient penalty takes the host some 1000 microseconds longer,
and saves the GPU seven times as much as a step without one, or more."""
PER_BYTE, PER_MAC = 11e-12, 7e-15
"""Seconds that a pair saves an H200 in 16 bits, by the bytes and multiply-adds of the convolution that is not pooled first:
those of `benchmarks/results/h200_torch_layers.json`."""
H200_BANDWIDTH, H200_PROCESSORS = 4.8e12, 132
MOST_KINDS = 64


@dataclass
class EagerSteps:
    """What is known of a module's eager steps.

    saves: for each kind of inputs, seconds that a step saves; below 0 the host loses more.
    ran: kinds that a plan has run outside of captures."""

    saves: dict[tuple, float] = field(default_factory=dict)
    ran: set[tuple] = field(default_factory=set)

    def wait_for_host(self, root: nn.Module, tensors: Sequence[torch.Tensor], plan: Callable[[], Any]) -> bool:
        """Whether a call, which nobody compiles, is to run the original forward.  tensors: its inputs.  plan: gives its plan."""
        first = tensors[0]
        if type(first) is not torch.Tensor or not first.is_cuda or not torch.is_grad_enabled():
            return False
        penalty = first.requires_grad and first.grad_fn is None  # unlike what a generator made
        kind = (root.training, penalty, _rounding(), *[(x.shape, x.dtype, x.device) for x in tensors])
        captures, default = torch.cuda.is_current_stream_capturing(), _is_default_stream(first)
        saves = self.saves.get(kind)
        if saves is None:
            found = None if captures or len(self.saves) >= MOST_KINDS else plan()
            if found is None:
                return False
            host = HOST_OF_A_PENALTY if penalty else HOST
            saves = math.inf if found.graph is None else saved_time(root, found.graph, tensors, _speed(first), host)
            self.saves[kind] = saves
        if saves >= 0 or not any(x.requires_grad for x in itertools.chain((first,), root.parameters())):
            return False
        if captures and kind not in self.ran:
            warnings.warn(
                f"convpool: {type(root).__name__} is captured as it was before optimize; run it on a side stream first,"
                " as torch.cuda.graph asks for",
                stacklevel=3,
            )
            return True
        if captures or not default:
            self.ran.add(kind)
            return False
        return True


def _is_default_stream(x: torch.Tensor) -> bool:
    return torch._C._cuda_getCurrentRawStream(x.get_device()) == 0


def _rounding() -> tuple[bool, bool]:
    """Whether operators run in 16 bits, and float32 is multiplied as TF32."""
    return torch.is_autocast_enabled("cuda"), torch.backends.cudnn.allow_tf32


@dataclass(frozen=True)
class Speed:
    """How many times an H200's time in 16 bits it takes to move a byte, and to multiply and add."""

    bytes: float = 1.0
    macs: float = 1.0


def _speed(x: torch.Tensor) -> Speed:
    device = torch.cuda.get_device_properties(x.device)
    processors = H200_PROCESSORS / device.multi_processor_count
    bandwidth = 2e3 * getattr(device, "memory_clock_rate", 0) * getattr(device, "memory_bus_width", 0) / 8
    autocast, tf32 = _rounding()
    macs = 1 if autocast or x.element_size() == 2 else 2 if tf32 and x.dtype == torch.float32 else 15
    older = 1.0 if device.major >= 9 else 2.6
    return Speed(H200_BANDWIDTH / bandwidth if bandwidth else processors, macs * processors * older)


def saved_time(root: nn.Module, graph: fx.Graph, tensors: Sequence[torch.Tensor], speed: Speed, host: float) -> float:
    """Seconds that pooling first saves a training step, less `host` for each pair."""
    values = values_of(root, graph, tensors, [x.shape for x in tensors])
    if values is None:
        return math.inf
    saved = 0.0
    for node, y in values.items():
        window: Any = node.args[6] if node.target is pooled_conv else ()
        if math.prod(window) > 1:
            weight = values[node.args[1]]
            results = y.numel() * math.prod(window)
            moved, macs = results * y.element_size(), results * weight[0].numel()
            saved += moved * PER_BYTE * speed.bytes + macs * PER_MAC * speed.macs - host
    return saved
