# SPDX-License-Identifier: Apache-2.0
"""The operators as PyTorch's compiler, transforms and autocast see them, functions' arguments, modules, addresses for kernels."""

import contextlib
import copy
import ctypes
import functools
import itertools
import struct
import types

import pytest

from tests.support.torch import drawn, require_torch, results

torch = require_torch()
import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402
from torch.testing._internal.two_tensor import TwoTensor  # noqa: E402

import convpool.torch  # noqa: E402
from convpool.errors import OptionError  # noqa: E402
from convpool.torch import conv_avg_pool2d, kernels, optimize, plain, upsampling  # noqa: E402

ops = torch.ops.convpool
WINDOW = ([2, 3], [1, 2], [1, 0, 1, 2], [1, 2])


def pair(x, weight, bias=None):
    return F.avg_pool2d(F.conv2d(x, weight, bias, padding=1), 2)


fused = functools.partial(conv_avg_pool2d, padding=1, pool_size=2)

# ---- what torch.library promises ----

PLAIN = ([2, 2], [1, 1], [1, 1, 1, 1], [1, 1], [2, 2], [0, 0, 0, 0], [1, 1], 1, False)
FUSED = ([2, 2], [1, 1], [1, 0, 1, 1], [1, 1], [2, 2], [0, 1, 0, 0], [1, 1], 1, True)


@pytest.mark.parametrize("last", [False, True])
def test_opcheck(last):
    x, weight, bias = drawn(2, 4, 6, 8, last=last), drawn(3, 4, 3, 3, last=last), drawn(3)
    torch.library.opcheck(ops.pooled_conv.default, (x, weight, bias, *PLAIN))
    torch.library.opcheck(ops.pooled_conv.default, (x, weight, None, *FUSED))
    z = ops.box_mean(x, *WINDOW).detach().requires_grad_()
    torch.library.opcheck(ops.box_mean.default, (x, *WINDOW))
    torch.library.opcheck(ops.box_mean_adjoint.default, (z, [6, 8], *WINDOW))
    given = [t.detach() for t in (ops.pooled_conv(x, weight, None, *FUSED), x, weight)]
    for wanted in ((True, True, True), (True, True, False), (True, False, False), (False, True, True)):
        torch.library.opcheck(ops.pooled_conv_gradients.default, (*given, *FUSED[:8], *wanted))


@pytest.mark.parametrize("dynamic", [False, True, None])
def test_compile_of_the_whole_graph(dynamic, recwarn):
    layer = convpool.torch.ConvAvgPool1d(3, 4, 3, padding="same", pool_size=2, dtype=torch.float64)
    up = nn.Sequential(nn.Upsample(scale_factor=2), nn.Conv2d(64, 3, 3, padding=1, dtype=torch.float64))
    for function, own, shapes in (
        (fused, pair, ((2, 4, 8), (3, 4, 3, 3), (3,))),
        (layer, layer, ((2, 3),)),
        (up, up, ((8, 64, 8),)),
    ):
        torch._dynamo.reset()
        backend = convpool.torch.backend.Backend(inner=torch._dynamo.lookup_backend("aot_eager"))
        compiled = torch.compile(function, fullgraph=True, backend=backend, dynamic=dynamic)
        for size in (6, 10):
            given = [drawn(*shapes[0], size), *(drawn(*shape) for shape in shapes[1:])]
            if dynamic is None:  # nor is the batch known
                torch._dynamo.decorators.mark_unbacked(given[0], 0)
            y, expected = compiled(*given), own(*given)
            torch.testing.assert_close(y, expected)
            torch.testing.assert_close(*(torch.autograd.grad(out.square().sum(), given) for out in (y, expected)))
    assert not [w for w in recwarn if "lru_cache" in str(w.message)]


# ---- torch.func ----


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("dims", [(0, None, None), (None, 0, None), (1, 0, 0), (None, None, 0)])
def test_vmap(dims, last):
    x, weight = (drawn(*shape, grad=False, last=last) for shape in ((2, 4, 6, 8), (3, 4, 3, 3)))
    bias = drawn(3, grad=False)
    batched = [t if dim is None else torch.stack([t, 2 * t, t + 1], dim) for t, dim in zip((x, weight, bias), dims, strict=True)]
    torch.testing.assert_close(torch.vmap(fused, dims)(*batched), torch.vmap(pair, dims)(*batched))


@pytest.mark.parametrize("transform", ["jacrev", "jacfwd", "hessian", "gradients of samples"])
def test_derivatives_by_transforms(transform):
    x, weight = drawn(5, 1, 4, 4, grad=False), drawn(1, 1, 3, 3, grad=False)

    def of(function):
        if transform == "gradients of samples":
            return torch.vmap(torch.func.grad(lambda w, x: function(x[None], w).square().sum()), (None, 0))(weight, x)
        return getattr(torch.func, transform)(lambda x: function(x, weight).square().sum())(x)

    torch.testing.assert_close(of(fused), of(pair))


# ---- 16 bits ----


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bits(dtype, device):
    """Autocast computes in its type, and gradients in their own; PyTorch's averages of three axes on a CPU are of float32."""
    shapes = (2, 4, 6, 8), (3, 4, 3, 3), (3,)
    x, weight, bias = (drawn(*shape, dtype=torch.float32).detach().to(device).requires_grad_() for shape in shapes)
    with torch.autocast(device, dtype=dtype):
        y, deep = fused(x, weight, bias), convpool.torch.conv_avg_pool3d(x[..., None], weight[..., None], pool_size=(2, 2, 1))
        assert torch.vmap(fused, (0, None))(x[None], weight).dtype == dtype
        assert deep.dtype == (torch.float32 if device == "cpu" else dtype)
    y.float().sum().backward()
    assert {t.grad.dtype for t in (x, weight, bias)} == {torch.float32}
    for found in (y, fused(*(t.to(dtype) for t in (x, weight, bias)))):
        assert found.dtype == dtype
        torch.testing.assert_close(found.float(), pair(x, weight, bias), rtol=0.03, atol=0.03)


ADAPTIVE, LARGER = (nn.Conv3d(3, 4, 1), nn.AdaptiveAvgPool3d(4)), (nn.Upsample(scale_factor=2), nn.Conv3d(3, 4, 3))
DEEP = [((nn.Conv3d(3, 4, 3, padding=1), nn.AvgPool3d(2)), True)]
DEEP += [(layers, casts) for layers in (ADAPTIVE, LARGER) for casts in (True, False)]
SIXTEEN = [((2, 3, 8, 8, 8), *case) for case in DEEP]
for size, (kernel, mode) in itertools.product((6, 16), ((3, "zeros"), (1, "zeros"), (3, "reflect"))):
    behind = nn.Upsample(scale_factor=2), nn.Conv2d(4, 6, kernel, padding=kernel // 2, padding_mode=mode)
    SIXTEEN += [((8, 4, size, size), (*front, *behind), True) for front in ((), (nn.Conv2d(4, 4, 3, padding=1),))]
SCALED = nn.LeakyReLU(1e5), nn.LeakyReLU(1e-5)  # in between numbers are larger than float16 has
SIXTEEN += [((8, 4, 16, 16), (nn.Conv2d(4, 4, 1), nn.Upsample(scale_factor=2), *SCALED, nn.Conv2d(4, 6, 3)), True)]


@pytest.mark.parametrize("shape, layers, casts", SIXTEEN)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bits_of_layers(dtype, shape, layers, casts, device, monkeypatch):
    """A CPU has no avg_pool3d of them, autocast averages there in float32, on a GPU, so here, upsamples; others are halves."""
    upsample, given = torch._C._nn.upsample_nearest2d, {"device": device, "dtype": torch.float32 if casts else dtype}
    monkeypatch.setattr(upsampling, "CHANNELS", (0, 0))
    if device == "cpu":
        monkeypatch.setattr(torch._C._nn, "upsample_nearest2d", lambda x, *sizes: upsample(x.float() if casts else x, *sizes))
    plain, x = copy.deepcopy(nn.Sequential(*layers)).to(**given), torch.randn(shape, **given)
    changed = optimize(copy.deepcopy(plain), x.requires_grad_())[0]
    with torch.autocast(device, dtype, enabled=casts):
        for mine, own in zip(results(changed, x), results(plain, x), strict=True):
            torch.testing.assert_close(mine, own, rtol=0.03, atol=0.03 * float(own.detach().abs().max()))


# ---- arguments ----


def test_results_lie_as_pytorchs(monkeypatch):
    monkeypatch.setattr(upsampling, "_pays", lambda *given: True)
    x, weight = drawn(2, 4, 6, 8), drawn(3, 4, 3, 3)
    for a in (x, x.contiguous(memory_format=torch.channels_last)):
        for b in (weight, *(w.to(memory_format=torch.channels_last) for w in (weight, weight[..., :1, :1]))):
            assert fused(a, b).stride() == pair(a, b).stride()
            expected = F.conv2d(F.interpolate(a, scale_factor=2.0), b, padding=1)
            assert upsampling.upsample_conv2d(a, b, padding=1).stride() == expected.stride()
    assert fused(x[:, :, :, ::2], weight).shape == (2, 3, 3, 2)
    torch.testing.assert_close(fused(x[0], weight), pair(x[0], weight))  # a sample without a batch


def test_maps_of_three_axes_that_are_smaller_than_the_window():
    x, weight = drawn(2, 2, 1, 4, 2), drawn(3, 2, 1, 3, 2)
    net = nn.Sequential(nn.Conv3d(2, 3, (1, 3, 2), padding=1, bias=False), nn.AvgPool3d(3)).double()
    net[0].weight = nn.Parameter(weight.detach())
    optimized, report = optimize(net, x)
    assert [site.status for site in report.sites] == ["rewritten"]
    function = functools.partial(convpool.torch.conv_avg_pool3d, padding=1, pool_size=3)
    for found in (function(x, weight), optimized(x)):
        torch.testing.assert_close(found, net(x), rtol=1e-12, atol=1e-12)
    assert torch.autograd.gradgradcheck(function, (x, weight), fast_mode=True)
    small = drawn(1, 1, 3, 2, 3), drawn(1, 1, 2, 4, 2)
    upsampled = convpool.torch.upsampling._apply
    assert torch.autograd.gradcheck(lambda x, w: upsampled(x, w, None, (2, 2, 2), (0,) * 6), small, fast_mode=True)


WRONG = [{"pool_size": 0}, {"pool_size": (2, 2, 2)}, {"pool_size": 2.5}]
WRONG += [{"pool_size": 2, **rest} for rest in ({"stride": 0}, {"padding": "around"}, {"stride": 2, "padding": "same"})]
WRONG += [{"scale_factor": 0}, {"scale_factor": 1.5}, {"padding": -1}, {"scale_factor": (2, 2, 2)}]


@pytest.mark.parametrize("options", WRONG)
def test_wrong_arguments_are_named(options):
    function = conv_avg_pool2d if "pool_size" in options else upsampling.upsample_conv2d
    with pytest.raises(OptionError, match=list(options)[-1]):
        function(drawn(1, 2, 5, 5), drawn(2, 2, 3, 3), **options)


def test_sizes_and_types_that_do_not_fit_are_refused():
    for shape, dtype in (((1, 2, 3, 3), torch.float64), ((1, 3, 8, 8), torch.float64), ((1, 2, 8, 8), torch.float32)):
        with pytest.raises(RuntimeError):
            conv_avg_pool2d(drawn(*shape), drawn(2, 2, 3, 3, dtype=dtype), pool_size=2)
    with pytest.raises(RuntimeError):
        upsampling.upsample_conv2d(drawn(2, 4, 16, 16), drawn(3, 4, 3, 3), drawn(3, dtype=torch.float32), padding=1)


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int32, torch.int64, torch.bool, torch.complex64])
def test_types_other_than_floats_are_as_in_pytorch(dtype, rank):
    """Most are refused; of int64 PyTorch gives averages rounded down."""
    function = getattr(convpool.torch, f"conv_avg_pool{rank}d")
    x, weight = torch.arange(2 * 6**rank).reshape(1, 2, *[6] * rank).to(dtype), torch.ones(2, 2, *[3] * rank, dtype=dtype)
    try:
        expected = getattr(F, f"avg_pool{rank}d")(getattr(F, f"conv{rank}d")(x, weight), 2)
    except RuntimeError:
        with pytest.raises(RuntimeError):
            function(x, weight, pool_size=2)
        assert dtype != torch.int64
    else:
        assert torch.equal(function(x, weight, pool_size=2), expected)


@pytest.mark.parametrize("kernel, pool_size, pool_padding", itertools.product((1, 2, 3), repeat=3))
def test_pads_of_more_than_half_a_window(kernel, pool_size, pool_padding):
    """They are refused as by PyTorch."""
    x, weight = drawn(2, 2, 7, 8), drawn(3, 2, kernel, kernel)
    with pytest.raises(RuntimeError, match="pad") if 2 * pool_padding > pool_size else contextlib.nullcontext():
        found = conv_avg_pool2d(x, weight, padding=2, pool_size=pool_size, pool_stride=2, pool_padding=pool_padding)
        torch.testing.assert_close(found, F.avg_pool2d(F.conv2d(x, weight, padding=2), pool_size, 2, pool_padding))


# ---- modules ----

ARGUMENTS = [
    (1, {"padding": 1}, {"pool_size": 2}),
    (2, {"padding": 1, "bias": False}, {"pool_size": 2}),
    (2, {"stride": 2, "padding": (1, 2), "groups": 2, "dilation": 2}, {"pool_size": (2, 3), "pool_stride": (2, 1)}),
    (2, {"padding": 1, "padding_mode": "reflect"}, {"pool_size": 3, "pool_padding": 1, "count_include_pad": False}),
    (2, {"padding": "same", "padding_mode": "circular"}, {"pool_size": 2, "ceil_mode": True}),
    (3, {"padding": 1}, {"pool_size": 2}),
]
EVEN, BEYOND = {"kernel_size": (2, 4)}, {"pool_size": 3, "pool_stride": 2, "ceil_mode": True}
ARGUMENTS += [(2, EVEN | {"padding": padding, "dilation": (1, 2)}, {"pool_size": 2}) for padding in ("same", "valid", 2)]
ARGUMENTS += [(2, EVEN | {"padding": 1}, BEYOND | rest) for rest in ({}, {"pool_padding": 1, "count_include_pad": False})]

UPSAMPLED = ({}, {"padding": 1, "bias": False}, {"padding": "same"}, {"padding": 1, "padding_mode": "reflect"})
ARGUMENTS += [(rank, conv, {"scale_factor": 3}) for rank in (1, 2, 3) for conv in UPSAMPLED]


@pytest.mark.parametrize("rank, conv, rest", ARGUMENTS)
def test_a_module_is_its_two(rank, conv, rest, monkeypatch):
    monkeypatch.setattr(upsampling, "_pays", lambda *given: True)
    torch.manual_seed(0)
    conv, upsamples = {"kernel_size": 3, "dtype": torch.float64} | conv, "scale_factor" in rest
    original = getattr(nn, f"Conv{rank}d")(4, 6, **conv)
    cls = getattr(convpool.torch, f"{'UpsampleConv' if upsamples else 'ConvAvgPool'}{rank}d")
    module, x = cls(4, 6, **conv, **rest), torch.randn(2, 4, *[9, 8, 7][:rank], dtype=torch.float64)
    module.load_state_dict(original.state_dict())
    original.load_state_dict(module.state_dict())
    pooling = {key.removeprefix("pool_").replace("size", "kernel_size"): value for key, value in rest.items()}
    expected = original(nn.Upsample(**rest)(x)) if upsamples else getattr(nn, f"AvgPool{rank}d")(**pooling)(original(x))
    for made in (module, optimize(copy.deepcopy(module), x)[0]):
        torch.testing.assert_close(made(x), expected)
    pairs = (module(x), module), (expected, original)
    torch.testing.assert_close(*(torch.autograd.grad(y.sum(), list(made.parameters())) for y, made in pairs))
    if upsamples and "padding_mode" not in conv:
        function, padding = getattr(convpool.torch, f"upsample_conv{rank}d"), conv.get("padding", 0)
        torch.testing.assert_close(function(x, module.weight, module.bias, **rest, padding=padding), expected)
    assert not upsamples or repr(module).endswith(f"scale_factor={(3,) * rank})")


def test_a_module_is_made_told_copied_and_parametrized_as_a_convolution():
    torch.manual_seed(3)
    original = nn.Conv2d(4, 6, 3, padding=1)
    torch.manual_seed(3)
    module, x = convpool.torch.ConvAvgPool2d(4, 6, 3, padding=1, pool_size=2), drawn(1, 4, 8, 8, dtype=torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), original.parameters(), strict=True))
    assert "padding=(1, 1), pool_size=(2, 2), pool_stride=(2, 2)" in repr(module)
    assert torch.equal(copy.deepcopy(module)(x), module(x))
    nn.utils.parametrizations.spectral_norm(module)(x).sum().backward()
    assert module.parametrizations.weight.original.grad is not None


# ---- launches ----


def test_kernels_get_addresses_that_are_multiples_of_16(monkeypatch):
    """A kind of call whose launch notes what it is given, of one axis: the library's order of its weights is another."""
    monkeypatch.setattr(kernels, "raw_stream", lambda index: 0)
    kind, seen, weight = object.__new__(kernels.Planned), [], torch.arange(25.0)[1:].view(2, 3, 4)
    kind.formats, kind.device, kind.handle, kind.space = (torch.contiguous_format,) * 2, torch.device("cpu"), None, 0
    kind.y_shape = kind.y_strides = (1, 1, 1)
    kind.copies_others, kind.copies_weight = False, True

    def launch(handle, packed, stream):
        seen[:] = struct.unpack("@IIPPPPPPNPPPNP", packed)[2:5]
        assert list((ctypes.c_float * 24).from_address(seen[1])) == weight.movedim(1, -1).flatten().tolist()
        return 0

    kind.launch = launch
    kind(torch.ones(49)[1:].view(1, 3, 16), weight, torch.ones(3)[1:])
    assert len(seen) == 3 and all(address and address % 16 == 0 for address in seen)


def test_kernels_get_no_bias_or_weight_that_does_not_fit_or_has_no_address(monkeypatch):
    """They are told apart from those that a kind of call was planned for, which only launches."""
    planned = types.SimpleNamespace(plan=types.SimpleNamespace(tactic=types.SimpleNamespace(family="fused")))
    monkeypatch.setattr(kernels, "_calls", {})
    monkeypatch.setattr(kernels, "Planned", lambda *given: planned)
    given, find = (drawn(2, 4, 6, 8), drawn(3, 4, 3, 3), drawn(3)), functools.partial(kernels.find, kernels.frozen(PLAIN))
    x, weight, bias = (tensor.float() for tensor in given)
    assert find(x, weight, bias) is planned and find(x, weight, bias[:2]) is None
    assert find(x, weight, bias.to("meta")) is None and find(x, weight.to("meta"), bias) is None
    monkeypatch.setattr(plain, "pooled_conv", None)  # which eager calls go to at once, as to the kernels on a GPU
    for others in ((TwoTensor(weight, weight),), (weight, TwoTensor(bias, bias).requires_grad_())):
        torch.testing.assert_close(fused(x, *others).a, pair(x, *others).a)


def test_what_ends_says_so():
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Conv2d(3, 64, 3, padding=1), nn.AvgPool2d(2)), torch.randn(2, 3, 16, 16)
    window = ([2, 2], [1, 1], [1, 1, 1, 1], [1, 1], [2, 2], [0, 0, 0, 0], [1, 1], 1)
    with pytest.warns(DeprecationWarning, match="ends with release 0.4") as told:
        options = convpool.torch.compile_options(accumulation="packed")
        convpool.torch.conv_avg_pool1d(x[..., 0], net[0].weight[..., 0], pool_size=2, accumulation="packed")
    rewrite, graphs = options["pre_grad_custom_pass"], []
    y = torch.compile(net, backend=lambda one, given: graphs.append(one.graph) or rewrite(one.graph) or one.recompile() or one)(x)
    assert len(graphs[0].find_nodes(op="call_function", target=torch.ops.convpool.pooled_conv)) == 1
    with pytest.warns(DeprecationWarning, match="it does nothing") as last, convpool.torch.constant_weights():
        torch.testing.assert_close(y, net(x), rtol=1e-5, atol=1e-5)
    assert [one.filename for one in (*told, *last)] == [__file__] * 3
    for call in (
        lambda: fused(x, net[0].weight, net[0].bias, accumulation="packed"),
        lambda: convpool.torch.ConvAvgPool2d(3, 64, 3, padding=1, pool_size=2, accumulation="default").eval() and net(x),
        lambda: optimize(net, x, accumulation="packed")[0](x),
        lambda: convpool.torch.pooled_conv(x, net[0].weight, net[0].bias, *window, 0, 0.0, 1),
    ):
        with pytest.warns(DeprecationWarning, match="ends with release 0.4"):
            torch.testing.assert_close(call(), net(x), rtol=1e-5, atol=1e-5)
    call = torch.compile(lambda x: fused(x, net[0].weight, net[0].bias, accumulation="packed"), backend="eager", fullgraph=True)
    torch.testing.assert_close(call(x), net(x), rtol=1e-5, atol=1e-5)
    with pytest.warns(DeprecationWarning, match="an epilogue of pooled_conv"):
        leaky = convpool.torch.pooled_conv(x, net[0].weight, net[0].bias, *window, 2, 0.1)
    torch.testing.assert_close(leaky, F.leaky_relu(net(x), 0.1), rtol=1e-5, atol=1e-5)
