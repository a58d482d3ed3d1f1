# SPDX-License-Identifier: Apache-2.0
"""`BuildOptions`: how an engine is built from a model, and how it is checked."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import numpy as np

from convpool.errors import OptionError, OutputError
from convpool.options import check_arguments, check_choice
from convpool.types import Accumulation

PRECISIONS = ("fp32", "tf32", "fp16", "bf16")
HALF_PRECISIONS = ("fp16", "bf16")
LOWERINGS = ("convavgpool", "direct", "fused", "auto", "none")
"""The lowerings of `convpool.optimize`, and none: the model as it is."""
DEFAULT_WORKSPACE_BYTES = 1 << 30

Profile = Mapping[str, tuple[Sequence[int], Sequence[int], Sequence[int]]]
"""For each input with open dimensions its smallest, typical and largest shape."""
Progress = Callable[[str, int, int], None]
"""Called with (phase, steps done, steps in all); TensorRT 10 and later report steps.  What it raises stops the build."""


@dataclass(frozen=True, kw_only=True)
class BuildOptions:
    """The options of `build`.

    Attributes:
        precision: "fp32", "tf32", "fp16" or "bf16"; `convpool.tensorrt.builder` says what each
            means to TensorRT.
        profiles: Shapes of inputs with open dimensions.  Several profiles form a sequence; the
            first one decides which convolutions are small enough for `plain_conv`.
        plugin: Load the plugin and let it run the ConvAvgPool nodes.  Otherwise they become
            standard operators.
        lowering: As in `convpool.optimize`, or "none" for the model as it is.  Default:
            `prepare.with_default_lowering`.  A model with ConvAvgPool nodes is not optimized again.
        autotune: Build an engine for every lowering, time the engines on this GPU, and keep the
            fastest.
        stem: Let the plugin also run convolutions of images (the rule image_conv) where
            `prepare.offloaded_convs` says that this is faster.
        plain_conv: Likewise convolutions of many channels.
        accumulation: How the plugin's kernels sum pooling windows of half precisions, as in
            `convpool.optimize`; of nodes that the model has already too.  "packed" needs the
            plugin's nodes, and has no effect in float32.
        layers: Keep intermediate tensors as outputs, to compare them.  This makes the engine
            slower.
        timing_cache: A file to take layer timings from and to add new ones to.
        workspace_bytes: The most memory that TensorRT may use beside weights and activations.
        optimization_level: TensorRT's 0 to 5.  None: TensorRT's default.
        max_aux_streams: The most streams, besides the engine's own, on which independent layers may
            run.  None: TensorRT's choice, which is none in 8.6.
        progress: Called as the build goes on; see `Progress`.
        trt: TensorRT's package.  Default: `import tensorrt`.
        configure: Called last of all with the builder's config, for instance to set types and
            formats of inputs and outputs.
        configure_network: Likewise with the network.
        check: Number of random input sets for the comparison with onnxruntime; 0 for none.
        data: Input arrays by name, or a .npz file with them, in place of random ones.
        rtol: Relative tolerance in place of the precision's own.
        atol: Absolute tolerance in place of the precision's own, in the outputs' units.
        seed: Seed of the random inputs.
    """

    precision: str = "fp32"
    profiles: Profile | Sequence[Profile] | None = None
    plugin: bool = True
    lowering: str | None = None
    autotune: bool = False
    stem: bool = True
    plain_conv: bool = True
    accumulation: Accumulation | None = None
    layers: bool = False
    timing_cache: str | os.PathLike[str] | None = None
    workspace_bytes: int = DEFAULT_WORKSPACE_BYTES
    optimization_level: int | None = None
    max_aux_streams: int | None = None
    progress: Progress | None = None
    trt: ModuleType | None = None
    configure: Callable[[Any], None] | None = None
    configure_network: Callable[[Any], None] | None = None
    check: int = 1
    data: Mapping[str, np.ndarray] | str | os.PathLike[str] | None = None
    rtol: float | None = None
    atol: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse what no model and no TensorRT can change.  Raises OptionError."""
        check_choice("precision", self.precision, PRECISIONS)
        if self.lowering is not None:
            check_choice("lowering", self.lowering, LOWERINGS)
        if self.autotune and (self.lowering or self.layers):
            other = "lowering" if self.lowering else "layers"
            raise OptionError(f"autotune: got {other} too; expected one of them")
        if self.accumulation is not None:
            check_choice("accumulation", self.accumulation, get_args(Accumulation))
        packed = self.accumulation == "packed"  # where no node of the plugin computes in 16 bits
        if packed and not self.plugin:
            raise OptionError("accumulation: got packed without the plugin, expected one of them")
        if packed and self.precision == "tf32":
            raise OptionError("accumulation: got packed with precision tf32, expected precision fp16 or bf16")
        if packed and self.lowering not in (None, "convavgpool"):
            raise OptionError(f"accumulation: got packed with lowering {self.lowering}, expected lowering convavgpool")
        check_arguments(check=self.check, seed=self.seed, rtol=self.rtol, atol=self.atol)
        for name, shapes in (item for profile in self.profile_list for item in profile.items()):
            where, expected = f"profile: input '{name}'; got", "expected its smallest, typical and largest"
            if not (np.iterable(shapes) and all(map(np.iterable, shapes))):
                raise OptionError(f"{where} {shapes}, {expected} shape")
            if len(shapes) != 3:
                raise OptionError(f"{where} {len(shapes)} shapes, {expected}")
            if len(set(map(len, shapes))) > 1 or not all(low <= mid <= high for low, mid, high in zip(*shapes, strict=True)):
                got = " / ".join(str(list(shape)) for shape in shapes)
                raise OptionError(f"{where} {got}, expected the same rank and smallest <= typical <= largest")

    @property
    def checked(self) -> bool:
        """True if the engine is compared with onnxruntime."""
        return bool(self.check) or self.data is not None

    @property
    def in_half_precision(self) -> bool:
        """True if most of the engine computes in 16 bits."""
        return self.precision in HALF_PRECISIONS

    @property
    def profile_list(self) -> list[Profile]:
        """The profiles, none, one or several."""
        if self.profiles is None:
            return []
        return [self.profiles] if isinstance(self.profiles, Mapping) else list(self.profiles)

    @property
    def timing_cache_path(self) -> Path | None:
        """The timing cache's file.  Raises OutputError if its folder is not there."""
        if not self.timing_cache:
            return None
        path = Path(self.timing_cache)
        if not path.parent.is_dir():
            raise OutputError(f"timing cache {self.timing_cache}: no folder {str(path.parent)!r}; make it first")
        return path
