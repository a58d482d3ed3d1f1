# SPDX-License-Identifier: Apache-2.0
"""Shared by tests of PyTorch on a GPU.  Importing it skips a module where there is no PyTorch."""

import pytest

from tests.support.torch import require_cuda, require_torch

torch = require_torch()

from torch._subclasses.fake_tensor import FakeTensor  # noqa: E402

from benchmarks.torch_layers import captured  # noqa: E402

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
LAST = {2: torch.channels_last, 3: torch.channels_last_3d}


@pytest.fixture
def gpu(monkeypatch):
    """A GPU, on which cuDNN does not round floats to TF32."""
    require_cuda()
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def on_gpu(shape, dtype, last=False, grad=False):
    t = torch.randn(shape, dtype=torch.float64, device="cuda").to(dtype)
    t = t.contiguous(memory_format=LAST[t.dim() - 2]) if last and t.dim() - 2 in LAST else t
    return t.requires_grad_(grad)


def as_on_a_gpu(graph):
    """The graph, whose tensors are said to be a GPU's."""
    for node in graph.nodes:
        if isinstance(value := node.meta.get("example_value"), FakeTensor):
            value.fake_device = torch.device("cuda", 0)
    return graph


def replayed(step):
    """Return a CUDA graph's results, step by step, and a function that runs it again."""
    graph, found = captured(step)
    return found, graph.replay


def by_replays(step, changed, times=1):
    """Pairs of a step's results: of a CUDA graph whose input changes before each replay, and on a stream of the step's own, where
    all pairs run by kernels as in a capture."""
    found, replay = replayed(step)
    for _ in range(times):
        with torch.no_grad():
            changed.copy_(torch.randn_like(changed))
        replay()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            expected = step()
        torch.cuda.current_stream().wait_stream(stream)
        yield from zip(found, expected, strict=True)
