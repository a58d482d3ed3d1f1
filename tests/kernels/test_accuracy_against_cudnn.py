"""float16 against float64: the error is no larger than 1.1 times that of cuDNN's convolution followed by pooling."""

from __future__ import annotations

import math

import pytest

from convpool.cuda import Problem, conv_avg_pool, tactics

CONFIGURATIONS = [(8, 32, 32, 16), (4, 64, 64, 32), (4, 128, 96, 16), (2, 256, 256, 16), (2, 512, 512, 8), (4, 3, 64, 32)]


@pytest.mark.parametrize("n,c,m,size", CONFIGURATIONS)
def test_float16_error(torch_gpu, n, c, m, size):
    torch = torch_gpu
    functional = torch.nn.functional
    generator = torch.Generator(device="cuda").manual_seed(c)
    options = dict(device="cuda", dtype=torch.float64, generator=generator)
    x = torch.randn(n, c, size, size, **options).half()
    w = (torch.randn(m, c, 3, 3, **options) / math.sqrt(9 * c)).half()
    exact = functional.avg_pool2d(functional.conv2d(x.double(), w.double(), padding=1), 2)
    last = dict(memory_format=torch.channels_last)
    cudnn = functional.avg_pool2d(functional.conv2d(x.contiguous(**last), w.contiguous(**last), padding=1), 2)
    allowed = 1.1 * (cudnn.double() - exact).norm()

    problem = Problem(
        n=n, c=c, m=m, spatial=(size, size), kernel_shape=3, pool_kernel_shape=2, pool_pads=1, strides=2, layout="NHWC"
    )
    x_last, w_last = x.permute(0, 2, 3, 1).contiguous(), w.permute(0, 2, 3, 1).contiguous()
    tried = 0
    for tactic in tactics():
        if problem.why_not(tactic) is not None:
            continue
        y = conv_avg_pool(x_last, w_last, pool_kernel_shape=2, pool_pads=1, strides=2, layout="NHWC", tactic=tactic)
        error = (y.permute(0, 3, 1, 2).double() - exact).norm()
        ratio = float(error / allowed * 1.1)
        assert error <= allowed, f"{tactic.name}: error {ratio:.3f} times cuDNN's, expected at most 1.1"
        tried += 1
    assert tried >= 10


def test_full_precision_error_is_within_twice_plain_float32(torch_gpu):
    torch = torch_gpu
    functional = torch.nn.functional
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    generator = torch.Generator(device="cuda").manual_seed(1)
    x = torch.randn(4, 128, 16, 16, device="cuda", generator=generator)
    w = torch.randn(128, 128, 3, 3, device="cuda", generator=generator) / math.sqrt(9 * 128)
    exact = functional.avg_pool2d(functional.conv2d(x.double(), w.double(), padding=1), 2)
    plain = functional.avg_pool2d(functional.conv2d(x, w, padding=1), 2)
    allowed = 2 * (plain.double() - exact).norm()
    x_last, w_last = x.permute(0, 2, 3, 1).contiguous(), w.permute(0, 2, 3, 1).contiguous()
    for tactic in tactics():
        if "tf32x3" not in tactic.name and tactic.family != "generic":
            continue
        y = conv_avg_pool(x_last, w_last, pool_kernel_shape=2, pool_pads=1, strides=2, layout="NHWC", tactic=tactic)
        ratio = float((y.permute(0, 3, 1, 2).double() - exact).norm() / allowed * 2)
        assert ratio <= 2, f"{tactic.name}: error {ratio:.3f} times that of fp32, expected at most 2"
