# SPDX-License-Identifier: Apache-2.0
"""The registry of seeded network generators: ``generate(name, ...)`` returns an ONNX model.

A generator's arguments are those of its function in ``densenets``, ``discriminators``, ``classifiers`` or ``layers``;
every one takes ``batch``, ``seed``, ``opset`` and ``dtype`` besides. Same arguments and seed, same bytes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import onnx

from models import classifiers, decoders, densenets, discriminators, layers
from models.builder import Net

DEFAULT_SEED = 0
DEFAULT_OPSET = 17


@dataclass(frozen=True)
class Generator:
    """A named network: the function that builds it, the arguments that make it this network, and its sites.

    ``sites`` counts, by what stands in the graph and regardless of cost (absent means none):

    - conv_pool: Conv, its only reader an AveragePool of a window larger than 1; conv_pool_window1: of window 1;
    - conv_slices: Conv, then the mean of 2x2 written as strided Slices and Adds;
    - conv_global_pool: Conv, its only reader a GlobalAveragePool;
    - add_pool, concat_pool: convolutions whose only reader is an Add or a Concat that only an AveragePool reads;
    - pool_conv: the reverse, AveragePool (stride = window) whose only reader is a Conv.
    """

    name: str
    build: Callable[..., None]
    args: Mapping[str, object]
    sites: Mapping[str, int]

    @property
    def summary(self) -> str:
        """The first line of the generator's docstring."""
        return inspect.getdoc(self.build).splitlines()[0]

    @property
    def parameters(self) -> dict[str, object]:
        """Every argument with its default for this network."""
        names = list(inspect.signature(self.build).parameters.values())[1:]
        return {p.name: p.default for p in names} | dict(self.args)


_SMALL_DENSENET = {"size": 32, "growth": 8, "blocks": (2, 2, 2, 2), "classes": 10}
_SLICES = {"conv_slices": 3}
_GENERATORS = (
    # The networks of the papers.
    Generator("densenet121", densenets.densenet, {}, {"conv_pool": 3}),
    Generator("densenet_bc100", densenets.densenet_bc, {}, {"conv_pool": 2}),
    Generator("densenet121_3d", densenets.densenet, {"size": 64, "channels": 1, "rank": 3, "classes": 2}, {"conv_pool": 3}),
    Generator("sparcnet", densenets.sparcnet, {}, {"conv_pool": 7}),
    Generator("condensenet74", densenets.condensenet, {}, {"concat_pool": 4}),
    Generator("sngan64", discriminators.sngan, {}, {"conv_pool": 9, "pool_conv": 1}),
    Generator("sngan64_in_place", discriminators.sngan, {"in_place": True}, {"conv_pool": 9, "pool_conv": 1}),
    Generator("biggan128", discriminators.biggan, {}, {"conv_pool": 9, "pool_conv": 1}),
    Generator(
        "biggan256",
        discriminators.biggan,
        {"size": 256, "factors": (2, 4, 8, 8, 16), "attention_after": 2},
        {"conv_pool": 11, "pool_conv": 1},
    ),
    Generator("wgan_gp", discriminators.wgan_gp, {}, {"conv_pool": 3, "pool_conv": 1}),
    Generator("wgan_gp_slices", discriminators.wgan_gp, {"mean": "slices_div"}, _SLICES),
    Generator("stargan_v2", discriminators.stargan_v2, {}, {"conv_pool": 9}),
    Generator("stargan_v2_style", discriminators.stargan_v2, {"style": 64}, {"conv_pool": 9}),
    Generator("igebm", discriminators.igebm, {}, {"add_pool": 4}),
    Generator("lenet5", classifiers.lenet5, {}, {"conv_pool": 2}),
    Generator("mobilenet_v1", classifiers.mobilenet_v1, {}, {"conv_pool": 5, "conv_pool_window1": 9}),
    Generator("darknet19", classifiers.darknet19, {}, {"conv_global_pool": 1}),
    Generator("nextvit", classifiers.nextvit, {}, {"add_pool": 3, "pool_conv": 3}),
    # The same, reduced for tests.
    Generator("densenet_small", densenets.densenet, _SMALL_DENSENET, {"conv_pool": 3}),
    Generator("densenet_bc22", densenets.densenet_bc, {"depth": 22}, {"conv_pool": 2}),
    Generator("densenet_small_3d", densenets.densenet, _SMALL_DENSENET | {"channels": 1, "rank": 3}, {"conv_pool": 3}),
    Generator("sparcnet_small", densenets.sparcnet, {"size": 256, "layers": 2, "growth": 8}, {"conv_pool": 6}),
    Generator(
        "condensenet_small",
        densenets.condensenet,
        {"size": 64, "stages": (2, 2, 2), "growth": (4, 8, 16), "classes": 10},
        {"concat_pool": 2},
    ),
    Generator("sngan64_small", discriminators.sngan, {"width": 8}, {"conv_pool": 9, "pool_conv": 1}),
    Generator("sngan64_in_place_small", discriminators.sngan, {"width": 8, "in_place": True}, {"conv_pool": 9, "pool_conv": 1}),
    Generator("biggan_small", discriminators.biggan, {"size": 64, "width": 8}, {"conv_pool": 9, "pool_conv": 1}),
    Generator("wgan_gp_small", discriminators.wgan_gp, {"width": 16}, {"conv_pool": 3, "pool_conv": 1}),
    Generator("wgan_gp_slices_small", discriminators.wgan_gp, {"width": 16, "mean": "slices_div"}, _SLICES),
    Generator("wgan_gp_slices_mul_small", discriminators.wgan_gp, {"width": 16, "mean": "slices_mul"}, _SLICES),
    Generator("wgan_gp_slices_sum_small", discriminators.wgan_gp, {"width": 16, "mean": "slices_sum"}, _SLICES),
    Generator("wgan_gp_python_sum_small", discriminators.wgan_gp, {"width": 16, "mean": "slices_python_sum"}, _SLICES),
    Generator("stargan_v2_small", discriminators.stargan_v2, {"size": 64, "width": 8, "max_width": 32}, {"conv_pool": 6}),
    Generator("igebm_small", discriminators.igebm, {"width": 16}, {"add_pool": 4}),
    Generator(
        "mobilenet_v1_small",
        classifiers.mobilenet_v1,
        {"frames": 64, "width": 8, "classes": 10},
        {"conv_pool": 5, "conv_pool_window1": 9},
    ),
    Generator("darknet19_small", classifiers.darknet19, {"size": 64, "width": 8, "classes": 20}, {"conv_global_pool": 1}),
    Generator(
        "nextvit_small",
        classifiers.nextvit,
        {"size": 64, "depths": (1, 1, 2), "widths": (32, 64, 96), "classes": 10},
        {"add_pool": 2, "pool_conv": 2},
    ),
    # Single layers and blocks; the transitions are DenseNet-121's.
    Generator("conv_pool", layers.conv_pool, {}, {"conv_pool": 1}),
    Generator("conv_global_pool", layers.conv_pool, {"kernel": 1, "pool": None}, {"conv_global_pool": 1}),
    Generator("densenet_transition1", layers.densenet_transition, {}, {"conv_pool": 1}),
    Generator("densenet_transition2", layers.densenet_transition, {"size": 28, "channels": 512}, {"conv_pool": 1}),
    Generator("densenet_transition3", layers.densenet_transition, {"size": 14, "channels": 1024}, {"conv_pool": 1}),
    Generator("discriminator_block", layers.discriminator_block, {}, {"conv_pool": 2}),
    # Convolutions behind resamplings.
    Generator("vae_decoder", decoders.vae_decoder, {}, {}),
    Generator("sngan_generator", decoders.sngan_generator, {}, {}),
    Generator("biggan_generator", decoders.sngan_generator, {"conditional": True}, {}),
    Generator("stargan_v2_generator", decoders.stargan_generator, {}, {}),
    Generator("unet_nearest", decoders.unet, {}, {}),
    Generator("unet3d", decoders.unet, {"size": 16, "widths": (8, 16, 32), "rank": 3, "groups": 4}, {}),
    Generator("segformer_head", decoders.segformer_head, {}, {}),
    Generator("hrnet_head", decoders.hrnet_head, {}, {}),
    Generator("yolo_neck", decoders.yolo_neck, {}, {}),
    Generator("esrgan_tail", decoders.esrgan_tail, {}, {}),
    # No convolution before a pooling that could be joined with it.
    Generator("vgg_average", classifiers.vgg_average, {}, {"pool_conv": 2}),
    Generator("squeeze_excite", classifiers.squeeze_excite, {}, {}),
    Generator("resnet_d", classifiers.resnet_d, {"width": 32}, {"pool_conv": 3}),
)
REGISTRY: dict[str, Generator] = {g.name: g for g in _GENERATORS}


def names() -> list[str]:
    """All generators, the networks of the papers first."""
    return list(REGISTRY)


def generate(
    name: str,
    *,
    batch: str | int = "dynamic",
    seed: int = DEFAULT_SEED,
    opset: int = DEFAULT_OPSET,
    dtype: str = "float32",
    **args,
) -> onnx.ModelProto:
    """Builds network ``name``.

    ``batch``: "dynamic" for the symbolic dimension N, or an int. ``dtype``: float16, float32 or float64, of inputs,
    weights and outputs. ``args`` override the network's own arguments (``REGISTRY[name].parameters`` lists them).
    Raises KeyError for an unknown name, TypeError for an unknown argument, ValueError for a value that does not fit.
    """
    if name not in REGISTRY:
        raise KeyError(f"{name}: unknown generator; expected one of {', '.join(REGISTRY)}")
    generator = REGISTRY[name]
    unknown = sorted(set(args) - set(generator.parameters))
    if unknown:
        raise TypeError(f"{name}: unknown argument; got {', '.join(unknown)}, expected {', '.join(generator.parameters)}")
    net = Net(name, batch=batch, seed=seed, opset=opset, dtype=dtype)
    generator.build(net, **{**generator.args, **args})
    return net.model()


def serialize(model: onnx.ModelProto) -> bytes:
    """The bytes that the manifest's hashes are over."""
    return model.SerializeToString(deterministic=True)


def random_inputs(model: onnx.ModelProto, *, seed: int = 0, batch: int = 2) -> dict[str, np.ndarray]:
    """Random arrays of unit variance for a generated model's inputs; ``batch`` stands for N where it is symbolic.

    Half of the variance is constant over patches of 8 per spatial axis, as images are smooth: pooled white noise
    would make all inputs look the same to a deep network.
    """
    rng = np.random.default_rng(seed)
    weights = {w.name for w in model.graph.initializer}
    feeds = {}
    for value in model.graph.input:
        if value.name in weights:
            continue
        tensor = value.type.tensor_type
        shape = [d.dim_value or batch for d in tensor.shape.dim]
        patches = rng.standard_normal([*shape[:2], *(-(-n // 8) for n in shape[2:])])
        for axis, n in enumerate(shape[2:], 2):
            patches = np.repeat(patches, 8, axis).take(np.arange(n), axis)
        x = (patches + rng.standard_normal(shape)) / np.sqrt(2.0)
        feeds[value.name] = x.astype(onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type))
    return feeds
