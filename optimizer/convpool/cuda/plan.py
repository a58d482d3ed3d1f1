# SPDX-License-Identifier: Apache-2.0
"""Plans: a problem worked out once for one tactic on one device, and launched many times.

    plan = Plan(Problem(n=8, c=64, m=64, spatial=(32, 32), kernel_shape=3, pool_kernel_shape=2, strides=2, pool_pads=1))
    plan.launch(x, w, y, workspace=space)  # arrays, or addresses as numbers

Making a plan needs a GPU; it checks the problem, chooses the tactic and loads its kernels.  A launch does none of that.
"""

import ctypes
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from convpool.cuda import arrays, library
from convpool.cuda.problem import Problem, Tactic, find_tactic, whole
from convpool.errors import ArrayError

_HOW_CHOSEN = {0: "named", 1: "measured", 2: "rule"}
OPERANDS = ("x", "w", "b", "residual", "scale", "shift", "w_scale", "y")
_WRITTEN = ("y", "workspace", "prepared")


def shapes_and_types(p: Problem) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and type of every tensor, whether the problem has it or not."""
    x, w, y = p.dtypes
    factors = (p.n, p.c) if p.prologue_affine == 2 else (p.c,)
    return {
        "x": (p.x_shape, x),
        "w": (p.w_shape, w),
        "b": ((p.m,), y),
        "residual": (p.y_shape, y),
        "scale": (factors, w),
        "shift": (factors, w),
        "w_scale": ((p.m,), "float32"),
        "y": (p.y_shape, y),
    }


class _Accepted(NamedTuple):
    """The array that passed last under a name: another of its type and kind passes too."""

    type: type
    address: Callable[[Any, arrays.Kind], int | None]
    kind: arrays.Kind
    nbytes: int


class Plan:
    """A problem planned for the current device.

    Several threads may launch a plan at once.  It keeps no device memory, so it may go while its
    kernels still run.

    Args:
        problem: The problem.
        tactic: An id or name of `tactics()`; None lets the library choose the fastest that needs at
            most max_workspace_bytes.
        max_workspace_bytes: That bound; None: any.
        unaligned: For a tactic that the library chooses: addresses are multiples of their elements'
            size only.  Else they are multiples of 16 bytes wherever the tactic reads or writes
            vectors.

    Attributes:
        problem: The problem.
        tactic: The tactic chosen.
        how_chosen: "named", "measured" (fastest in a measurement of this problem on such a device)
            or "rule" (by the cost rule).
        expected_us: Microseconds that the cost rule expects, whose constants were fitted on an
            H200.
        workspace_bytes: Bytes of device memory that a launch needs.
        prepared_bytes: Its first part, which transformed weights take.
        device: The ordinal of the CUDA device.
        y_shape: The shape of Y in its layout.
        alignments: Bytes that an operand's address must be a multiple of, by name.

    Raises:
        ProblemError: No ConvAvgPool, or a tactic that needs more workspace.
        UnsupportedError: The tactic does not run this problem here.
        LibraryError: No libconvpool.so.
        CudaError: No GPU.
    """

    def __init__(
        self,
        problem: Problem,
        *,
        tactic: int | str | Tactic | None = None,
        max_workspace_bytes: int | None = None,
        unaligned: bool = False,
    ) -> None:
        lib = library.load()
        handle = ctypes.c_void_p()
        chosen = 0 if tactic is None else find_tactic(tactic).id
        bound = library.ANY_BYTES if max_workspace_bytes is None else max_workspace_bytes
        most = whole("max_workspace_bytes", bound, 64, signed=False)
        library.check(lib.convpool_plan_create(problem.struct, chosen, most, library.PLAN_UNALIGNED if unaligned else 0, handle))
        if chosen == 0:
            library.warn_of_tuned_file()
        self._handle, self._launch = handle.value, lib.convpool_plan_launch
        weakref.finalize(self, lib.convpool_plan_destroy, self._handle)  # of host memory: no device and no context matters
        info = library.PlanStruct(struct_size=ctypes.sizeof(library.PlanStruct))
        library.check(lib.convpool_plan_info(self._handle, info))
        self.problem = problem
        self.tactic = find_tactic(info.tactic)
        self.how_chosen = _HOW_CHOSEN[info.chosen_by]
        self.expected_us: float = info.expected_us
        self.workspace_bytes: int = info.workspace_bytes
        self.prepared_bytes: int = info.prepared_bytes
        self.device: int = info.device
        self.y_shape = problem.y_shape
        self._expected = shapes_and_types(problem)
        self._accepted: dict[str, _Accepted] = {}
        found = {name: getattr(info, f"{name}_alignment") for name in self._expected}
        self.alignments: dict[str, int] = {name: size for name, size in found.items() if size}

    def __repr__(self) -> str:
        costs = f"{self.expected_us:.1f} us, {self.workspace_bytes} bytes of workspace"
        return f"Plan({self.tactic.name}, {self.how_chosen}, {costs})"

    def launch(
        self,
        x: Any,
        w: Any,
        y: Any,
        *,
        b: Any = None,
        residual: Any = None,
        scale: Any = None,
        shift: Any = None,
        w_scale: Any = None,
        workspace: Any = None,
        prepared: Any = None,
        weights_prepared: bool = False,
        stream: Any = None,
    ) -> None:
        """Queue the work on a stream of the plan's device, and return.

        Every tensor is a GPU array, whose type, shape, order and device are checked, or the address
        of one as a number, which is not.

        Args:
            x: The input.
            w: The weights.
            y: The result, which shares no memory with another.
            b: The bias.
            residual: The addend of Y's shape.
            scale: The prologue's factor by channel, or by image and channel.
            shift: The prologue's summand, as scale.
            w_scale: Factors of 8-bit sums by output channel.
            workspace: An array of workspace_bytes, or the address of as many.
            prepared: Likewise of prepared_bytes, for the transformed weights; with it the workspace
                is that much smaller.
            weights_prepared: True says that w is what it was in an earlier launch, and that
                prepared, or without it the workspace, still holds what that launch left there; both
                may be read before work queued earlier is done.
            stream: The stream.  Default: the default stream.

        Raises:
            ArrayError: An array does not fit.
            ProblemError: An address or the bytes of workspace or prepared do not fit.
            CudaError: The launch failed.
        """
        addresses = [
            array if type(array) is int else 0 if array is None else self._read(name, array)[0]
            for name, array in zip(OPERANDS, (x, w, b, residual, scale, shift, w_scale, y), strict=True)
        ]
        space, space_bytes = self._memory("workspace", workspace, self.workspace_bytes)
        kept, kept_bytes = self._memory("prepared", prepared, self.prepared_bytes)
        flags = library.WEIGHTS_PREPARED if weights_prepared else 0
        self.launch_raw(addresses, space, space_bytes, arrays.stream_handle(stream), flags, kept, kept_bytes)

    def launch_raw(
        self,
        operands: Sequence[int],
        workspace: int,
        workspace_bytes: int,
        stream: int,
        flags: int = 0,
        prepared: int = 0,
        prepared_bytes: int = 0,
    ) -> None:
        """`launch` of the addresses of x, w, b, residual, scale, shift, w_scale and y, 0 for what the problem does not have."""
        x, w, b, residual, scale, shift, w_scale, y = operands
        memory = workspace, workspace_bytes, scale, shift, prepared, prepared_bytes  # as they stand in convpool_tensors
        tensors = library.PACK_TENSORS(library.TENSORS_BYTES, flags, x, w, b, residual, y, *memory, w_scale)
        library.check(self._launch(self._handle, tensors, stream))

    def _read(self, name: str, array: Any) -> tuple[int, int]:
        """Address and bytes of an array that may have this name."""
        accepted = self._accepted.get(name)
        if accepted is not None and type(array) is accepted.type:
            address = accepted.address(array, accepted.kind)
            if address is not None:
                return address, accepted.nbytes
        reading = arrays.read(name, array)
        pointer, kind, _, read_only = reading
        shape, dtype = self._expected.get(name, (kind[0], arrays.dtype_name(kind[1])))
        if kind[0] != shape:
            raise ArrayError(f"{name}: wrong shape; got {tuple(kind[0])}, expected {shape}")
        if arrays.dtype_name(kind[1]) != dtype:
            raise ArrayError(f"{name}: wrong type; got {arrays.dtype_name(kind[1])}, expected {dtype}")
        if kind[2] not in (None, self.device):
            raise ArrayError(f"{name}: on another device; got device {kind[2]}, expected {self.device}, that of the plan")
        if read_only and name in _WRITTEN:
            raise ArrayError(f"{name}: read-only; got an array that must not be written, expected one that may")
        nbytes, address_of = arrays.nbytes(reading), arrays.address_by(array)
        if address_of is not None:
            self._accepted[name] = _Accepted(type(array), address_of, kind, nbytes)
        return pointer, nbytes

    def _memory(self, name: str, array: Any, needed: int) -> tuple[int, int]:
        """Address and bytes; of a number as many as the plan needs."""
        if array is None:
            return 0, 0
        return (array, needed) if type(array) is int else self._read(name, array)
