# SPDX-License-Identifier: Apache-2.0
"""upsample_conv2d against PyTorch's two operators: values, two derivatives, and what passes to these."""

import contextlib
import random

import pytest

from tests.support.torch import require_torch

torch = require_torch()
import torch.nn.functional as F  # noqa: E402

from convpool.errors import OptionError  # noqa: E402
from convpool.torch import constant_weights, upsample_conv2d, upsampling  # noqa: E402
from tests.support.torch_gpu import gpu  # noqa: E402, F401

torch.set_num_threads(1)


def two_operators(x, weight, bias, scale, padding):
    return F.conv2d(F.interpolate(x, scale_factor=[float(s) for s in scale], mode="nearest"), weight, bias, padding=padding)


def layer(seed, dtype=torch.float64):
    """x, weight, bias (or None), scales and pads of a random layer."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    n, c, m = rng.randint(1, 3), rng.randint(1, 4), rng.randint(1, 4)
    kernel = [rng.randint(1, 4) for _ in range(2)]
    scale = (rng.randint(1, 4), rng.randint(2, 4))
    pads = tuple(rng.randint(0, k - 1) for k in kernel)
    size = [rng.randint(max(2, k - 2 * p), 5) for k, p in zip(kernel, pads, strict=True)]
    made = [torch.randn(shape, dtype=dtype, generator=generator) for shape in ((n, c, *size), (m, c, *kernel), (m,))]
    if rng.random() < 0.5:
        made[0] = made[0].contiguous(memory_format=torch.channels_last)
    return *(t.requires_grad_() for t in made[:2]), made[2].requires_grad_() if rng.random() < 0.7 else None, scale, pads


@pytest.mark.parametrize("seed", range(60))
def test_values_and_two_derivatives(seed):
    x, weight, bias, scale, pads = layer(seed)

    def function(x, weight, bias=None):
        return upsample_conv2d(x, weight, bias, scale_factor=scale, padding=pads)

    given = [x, weight, *([] if bias is None else [bias])]
    torch.testing.assert_close(function(*given), two_operators(x, weight, bias, scale, pads), rtol=1e-12, atol=1e-12)
    assert torch.autograd.gradcheck(function, given, fast_mode=True)
    assert torch.autograd.gradgradcheck(function, given, fast_mode=True)


@pytest.mark.parametrize("seed", range(30))
def test_the_transposed_form_alone(seed):
    x, weight, bias, scale, pads = layer(seed)
    found = upsampling._transposed(x, weight, bias, scale, pads)
    torch.testing.assert_close(found, two_operators(x, weight, bias, scale, pads), rtol=1e-12, atol=1e-12)


def test_results_lie_as_pytorchs():
    x, weight = torch.randn(2, 4, 5, 6), torch.randn(3, 4, 3, 3)
    for made in (x, x.contiguous(memory_format=torch.channels_last)):
        expected = two_operators(made, weight, None, (2, 2), 1)
        found = upsample_conv2d(made, weight, scale_factor=2, padding=1)
        assert found.stride() == expected.stride() and found.shape == expected.shape


def test_pads_beyond_the_kernel_and_other_calls_run_the_two_operators():
    x, weight = torch.randn(2, 4, 5, 6), torch.randn(3, 4, 3, 3)
    for arguments in (dict(scale_factor=2, padding=4), dict(scale_factor=1, padding=1), dict(scale_factor=(1, 3))):
        found = upsample_conv2d(x, weight, **arguments)
        scale = arguments["scale_factor"]
        expected = two_operators(
            x, weight, None, scale if isinstance(scale, tuple) else (scale,) * 2, arguments.get("padding", 0)
        )
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    compiled = torch.compile(lambda a: upsample_conv2d(a, weight, padding=1), backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), two_operators(x, weight, None, (2, 2), 1))
    mapped = torch.vmap(lambda a: upsample_conv2d(a, weight, padding=1))(x[None])
    torch.testing.assert_close(mapped[0], two_operators(x, weight, None, (2, 2), 1))


@pytest.mark.parametrize(
    "arguments", [dict(scale_factor=0), dict(scale_factor=1.5), dict(padding=-1), dict(scale_factor=(2, 2, 2))]
)
def test_wrong_sizes_are_refused(arguments):
    with pytest.raises(OptionError, match=next(iter(arguments))):
        upsample_conv2d(torch.randn(1, 2, 3, 3), torch.randn(2, 2, 3, 3), **arguments)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("dtype, bound", [(torch.float16, 2e-3), (torch.bfloat16, 1.6e-2), (torch.float32, 2e-3)])
@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("constant", [True, False])
def test_on_a_gpu(dtype, bound, last, constant):
    """Three layers: values and derivatives against float64, and with weights that stay."""
    for n, c, m, size in ((2, 64, 64, 16), (3, 40, 24, 9), (1, 256, 128, 8)):
        generator = torch.Generator().manual_seed(c)
        wide = [torch.randn(shape, generator=generator).to(dtype) for shape in ((n, c, size, size), (m, c, 3, 3), (m,))]
        wide[1] *= (9 * c) ** -0.5
        given = [t.cuda().requires_grad_() for t in wide]
        if last:
            given[0] = given[0].detach().contiguous(memory_format=torch.channels_last).requires_grad_()
        exact = [t.double().requires_grad_() for t in wide]
        expected = two_operators(*exact, (2, 2), 1)
        with constant_weights() if constant else contextlib.nullcontext():
            found = [upsample_conv2d(*given, scale_factor=2, padding=1) for _ in range(2)]
        assert torch.equal(found[0], found[1])
        assert any(key[0] == given[0].shape and kind is not None for key, kind in upsampling._kinds.items())
        cotangent = torch.randn(expected.shape, generator=generator).to(dtype)
        found[0].backward(cotangent.cuda())
        expected.backward(cotangent.double())
        pairs = [(found[0], expected), *((a.grad, b.grad) for a, b in zip(given, exact, strict=True))]
        for a, b in pairs:
            error = (a.double().cpu() - b).norm() / b.norm()
            assert error < bound, (n, c, m, size, float(error))
