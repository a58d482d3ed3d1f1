# SPDX-License-Identifier: Apache-2.0
"""Values against PyTorch's two operators, and first and second derivatives in float64, by finite differences: of a pooling behind
a convolution, and of an upsampling before one.  Under torch.compile what the backward is made of; what the two operators run."""

import copy

import pytest

from tests.support.torch import calls_of, drawn, pool_seeds, pools_first, random_layer, random_upsampling, require_torch, results

torch = require_torch()
import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402
from torch._dynamo.backends.common import aot_autograd  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import convpool.torch  # noqa: E402
from convpool.torch import conv_avg_pool2d, kernels, optimize, pairs, plain, upsampling  # noqa: E402
from tests.support.torch_gpu import gpu  # noqa: E402, F401
from tests.support.torch_modules import Forward  # noqa: E402

pooled_conv, upsample_conv2d = convpool.torch.pooled_conv, upsampling.upsample_conv2d
FUNCTIONS = {rank: getattr(convpool.torch, f"conv_avg_pool{rank}d") for rank in (1, 2, 3)}
ops, aten = torch.ops.convpool, torch.ops.aten


def tensors(layer, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_() for shape in layer.shapes]


def pair(layer, given):
    """Return what convpool's function and PyTorch's two operators give."""
    mine = FUNCTIONS[layer.rank](*given, **layer.conv, **layer.pool)
    return mine, layer.original(F, *given, *([] if layer.bias else [None]))


def convolution(layer, given):
    conv = [layer.conv[name] for name in ("stride", "padding", "dilation", "groups")]
    three = (*given, *([] if layer.bias else [None]))
    return pairs.conv_with_derivatives(*three, conv), getattr(F, f"conv{layer.rank}d")(*three, *conv)


def check_with_derivatives(function, given, *expected):
    """Compare what several functions give; the derivatives of the first one."""
    for other in expected:
        torch.testing.assert_close(function(*given), other(*given), rtol=1e-12, atol=1e-12)
    assert torch.autograd.gradcheck(function, given, fast_mode=True)
    assert torch.autograd.gradgradcheck(function, given, fast_mode=True)


@pytest.mark.parametrize(("both", "seed"), [*((pair, seed) for seed in range(200)), *((convolution, seed) for seed in range(60))])
def test_values_and_two_derivatives(both, seed):
    layer = random_layer(seed)
    mine, original = (lambda *given, i=i: both(layer, given)[i] for i in (0, 1))
    check_with_derivatives(mine, tensors(layer, seed=seed), original)


def test_the_random_layers_have_every_kind():
    layers = [random_layer(seed) for seed in range(200)]
    assert {layer.rank for layer in layers} == {1, 2, 3} and 100 < sum(map(pools_first, layers)) < 200
    assert all(sum(2 in layer.conv[name] for layer in layers) > 9 for name in ("stride", "dilation", "padding"))
    assert sum(layer.conv["groups"] == 3 for layer in layers) > 9
    assert sum(any(layer.pool["pool_padding"]) for layer in layers) > 9


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("pool", [1, 2])
@pytest.mark.parametrize("wanted", range(1, 8))
def test_gradients_of_any_of_the_inputs(wanted, pool, relu):
    """A first-order backward pass, of pads that PyTorch's convolution takes, and the second derivatives."""
    torch.manual_seed(wanted)
    shapes = [(2, 4, 8, 6), (4, 2, 3, 3), (4,)]
    given = [torch.randn(shape, dtype=torch.float64).requires_grad_(bool(wanted >> i & 1)) for i, shape in enumerate(shapes)]
    box_pads, pads = ([1] * 4, [0] * 4) if pool > 1 else ([0] * 4, [1] * 4)  # of a padding of 1
    geometry = ([pool] * 2, [1, 1], box_pads, [1, 1], [pool] * 2, pads, [1, 1], 2, relu)
    y, expected = pooled_conv(*given, *geometry), F.avg_pool2d(F.conv2d(*given, padding=1, groups=2), pool)
    expected = expected.relu() if relu else expected
    assert torch.autograd.gradgradcheck(lambda *t: pooled_conv(*t, *geometry), given, fast_mode=True)
    asked, grad = [t for t in given if t.requires_grad], torch.randn_like(y)
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(*(torch.autograd.grad(t, asked, grad) for t in (y, expected)), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("last_pad", [0, 1])
def test_activation_checkpoints(last_pad, relu, reentrant):
    """torch.utils.checkpoint computes what a backward pass kept again, and lets the pass ask for it once."""
    torch.manual_seed(0)
    x, weight = (torch.randn(shape, requires_grad=True) for shape in ((2, 4, 9, 9), (4, 4, 2, 2)))
    given = x, weight, None, [2, 2], [1, 1], [0] * 4, [1, 1], [2, 2], [0, 0, 2 * last_pad, 0], [1, 1], 1, relu
    expected = torch.autograd.grad(pooled_conv(*given).square().sum(), given[:2])
    checkpoint(pooled_conv, *given, use_reentrant=reentrant).square().sum().backward()
    torch.testing.assert_close((x.grad, weight.grad), expected)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("window", [([3, 2], [2, 1], [1, 2, 0, 1], [2, 1]), ([3, 2], [2, 3], [1, 0, 1, 0], [1, 1])])
def test_the_box_mean_and_its_adjoint(window, last):
    """16 bits are rounded once, also where windows overlap."""
    x = drawn(2, 3, 7, 6, last=last)
    z = ops.box_mean(x, *window)
    spread = ops.box_mean_adjoint(g := torch.randn_like(z).requires_grad_(), [7, 6], *window)
    torch.testing.assert_close((z * g).sum(), (x * spread).sum(), rtol=1e-12, atol=0)
    assert torch.autograd.gradgradcheck(lambda x: ops.box_mean(x, *window), [x])
    assert torch.autograd.gradgradcheck(lambda g: ops.box_mean_adjoint(g, [7, 6], *window), [g])
    assert plain.memory_format(spread) == plain.memory_format(x)
    half, full = (ops.box_mean_adjoint(g.detach().bfloat16().to(dtype), [7, 6], *window) for dtype in (torch.bfloat16, g.dtype))
    assert torch.equal(half, full.bfloat16())


def test_the_first_pass_of_a_gradient_penalty_makes_no_gradient_of_weights():
    x = torch.randn(2, 3, 8, 8, requires_grad=True)
    layer = convpool.torch.ConvAvgPool2d(3, 4, 3, padding=1, pool_size=2)
    y = layer(x).square().sum()
    with calls_of(aten.convolution_backward.default) as found:
        (grad,) = torch.autograd.grad(y, [x], create_graph=True)
        (grad.square().sum() + y).backward()
    assert found[0][-1] == [True, False, False]
    assert all(p.grad is not None for p in layer.parameters())


@pytest.mark.parametrize("captures", [False, True])
def test_while_a_graph_is_captured_only_gradients_that_are_asked_for_are_made(captures, monkeypatch):
    """Elsewhere whoever asks for one parameter is taken to ask for all: PyTorch's answer takes the host long."""
    asked = []

    def wanted(*arguments, known=pairs.wanted):
        asked.append(known(*arguments))
        return asked[-1]

    monkeypatch.setattr(pairs, "wanted", wanted)
    monkeypatch.setattr(pairs, "_is_cuda_graph_captured", lambda: captures)
    x, weight = torch.randn(2, 3, 5, 5), torch.randn(3, 3, 1, 1)
    weights, biases = zip(*((weight.clone().requires_grad_(), torch.randn(3).requires_grad_()) for _ in range(3)), strict=True)
    y = x
    for one, bias in zip(weights, biases, strict=True):
        y = pairs.conv_with_derivatives(y, one, bias, ((1, 1), (0, 0), (1, 1), 1))
    torch.autograd.grad(y.sum(), biases)
    exact = [[True, False, True], [True, False, True], [False, False, True]]
    assert asked == (exact if captures else [[True, False, True], [True, True, True], [False, True, True]])


def assert_several(y, asked, weight, **options):
    """Check several gradients at once, as of jacobian(vectorize=True), and by torch.vmap, and derivatives; return single ones."""
    many = torch.randn(3, *y.shape, dtype=y.dtype, device=y.device, generator=torch.Generator(y.device).manual_seed(3))
    one = [torch.autograd.grad(y, asked, each, create_graph=True) for each in many]
    expected = tuple(map(torch.stack, zip(*one, strict=True)))
    for records in (False, True):
        kept = {"create_graph": records, "retain_graph": True}
        mapped = torch.vmap(lambda each, kept=kept: torch.autograd.grad(y, asked, each, **kept))(many)
        for found in (mapped, torch.autograd.grad(y, asked, many, is_grads_batched=True, **kept)):
            torch.testing.assert_close(found, expected, **options)
            sums = [sum(t.sin().sum() for t in each) for each in (found if records else expected, expected)]
            torch.testing.assert_close(*(torch.autograd.grad(t, weight, retain_graph=True) for t in sums), **options)
    return one


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("relu", [False, True])
def test_several_gradients_at_once(last, relu):
    given = x, weight, bias = drawn(2, 4, 6, 8, last=last), drawn(3, 4, 3, 3, last=last), drawn(3)
    window, rest = ([2, 2], [1, 1], [1, 1, 1, 1], [1, 1]), ([2, 2], [0, 0, 0, 0], [1, 1], 1, relu)
    hidden = pairs.conv_with_derivatives(x, weight.transpose(0, 1).repeat(1, 2, 1, 1)[:, :4], None, ((1, 1), (1, 1), (1, 1), 1))
    one = assert_several(pooled_conv(hidden, weight, bias, *window, *rest).square(), given, weight)
    assert_several(one[0][0], given[1:2], weight)


def test_several_gradients_of_an_upsampled_convolution(device, monkeypatch):
    monkeypatch.setattr(upsampling, "_pays", lambda *given: True)
    x, weight = (torch.randn(shape, device=device, requires_grad=True) for shape in ((2, 32, 6, 6), (8, 32, 3, 3)))
    assert_several(upsampling.upsample_conv2d(x, weight / 99, padding=1).square(), (x, weight), weight, rtol=1e-3, atol=1e-3)


# ---- under torch.compile ----


def backward_of(function, expected, given, **options):
    """Compare the gradients of a function compiled by AOTAutograd alone; the operators of its one backward graph."""
    backwards = []

    def keep(graph, example):
        backwards.append([node.target for node in graph.graph.nodes if node.op == "call_function"])
        return graph.forward

    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=lambda graph, example: graph.forward, bw_compiler=keep)
    results = torch.compile(function, fullgraph=True, backend=backend)(*given), expected
    torch.testing.assert_close(*(torch.autograd.grad(y.square().sum(), given) for y in results), **options)
    (found,) = backwards
    return found


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(("channels", "sums"), [(3, 0), (4, 1)])
def test_a_pair_s_backward(channels, sums, last):
    """One operator for the gradients at weight, box means and, of few channels, bias, and a pooling that inductor can fuse."""
    given = [drawn(2, channels, 8, 8, last=last), drawn(3, channels, 3, 3, last=last), drawn(3)]
    expected = F.avg_pool2d(F.conv2d(*given, padding=1), 2)
    found = backward_of(lambda *t: conv_avg_pool2d(*t, padding=1, pool_size=2), expected, given, check_stride=True)
    assert found.count(ops.pooled_conv_gradients.default) == 1 and found.count(aten.avg_pool2d.default) == 1
    assert aten.convolution_backward.default not in found and ops.box_mean_adjoint.default not in found
    assert found.count(aten.sum.dim_IntList) == sums


@pytest.mark.parametrize("seed", pool_seeds(60)[::8])
def test_random_layers(seed):
    layer = random_layer(seed)
    given = tensors(layer)
    found = backward_of(lambda *t: FUNCTIONS[layer.rank](*t, **layer.conv, **layer.pool), pair(layer, given)[1], given)
    assert found.count(ops.pooled_conv_gradients.default) == 1


# ---- an upsampling before a convolution ----


@pytest.fixture
def always(monkeypatch):
    """Small maps too are convolved on the small map."""
    monkeypatch.setattr(upsampling, "_pays", lambda *given: True)


def two_operators(x, weight, bias, scale, pads):
    """PyTorch's interpolate and convolution; pads at begins, and at ends where they are others."""
    rank = len(scale)
    up = F.interpolate(x, scale_factor=[float(s) for s in scale], mode="nearest")
    sides = [(pads[axis], pads[-rank:][axis]) for axis in range(rank)] if isinstance(pads, tuple) else [(pads, pads)] * rank
    return plain.CONVS[rank](F.pad(up, [n for side in reversed(sides) for n in side]), weight, bias)


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("rank, seed", [(rank, seed) for rank, count in ((1, 12), (2, 36), (3, 8)) for seed in range(count)])
def test_values_and_two_derivatives_behind_an_upsampling(rank, seed):
    x, weight, bias, *rest = random_upsampling(seed, rank)
    own = (upsampling.upsample_conv_of, upsampling._transposed, two_operators)
    functions = (lambda x, weight, bias=None, run=run: run(x, weight, bias, *rest) for run in own)
    check_with_derivatives(next(functions), [x, weight, *([] if bias is None else [bias])], *functions)
    half = weight.detach().bfloat16()  # rounded once
    assert torch.equal(upsampling.summed_weights(half, rest[0]), upsampling.summed_weights(half.double(), rest[0]).bfloat16())


SMALL = [("cpu", torch.float64, 15, 64, False), ("cpu", torch.float64, 16, 64, True), ("cpu", torch.float64, 16, 63, False)]
SMALL += [("cuda", torch.float16, 40, 3, False), ("cuda", torch.float16, 40, 4, True), ("cuda", torch.float32, 40, 4, True)]


@pytest.mark.parametrize("device, dtype, pixels, channels, merged", SMALL)
def test_small_maps_run_the_two_operators(monkeypatch, request, device, dtype, pixels, channels, merged):
    """256 pixels of a kernel of 3x3 and a factor of 2 are the least, and with gradients 64 channels; on a GPU 512, and 4."""
    if device == "cuda":
        request.getfixturevalue("gpu")
    seen, own = [], upsampling._apply
    monkeypatch.setattr(upsampling, "_apply", lambda *given: seen.append(1) or own(*given))
    x = torch.randn(16, channels, 1, pixels, dtype=dtype, device=device, requires_grad=True)
    weight = torch.randn(3, channels, 3, 3, dtype=dtype, device=device)
    found = upsample_conv2d(x, weight, padding=1)
    near = {"rtol": 0.02, "atol": 0.05} if x.is_cuda else {}
    torch.testing.assert_close(found, two_operators(x, weight, None, (2, 2), 1), **near)
    assert bool(seen) == merged
    if x.is_cuda and dtype == torch.float32:  # PyTorch's two are faster for few channels without gradients
        with torch.no_grad():
            upsample_conv2d(x, weight, padding=1)
        assert len(seen) == 1


def test_pads_beyond_the_kernel_and_other_calls_run_the_two_operators():
    x, weight = torch.randn(2, 4, 5, 6), torch.randn(3, 4, 3, 3)
    for scale, given, padding in ((2, (2, 2), 4), (1, (1, 1), 1), ((1, 3), (1, 3), 0)):
        found = upsample_conv2d(x, weight, scale_factor=scale, padding=padding)
        torch.testing.assert_close(found, two_operators(x, weight, None, given, padding), rtol=1e-5, atol=1e-5)
    compiled = torch.compile(lambda a: upsample_conv2d(a, weight, padding=1), backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), two_operators(x, weight, None, (2, 2), 1))
    mapped = torch.vmap(lambda a: upsample_conv2d(a, weight, padding=1))(x[None])
    torch.testing.assert_close(mapped[0], two_operators(x, weight, None, (2, 2), 1))


# ---- the rule of upsampling ----


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
    "casts": net(lambda m, x: m.conv(F.upsample(x.detach().half(), scale_factor=2).float().type_as(x)) + x.mean()),
}
torch.nn.utils.parametrizations.spectral_norm(REWRITTEN["parametrized"][1])
KEPT = {
    "factors; got [5, 5]": conv(up=nn.Upsample(scale_factor=5)),
    "strides; got [2, 2]": conv(stride=2),
    "groups and dilations; got [2, 1, 1]": conv(groups=2),
    "groups and dilations; got [1, 2, 2]": conv(dilation=2, padding=2),
    "pads; got [3, 3, 3, 3]": conv(padding=3),
    "form; got training": conv(nn.BatchNorm2d(4)),
    "expected operators that act on each": conv(nn.GroupNorm(2, 4)),
    "training_mode": conv(nn.Dropout(0.5)),
    "views or borders": conv(nn.ReflectionPad2d(1), padding=0),
    "several, or a sum": net(joined, 7),
    "tensor changed in place": net(changed_between),
    None: conv(up=nn.Upsample(scale_factor=1.5)),
    "resampling": conv(up=nn.Upsample(scale_factor=2, mode="bilinear")),
}
"""The words of the reason, None where nothing is resampled by whole factors."""
BETWEEN = {"BatchNorm, ReLU": (nn.BatchNorm2d(4), nn.ReLU()), "Dropout": (nn.Dropout(0.5),)}
REWRITTEN |= {f"{name} in evaluation": conv(*layers).eval() for name, layers in BETWEEN.items()}


def same(module, x):
    """Compare values and two derivatives of the optimized module with the original's; the report."""
    changed, report = optimize(copy.deepcopy(module), x.clone().requires_grad_())
    torch.testing.assert_close(results(changed, x, 2), results(module, x, 2), rtol=1e-9, atol=1e-9)
    return [(site.status, site.reason) for site in report.sites if site.rule == "upsample_last"]


X = torch.randn(2, 4, 6, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("name", [*REWRITTEN, *KEPT])
def test_which_are_rewritten(name):
    found = same((REWRITTEN | KEPT)[name].double(), X)
    assert bool(found) == bool(name)
    assert all(status == "rewritten" if name in REWRITTEN else status == "rejected" and name in why for status, why in found), (
        found
    )


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
def test_on_a_gpu(dtype, bound, last):
    """Three layers: values and derivatives against float64."""
    for n, c, m, size in ((2, 64, 64, 16), (3, 40, 24, 9), (1, 256, 128, 8)):
        generator = torch.Generator().manual_seed(c)
        wide = [torch.randn(shape, generator=generator).to(dtype) for shape in ((n, c, size, size), (m, c, 3, 3), (m,))]
        wide[1] *= (9 * c) ** -0.5
        given = [t.cuda().requires_grad_() for t in wide]
        if last:
            given[:2] = (t.detach().contiguous(memory_format=torch.channels_last).requires_grad_() for t in given[:2])
        exact = [t.double().requires_grad_() for t in wide]
        expected = two_operators(*exact, (2, 2), 1)
        found = [upsample_conv2d(*given, scale_factor=2, padding=1) for _ in range(2)]
        assert torch.equal(found[0], found[1])
        if n * size * size >= 512:
            assert any(k[0] == given[0].shape and ((2, 2), (1,) * 4) in k and call for k, call in kernels._calls.items())
        cotangent = torch.randn(expected.shape, generator=generator).to(dtype)
        found[0].backward(cotangent.cuda())
        expected.backward(cotangent.double())
        for a, b in ((found[0], expected), *((a.grad, b.grad) for a, b in zip(given, exact, strict=True))):
            error = (a.double().cpu() - b).norm() / b.norm()
            assert error < bound, (n, c, m, size, float(error))
