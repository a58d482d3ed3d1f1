# SPDX-License-Identifier: Apache-2.0
"""Against float64: the error in float16 is no larger than 1.1 times that of cuDNN's convolution followed by pooling, in full
float32 than twice."""

import math

import pytest

from convpool.cuda import Problem, conv_avg_pool, tactics


def check_tactics(x, w, exact, unit, most, least, runs=lambda tactic: True):
    """At least so many tactics that run this layer have errors within `most`; unit: the error of what they are compared with."""
    kernel, options = w.shape[2], dict(pool_kernel_shape=2, pool_pads=w.shape[2] // 2, strides=2, layout="NHWC")
    kinds = dict(kernel_shape=kernel, dtype=str(x.dtype).removeprefix("torch."), **options)
    problem = Problem(n=x.shape[0], c=x.shape[1], m=w.shape[0], spatial=tuple(x.shape[2:]), **kinds)
    x_last, w_last = (t.permute(0, 2, 3, 1).contiguous() for t in (x, w))
    tried = [tactic for tactic in tactics() if runs(tactic) and problem.why_not(tactic) is None]
    for tactic in tried:
        y = conv_avg_pool(x_last, w_last, tactic=tactic, **options)
        error = (y.permute(0, 3, 1, 2).double() - exact).norm()
        told = f"error {float(error / unit):.3f} times that of PyTorch, expected at most {float(most / unit):.3f}"
        assert error <= most, f"{tactic.name}: {told}"
    assert len(tried) >= least


CONFIGURATIONS = [(8, 32, 32, 16), (4, 64, 64, 32), (4, 128, 96, 16), (2, 256, 256, 16), (2, 512, 512, 8), (4, 3, 64, 32)]


@pytest.mark.parametrize("n,c,m,size", CONFIGURATIONS)
def test_float16_error(torch, n, c, m, size):
    functional = torch.nn.functional
    options = dict(device="cuda", dtype=torch.float64, generator=torch.Generator(device="cuda").manual_seed(c))
    x = torch.randn(n, c, size, size, **options).half()
    w = (torch.randn(m, c, 3, 3, **options) / math.sqrt(9 * c)).half()
    exact = functional.avg_pool2d(functional.conv2d(x.double(), w.double(), padding=1), 2)
    last = dict(memory_format=torch.channels_last)
    cudnn = functional.avg_pool2d(functional.conv2d(x.contiguous(**last), w.contiguous(**last), padding=1), 2)
    error_of_cudnn = (cudnn.double() - exact).norm()
    check_tactics(x, w, exact, error_of_cudnn, 1.1 * error_of_cudnn, least=10)


FULL_PRECISION = [(4, 128, 128, 3, 16), (8, 256, 128, 1, 28), (4, 16, 32, 3, 32), (2, 512, 64, 3, 8), (4, 1, 16, 5, 28)]
HALVES_UNIT = 2.0**-22  # what two TF32 numbers keep of a float32, however short the sum


@pytest.mark.parametrize("n,c,m,kernel,size", FULL_PRECISION)
def test_full_precision_error_is_within_twice_plain_float32(torch, n, c, m, kernel, size):
    functional = torch.nn.functional
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    generator = torch.Generator(device="cuda").manual_seed(1)
    x = torch.randn(n, c, size, size, device="cuda", generator=generator)
    w = torch.randn(m, c, kernel, kernel, device="cuda", generator=generator) / math.sqrt(kernel**2 * c)
    pad = kernel // 2
    exact = functional.avg_pool2d(functional.conv2d(x.double(), w.double(), padding=pad), 2)
    error_of_plain = (functional.avg_pool2d(functional.conv2d(x, w, padding=pad), 2).double() - exact).norm()
    allowed = max(2 * error_of_plain, HALVES_UNIT * exact.norm())
    runs = lambda tactic: "tf32x3" in tactic.name or tactic.family == "generic"  # noqa: E731
    check_tactics(x, w, exact, error_of_plain, allowed, 3, runs)
