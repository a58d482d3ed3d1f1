# SPDX-License-Identifier: Apache-2.0
"""The options of a rewrite as data: which rules run, how pairs are lowered, and the limits that the rules keep to; and checks
of the arguments of `convpool.optimize` and `convpool.verify`.

A target is a named set of these.

| target | for | lowering of pairs | beside pairs and resamplings |
|---|---|---|---|
| any | every runtime | ConvAvgPool where it pays and has a kernel, else standard operators | prologues, epilogues |
| cpu | onnxruntime on a CPU | standard operators, by cost | |
| tensorrt | TensorRT with the plugin | the operators, else one fused convolution | prologues, epilogues, offloaded convolutions |
| cuda | onnxruntime's CUDA provider | the same, in 3-D also AveragePool and Conv | these, and whole chains, channels last |

`RULES` has them all, by name.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral, Real
from sys import float_info
from typing import Any

from convpool.algebra.expand import FORMS
from convpool.algebra.geometry import REQUESTS, Refusal
from convpool.algebra.parts import ACCUMULATIONS
from convpool.errors import OptionError


def check_arguments(**given: Any) -> None:
    """Raise OptionError for an argument of another type, or a number out of its range, named as `optimize` names it."""
    for name, value in given.items():
        fits, expected = _ARGUMENTS[name]
        optional = name not in ("check", "seed", "exclude", "enable", "disable", "autotune")
        if not (optional and value is None or fits(value)):
            raise OptionError(f"{name}: got {value!r}, expected {expected}")


def check_choice(name: str, value: object, choices: Iterable[str]) -> None:
    """Raise OptionError for an argument that is none of the words that it may be."""
    if value not in (known := tuple(choices)):
        raise OptionError(f"{name}: got {value!r}, expected one of {', '.join(known)}")


def _is_count(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 0


def _is_tolerance(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and bool(value <= float_info.max and not value < 0)  # no NaN


def _are_names(value: object) -> bool:
    if isinstance(value, (str, Iterator)):  # an iterator can be read once only
        return True
    return isinstance(value, Iterable) and all(isinstance(name, str) for name in value)


def _are_shapes(value: object) -> bool:
    return isinstance(value, Mapping) and all(isinstance(name, str) and isinstance(v, Sequence) for name, v in value.items())


_ARGUMENTS: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(("check", "seed"), (_is_count, "0 or more")),
    **dict.fromkeys(("rtol", "atol"), (_is_tolerance, "a finite number of at least 0")),
    **dict.fromkeys(("exclude", "enable", "disable"), (_are_names, "a string, or several")),
    **dict.fromkeys(("fold", "autotune", "time"), (lambda value: isinstance(value, bool), "True or False")),
    **dict.fromkeys(("input_shapes", "fix_shapes"), (_are_shapes, "sizes by name, as {'x': [1, 3, 224, 224]}")),
    "base_dir": (lambda value: isinstance(value, (str, os.PathLike)), "a folder"),
    "progress": (callable, "a function"),
}


# Limits of the plugin's kernels for convolutions without a pooling, by support and speed.
IMAGE_CHANNELS = 4
"""Most channels of what counts as an image: TensorRT pads more of them less."""
FILTER_ELEMENTS = 64
"""Most weights of a filter, channels times kernel elements, that the kernel for images takes."""
WIDE_CHANNELS, CHANNEL_MULTIPLE = 64, 8
"""Fewest input and output channels of a plain convolution, the fewest that were measured; and what they are multiples of, so that
half precision needs no padding with the channels last."""
PLAIN_MACS = 2.5e9
"""Most multiply-adds of a plain convolution for the batch.  With more of them the better of TensorRT 8.6 and cuDNN takes 0.77 to
1.15 times as long as the plugin's kernels, in `python -m benchmarks layers plain` on an H200."""
PLAIN_RESULTS = 400_000
"""Most numbers in a result that takes more multiply-adds: TensorRT 8.6 adds up so few in too few blocks.  Of 16 images with 1536
channels of 4x4, with a residual, it takes 65 microseconds in BigGAN on an H200, the plugin 31."""
POOL_CHANNELS = 1024
"""Most channels of an AveragePool in a chain, which the kernels multiply by the identity."""
OF_IMAGES = f"at most {IMAGE_CHANNELS} channels and {FILTER_ELEMENTS} weights per filter"
OF_PLAIN_CONVOLUTIONS = (
    f"at least {WIDE_CHANNELS} channels in multiples of {CHANNEL_MULTIPLE}; "
    f"at most {PLAIN_MACS / 1e9:g}e9 multiply-adds per batch, or more if the result has at most {PLAIN_RESULTS:,} numbers"
)

ALL = ("any", "cpu", "tensorrt", "cuda")
"""Every target."""
NODES = ("any", "tensorrt", "cuda")
"""The targets that have nodes of the operator."""


@dataclass(frozen=True)
class Entry:
    """A rule: its name, what it rewrites, its stage (`convpool.rules`), module and class, and the targets that have it."""

    name: str
    text: str
    stage: str
    where: str
    targets: tuple[str, ...] = ()


RULES = (
    Entry("pool_first", "convolution followed by average pooling", "pairs", "pool_first.rule:PoolFirst", ALL),
    Entry("fuse_pool_conv", "AveragePool followed by Conv", "pairs", "offloaded:FusePoolConv"),
    Entry("upsample_last", "nearest upsampling followed by Conv", "pairs", "resampling.rule:UpsampleLast", ALL),
    Entry("upsample_if", "with upsample_last: where open sizes may differ from a multiple, an If on them",
          "pairs", "resampling.rule:UpsampleLast", ("cpu",)),
    Entry("resize_last", "any enlarging Resize followed by a 1x1 Conv", "pairs", "resampling.rule:ResizeLast", ALL),
    Entry("resize_first", "a 1x1 Conv followed by a Resize to fewer elements", "pairs", "resampling.rule:ResizeFirst", ALL),
    Entry("image_conv", f"convolutions of images: {OF_IMAGES}",
          "convolutions", "offloaded:ImageConv", ("tensorrt", "cuda")),
    Entry("plain_conv", f"other convolutions: {OF_PLAIN_CONVOLUTIONS}",
          "convolutions", "offloaded:ImageConv", ("tensorrt",)),
    Entry("norm_conv", "with plain_conv: of any size behind an InstanceNormalization and a SiLU or a scale by image",
          "convolutions", "offloaded:ImageConv", ("tensorrt",)),
    Entry("fuse_epilogue", "nodes after a ConvAvgPool", "epilogues", "neighbours.fuse:FuseEpilogue", NODES),
    Entry("fuse_prologue", "nodes before a ConvAvgPool", "prologues", "neighbours.fuse:FusePrologue", NODES),
    Entry("chain_pool_conv", "AveragePool followed by Conv in a model with a pair",
          "pairs of chains", "offloaded:ChainPoolConv", ("cuda",)),
    Entry("chain_conv", "convolutions between ConvAvgPool nodes, for onnxruntime's CUDA provider",
          "chains", "cuda_chain.conv:ChainConv", ("cuda",)),
    Entry("chain_pool", "AveragePools between ConvAvgPool nodes, for onnxruntime's CUDA provider",
          "chains", "cuda_chain.conv:ChainPool", ("cuda",)),
    Entry("chain_upsample", "1x1 Conv followed by nearest upsampling, beside nodes of UpsampleConv",
          "chains", "cuda_chain.conv:ChainUpsample", ("tensorrt", "cuda")),
    Entry("chain_head", "a sum or mean over space and the Gemm behind it, for onnxruntime's CUDA provider",
          "heads", "cuda_chain.conv:ChainHead", ("cuda",)),
    Entry("channels_last", "the layout of tensors between ConvAvgPool nodes, for onnxruntime's CUDA provider",
          "layouts", "cuda_chain.channels_last:ChannelsLast", ("cuda",)),
    Entry("fold_product", "additions and multiplications by constants behind a Gemm or MatMul",
          "products", "fold_product:FoldProduct", ("tensorrt",)),
    Entry("chain_concats", "Concats that begin with all inputs of an earlier Concat",
          "concats", "chain_concats:ChainConcats", ALL),
    Entry("lower_operator", "ConvAvgPool nodes of the file, if --lowering asks for standard operators",
          "earlier", "lower_operator:LowerOperator", ALL),
    Entry("fold", "what is computed from constants, and Identity nodes (--fold)", "constants", "fold:Fold"),
)  # fmt: skip
"""Every rule, one entry each."""
RULE_TEXTS: dict[str, str] = {entry.name: entry.text for entry in RULES}
"""The names that `enable` and `disable` take, and what each rewrites."""
OF_OPERATORS = tuple(entry.name for entry in RULES if "cpu" not in entry.targets and entry.name not in ("fold_product", "fold"))
"""The rules that make or change nodes of the operators only."""


def _rules_of(target: str) -> frozenset[str]:
    return frozenset(entry.name for entry in RULES if target in entry.targets)


@dataclass(frozen=True, kw_only=True)
class Preset:
    """The rules that run, the lowering asked for, and what stands for the operator where the plugin has no fast kernel.

    rules: by name.  lowering: one of `algebra.geometry.REQUESTS`.
    direct_without_kernel: whether AveragePool and Conv may, if they cost less than one fused convolution; in 3-D, without
    groups, they always may, but in TensorRT 8.6, which is slower with them.  keep_int8: leave convolutions behind
    DequantizeLinear, which TensorRT runs in INT8; any rewrite would make float kernels of them.
    plain_prologues: whether a plain convolution fuses maps per channel in front of it too.
    metadata: what a changed model gets in its metadata_props, so that it says what it is for.  devices: where the result has to
    be faster, of pairs (`pool_first.rule`) and beside resamplings: "cpu" by the cost model, "gpu" and "tensorrt" as was measured.
    """

    rules: frozenset[str] = _rules_of("any")
    lowering: str = "convavgpool"
    direct_without_kernel: bool = True
    keep_int8: bool = False
    plain_prologues: bool = False
    metadata: tuple[tuple[str, str], ...] = ()
    devices: tuple[str, ...] = ("cpu", "gpu")


TARGETS: dict[str, Preset] = {
    "any": Preset(),
    "cpu": Preset(rules=_rules_of("cpu"), lowering="auto", devices=("cpu",)),
    "tensorrt": Preset(rules=_rules_of("tensorrt"), direct_without_kernel=False, keep_int8=True, devices=("gpu", "tensorrt")),
    "cuda": Preset(
        rules=_rules_of("cuda"),
        direct_without_kernel=False,
        plain_prologues=True,
        devices=("gpu",),
        metadata=(("convpool.target", "cuda"),),
    ),
}


@dataclass(frozen=True, kw_only=True)
class OptimizeOptions(Preset):
    """How a model is rewritten.

    exclude: glob patterns of names that stay.  pinned: nodes of the main graph that stay, by name, each with the reason.
    upsampling: the form to take where it is admitted, whatever it costs.
    for_torch: the type of the device, where the model stands for a graph of PyTorch's, which has a node for upsampled
    convolutions, and weights of each call; else empty.
    accumulation: one of `algebra.parts.ACCUMULATIONS` for the operator's nodes; None leaves those of the file as they are.
    """

    exclude: tuple[str, ...] = ()
    pinned: Mapping[str, Refusal] = field(default_factory=dict)
    accumulation: str | None = None
    upsampling: str | None = None
    for_torch: str = ""

    def __post_init__(self) -> None:
        """Raise OptionError for names that there are not, and for packed sums of standard operators."""
        check_choice("lowering", self.lowering, REQUESTS)
        if self.accumulation is not None:
            check_choice("accumulation", self.accumulation, ACCUMULATIONS)
        if self.upsampling is not None:
            check_choice("upsampling", self.upsampling, FORMS)
        if self.accumulation == "packed" and self.lowering != "convavgpool":
            raise OptionError(f"accumulation: got 'packed' with lowering {self.lowering!r}, expected lowering 'convavgpool'")
        for name in sorted(self.rules):
            check_choice("rules", name, RULE_TEXTS)


def options_for(
    target: str = "any",
    *,
    lowering: str | None = None,
    exclude: str | Sequence[str] = (),
    enable: Iterable[str] = (),
    disable: Iterable[str] = (),
    fold: bool = False,
) -> OptimizeOptions:
    """The options of a target, with changes.  lowering: None for the target's.  enable, disable: names of `RULE_TEXTS`.  fold: if
    that rule is enabled too.  Raises OptionError."""
    check_choice("target", target, TARGETS)
    on, off = _names("enable", enable), _names("disable", disable)
    if both := sorted(on & off):
        raise OptionError(f"disable: got {both[0]!r}, which enable names too; expected it in one of them")
    chosen = OptimizeOptions(**vars(TARGETS[target]), exclude=(exclude,) if isinstance(exclude, str) else tuple(exclude))
    rules = chosen.rules | on | ({"fold"} if fold else set())
    return replace(chosen, rules=rules - off, lowering=chosen.lowering if lowering is None else lowering)


def _names(what: str, given: Iterable[str]) -> frozenset[str]:
    names = frozenset((given,) if isinstance(given, str) else given)
    for name in sorted(names):
        check_choice(what, name, RULE_TEXTS)
    return names


def unmatched(patterns: Iterable[str], matched: Iterable[str]) -> list[str]:
    """A warning for each pattern of `exclude` that matches no name."""
    known = set(matched)
    return [f"exclude: {name!r} matches no convolution, pooling or Concat here" for name in patterns if name not in known]
