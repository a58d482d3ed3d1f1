# SPDX-License-Identifier: Apache-2.0
"""TensorRT's builder: its network, its config, its timing cache, its progress, and the build itself, which Ctrl-C stops.

| precision | TensorRT 8.6, 9 (weakly typed) | TensorRT 10, 11 (strongly typed) |
|---|---|---|
| fp32 | no TF32 | no TF32 |
| tf32 | the TF32 flag | the TF32 flag |
| fp16, bf16 | the type's flag: TensorRT chooses per layer | the model's tensors cast, inputs and outputs float32 |

In fp16 and bf16 the TF32 flag stays on for what is left in float32, as it is by default in TensorRT and trtexec.  With the
plugin, TensorRT 8.6 and 9 are told to keep sums over whole maps and small matrix products in float32 there.

The plugin sees neither the TF32 flag nor which weights never change, so attributes of its nodes say so:

- allow_tf32 = 1 with "tf32", accumulation as the options say, else as the model has it (`prepare.for_parser`);
- constant_weights = 1 where the weights are initializers, unless the config lets the engine be refitted
  (`prepare.set_constant_weights`).
"""

import ctypes
import math
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from onnx import ModelProto

from convpool import interrupt
from convpool.errors import ModelError, OptionError, TensorRTError
from convpool.ir.files import serialize, write_atomically
from convpool.tensorrt import prepare
from convpool.tensorrt.build_options import BuildOptions, Profile, Progress
from convpool.tensorrt.engine import Engine
from convpool.tensorrt.package import is_weakly_typed, load_plugin, logger, parser_major

MAX_HEAD_MACS = 2**28
"""Most multiply-adds of a matrix product that stays in float32 in half precision: a classifier's, not VGG's first."""


def build_prepared(trt: ModuleType, model: ModelProto, options: BuildOptions) -> Engine:
    """Build an engine of what `prepare.lowered` gave, which changes.  Raises a ConvpoolError with TensorRT's own messages."""
    cache_path = options.timing_cache_path
    if options.plugin and prepare.has_plugin_nodes(model):
        load_plugin(trt)
    log = logger(trt)
    log.explain()
    model = prepare.for_parser(
        model, parser_major(trt), plugin=options.plugin, allow_tf32=options.precision == "tf32", accumulation=options.accumulation
    )
    nodes = [node.op_type for node in model.graph.node if node.op_type != "Constant"]
    if options.in_half_precision and not is_weakly_typed(trt):
        prepare.cast_floats(model, prepare.ELEMENT_TYPES[options.precision])
    elif options.precision == "fp16":
        prepare.half_weights(model, prepare.ELEMENT_TYPES["fp16"])
    try:
        builder = trt.Builder(log)
    except TypeError as error:
        raise TensorRTError(f"TensorRT: no builder; got {log.explain(error)}") from error
    prepare.set_constant_weights(model, options.plugin)
    network, parser = _parse(trt, builder, model)
    config = builder.create_builder_config()
    _configure(trt, config, options)
    monitor = monitor_of(trt, config, options.progress)
    add_profiles(builder, config, network, options.profile_list)
    cache = _timing_cache(config, cache_path)
    if options.configure:
        options.configure(config)
    names = ("REFIT", "REFIT_IDENTICAL", "REFIT_INDIVIDUAL", "STRIP_PLAN")  # by which weights may change later
    if any(hasattr(trt.BuilderFlag, name) and config.get_flag(getattr(trt.BuilderFlag, name)) for name in names):
        prepare.set_constant_weights(model, False)
        network, parser = _parse(trt, builder, model)
    if prepare.has_plugin_nodes(model) and options.plugin and is_weakly_typed(trt) and options.in_half_precision:
        keep_heads_in_float(trt, network, config)
    if options.configure_network:
        options.configure_network(network)
    with interruptible(monitor):
        plan = builder.build_serialized_network(network, config)
    if monitor is not None and monitor.error is not None:
        raise monitor.error
    if plan is None:
        raise TensorRTError(f"TensorRT {trt.__version__} cannot build the engine; got {log.explain() or 'no message'}")
    if cache_path is not None and cache is not None:
        write_atomically(cache_path, bytes(config.get_timing_cache().serialize()), "timing cache ")
    return Engine(bytes(plan), trt=trt, built_from=nodes)


def _parse(trt: ModuleType, builder: Any, model: ModelProto) -> tuple[Any, Any]:
    """The network of a model, and its parser, which has the weights and must outlive it.  Raises ModelError, as TensorRT says."""
    log = logger(trt)
    flags = trt.NetworkDefinitionCreationFlag
    typed = flags.EXPLICIT_BATCH if is_weakly_typed(trt) else getattr(flags, "STRONGLY_TYPED", None)
    network = builder.create_network(0 if typed is None else 1 << int(typed))
    parser = trt.OnnxParser(network, log)
    if not parser.parse(serialize(model)):
        errors = "; ".join(parser.get_error(i).desc() for i in range(parser.num_errors))
        raise ModelError(f"TensorRT {trt.__version__} cannot read the model; got {log.explain(errors)}")
    return network, parser


def keep_heads_in_float(trt: ModuleType, network: Any, config: Any) -> None:
    """Compute sums over whole maps, and small matrix products of vectors, in float32.

    They take next to no time.  TensorRT 8.6 sometimes adds them up in half precision, and most of an engine's error comes
    from there then.
    """
    kinds = (trt.LayerType.REDUCE, trt.LayerType.MATRIX_MULTIPLY)
    for layer in (network.get_layer(index) for index in range(network.num_layers)):
        if layer.type not in kinds or layer.get_output(0).dtype not in (trt.float32, trt.float16):
            continue
        product = layer.type == trt.LayerType.MATRIX_MULTIPLY
        output, *inputs = map(_shape, (layer.get_output(0), *(layer.get_input(i) for i in range(2 if product else 1))))
        if output is None or None in inputs or any(dim != 1 for dim in output[2:]):
            continue
        # Each of a product's three sizes stands in two of the three shapes; an open one, -1, counts as 1.
        sizes = [size for shape in (output, *inputs) for size in shape or ()]
        if product and math.isqrt(abs(math.prod(sizes))) > MAX_HEAD_MACS:
            continue
        layer.precision = trt.float32
        config.set_flag(trt.BuilderFlag.PREFER_PRECISION_CONSTRAINTS)


def _shape(tensor: Any) -> tuple[int, ...] | None:
    """Sizes, -1 where they are open; None where even the rank is."""
    try:
        return tuple(tensor.shape)
    except ValueError:
        return None


def add_profiles(builder: Any, config: Any, network: Any, profiles: Sequence[Profile]) -> None:
    """Give the config a profile of the network's open inputs for each one given.

    Profiles may name inputs that are not open: their shapes are checked too, since a shape that an input cannot have is a
    mistake.  Raises OptionError.
    """
    inputs = {network.get_input(i).name: tuple(network.get_input(i).shape) for i in range(network.num_inputs)}
    open_inputs = [name for name, shape in inputs.items() if -1 in shape]
    for profile in profiles:
        for name, shapes in profile.items():
            if name not in inputs:
                raise OptionError(f"profile: no input '{name}'; expected {', '.join(inputs)}")
            for shape, dims in ((shape, inputs[name]) for shape in shapes):
                if len(shape) != len(dims) or any(d not in (-1, s) or s < 0 for d, s in zip(dims, shape, strict=True)):
                    raise OptionError(f"profile: input '{name}'; got {list(shape)}, expected {list(dims)} with -1 replaced")
    if open_inputs and not profiles:
        raise OptionError(
            f"profile: input '{open_inputs[0]}' has the open shape {list(inputs[open_inputs[0]])}; "
            "give its smallest, typical and largest shape"
        )
    for profile in profiles if open_inputs else []:
        made = builder.create_optimization_profile()
        for name in open_inputs:
            if name not in profile:
                raise OptionError(f"profile: no shapes for input '{name}', which is open: {list(inputs[name])}")
            made.set_shape(name, *(tuple(map(int, shape)) for shape in profile[name]))
        config.add_optimization_profile(made)


def _configure(trt: ModuleType, config: Any, options: BuildOptions) -> None:
    weakly_typed = is_weakly_typed(trt)
    config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, options.workspace_bytes)
    if options.optimization_level is not None:
        config.builder_optimization_level = options.optimization_level
    if options.max_aux_streams is not None:
        config.max_aux_streams = options.max_aux_streams
    flags = trt.BuilderFlag
    if hasattr(flags, "TF32"):
        (config.clear_flag if options.precision == "fp32" else config.set_flag)(flags.TF32)
    if weakly_typed and options.in_half_precision:
        flag = getattr(flags, options.precision.upper(), None)
        if flag is None:
            raise OptionError(
                f"precision: got {options.precision}, which TensorRT {trt.__version__} does not have; "
                "expected fp32, tf32 or fp16, or a newer TensorRT"
            )
        config.set_flag(flag)
    if weakly_typed:
        config.set_tactic_sources(_usable_sources(trt, config.get_tactic_sources()))


def _usable_sources(trt: ModuleType, sources: int) -> int:
    """`sources` without the libraries that are missing here: TensorRT 8.6 stops at one, though it has kernels of its own."""
    for name, library, symbol in (
        ("CUBLAS", "libcublas.so.12", "cublasCreate_v2"),
        ("CUBLAS_LT", "libcublasLt.so.12", "cublasLtCreate"),
        ("CUDNN", "libcudnn.so.8", "cudnnCreate"),
    ):
        source = getattr(trt.TacticSource, name, None)
        try:
            found = hasattr(ctypes.CDLL(library), symbol)
        except OSError:
            found = False
        if source is not None and not found:
            sources &= ~(1 << int(source))
    return sources


def _timing_cache(config: Any, path: Path | None) -> Any:
    """The config's new timing cache, from the file if that is of this TensorRT and device; None without a path."""
    if path is None:
        return None
    try:
        data = path.read_bytes() if path.exists() else b""
    except OSError as error:
        raise OptionError(f"timing cache {path}: cannot be read; {error.strerror or error}") from error
    cache = config.create_timing_cache(data)
    if cache is None or not config.set_timing_cache(cache, False):
        cache = config.create_timing_cache(b"")  # of another version or device: start anew
        config.set_timing_cache(cache, False)
    return cache


def monitor_of(trt: ModuleType, config: Any, progress: Progress | None) -> Any:
    """The config's new monitor, which hands TensorRT's steps on; None without a progress function, or before TensorRT 10.
    TensorRT prints an exception in a callback and goes on: the monitor keeps it as `error` and stops the build."""
    if progress is None or not hasattr(trt, "IProgressMonitor") or not hasattr(config, "progress_monitor"):
        return None

    tell = progress

    class Monitor(trt.IProgressMonitor):  # type: ignore[name-defined]
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self._steps: dict[str, int] = {}
            self.error: BaseException | None = None

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            self._steps[phase_name] = num_steps
            self._tell(phase_name, 0, num_steps)

        def step_complete(self, phase_name: str, step: int) -> bool:
            self._tell(phase_name, step + 1, self._steps.get(phase_name, 0))
            return self.error is None

        def phase_finish(self, phase_name: str) -> None:
            steps = self._steps.pop(phase_name, 0)
            self._tell(phase_name, steps, steps)

        def _tell(self, *step: Any) -> None:
            try:
                if self.error is None:
                    tell(*step)
            except BaseException as error:
                self.error = error

    config.progress_monitor = Monitor()
    return config.progress_monitor


@contextmanager
def interruptible(monitor: Any) -> Iterator[None]:
    """Ctrl-C stops the build at its next step: Python would raise KeyboardInterrupt in a callback, where it is printed.  So do
    SIGTERM and SIGHUP in a command.  Without a monitor these end the process at once, as nothing is being written."""
    own = threading.current_thread() is threading.main_thread()
    before = {number: signal.getsignal(number) for number in interrupt.WORDS if own}
    raising = [number for number, handler in before.items() if handler in (signal.default_int_handler, interrupt.stop)]

    def stop(number: int, _frame: object) -> None:
        monitor.error = KeyboardInterrupt(number)

    for number in raising:
        if monitor is not None:
            signal.signal(number, stop)
        elif number != signal.SIGINT:
            signal.signal(number, signal.SIG_DFL)
    try:
        yield
    finally:
        for number in raising:
            signal.signal(number, before[number])
