# SPDX-License-Identifier: Apache-2.0
"""Descriptions of ConvAvgPool problems, and the tactics that run them.  Needs no GPU.

Y = act(Conv(AveragePool(f(X), count_include_pad=1), W) + B + R),  f(x) = pre(scale[c] * x + shift[c])
Y = act(Conv(Upsample(f(X)), W) + B + R), where every pixel of X stands `upsample` times along each dimension (nearest)
"""

import ctypes
import functools
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from convpool.cuda import library
from convpool.errors import ProblemError, UnsupportedError

_LAYOUTS = dict.fromkeys(("NCHW", "NCW", "NCDHW", "channels_first"), False)
_LAYOUTS |= dict.fromkeys(("NHWC", "NWC", "NDHWC", "channels_last"), True)


@dataclass(frozen=True)
class Tactic:
    """One kernel configuration.

    Attributes:
        family: The method, as docs/glossary.md has it; several families of kernels may share one.
        dtype: The type that it takes, None for every type.
        tf32: True if it rounds fp32 products.
        packed: True if it sums box means in their 16-bit type, which a problem has to allow.
        roundings: How often a term of an operand of the products, a box mean or a fused weight, is
            rounded to the type that is multiplied, by at most half a unit in the last place each.
    """

    id: int
    name: str
    family: str
    dtype: str | None
    tf32: bool
    min_cc: int
    split_k: int
    packed: bool
    roundings: int


@functools.cache
def tactics() -> tuple[Tactic, ...]:
    """Return all tactics of the library, in the order of its table.

    Raises:
        LibraryError: No libconvpool.so.
    """
    lib = library.load()
    count = lib.convpool_tactics(None, 0)
    infos = (library.TacticStruct * count)()
    infos[0].struct_size = ctypes.sizeof(library.TacticStruct)
    if lib.convpool_tactics(infos, count) != count:
        raise ProblemError("convpool_tactics: the library has another structure; got another version, expected this one")
    names = {code: name for name, code in library.DTYPES.items()}
    found = []
    for i in infos:
        name, family, dtype, packed = i.name.decode(), i.family.decode(), names.get(i.dtype), bool(i.packed)
        found.append(Tactic(i.id, name, family, dtype, bool(i.tf32), i.min_cc, i.split_k, packed, i.roundings))
    return tuple(found)


def find_tactic(which: int | str | Tactic) -> Tactic:
    """Return the tactic of an id or name.

    Raises:
        ProblemError: There is none.
    """
    if isinstance(which, Tactic):
        return which
    for tactic in tactics():
        if which in (tactic.id, tactic.name):
            return tactic
    raise ProblemError(f"tactic: unknown; got {which!r}, expected an id or name of convpool.cuda.tactics()")


def current_device() -> dict[str, int]:
    """Return the current GPU as `Problem.default_tactic` takes it.

    Returns:
        The compute capability as cc (90 for 9.0), multiprocessors, and shared_bytes of a block.

    Raises:
        CudaError: There is no GPU.
    """
    cc, multiprocessors, shared_bytes = (ctypes.c_int32() for _ in range(3))
    library.check(library.load().convpool_device(cc, multiprocessors, shared_bytes))
    return {"cc": cc.value, "multiprocessors": multiprocessors.value, "shared_bytes": shared_bytes.value}


def channels_last(layout: str) -> bool:
    """Return True if a layout name puts the channels last."""
    try:
        return _LAYOUTS[layout]
    except KeyError:
        raise ProblemError(f"layout: unknown; got {layout!r}, expected one of {', '.join(_LAYOUTS)}") from None


def whole(name: str, value: int, bits: int, *, signed: bool = True) -> int:
    """The number: ctypes would cut off what does not fit."""
    try:
        number = operator.index(value)
    except TypeError:
        raise ProblemError(f"{name}: no whole number; got {value!r}, expected one") from None
    least = -(2 ** (bits - 1)) if signed else 0
    if not least <= number < least + 2**bits:
        kind = "a" if signed else "an unsigned"
        raise ProblemError(f"{name}: out of range; got {number}, expected {kind} {bits}-bit number")
    return number


def _numbers(name: str, values: Sequence[int] | int | None, count: int, default: int) -> list[int]:
    if values is None:
        return [default] * count
    if not isinstance(values, Iterable):
        return [whole(name, values, 32)] * count
    values = [whole(name, v, 32) for v in values]
    if len(values) != count:
        raise ProblemError(f"{name}: wrong length; got {values}, expected {count} numbers")
    return values


@dataclass(frozen=True)
class Problem:
    """A ConvAvgPool: sizes in elements, strides and dilations in positions.

    A single number stands for every dimension; pads are in ONNX's order, all leading ones, then all
    trailing ones.

    Attributes:
        kernel_shape: The convolution's window.
        pool_kernel_shape: The pooling's window; 1 where X is upsampled.
        upsample: Times that a pixel of X is repeated, 1 to 4.  The convolution pads the upsampled map.
        dtype: The type of all tensors, "float16", "bfloat16" or "float32", or of only X and W,
            "int8" or "float8_e4m3fn".
        alpha: LeakyReLU's slope or Clip's lower bound.
        beta: Clip's upper bound.
        prologue_affine: 1 or True: X is scaled and shifted by channel; 2: by image and channel; 3: by channel, after it got
            mean 0 and variance 1 in each of `prologue_groups` groups of channels of an image.
        prologue_epsilon: Added to the variance there.
        prologue_activation: Activation behind that: None, "relu", "leaky_relu" or "silu".
        prologue_alpha: The slope of that "leaky_relu".
        x_dtype: The type of X.  "float32" beside a 16-bit W is rounded to W's type as it is read,
            by the tactics for few channels and by generic.
        w_dtype: The type of W.
        y_dtype: The type of Y, bias and residual; by default "float32" with 8-bit X and W.
        w_scale: The sum of output channel m is multiplied by a float32 w_scale[m], with 8-bit
            types.
        accumulation: "default", fp32 sums, or "packed": tactics may form box means of float16 and
            bfloat16 in that type, of x / 4, so that no sum passes its range.  Other types are
            summed as by default.

    Raises:
        ProblemError: An argument is wrong, which the message names.
    """

    n: int
    c: int
    m: int
    spatial: tuple[int, ...]
    kernel_shape: Sequence[int] | int
    pool_kernel_shape: Sequence[int] | int
    dtype: str = "float16"
    layout: str = "NCHW"
    y_layout: str | None = None
    pool_strides: Sequence[int] | int | None = None
    pool_pads: Sequence[int] | int | None = None
    pool_dilations: Sequence[int] | int | None = None
    strides: Sequence[int] | int | None = None
    pads: Sequence[int] | int | None = None
    dilations: Sequence[int] | int | None = None
    group: int = 1
    bias: bool = False
    residual: bool = False
    activation: str | None = None
    alpha: float = 0.0
    beta: float = 0.0
    allow_tf32: bool = False
    prologue_affine: int = 0
    prologue_activation: str | None = None
    prologue_alpha: float = 0.0
    x_dtype: str | None = None
    w_dtype: str | None = None
    y_dtype: str | None = None
    w_scale: bool = False
    accumulation: str = "default"
    upsample: Sequence[int] | int | None = None
    prologue_groups: int = 0
    prologue_epsilon: float = 0.0
    struct: library.ProblemStruct = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        rank = len(self.spatial)
        if not 1 <= rank <= library.MAX_RANK:
            raise ProblemError(f"spatial: wrong rank; got {tuple(self.spatial)}, expected 1 to 3 sizes")
        for name in ("dtype", "x_dtype", "w_dtype", "y_dtype"):
            value = getattr(self, name)
            if value not in library.DTYPES and (name == "dtype" or value is not None):
                raise ProblemError(f"{name}: unknown; got {value!r}, expected one of {', '.join(library.DTYPES)}")
        for name in ("activation", "prologue_activation"):
            if (value := getattr(self, name)) not in library.ACTIVATIONS:
                names = ", ".join(a for a in library.ACTIVATIONS if a)
                raise ProblemError(f"{name}: unknown; got {value!r}, expected None or one of {names}")
        if self.accumulation not in library.ACCUMULATIONS:
            names = " or ".join(map(repr, library.ACCUMULATIONS))
            raise ProblemError(f"accumulation: unknown; got {self.accumulation!r}, expected {names}")
        s = library.ProblemStruct()
        s.struct_size = ctypes.sizeof(s)
        s.rank = rank
        s.x_dtype, s.w_dtype, s.y_dtype = (library.DTYPES[name] for name in self.dtypes)
        s.accumulation = library.ACCUMULATIONS[self.accumulation]
        s.x_layout, s.y_layout = channels_last(self.layout), channels_last(self.y_layout or self.layout)
        s.allow_tf32, s.has_bias, s.has_residual, s.has_w_scale = self.allow_tf32, self.bias, self.residual, self.w_scale
        s.n, s.c, s.m = whole("n", self.n, 64), whole("c", self.c, 64), whole("m", self.m, 64)
        s.group = whole("group", self.group, 32)
        s.activation, s.alpha, s.beta = library.ACTIVATIONS[self.activation], self.alpha, self.beta
        s.prologue_affine, s.prologue_alpha = whole("prologue_affine", self.prologue_affine, 32), self.prologue_alpha
        s.prologue_groups, s.prologue_epsilon = whole("prologue_groups", self.prologue_groups, 32), self.prologue_epsilon
        s.prologue_activation = library.ACTIVATIONS[self.prologue_activation]
        s.spatial[:rank] = [whole("spatial", size, 64) for size in self.spatial]
        for name, values in (("pool_kernel", self.pool_kernel_shape), ("kernel", self.kernel_shape)):
            getattr(s, name)[:rank] = _numbers(name, values, rank, 1)
        for name in ("pool_strides", "pool_dilations", "strides", "dilations", "upsample"):
            getattr(s, name)[:rank] = _numbers(name, getattr(self, name), rank, 1)
        for name in ("pool_pads", "pads"):
            getattr(s, name)[: 2 * rank] = _numbers(name, getattr(self, name), 2 * rank, 0)
        object.__setattr__(self, "struct", s)

    @property
    def dtypes(self) -> tuple[str, str, str]:
        """The types of X, of W, and of Y, bias and residual."""
        w = self.w_dtype or self.dtype
        return self.x_dtype or self.dtype, w, self.y_dtype or ("float32" if w in library.EIGHT_BIT else w)

    @property
    def x_shape(self) -> tuple[int, ...]:
        """X's shape in its layout."""
        return self._shape(self.layout, self.c, tuple(self.spatial))

    @property
    def w_shape(self) -> tuple[int, ...]:
        """W's shape, [M, kernel..., C/group]."""
        return (self.m, *self.struct.kernel[: len(self.spatial)], self.c // self.group)

    @functools.cached_property
    def y_shape(self) -> tuple[int, ...]:
        """Y's shape in its layout; ProblemError if the sizes are no ConvAvgPool."""
        out = (ctypes.c_int64 * library.MAX_RANK)()
        library.check(library.load().convpool_output_shape(self.struct, out))
        return self._shape(self.y_layout or self.layout, self.m, tuple(out[: len(self.spatial)]))

    def _shape(self, layout: str, channels: int, spatial: tuple[int, ...]) -> tuple[int, ...]:
        return (self.n, *spatial, channels) if channels_last(layout) else (self.n, channels, *spatial)

    def why_not(self, tactic: int | str | Tactic, *, cc: int = 0, shared_bytes: int = 0) -> str | None:
        """Return None if the tactic runs this problem, else the reason.

        Args:
            tactic: An id or name of `tactics()`.
            cc: A compute capability (90 for 9.0), 0 for the current device.
            shared_bytes: Its shared memory a block, in bytes.
        """
        device = whole("cc", cc, 32), whole("shared_bytes", shared_bytes, 32)
        try:
            library.check(library.load().convpool_supports(self.struct, find_tactic(tactic).id, *device))
        except UnsupportedError as error:
            return str(error)
        return None

    def workspace_bytes(self, tactic: int | str | Tactic) -> int:
        """Bytes of device memory, aligned to 256, that a launch of the tactic needs."""
        size = ctypes.c_size_t()
        library.check(library.load().convpool_workspace_bytes(self.struct, find_tactic(tactic).id, size))
        return size.value

    def default_tactic(
        self, *, max_workspace_bytes: int = 0, cc: int = 0, multiprocessors: int = 0, shared_bytes: int = 0
    ) -> Tactic:
        """Return the tactic that the library picks, as measured or by its cost rule.

        Args:
            max_workspace_bytes: Most bytes of workspace.
            cc: A compute capability (90 for 9.0), 0 for the current device.
            multiprocessors: Its multiprocessors.
            shared_bytes: Its shared memory a block, in bytes.
        """
        chosen, most = ctypes.c_int32(), whole("max_workspace_bytes", max_workspace_bytes, 64, signed=False)
        device = [whole("device", size, 32) for size in (cc, multiprocessors, shared_bytes)]
        library.check(library.load().convpool_default_tactic(self.struct, *device, most, chosen))
        library.warn_of_tuned_file()
        return find_tactic(chosen.value)
