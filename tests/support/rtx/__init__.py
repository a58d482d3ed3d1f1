# SPDX-License-Identifier: Apache-2.0
"""TensorRT-RTX, whose builder needs no GPU."""

from typing import Any


def for_ampere_and_later(config: Any) -> None:
    """Have an engine built for compute capability 80, in place of this machine's GPU."""
    import tensorrt_rtx_bindings as trt

    config.num_compute_capabilities = 1
    config.set_compute_capability(trt.ComputeCapability.SM80, 0)
