# SPDX-License-Identifier: Apache-2.0
"""The process in which onnx infers shapes; `convpool.ir.inference` starts it with the path of onnx's C++ module.

It imports neither numpy nor onnx's Python, which would take most of a second.  A request is a number of bytes, in 8 bytes, a byte
that tells whether inference is strict, and a serialised model.  An answer is one byte, a number of bytes, and as many: the model
with shapes, or what is wrong.
"""

from __future__ import annotations

import importlib.util
import os
import resource
import sys
from typing import Any

SIZE_BYTES = 8
"""Bytes of the number in front of a model or an answer."""
READY, DONE, FAILED, MEMORY = b"r", b"d", b"f", b"m"
STRICT, LENIENT = b"s", b"l"
CPU_S = 30
"""Seconds of processor time for a model: hundreds of times the need of the largest known ones."""
GROWTH_BYTES = 2 * 2**30
COPIES = 8
"""Memory for a model, beside so many times its own size: shapes take far less."""


def load(path: str) -> Any:
    """onnx's C++ module by itself."""
    spec = importlib.util.spec_from_file_location("onnx_cpp2py_export", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def limit(what: int, most: int) -> None:
    """Set a soft limit, as far as the hard one allows."""
    hard = resource.getrlimit(what)[1]
    resource.setrlimit(what, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def infer(module: Any, model: bytes, strict: bool) -> tuple[bytes, bytes]:
    """The answer to a model; this may end the process.  strict: as onnx's full check, else with the values of small tensors."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    limit(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime) + CPU_S)
    with open("/proc/self/statm") as memory:
        own_bytes = int(memory.read().split()[0]) * resource.getpagesize()
    limit(resource.RLIMIT_AS, own_bytes + GROWTH_BYTES + COPIES * len(model))
    try:
        return DONE, module.shape_inference.infer_shapes(model, strict, strict, not strict)
    except MemoryError:
        return MEMORY, b""
    except Exception as error:
        return FAILED, str(error).encode(errors="replace")


def main() -> None:
    """Answer requests until there are no more."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    limit(resource.RLIMIT_CORE, 0)
    module = load(sys.argv[1])
    answers.write(READY)
    answers.flush()
    while size := sys.stdin.buffer.read(SIZE_BYTES):
        strict = sys.stdin.buffer.read(1) == STRICT
        kind, content = infer(module, sys.stdin.buffer.read(int.from_bytes(size, "little")), strict)
        answers.write(kind + len(content).to_bytes(SIZE_BYTES, "little"))
        answers.write(content)
        answers.flush()


if __name__ == "__main__":
    main()
