"""`build_engine`: from an ONNX model to a TensorRT engine, with the plugin or without.

| precision | TensorRT 8.6, 9 (weakly typed) | TensorRT 10, 11 (strongly typed) |
|---|---|---|
| fp32 | no TF32 | no TF32 |
| tf32 | the TF32 flag | the TF32 flag |
| fp16, bf16 | the type's flag: TensorRT chooses per layer | the model's tensors cast, inputs and outputs float32 |

In fp16 and bf16 the TF32 flag stays on for what is left in float32, as it is by default in TensorRT and trtexec.  With the plugin
TensorRT 8.6 and 9 are told to keep sums over whole maps and small matrix products in float32 there.

The plugin cannot see the TF32 flag, so its nodes say it themselves: with "tf32" they get the attribute allow_tf32 = 1.
Nor can it see which weights never change: the nodes whose weights are initializers get constant_weights = 1, unless the
config says that the engine may be refitted.
"""

from __future__ import annotations

import ctypes
import math
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from types import ModuleType
from typing import Any

from onnx import ModelProto, TensorProto

from convpool.api import optimize
from convpool.cuda import current_device
from convpool.errors import ConvpoolError, ModelError, OptionError, OutputError
from convpool.files import write_atomically
from convpool.modelio import load
from convpool.tensorrt import prepare
from convpool.tensorrt.engine import Engine
from convpool.tensorrt.errors import TensorRTError
from convpool.tensorrt.library import load_plugin, logger, tensorrt_module, version

PRECISIONS = ("fp32", "tf32", "fp16", "bf16")
STEM_MIN_CC = 80
"""Least compute capability, 10 * major + minor, of the plugin's kernel for few channels."""
PLAIN_CONV_CC = 90
"""The compute capability for which the plugin's kernels for plain convolutions are made."""
ALONE_BEFORE = 10
"""The first TensorRT with other kernels of its own: against them nothing was measured, so what has no pooling stays with it."""
MAX_HEAD_MACS = 2**28
"""Most multiply-adds of a matrix product that stays in float32 in half precisions: a classifier's, not VGG's first."""
HALVES = {"fp16": TensorProto.FLOAT16, "bf16": TensorProto.BFLOAT16}
LOWERINGS = ("convavgpool", "direct", "fused", "auto", "none")
DEFAULT_WORKSPACE_BYTES = 1 << 30

Profile = Mapping[str, tuple[Sequence[int], Sequence[int], Sequence[int]]]
"""For each input with open dimensions its smallest, typical and largest shape."""
Progress = Callable[[str, int, int], None]
"""Called with (phase, steps done, steps in all); TensorRT 10 and later report steps.  What it raises stops the build."""


@dataclass(frozen=True)
class _Options:
    precision: str
    profiles: list[Profile]
    timing_cache: Path | None
    workspace_bytes: int
    optimization_level: int | None
    max_aux_streams: int | None
    progress: Progress | None
    configure: Callable[[Any], None] | None
    configure_network: Callable[[Any], None] | None


def build_engine(
    model: object,
    *,
    precision: str = "fp32",
    profiles: Profile | Sequence[Profile] | None = None,
    timing_cache: str | os.PathLike[str] | None = None,
    workspace_bytes: int = DEFAULT_WORKSPACE_BYTES,
    optimization_level: int | None = None,
    max_aux_streams: int | None = None,
    plugin: bool = True,
    lowering: str | None = None,
    stem: bool = True,
    plain_conv: bool = True,
    layers: bool = False,
    progress: Progress | None = None,
    trt: ModuleType | None = None,
    configure: Callable[[Any], None] | None = None,
    configure_network: Callable[[Any], None] | None = None,
) -> Engine:
    """Build an engine from a model, optimizing the model first if it has no nodes of the operator yet.

    model: a path, serialised bytes, an onnx.ModelProto, a gs.Graph or what `convpool.modelio.load` gave.
    precision: "fp32", "tf32", "fp16" or "bf16", see the module's table.
    profiles: shapes of inputs with open dimensions; several profiles as a sequence, the first of which decides what is small
        enough for `plain_conv`.
    timing_cache: a file to take layer timings from and to add new ones to.
    workspace_bytes: the most that TensorRT may use beside weights and activations.
    optimization_level: TensorRT's 0 to 5; None: its default.
    max_aux_streams: the most streams besides its own on which an engine may run layers that need not wait for one another;
        None: TensorRT's choice, which is none in 8.6.
    plugin: load the plugin and let it run the ConvAvgPool nodes; else they become standard operators.
    lowering: as in `convpool.optimize`, or "none" for the model as it is; default: `default_lowering`.  A model that has the
        operator's nodes already is taken as it is.
    stem, plain_conv: let the plugin also run convolutions of images, and others of many channels, as in `convpool.optimize`,
        where `plugin_takes` says so.
    layers: keep intermediate tensors as outputs, to compare them; slows the engine down.
    trt: TensorRT's package, default `import tensorrt`.  configure, configure_network: called last of all with the builder's
    config and with the network, for instance to set types and formats of inputs and outputs.

    Raises OptionError, ModelError, OutputError, or TensorRTError with TensorRT's own messages.
    """
    if precision not in PRECISIONS:
        raise OptionError(f"precision: got {precision!r}, expected one of {', '.join(PRECISIONS)}")
    model = load(model)
    if lowering in ("direct", "fused") and prepare.has_operator(model.proto):
        raise OptionError(f"lowering: got {lowering} for a model with the operator's nodes already; expected the original model")
    lowering = lowering or default_lowering(precision, plugin)
    if lowering not in LOWERINGS:
        raise OptionError(f"lowering: got {lowering!r}, expected one of {', '.join(LOWERINGS)}")
    options = _Options(
        precision,
        _profiles(profiles),
        Path(timing_cache) if timing_cache else None,
        workspace_bytes,
        optimization_level,
        max_aux_streams,
        progress,
        configure,
        configure_network,
    )
    if options.timing_cache is not None and not options.timing_cache.parent.is_dir():
        raise OutputError(f"timing cache {timing_cache}: no folder {str(options.timing_cache.parent)!r}; make it first")
    trt = trt or tensorrt_module()
    taken = plugin_takes(precision, plugin, stem=stem, plain_conv=plain_conv, trt=trt)
    prepared = prepared_model(model, lowering, layers, typical(profiles), **taken)
    if plugin and prepare.has_operator(prepared):
        load_plugin(trt)
    return _build(trt, prepared, plugin, options)


def default_lowering(precision: str, plugin: bool) -> str:
    """The form of rewritten pairs where none is asked for: "convavgpool" with the plugin, "auto" without, "fused" in "tf32".

    TensorRT 8.6 keeps float tensors channels first between its own layers and the plugin's.  In TF32 fused convolutions of 3x3
    pairs are as fast as the plugin then, or faster: docs/tensorrt.md.  1x1 pairs have no fused form that saves anything, so they
    stay as they are.
    """
    if not plugin:
        return "auto"
    return "fused" if precision == "tf32" else "convavgpool"


def _profiles(profiles: Profile | Sequence[Profile] | None) -> list[Profile]:
    if profiles is None:
        return []
    return [profiles] if isinstance(profiles, Mapping) else list(profiles)


def plugin_takes(precision: str, plugin: bool, *, stem: bool, plain_conv: bool, trt: ModuleType | None = None) -> dict[str, bool]:
    """Which convolutions without a pooling the plugin runs, of those that the caller allows, as `prepared_model` takes it.

    Both kinds in fp16 with TensorRT 8.6 or 9 only.  stem: on GPUs from compute capability 8.0 on, or unknown.  plain_conv: on
    9.0; libconvpool.so is asked for it.
    """
    if not plugin or precision not in HALVES or _major(trt or tensorrt_module()) >= ALONE_BEFORE:
        return {"stem": False, "plain_conv": False}
    try:
        cc = current_device()["cc"]
    except ConvpoolError:  # no GPU, or no libconvpool.so to ask
        return {"stem": stem, "plain_conv": False}
    return {"stem": stem and cc >= STEM_MIN_CC, "plain_conv": plain_conv and cc == PLAIN_CONV_CC}


def _major(trt: ModuleType) -> int:
    return 11 if "rtx" in trt.__name__ else version(trt)[0]  # TensorRT-RTX counts anew; it is strongly typed


def typical(profiles: Profile | Sequence[Profile] | None) -> dict[str, list[int]]:
    """The first profile's typical shapes, without those that are none: `_add_profiles` says so."""
    first = next(iter(_profiles(profiles)), {})
    shapes = {name: list(three[1]) for name, three in first.items() if len(three) == 3}
    whole = {name: shape for name, shape in shapes.items() if all(isinstance(d, Integral) and d >= 1 for d in shape)}
    return {name: [int(d) for d in shape] for name, shape in whole.items()}


def prepared_model(
    model: object,
    lowering: str,
    layers: bool = False,
    shapes: Mapping[str, Sequence[int]] | None = None,
    *,
    stem: bool = False,
    plain_conv: bool = False,
) -> ModelProto:
    """What an engine is built from: the model in the form asked for, self-contained, its weights initializers.

    shapes: of open inputs, by which the size of plain convolutions is judged.
    """
    loaded = load(model)
    if lowering == "none" or prepare.has_operator(loaded.proto):
        result = prepare.self_contained(loaded)
    else:
        optimized = optimize(
            loaded.proto,
            lowering=lowering,
            stem=stem,
            plain_conv=plain_conv,
            check=0,
            input_shapes=shapes,
            base_dir=loaded.base_dir,
        )
        result = prepare.self_contained(load(optimized.model, loaded.base_dir))
    result = prepare.inline_own_functions(result)
    prepare.fold_weights(result)
    if layers:
        prepare.mark_all(result)
    return result


def _build(trt: ModuleType, model: ModelProto, plugin: bool, options: _Options) -> Engine:
    log = logger(trt)
    log.explain()
    major = _major(trt)
    weakly_typed = major < 10
    model = prepare.for_parser(model, major, plugin=plugin, allow_tf32=options.precision == "tf32")
    nodes = [node.op_type for node in model.graph.node if node.op_type != "Constant"]
    if options.precision in HALVES:
        if weakly_typed and options.precision == "fp16":
            prepare.half_weights(model, TensorProto.FLOAT16)
        elif not weakly_typed:
            prepare.cast_floats(model, HALVES[options.precision])
    try:
        builder = trt.Builder(log)
    except TypeError as error:
        raise TensorRTError(f"TensorRT: no builder; got {log.explain(error)}") from error
    prepare.say_constant_weights(model, plugin)
    network, parser = _parse(trt, builder, model, weakly_typed)
    config = builder.create_builder_config()
    _configure(trt, config, weakly_typed, options)
    monitor = _monitor(trt, config, options.progress)
    _add_profiles(builder, config, network, options.profiles)
    cache = _timing_cache(config, options.timing_cache)
    if options.configure:
        options.configure(config)
    if _refittable(trt, config):
        prepare.say_constant_weights(model, False)
        network, parser = _parse(trt, builder, model, weakly_typed)
    if plugin and prepare.has_operator(model) and weakly_typed and options.precision in HALVES:
        _keep_heads_in_float(trt, network, config)
    if options.configure_network:
        options.configure_network(network)
    with _interruptible(monitor):
        plan = builder.build_serialized_network(network, config)
    if monitor is not None and monitor.error is not None:
        raise monitor.error
    if plan is None:
        raise TensorRTError(f"TensorRT {trt.__version__} cannot build the engine; got {log.explain() or 'no message'}")
    if options.timing_cache is not None and cache is not None:
        try:
            write_atomically(options.timing_cache, bytes(config.get_timing_cache().serialize()))
        except OSError as error:
            raise OutputError(f"timing cache {options.timing_cache}: cannot be written; {error.strerror or error}") from error
    del parser  # the network's weights were its own
    return Engine(bytes(plan), trt=trt, built_from=nodes)


def _parse(trt: ModuleType, builder: Any, model: ModelProto, weakly_typed: bool) -> tuple[Any, Any]:
    """The network and the parser, which must outlive it."""
    log = logger(trt)
    network = builder.create_network(_network_flags(trt, weakly_typed))
    parser = trt.OnnxParser(network, log)
    if not parser.parse(prepare.serialized(model)):
        errors = "; ".join(parser.get_error(i).desc() for i in range(parser.num_errors))
        raise ModelError(f"TensorRT {trt.__version__} cannot read the model; got {log.explain(errors)}")
    return network, parser


def _keep_heads_in_float(trt: ModuleType, network: Any, config: Any) -> None:
    """Have sums over all of a map, and small matrix products of vectors, computed in float32.

    They take next to no time, but now and then TensorRT 8.6 adds them up in half precision: most of an engine's error then.
    """
    kinds = (trt.LayerType.REDUCE, trt.LayerType.MATRIX_MULTIPLY)
    for layer in (network.get_layer(index) for index in range(network.num_layers)):
        if layer.type not in kinds or layer.get_output(0).dtype not in (trt.float32, trt.float16):
            continue
        product = layer.type == trt.LayerType.MATRIX_MULTIPLY
        shapes = [_shape(tensor) for tensor in (layer.get_output(0), *(layer.get_input(i) for i in range(2 if product else 1)))]
        if any(shape is None for shape in shapes) or any(dim != 1 for dim in shapes[0][2:]):
            continue
        # Each of a product's three sizes stands in two of the three shapes; an open one, -1, counts as 1.
        if product and math.isqrt(abs(math.prod(map(math.prod, shapes)))) > MAX_HEAD_MACS:
            continue
        layer.precision = trt.float32
        config.set_flag(trt.BuilderFlag.PREFER_PRECISION_CONSTRAINTS)


def _shape(tensor: Any) -> tuple[int, ...] | None:
    """Sizes, -1 where they are open; None where even the rank is."""
    try:
        return tuple(tensor.shape)
    except ValueError:
        return None


def _refittable(trt: ModuleType, config: Any) -> bool:
    """Whether weights of the engine may be changed after it is built."""
    names = ("REFIT", "REFIT_IDENTICAL", "REFIT_INDIVIDUAL", "STRIP_PLAN")
    flags = (getattr(trt.BuilderFlag, name, None) for name in names)
    return any(flag is not None and config.get_flag(flag) for flag in flags)


def _network_flags(trt: ModuleType, weakly_typed: bool) -> int:
    flags = trt.NetworkDefinitionCreationFlag
    if weakly_typed:
        return 1 << int(flags.EXPLICIT_BATCH)
    return 1 << int(flags.STRONGLY_TYPED) if hasattr(flags, "STRONGLY_TYPED") else 0


def _configure(trt: ModuleType, config: Any, weakly_typed: bool, options: _Options) -> None:
    config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, options.workspace_bytes)
    if options.optimization_level is not None:
        config.builder_optimization_level = options.optimization_level
    if options.max_aux_streams is not None:
        config.max_aux_streams = options.max_aux_streams
    flags = trt.BuilderFlag
    if hasattr(flags, "TF32"):
        (config.clear_flag if options.precision == "fp32" else config.set_flag)(flags.TF32)
    if weakly_typed and options.precision in HALVES:
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
    """Without the libraries that are not there: TensorRT 8.6 would stop at one, though it has kernels of its own."""
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


def _monitor(trt: ModuleType, config: Any, progress: Progress | None) -> Any:
    """What TensorRT tells of its steps, now set in the config; None without a progress function or such a monitor.

    TensorRT prints an exception in a callback and goes on: the monitor keeps it as `error` and stops the build.
    """
    if progress is None or not hasattr(trt, "IProgressMonitor") or not hasattr(config, "progress_monitor"):
        return None

    class Monitor(trt.IProgressMonitor):
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
                    progress(*step)
            except BaseException as error:
                self.error = error

    config.progress_monitor = Monitor()
    return config.progress_monitor


@contextmanager
def _interruptible(monitor: Any) -> Iterator[None]:
    """Ctrl-C stops the build at its next step: Python would raise KeyboardInterrupt in a callback, where it is printed."""
    own = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGINT)
    if monitor is None or not own or before is not signal.default_int_handler:
        yield
        return

    def stop(*_: object) -> None:
        monitor.error = KeyboardInterrupt()

    signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _add_profiles(builder: Any, config: Any, network: Any, profiles: list[Profile]) -> None:
    inputs = {network.get_input(i).name: tuple(network.get_input(i).shape) for i in range(network.num_inputs)}
    open_inputs = [name for name, shape in inputs.items() if -1 in shape]
    for profile in profiles:
        for name, shapes in profile.items():
            if name not in inputs:
                raise OptionError(f"profile: no input '{name}'; expected {', '.join(inputs)}")
            _check_shapes(name, inputs[name], shapes)
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


def _check_shapes(name: str, dims: tuple[int, ...], shapes: Sequence[Sequence[int]]) -> None:
    """Also of an input that is not open: a shape that it cannot have is a mistake, not to be passed over."""
    if len(shapes) != 3:
        raise OptionError(f"profile: input '{name}'; got {len(shapes)} shapes, expected its smallest, typical and largest")
    for shape in shapes:
        if len(shape) != len(dims) or any(d not in (-1, s) or s < 0 for d, s in zip(dims, shape, strict=True)):
            raise OptionError(f"profile: input '{name}'; got {list(shape)}, expected {list(dims)} with -1 replaced")
    if not all(low <= middle <= high for low, middle, high in zip(*shapes, strict=True)):
        raise OptionError(
            f"profile: input '{name}'; got {' / '.join(str(list(shape)) for shape in shapes)}, expected "
            "smallest <= typical <= largest"
        )


def _timing_cache(config: Any, path: Path | None) -> Any:
    """The cache in use, from the file where it is one of this TensorRT and device; None without a file name."""
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
