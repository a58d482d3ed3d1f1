# SPDX-License-Identifier: Apache-2.0
"""The process in which onnx infers shapes, by onnx's C++ module alone: numpy and onnx's Python would take most of a second."""

import importlib.util
import resource

CPU_S = 30
"""Seconds of processor time for a model: hundreds of times the need of the largest known ones."""
GROWTH_BYTES = 2 * 2**30
COPIES = 8
"""Memory for a model, beside so many times its own size: shapes take far less."""


def limit(what: int, most: int) -> None:
    """Set a soft limit, as far as the hard one allows."""
    hard = resource.getrlimit(what)[1]
    resource.setrlimit(what, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


class Service:
    """Shape inference by onnx's C++ module."""

    def __init__(self, path: str) -> None:
        """path: the module's file."""
        spec = importlib.util.spec_from_file_location("onnx_cpp2py_export", path)
        assert spec is not None and spec.loader is not None
        self._module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(self._module)

    def infer(self, model: bytes, strict: bool) -> bytes:
        """The model with shapes; this may end the process.  strict: as onnx's full check, else with values of small tensors."""
        used = resource.getrusage(resource.RUSAGE_SELF)
        limit(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime) + CPU_S)
        with open("/proc/self/statm") as memory:
            own_bytes = int(memory.read().split()[0]) * resource.getpagesize()
        limit(resource.RLIMIT_AS, own_bytes + GROWTH_BYTES + COPIES * len(model))
        return self._module.shape_inference.infer_shapes(model, strict, strict, not strict)
