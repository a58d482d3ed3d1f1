# SPDX-License-Identifier: Apache-2.0
"""Inputs to run a model on: given ones, or seeded random ones in the shapes that the model leaves open.

`InputMaker.overhang` finds poolings whose window is larger than their map.  By ONNX they give nothing; onnxruntime clips the
window and gives numbers, which no exact rewrite does."""

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
from onnx import ModelProto, ValueInfoProto, helper

from convpool.errors import ConvpoolError, ModelError, OptionError
from convpool.ir.index import Dim
from convpool.ir.inference import infer_shapes
from convpool.ir.model import at_shapes, check_shape, dims_of, feeds, fit_shapes
from convpool.ir.protos import graphs_within, known_attributes, model_nodes, named, ops_of

Arrays = dict[str, np.ndarray]
Run = Callable[[Arrays], list[object]]
"""Gives what a model makes of inputs by name.  Raises ModelError where it takes none such."""
Ranges = Mapping[str, Sequence[Sequence[int]]]
"""The least, the typical and the largest shape of inputs, by name."""
MAX_INPUT_BYTES = 2**30
"""Largest random input, at 8 bytes an element: a damaged shape must not take the memory of the machine."""
OPEN_SIZES = (64, 224, 32, 128, 16, 8, 1, 256, 512)
"""Tried in turn for open dimensions other than the first until the model runs.

Small ones come late: where a pooling window does not fit, onnxruntime rounds its negative size up and gives numbers all
the same, so that the original seems to run and nothing exact can agree with it.
"""
OTHER_SIZES = ((3, 1), (0, 1), (3, 32), (3, 0))
"""(batch, step) by which sizes change for a second run, tried in turn.

batch 0: as it was.  step: 0 as they were, 1 to odd sizes and another one for each axis, or from odd ones to multiples of 32, by
which an If may decide; 32 for networks that halve five times.
Never smaller, so that the windows of poolings fit as before, unless an engine takes no larger ones.
"""
SCALES = (1.0, 2.0**-4, 2.0**-8, 2.0**-12)
"""Tried in turn for random floats until every value given is finite.  Not smaller: biases would hide everything else."""
HARDER = (1, 4, 16, 64, 256, 2.0**-4)
"""Random floats are multiplied by these where no output had a value: something behind a threshold may then."""
NOISE = 0.5
"""Relative change of given floats that an output which depends on them does not overlook."""


def load_arrays(data: Mapping[str, np.ndarray] | str | os.PathLike[str] | None) -> Arrays | None:
    """Arrays by input name, from a mapping or a .npz file.  Raises OptionError."""
    if data is None or isinstance(data, Mapping):
        return None if data is None else dict(data)
    try:
        with np.load(data, allow_pickle=False) as file:
            if not hasattr(file, "files"):
                raise ValueError("one array without a name")
            return {name: file[name] for name in file.files}
    except (OSError, ValueError, AttributeError, TypeError) as error:
        reason = getattr(error, "strerror", None) or "not a .npz file of named arrays"
        raise OptionError(f"data {str(data)!r}: {reason}") from error


def shapes_of(arrays: Arrays) -> dict[str, list[int]]:
    return {name: list(array.shape) for name, array in arrays.items()}


@dataclass(frozen=True)
class CheckInputs:
    """The inputs of a comparison or a timing, and how it is judged.

    check: number of random input sets.  arrays: inputs in place of these, by name.  shapes: of inputs that the model leaves open.
    seed: of random numbers.  rtol, atol: in place of the default ones.  progress: called with (number, count, what is done).
    """

    check: int
    arrays: Arrays | None
    shapes: Mapping[str, Sequence[int]]
    seed: int
    rtol: float | None = None
    atol: float | None = None
    progress: Callable[[int, int, str], None] | None = None

    def maker(self, model: ModelProto) -> "InputMaker":
        """A maker of inputs for a model.  Raises OptionError where what is given does not fit them."""
        return InputMaker(model, self.arrays, self.shapes, self.seed)


class InputMaker:
    """Makes sets of inputs for one model; the same seed and number give the same set."""

    def __init__(self, model: ModelProto, data: Arrays | None, shapes: Mapping[str, Sequence[int]], seed: int) -> None:
        self._counts = {name for node in ops_of(model_nodes(model), "Loop") for name in node.input[:2]}
        """Inputs, among others, that say whether and how often a Loop runs its body."""
        self._model, self._feeds, self._seed = model, feeds(model), seed
        self._data = None if data is None else _fit_data(self._feeds, data)
        self._shapes = fit_shapes(self._feeds, shapes)
        self._open_size: int | None = None
        self._scale: float | None = None
        self._dims = {value.name: dims_of(value) for value in self._feeds}
        shapes_of_all = list(self._dims.values())
        sides = {dim for dims in shapes_of_all for axis, dim in enumerate(dims) if axis > 1 or dims.count(dim) > 1}
        self._shared = {dims[0] for dims in shapes_of_all if dims and isinstance(dims[0], str)} & sides
        """Names of first sizes that are no batch's alone: of a side of a map too, or of another size of the same input."""
        self._named = self._named_sizes()

    def runnable(self, number: int, run: Run) -> tuple[Arrays, list[object]]:
        """Set `number` of inputs, and what `run` gives for it.  Random floats are made smaller where that makes more of the
        outputs finite, by the same of SCALES from then on."""
        if self._data is not None:
            return self._data, run(self._data)
        best: tuple[float, float, Arrays, list[object]] | None = None
        for scale in SCALES if self._scale is None else (self._scale,):
            arrays, outputs = self._sized(number, scale, run)
            finite = sum(map(_finite_share, outputs))
            if best is None or finite > best[0]:
                best = finite, scale, arrays, outputs
            if finite == len(outputs):
                break
        assert best is not None
        _, self._scale, arrays, outputs = best
        return arrays, outputs

    def elsewhere(
        self, arrays: Arrays, other: ModelProto | None, run: Run, ranges: Sequence[Ranges] = ()
    ) -> tuple[Arrays, list[object]] | None:
        """Inputs of other sizes than `arrays`, and what `run` gives for them; None where it takes none.  Sizes change that the
        model and `other` leave open, within all `ranges`.  Values are drawn from those of `arrays`; an input of the same shape
        keeps its values."""
        dims = {name: list(own) for name, own in self._dims.items()}
        for value in feeds(other) if other is not None else ():
            for axis, dim in enumerate(dims_of(value)):
                if isinstance(dim, int) and axis < len(dims.get(value.name, ())):
                    dims[value.name][axis] = dim
        for batch, step in OTHER_SIZES:
            shapes = self._other_shapes(arrays, dims, batch, step)
            for bounds in ranges:
                shapes |= {name: _within(bounds[name], shapes[name], arrays[name].shape) for name in bounds}
            changed = [name for name, array in arrays.items() if array.shape != shapes[name] and array.size]
            if not changed or any(math.prod(shapes[name]) * 8 > MAX_INPUT_BYTES for name in changed):
                continue
            rng = np.random.default_rng(self._seed)
            with suppress(ConvpoolError, MemoryError):
                drawn = {name: arrays[name].reshape(-1)[rng.integers(arrays[name].size, size=shapes[name])] for name in changed}
                return {**arrays, **drawn}, run({**arrays, **drawn})
        return None

    def sets(
        self, count: int, run: Run, compared: Callable[[], bool], progress: Callable[[int, int, str], None] | None = None
    ) -> Iterator[tuple[Arrays, list[object], str]]:
        """The sets of inputs, what `run` gives, and a remark; then more, with other floats, until something is `compared`."""
        count = count if self._data is None else 1
        for number in range(count):
            if progress is not None:
                progress(number + 1, count, "checking")
            arrays, outputs = self.runnable(number, run)
            yield arrays, outputs, ""
        for step, factor in enumerate(HARDER if self._data is None and arrays else ()):
            if compared():
                return
            try:
                arrays, outputs = self.runnable(count + step, run)
                if factor != 1:
                    arrays = {name: _times(array, factor) for name, array in arrays.items()}
                    outputs = run(arrays)
            except ModelError:
                continue
            yield arrays, outputs, f"random inputs {factor:g} times as large, since outputs were empty before"

    def outputs_of_others(self, number: int, run: Run) -> list[object] | None:
        """Run on inputs unlike the sets before `number` and the data; None where `run` takes none."""
        try:
            if self._data is None:
                return self.runnable(number, run)[1]
            others = noisy(self._data, NOISE, np.random.default_rng(number))
            return None if all(np.array_equal(array, others[name]) for name, array in self._data.items()) else run(others)
        except ModelError:
            return None

    def _other_shapes(
        self, arrays: Arrays, dims: Mapping[str, Sequence[Dim]], batch: int, step: int
    ) -> dict[str, tuple[int, ...]]:
        """Shapes with other sizes where `dims` has none, one for each name, by a row of OTHER_SIZES."""
        sizes: dict[object, int] = {}
        shapes, sides = {}, 0
        for name, array in arrays.items():
            shape = list(array.shape)
            for axis, dim in enumerate(dims[name]):
                if isinstance(dim, int):
                    continue
                key = dim or (name, axis)
                if key not in sizes and axis == 0 and dim not in self._shared:
                    sizes[key] = batch + 2 if batch == shape[0] else batch or shape[0]
                elif key not in sizes:
                    flips = shape[axis] % 2 and step % 2
                    odd = shape[axis] + step * (2 * sides + 1) | step % 2
                    sizes[key] = (shape[axis] // 32 + sides + 1) * 32 if flips else odd
                    sides += 1
                shape[axis] = sizes[key]
            shapes[name] = tuple(shape)
        return shapes

    @property
    def scale(self) -> float:
        """The factor of random floats."""
        return 1.0 if self._scale is None else self._scale

    def _sized(self, number: int, scale: float, run: Run) -> tuple[Arrays, list[object]]:
        """Do `runnable` for one scale, at the first of OPEN_SIZES that runs, from then on; else raise its first ModelError."""
        sizes = self._open_sizes() if self._open_size is None else [self._open_size]
        failure: ModelError | None = None
        for size in sizes:
            arrays = self._random(number, size, scale)
            try:
                outputs = run(arrays)
            except ModelError as error:
                failure = failure or error
                if not self._has_open_sizes():
                    raise
                continue
            if any(isinstance(out, np.ndarray) and out.size == 0 for out in outputs) and size != sizes[-1]:
                continue  # an empty result proves nothing; larger sizes may give one
            self._open_size = size
            return arrays, outputs
        raise ModelError(f"{failure}; give the input shapes")

    def _open_sizes(self) -> list[int]:
        """OPEN_SIZES, those last at which a window is larger than its map."""

        def overhangs(size: int) -> bool:
            return bool(self.overhang({name: self._shape(name, size) for name in self._dims}))

        if not self._has_open_sizes() or not overhangs(OPEN_SIZES[0]):
            return list(OPEN_SIZES)  # the others are hardly needed
        return sorted(OPEN_SIZES, key=overhangs)

    def overhang(self, shapes: Mapping[str, Sequence[int]]) -> str:
        """The first average whose window is larger than its map for inputs of these shapes, in words; "" where none is known."""
        if not ops_of(model_nodes(self._model), "AveragePool"):
            return ""
        inferred = infer_shapes(at_shapes(self._model, shapes))
        for graph in graphs_within(inferred.graph) if inferred is not None else ():
            shapes_of_all = {value.name: value.type.tensor_type.shape.dim for value in (*graph.input, *graph.value_info)}
            for node in ops_of(graph.node, "AveragePool"):
                values, sizes = known_attributes(node) or {}, [dim.dim_value for dim in shapes_of_all.get(node.input[0], ())[2:]]
                kernel = values.get("kernel_shape", [])
                if len(sizes) != len(kernel) or values.get("auto_pad", b"").startswith(b"SAME"):
                    continue
                pads, dilations = values.get("pads") or [0] * 2 * len(kernel), values.get("dilations") or [1] * len(kernel)
                for k, d, size, before, after in zip(kernel, dilations, sizes, pads, pads[len(kernel) :], strict=False):
                    if size and (k - 1) * d + 1 > size + before + after:
                        return f"{named(node)}: window; got {list(kernel)} on a map of {sizes}; give larger inputs"
        return ""

    def _has_open_sizes(self) -> bool:
        unknown = [dims for name, dims in self._dims.items() if name not in self._shapes]
        return any(not isinstance(dim, int) for dims in unknown for dim in dims[1:])

    def _named_sizes(self) -> dict[str, int]:
        """Sizes of symbolic dimensions: as given for another input, or 1 for a name that is some input's first axis alone."""
        sizes: dict[str, int] = {}
        for name, dims in self._dims.items():
            for axis, dim in enumerate(dims):
                if isinstance(dim, str) and name in self._shapes:
                    sizes[dim] = self._shapes[name][axis]
                elif isinstance(dim, str) and axis == 0 and dim not in self._shared:
                    sizes.setdefault(dim, 1)
        return sizes

    def _shape(self, name: str, open_size: int) -> list[int]:
        dims = self._shapes.get(name) or self._dims[name]
        named = {**dict.fromkeys(self._shared, max(open_size // 4, 1)), **self._named}  # batches of the largest maps take long
        return [dim if isinstance(dim, int) else named.get(dim or "", open_size if axis else 1) for axis, dim in enumerate(dims)]

    def _random(self, number: int, open_size: int, scale: float) -> Arrays:
        rng = np.random.default_rng([self._seed, number])
        arrays = {}
        for value in self._feeds:
            dims = self._shape(value.name, open_size)
            dtype = _dtype(value)
            if (size := math.prod(dims) * max(dtype.itemsize, 8)) > MAX_INPUT_BYTES:
                got = f"shape {dims}; got {size} bytes"
                raise ModelError(f"input '{value.name}': {got}, expected at most {MAX_INPUT_BYTES} to check")
            array = random_array(rng, dtype, dims)
            array = np.full_like(array, 2) if value.name in self._counts and array.dtype.kind in "bi" else array
            arrays[value.name] = array if scale == 1 else _times(array, scale)
        return arrays


def typed_inputs(types: Mapping[str, np.dtype], shapes: Mapping[str, Sequence[int]]) -> ModelProto:
    """A model that takes arrays of these types and numbers of axes, of any sizes, and gives nothing.  Raises OptionError."""
    try:
        kinds = {name: helper.np_dtype_to_tensor_dtype(dtype) for name, dtype in types.items()}
    except ValueError as error:
        raise OptionError(f"data: {error}") from error
    inputs = [helper.make_tensor_value_info(name, kind, [None] * len(shapes[name])) for name, kind in kinds.items()]
    return helper.make_model(helper.make_graph([], "inputs", inputs, []))


def _within(bounds: Sequence[Sequence[int]], shape: Sequence[int], before: Sequence[int]) -> tuple[int, ...]:
    """A shape within bounds; where these have no larger size than before, the least one."""
    sizes = zip(bounds[0], bounds[2], shape, before, strict=True)
    return tuple(old if size == old else min(max(size, least), most) if old < most else least for least, most, size, old in sizes)


def random_array(rng: np.random.Generator, dtype: np.dtype, shape: Sequence[int]) -> np.ndarray:
    """Normal floats; integers and truth values from {0, 1}, which every index and flag allows; strings "a"."""
    if dtype == np.dtype(object) or dtype.kind in "SU":
        return np.full(shape, "a", dtype=object)
    if dtype.kind in "iub":
        return rng.integers(0, 2, shape).astype(dtype)
    if dtype.kind == "c":
        return (rng.standard_normal(shape) + 1j * rng.standard_normal(shape)).astype(dtype)
    return rng.standard_normal(shape).astype(dtype)


def _times(array: np.ndarray, factor: float) -> np.ndarray:
    """An array of floats times a factor, also one without axes, of which numpy makes a number; any other as it is."""
    return array if array.dtype.kind in "OSUiub" else np.asarray(array * array.dtype.type(factor))


def noisy(arrays: Arrays, share: float, rng: np.random.Generator) -> Arrays:
    """The arrays with floats that differ by up to a share of theirs."""
    changed = {}
    for name, array in arrays.items():
        if array.dtype.kind == "f" or array.dtype.name == "bfloat16":
            wide = array if array.dtype == np.float64 else array.astype(np.float32)
            array = np.asarray(wide * (1 + share * rng.uniform(-1, 1, array.shape)).astype(wide.dtype))
        changed[name] = array
    return changed


def _finite_share(output: object) -> float:
    """The share of an output's values that are neither NaN nor infinite; 1 for one without numbers."""
    if isinstance(output, list):
        return sum(map(_finite_share, output)) / len(output) if output else 1.0
    if not isinstance(output, np.ndarray) or output.dtype.kind in "OSUiub" or output.size == 0:
        return 1.0
    return float(np.isfinite(output if output.dtype.kind in "fc" else output.astype(np.float32)).mean())


def _dtype(value: ValueInfoProto) -> np.dtype:
    if not value.type.HasField("tensor_type"):
        raise ModelError(f"input '{value.name}': not a tensor; give it as data or switch the check off")
    if not value.type.tensor_type.elem_type:
        raise ModelError(f"input '{value.name}': no element type")
    return helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)


def _fit_data(values: list[ValueInfoProto], data: Arrays) -> Arrays:
    wanted = {value.name: value for value in values}
    for name in data:
        if name not in wanted:
            raise OptionError(f"data: array '{name}'; expected inputs {', '.join(wanted) or 'none'}")
    arrays = {}
    for name, value in wanted.items():
        if name not in data:
            raise OptionError(f"data: no array for input '{name}'; got {', '.join(data) or 'none'}")
        dtype = _dtype(value)
        array = np.asarray(data[name])
        if array.dtype != dtype and not (array.dtype.kind == "f" and (dtype.kind == "f" or dtype.name == "bfloat16")):
            raise OptionError(f"data: input '{name}'; got type {array.dtype}, expected {dtype}")
        check_shape(value, array.shape, "data")
        arrays[name] = array.astype(dtype, copy=False)
    return arrays
