# SPDX-License-Identifier: Apache-2.0
"""upsample_conv2d against PyTorch's two operators: values, two derivatives, and what passes to these."""

import contextlib
import copy
import itertools

import pytest

from tests.support.torch import random_upsampling, require_torch, results

torch = require_torch()
import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402

from convpool.torch import calls, constant_weights, optimize, plain, upsample_conv2d, upsampling  # noqa: E402
from tests.support.torch_gpu import gpu  # noqa: E402, F401
from tests.support.torch_modules import Forward  # noqa: E402


@pytest.fixture
def always(monkeypatch):
    """Small maps too are convolved on the small map."""
    monkeypatch.setattr(upsampling, "SUM_MACS", {"cpu": 0, "cuda": 0})


def two_operators(x, weight, bias, scale, pads):
    """PyTorch's interpolate and convolution; pads at begins, and at ends where they are others."""
    rank = len(scale)
    up = F.interpolate(x, scale_factor=[float(s) for s in scale], mode="nearest")
    sides = [(pads[axis], pads[-rank:][axis]) for axis in range(rank)] if isinstance(pads, tuple) else [(pads, pads)] * rank
    return plain.CONVS[rank](F.pad(up, [n for side in reversed(sides) for n in side]), weight, bias)


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("rank, seed", [(rank, seed) for rank, count in ((1, 12), (2, 36), (3, 8)) for seed in range(count)])
def test_values_and_two_derivatives(rank, seed):
    x, weight, bias, scale, pads = random_upsampling(seed, rank)

    def function(x, weight, bias=None):
        return upsampling.upsample_conv_of(x, weight, bias, scale, pads)

    given = [x, weight, *([] if bias is None else [bias])]
    expected = two_operators(x, weight, bias, scale, pads)
    torch.testing.assert_close(function(*given), expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(upsampling._transposed(x, weight, bias, scale, pads), expected, rtol=1e-12, atol=1e-12)
    half = weight.detach().bfloat16()  # rounded once
    assert torch.equal(upsampling.summed_weights(half, scale), upsampling.summed_weights(half.double(), scale).bfloat16())
    assert torch.autograd.gradcheck(function, given, fast_mode=True)
    assert torch.autograd.gradgradcheck(function, given, fast_mode=True)


@pytest.mark.parametrize("pixels, merged", ((15, False), (16, True)))
def test_few_pixels_run_the_two_operators(monkeypatch, pixels, merged):
    """256 pixels of a kernel of 3x3 and a factor of 2 are the least."""
    seen, own = [], upsampling._transposed
    monkeypatch.setattr(upsampling, "_transposed", lambda *given: seen.append(1) or own(*given))
    x, weight = torch.randn(16, 4, 1, pixels), torch.randn(3, 4, 3, 3)
    found = upsample_conv2d(x, weight, padding=1)
    torch.testing.assert_close(found, two_operators(x, weight, None, (2, 2), 1), rtol=1e-5, atol=1e-5)
    assert bool(seen) == merged


@pytest.mark.parametrize("size", [6, 16])
@pytest.mark.parametrize(("kernel", "mode"), [(3, "zeros"), (1, "zeros"), (3, "reflect")])
@pytest.mark.parametrize("half", [False, True], ids=["float", "behind another layer"])
def test_autocast_is_that_of_the_two_operators(size, kernel, mode, half):
    """Small maps, which PyTorch runs, and large ones; a layer behind another one gets halves, and has weights of floats."""
    front = [nn.Conv2d(4, 4, 3, padding=1)] if half else []
    last = nn.Conv2d(4, 6, kernel, padding=kernel // 2, padding_mode=mode)
    plain, x = nn.Sequential(*front, nn.Upsample(scale_factor=2), last), torch.randn(8, 4, size, size)
    net = optimize(copy.deepcopy(plain), x)[0]
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = net(x), plain(x)
    assert found.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(found, expected, rtol=3e-2, atol=1e-1)
    gradients = (torch.autograd.grad(y.float().sum(), [*made.parameters()]) for y, made in ((found, net), (expected, plain)))
    for mine, own in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, own, rtol=3e-2, atol=2e-2 * float(own.abs().max()))


def test_a_bias_of_another_type_is_refused_as_by_pytorch():
    x, weight = torch.randn(2, 4, 16, 16).double(), torch.randn(3, 4, 3, 3).double()
    with pytest.raises(RuntimeError):
        upsample_conv2d(x, weight, torch.randn(3), padding=1)


@pytest.mark.parametrize("norm", [nn.InstanceNorm2d(4), nn.GroupNorm(4, 4)])
def test_no_statistic_becomes_one_of_one_value(norm):
    module, x = conv(norm), torch.randn(1, 4, 1, 1)
    torch.testing.assert_close(optimize(copy.deepcopy(module), x)[0](x), module(x))


@pytest.mark.usefixtures("always")
def test_results_lie_as_pytorchs():
    orders = (torch.contiguous_format, torch.channels_last)
    for x, weight in itertools.product(*([torch.randn(n, 4, 5, 6).contiguous(memory_format=f) for f in orders] for n in (2, 3))):
        expected = two_operators(x, weight, None, (2, 2), 1)
        found = upsample_conv2d(x, weight, scale_factor=2, padding=1)
        assert found.stride() == expected.stride() and found.shape == expected.shape


def test_pads_beyond_the_kernel_and_other_calls_run_the_two_operators():
    x, weight = torch.randn(2, 4, 5, 6), torch.randn(3, 4, 3, 3)
    for scale, given, padding in ((2, (2, 2), 4), (1, (1, 1), 1), ((1, 3), (1, 3), 0)):
        found = upsample_conv2d(x, weight, scale_factor=scale, padding=padding)
        torch.testing.assert_close(found, two_operators(x, weight, None, given, padding), rtol=1e-5, atol=1e-5)
    compiled = torch.compile(lambda a: upsample_conv2d(a, weight, padding=1), backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), two_operators(x, weight, None, (2, 2), 1))
    mapped = torch.vmap(lambda a: upsample_conv2d(a, weight, padding=1))(x[None])
    torch.testing.assert_close(mapped[0], two_operators(x, weight, None, (2, 2), 1))


# ---- the rule ----


def net(forward, channels=4):
    """Two convolutions, and a forward that is given them."""
    return Forward(forward, conv=nn.Conv2d(channels, 6, 3, padding=1), other=nn.Conv2d(4, 3, 1))


def twice(m, x):
    """The upsampled map is read twice, one reader changes a copy of it in place."""
    up = F.interpolate(x, scale_factor=2)
    return m.conv(up.clone().relu_()) + m.other(up).mean() + x.mean()


def changed_between(m, x):
    """The map changes in place between upsampling and convolution."""
    x = x + 1
    up = F.interpolate(x, scale_factor=2)
    x.mul_(3)
    return m.conv(up) + m.other(x).mean()


def joined(m, x):
    """A U-Net's: the upsampled map beside one of the size."""
    return m.conv(torch.cat([F.interpolate(x[:, :, ::2, ::2], size=x.shape[2:]), m.other(x)], 1))


def conv(*between, channels=4, kernel=3, up=None, **options):
    return nn.Sequential(up or nn.Upsample(scale_factor=2), *between, nn.Conv2d(channels, 6, kernel, **{"padding": 1} | options))


REWRITTEN = {
    "plain": conv(),
    "sizes": conv(up=nn.Upsample(size=(18, 32)), padding=(0, 1)),
    "no pads, no bias": conv(padding=0, bias=False),
    "same, even kernel": conv(kernel=4, padding="same"),
    "uneven factors": conv(up=nn.Upsample(scale_factor=(4, 3))),
    "nearest-exact": conv(up=nn.Upsample(scale_factor=3, mode="nearest-exact")),
    "zeros in front": conv(nn.ZeroPad2d((2, 0, 1, 1)), padding=0),
    "activation": conv(nn.LeakyReLU(0.2)),
    "activation in place": nn.Sequential(nn.Tanh(), *conv(nn.ReLU(inplace=True))),
    "pointwise": conv(kernel=1, padding=0),
    "two upsamplings": conv(nn.Upsample(scale_factor=2)),
    "parametrized": conv(),
    "read twice": net(twice),
}
torch.nn.utils.parametrizations.spectral_norm(REWRITTEN["parametrized"][1])
KEPT = {
    "factors; got [5, 5]": conv(up=nn.Upsample(scale_factor=5)),
    "strides; got [2, 2]": conv(stride=2),
    "groups and dilations; got [2, 1, 1]": conv(groups=2),
    "groups and dilations; got [1, 2, 2]": conv(dilation=2, padding=2),
    "pads; got [3, 3, 3, 3]": conv(padding=3),
    "form; got training": conv(nn.BatchNorm2d(4)),
    "expected operators that act on each": conv(nn.InstanceNorm2d(4, track_running_stats=True)),  # it keeps the map's variance
    "training_mode": conv(nn.Dropout(0.5)),
    "views or borders": conv(nn.ReflectionPad2d(1), padding=0),
    "several, or a sum": net(joined, 7),
    "tensor changed in place": net(changed_between),
    None: conv(up=nn.Upsample(scale_factor=1.5)),
    "resampling": conv(up=nn.Upsample(scale_factor=2, mode="bilinear")),
}
"""The words of the reason, None where nothing is resampled by whole factors."""
BETWEEN = {"BatchNorm, ReLU": (nn.BatchNorm2d(4), nn.ReLU()), "Dropout": (nn.Dropout(0.5),), "GroupNorm": (nn.GroupNorm(2, 4),)}
BETWEEN["InstanceNorm"] = (nn.InstanceNorm2d(4),)
REWRITTEN |= {f"{name} in evaluation": conv(*layers).eval() for name, layers in BETWEEN.items()}


def same(module, x):
    """Compare values and two derivatives of the optimized module with the original's; the report."""
    changed, report = optimize(copy.deepcopy(module), x)
    torch.testing.assert_close(results(changed, x, 2), results(module, x, 2), rtol=1e-9, atol=1e-9)
    return [(site.status, site.reason) for site in report.sites if site.rule == "upsample_last"]


X = torch.randn(2, 4, 6, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("name", REWRITTEN)
def test_rewritten(name):
    found = same(REWRITTEN[name].double(), X)
    assert {status for status, _ in found} == {"rewritten"}, found


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("reason", KEPT)
def test_kept(reason):
    found = same(KEPT[reason].double(), X)
    assert (found == []) == (reason is None)
    assert all(status == "rejected" and reason in why for status, why in found), found


@pytest.mark.parametrize("scales", [(2,), (2, 3), (1, 2, 2)])
def test_values_repeated_over_blocks(scales):
    x = torch.randn(2, 3, *[4, 3, 2][: len(scales)], dtype=torch.float64, requires_grad=True)
    assert torch.equal(upsampling._blocks(x, scales, False), F.interpolate(x, scale_factor=[float(s) for s in scales]))
    assert torch.autograd.gradcheck(upsampling._blocks, (x, scales, False))
    assert torch.autograd.gradgradcheck(upsampling._blocks, (x, scales, False))


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("scales, channels", [((2, 2), 24), ((3, 1), 16), ((2, 2), 5)])
def test_values_repeated_on_a_gpu(monkeypatch, dtype, scales, channels):
    monkeypatch.setattr(upsampling, "LARGE", 0)
    x = torch.randn(2, channels, 9, 10).cuda().to(dtype, memory_format=torch.channels_last).requires_grad_()
    found, expected = upsampling._upsampled(x, scales), F.interpolate(x, scale_factor=[float(s) for s in scales])
    assert "Blocks" in type(found.grad_fn).__name__
    assert torch.equal(found, expected) and found.stride() == expected.stride()
    grad = torch.randn_like(found)
    sums = [torch.autograd.grad(y, x, grad)[0] for y in (found, expected)]
    torch.testing.assert_close(sums[0], sums[1], rtol=1e-6 if dtype == torch.float32 else 2**-7, atol=1e-6)
    whole = [torch.ones_like(t) for t in (x, found)]
    assert (upsampling._blocks(whole[1], scales, True) == scales[0] * scales[1] * whole[0]).all()


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
            given[:2] = (t.detach().contiguous(memory_format=torch.channels_last).requires_grad_() for t in given[:2])
        exact = [t.double().requires_grad_() for t in wide]
        expected = two_operators(*exact, (2, 2), 1)
        with constant_weights() if constant else contextlib.nullcontext():
            found = [upsample_conv2d(*given, scale_factor=2, padding=1) for _ in range(2)]
        assert torch.equal(found[0], found[1])
        if constant or n * size * size >= 512:
            assert any(k[0] == given[0].shape and ((2, 2), (1,) * 4) in k and call for k, call in calls._calls.items())
        cotangent = torch.randn(expected.shape, generator=generator).to(dtype)
        found[0].backward(cotangent.cuda())
        expected.backward(cotangent.double())
        for a, b in ((found[0], expected), *((a.grad, b.grad) for a, b in zip(given, exact, strict=True))):
            error = (a.double().cpu() - b).norm() / b.norm()
            assert error < bound, (n, c, m, size, float(error))
