# SPDX-License-Identifier: Apache-2.0
"""`Engine`: a serialised TensorRT engine, its inputs and outputs, and running it; and how `convpool.check` runs one.

GPU memory and streams are pycuda's, which is imported here alone, and only when an engine runs."""

from __future__ import annotations

import atexit
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from convpool.check.inputs import Arrays, Ranges
from convpool.check.judge import precision_of
from convpool.check.session import Runner
from convpool.cuda import arrays as gpu_arrays
from convpool.errors import OptionError, TensorRTError
from convpool.ir.files import write_atomically
from convpool.tensorrt.package import load_plugin, logger, tensorrt_module

_threads = threading.local()


class _Pushed:
    """A context that is current in this thread until the thread ends: pycuda ends the process if one is left behind.

    A thread's own data, where this is kept, goes in the thread itself; the main thread's goes too late.
    """

    def __init__(self, driver: Any, device: int) -> None:
        self._driver, self._context = driver, None
        context = driver.Device(device).retain_primary_context()
        context.push()
        self._context = context
        if threading.current_thread() is threading.main_thread():
            atexit.register(self.pop)

    def pop(self) -> None:
        context, self._context = self._context, None
        if context is not None:
            with suppress(self._driver.Error):  # the caller has popped it
                context.pop()

    __del__ = pop


class PycudaMemory:
    """Buffers and a stream in the device's primary context, which TensorRT and other libraries share.

    device: number of the GPU; None: that of the context that the caller has made current, else 0.  Belongs to the thread
    that made it.  Raises TensorRTError, also if another device's context is current.
    """

    def __init__(self, device: int | None = None) -> None:
        try:
            import pycuda.driver as driver
        except ImportError as error:
            raise TensorRTError(f"pycuda: cannot be imported; got {error}; pip install pycuda") from error
        self._driver = driver
        with self._errors(f"CUDA device {device or 0}: cannot be used"):
            driver.init()
            if driver.Context.get_current() is None:
                _threads.__dict__.setdefault("pushed", []).append(_Pushed(driver, device or 0))
            elif device is not None and driver.Context.get_device() != driver.Device(device):
                raise TensorRTError(
                    f"CUDA device {device}: cannot be used; got a context of another device that is current "
                    "in this thread, expected none; use a thread for each device"
                )
            self.stream = driver.Stream()

    def allocate(self, size_bytes: int) -> Any:
        """A device buffer; `int(buffer)` is its address.  Raises TensorRTError."""
        with self._errors(f"GPU memory: {size_bytes} bytes cannot be had"):
            return self._driver.mem_alloc(max(size_bytes, 1))

    def upload(self, buffer: Any, array: np.ndarray, stream: Any) -> None:
        """Copy a C-ordered host array to a buffer, on the stream.  Raises TensorRTError."""
        if array.nbytes:
            with self._errors(f"GPU memory: {array.nbytes} bytes cannot be copied to the GPU"):
                self._driver.memcpy_htod_async(int(buffer), array.reshape(-1).view(np.uint8), self._owned(stream))

    def download(self, array: np.ndarray, buffer: Any, stream: Any) -> None:
        """Copy a buffer to a host array, on the stream.  Raises TensorRTError, also if what ran before it failed."""
        if array.nbytes:
            with self._errors(f"GPU memory: {array.nbytes} bytes cannot be copied from the GPU"):
                self._driver.memcpy_dtoh_async(array.reshape(-1).view(np.uint8), int(buffer), self._owned(stream))

    def synchronize(self, stream: Any) -> None:
        """Wait for the stream.  Raises TensorRTError if what ran on it failed."""
        with self._errors("GPU: the engine's work failed"):
            self._owned(stream).synchronize()

    def elapsed_us(self, work: Callable[[], None]) -> float:
        """Microseconds that what `work` puts on the stream takes on the GPU.  Raises TensorRTError if it failed."""
        with self._errors("GPU: the engine's work failed"):
            start, stop = self._driver.Event(), self._driver.Event()
            start.record(self.stream)
            work()
            stop.record(self.stream)
            stop.synchronize()
            return start.time_till(stop) * 1000

    @contextmanager
    def _errors(self, what: str) -> Iterator[None]:
        try:
            yield
        except self._driver.Error as error:
            raise TensorRTError(f"{what}; got {error}") from error

    def _owned(self, stream: Any) -> Any:
        return self.stream if stream is None else stream


Shape = tuple[int, ...]
_NUMPY_TYPES = {"FLOAT": "float32", "HALF": "float16", **{name.upper(): name for name in "int8 int32 int64 bool uint8".split()}}


@dataclass(frozen=True)
class TensorInfo:
    """An input or output.

    Attributes:
        shape: Its sizes, -1 where open.
        profiles: (smallest, typical, largest) shape per profile, for inputs.
        format: TensorRT's name of the order in memory.
    """

    name: str
    shape: Shape
    dtype: np.dtype
    profiles: tuple[tuple[Shape, ...], ...] = ()
    format: str = "LINEAR"


@dataclass
class _Loaded:
    """The deserialised engine with its context, and the runtime that must outlive both."""

    runtime: Any
    engine: Any
    context: Any
    memory: PycudaMemory
    inputs: dict[str, TensorInfo]
    outputs: dict[str, TensorInfo]
    buffers: dict[str, tuple[Any, int]] = field(default_factory=dict)
    """Memory and its bytes, by tensor."""
    given: dict[str, Any] = field(default_factory=dict)
    """The inputs that the next runs read, which must not go before."""
    profile: int = 0


class Engine:
    """A TensorRT engine, deserialised when first run or asked for its tensors.

    One object is for one thread.

    Args:
        plan: The serialised engine, as trtexec and other tools read it.
        trt: TensorRT's package.  Default: `import tensorrt`.
        device: Number of the GPU.  Default: that of the current context, else 0.
        built_from: Operators of the graph's nodes; none where it comes from a file.
    """

    def __init__(
        self, plan: bytes, *, trt: ModuleType | None = None, device: int | None = None, built_from: Iterable[str] = ()
    ) -> None:
        self.plan, self._trt, self._device = plan, trt, device
        self.built_from = Counter(built_from)

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, trt: ModuleType | None = None, device: int | None = None) -> Engine:
        """Read an engine from a file.

        Args:
            path: The file.
            trt: As in the class.
            device: As in the class.

        Raises:
            OptionError: The file cannot be read.
        """
        try:
            return cls(Path(path).read_bytes(), trt=trt, device=device)
        except OSError as error:
            raise OptionError(f"engine {os.fspath(path)}: cannot be read; {error.strerror or error}") from error

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the engine to a file, atomically.

        Raises:
            OutputError: The file cannot be written.
        """
        write_atomically(path, self.plan)

    @property
    def inputs(self) -> dict[str, TensorInfo]:
        """Inputs by name."""
        return dict(self._loaded.inputs)

    @property
    def outputs(self) -> dict[str, TensorInfo]:
        """Outputs by name."""
        return dict(self._loaded.outputs)

    @property
    def handle(self) -> Any:
        """TensorRT's own ICudaEngine."""
        return self._loaded.engine

    @property
    def context(self) -> Any:
        """TensorRT's own IExecutionContext, which `run` and `execute` use."""
        return self._loaded.context

    @property
    def memory(self) -> PycudaMemory:
        """The GPU memory and stream of this engine."""
        return self._loaded.memory

    def run(self, inputs: Mapping[str, Any], *, stream: Any = None, on_device: bool = False) -> dict[str, Any]:
        """Run once and return the outputs by name.

        Args:
            inputs: Host arrays, or GPU arrays (DLPack or CUDA array interface), by name.  Where the
                engine's format is not LINEAR, arrays have the shape that the engine says and their
                elements in the format's order.
            stream: A pycuda stream; default one of the engine's own, which waits for the default
                stream's work and for no other.
            on_device: Return device buffers (pycuda allocations that the next run overwrites)
                without waiting, in place of host arrays.

        Raises:
            OptionError: Names, shapes or types do not fit.
            TensorRTError: The run fails.
        """
        shapes = self.bind(inputs, stream)
        self.execute(stream)
        loaded = self._loaded
        buffers = {name: loaded.buffers[name][0] for name in shapes}
        if on_device:
            return buffers
        results = {name: np.empty(shape, loaded.outputs[name].dtype) for name, shape in shapes.items()}
        for name, array in results.items():
            loaded.memory.download(array, buffers[name], stream)
        loaded.memory.synchronize(stream)
        return results

    def bind(self, inputs: Mapping[str, Any], stream: Any = None) -> dict[str, Shape]:
        """Copy inputs to the device and set every address, without running.  Returns the outputs' shapes."""
        loaded = self._loaded
        values = {name: self._fit(info, inputs) for name, info in loaded.inputs.items()}
        for name in inputs:
            if name not in values:
                raise OptionError(f"engine: no input '{name}'; expected {', '.join(values)}")
        self._choose_profile({name: tuple(value.shape) for name, value in values.items()}, stream)
        loaded.given = values
        for name, value in values.items():
            accepted = loaded.context.set_input_shape(name, tuple(value.shape))
            self._expect(accepted, f"tensor '{name}': shape {list(value.shape)} is refused")
            if isinstance(value, np.ndarray):
                buffer = self._buffer(name, value.nbytes)
                loaded.memory.upload(buffer, value, stream)
                self._set_address(name, int(buffer))
            else:
                self._set_address(name, value.pointer)
        shapes = {}
        for name, info in loaded.outputs.items():
            shape = tuple(loaded.context.get_tensor_shape(name))
            if any(size < 0 for size in shape):
                raise TensorRTError(f"engine: output '{name}' has a shape that depends on the data: {list(shape)}")
            shapes[name] = shape
            size = int(np.prod(shape, dtype=np.int64)) * info.dtype.itemsize
            self._set_address(name, int(self._buffer(name, size)))
        return shapes

    def point(self, inputs: Mapping[str, Any]) -> None:
        """Let the next `execute` read other GPU arrays of the shapes that `bind` has set; also between captured runs."""
        given = self._loaded.given
        for name, value in inputs.items():
            if name not in given:
                raise OptionError(f"engine: no input '{name}'; expected {', '.join(given)}")
            array, bound = self._fit(self._loaded.inputs[name], inputs), tuple(given[name].shape)
            if isinstance(array, np.ndarray):
                gpu_arrays.view(name, value)  # raises ArrayError: it is the host's
            if tuple(array.shape) != bound:
                raise OptionError(f"input '{name}': shape; got {list(array.shape)}, expected {list(bound)}, as bound")
            given[name] = array
            self._set_address(name, array.pointer)

    def execute(self, stream: Any = None) -> None:
        """Run on what `bind` has set, without waiting; may be captured into a CUDA graph."""
        loaded = self._loaded
        self._expect(loaded.context.execute_async_v3(gpu_arrays.stream_handle(stream or loaded.memory.stream)), "the run failed")

    def _set_address(self, name: str, pointer: int) -> None:
        self._expect(self._loaded.context.set_tensor_address(name, pointer), f"tensor '{name}': address {pointer:#x} is refused")

    def _expect(self, done: bool, fault: str) -> None:
        """Raise TensorRTError for what TensorRT does not do: it would run on with what it had before."""
        if not done:
            raise TensorRTError(f"engine: {fault}; got {logger(self._module).explain() or 'no message'}")

    @cached_property
    def _module(self) -> ModuleType:
        return self._trt or tensorrt_module()

    @cached_property
    def _loaded(self) -> _Loaded:
        trt = self._module
        memory = PycudaMemory(self._device)
        log = logger(trt)
        missing = ""
        try:
            load_plugin(trt)
        except TensorRTError as error:
            missing = str(error)  # an engine without the plugin's layers loads all the same
        try:
            runtime = trt.Runtime(log)
        except TypeError as error:
            raise TensorRTError(f"TensorRT: no runtime; got {log.explain(error)}") from error
        engine = runtime.deserialize_cuda_engine(self.plan)
        if engine is None:
            raise TensorRTError(f"engine: cannot be loaded by TensorRT {trt.__version__}; got {log.explain(missing)}")
        context = engine.create_execution_context()
        self._expect(context is not None, "no execution context")
        inputs, outputs = _tensor_infos(trt, engine)
        return _Loaded(runtime, engine, context, memory, inputs, outputs)

    def _fit(self, info: TensorInfo, given: Mapping[str, Any]) -> Any:
        """The input as a C-ordered host array of the engine's type, or a view of a GPU array."""
        if info.name not in given:
            raise OptionError(f"engine: no value for input '{info.name}'; got {', '.join(given) or 'none'}")
        value = given[info.name]
        by_dlpack = hasattr(value, "__dlpack_device__") and not isinstance(value, np.ndarray)
        on_gpu = hasattr(value, "__cuda_array_interface__") or by_dlpack
        array: Any = gpu_arrays.view(info.name, value) if on_gpu else np.asarray(value)
        dims = tuple(array.shape)
        if len(dims) != len(info.shape) or any(s not in (-1, d) for s, d in zip(info.shape, dims, strict=True)):
            raise OptionError(f"input '{info.name}': shape; got {list(dims)}, expected {list(info.shape)}")
        if on_gpu:
            if array.dtype != info.dtype.name:
                raise OptionError(f"input '{info.name}': type; got {array.dtype}, expected {info.dtype}")
            return array
        floats = array.dtype.kind == "f" and info.dtype.kind in "fV"
        if array.dtype != info.dtype and not floats and not np.can_cast(array.dtype, info.dtype, "same_kind"):
            raise OptionError(f"input '{info.name}': type; got {array.dtype}, expected {info.dtype}")
        converted = np.asarray(array, info.dtype, order="C")
        if array.dtype.kind in "iu" and info.dtype.kind in "iu" and not np.array_equal(converted, array):
            raise OptionError(f"input '{info.name}': values; got {array.dtype} ones that {info.dtype} does not hold")
        return converted

    def _choose_profile(self, shapes: dict[str, Shape], stream: Any) -> None:
        """Make a profile current that all shapes lie in."""
        loaded = self._loaded
        for number in [loaded.profile, *range(loaded.engine.num_optimization_profiles)]:
            wrong = ""
            for name, shape in shapes.items():
                least, _, most = loaded.inputs[name].profiles[number]
                if not all(low <= size <= high for low, size, high in zip(least, shape, most, strict=True)):
                    wrong = f"input '{name}': shape; got {list(shape)}, expected {list(least)} to {list(most)}"
            if not wrong:
                if number != loaded.profile:
                    handle = gpu_arrays.stream_handle(stream or loaded.memory.stream)
                    loaded.context.set_optimization_profile_async(number, handle)
                    loaded.memory.synchronize(stream)
                    loaded.profile = number
                return
        raise OptionError(wrong)

    def _buffer(self, name: str, size_bytes: int) -> Any:
        loaded = self._loaded
        if name not in loaded.buffers or loaded.buffers[name][1] < size_bytes:
            loaded.buffers[name] = loaded.memory.allocate(size_bytes), size_bytes
        return loaded.buffers[name][0]


def _tensor_infos(trt: ModuleType, engine: Any) -> tuple[dict[str, TensorInfo], dict[str, TensorInfo]]:
    """The engine's inputs and outputs by name.  Raises TensorRTError for one that is no plain array in GPU memory."""
    inputs: dict[str, TensorInfo] = {}
    outputs: dict[str, TensorInfo] = {}
    for index in range(engine.num_io_tensors):
        name = engine.get_tensor_name(index)
        _check_memory(trt, engine, name)
        shape, dtype = tuple(engine.get_tensor_shape(name)), _numpy_type(engine, name)
        order = str(engine.get_tensor_format(name)).rpartition(".")[2]
        is_input = engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT
        numbers = range(engine.num_optimization_profiles if is_input else 0)
        profiles = [tuple(map(tuple, engine.get_tensor_profile_shape(name, number))) for number in numbers]
        (inputs if is_input else outputs)[name] = TensorInfo(name, shape, dtype, tuple(profiles), order)
    return inputs, outputs


def _check_memory(trt: ModuleType, engine: Any, name: str) -> None:
    """Raise TensorRTError for a tensor that is no plain array in GPU memory: TensorRT would read or write past it."""
    if engine.get_tensor_location(name) != trt.TensorLocation.DEVICE:
        raise TensorRTError(f"engine: tensor '{name}': got one in host memory (its values are a shape), expected GPU memory")
    dims, axis = tuple(engine.get_tensor_shape(name)), engine.get_tensor_vectorized_dim(name)
    chunk = engine.get_tensor_components_per_element(name) if axis >= 0 else 1
    if chunk > 1 and (dims[axis] < 0 or dims[axis] % chunk):
        raise TensorRTError(
            f"engine: tensor '{name}': format {engine.get_tensor_format_desc(name)}; got shape {list(dims)}, "
            f"which it pads, expected a multiple of {chunk} in dimension {axis}"
        )


def _numpy_type(engine: Any, name: str) -> np.dtype:
    """Return a tensor's numpy type, by its type's name: TensorRT's own nptype has no bfloat16."""
    kind = str(engine.get_tensor_dtype(name)).rpartition(".")[2]
    if kind == "BF16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    if kind not in _NUMPY_TYPES:
        raise TensorRTError(f"engine: tensor '{name}': type; got {kind}, expected {', '.join(_NUMPY_TYPES)} or BF16")
    return np.dtype(_NUMPY_TYPES[kind])


ENGINE_SUFFIXES = (".engine", ".plan", ".trt")


class EngineRunner(Runner):
    """An engine in TensorRT, of the precision of its inputs and outputs.  Raises OptionError for formats other than LINEAR."""

    runtime = "TensorRT"

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.input_names, self.output_names = list(engine.inputs), list(engine.outputs)
        self.input_types = {name: info.dtype for name, info in engine.inputs.items()}
        infos = (*engine.inputs.values(), *engine.outputs.values())
        self.precision = precision_of(info.dtype for info in infos)
        for info in infos:
            if info.format != "LINEAR":
                raise OptionError(f"engine: tensor '{info.name}'; got format {info.format}, expected LINEAR to compare")

    def run(self, arrays: Arrays) -> dict[str, np.ndarray]:
        """All outputs by name.  Raises OptionError or TensorRTError."""
        return self._engine.run(arrays)

    def ranges(self) -> Ranges:
        """For every input the shapes of the first profile."""
        return {name: info.profiles[0] for name, info in self._engine.inputs.items()}


def is_engine(path: str) -> bool:
    """Return True if a file is an engine, by its suffix."""
    return Path(path).suffix.lower() in ENGINE_SUFFIXES
