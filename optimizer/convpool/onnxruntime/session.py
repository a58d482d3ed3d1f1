# SPDX-License-Identifier: Apache-2.0
"""Sessions on onnxruntime's CUDA provider: the library of custom operators, libconvpool_ort.so, and a model as `convpool.check`
runs it there."""

import ctypes
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary

from onnx import TensorProto, helper

from convpool.check.inputs import Arrays
from convpool.check.judge import precision_of
from convpool.check.session import Runner, with_layers
from convpool.cuda.library import INSTALL
from convpool.cuda.library import library_path as cuda_library_path
from convpool.errors import LibraryError, OnnxruntimeError, first_line
from convpool.ir.files import serialize
from convpool.ir.model import LoadedModel, load
from convpool.types import Model

NAME = "libconvpool_ort.so"
"""The file beside libconvpool.so."""


def library_path() -> Path:
    """Return the file to register with onnxruntime.

    Raises:
        OnnxruntimeError: It is not there or of another version.
    """
    try:
        path = cuda_library_path().resolve().parent / NAME
    except LibraryError as error:
        raise OnnxruntimeError(str(error)) from error
    if not path.is_file():
        raise OnnxruntimeError(f"{NAME}: not found; got {path}, expected it beside libconvpool.so; {INSTALL}")
    return path


def register(options: Any) -> Path:
    """Register the operators with session options; a second time changes nothing.

    A session of these options runs ConvAvgPool and its fused variants by the library alone: by CUDA
    kernels on the CUDA provider, by plain loops on the CPU provider.  The functions that a model
    carries are faster than these loops; so do not register the library where there is no CUDA
    provider.

    Args:
        options: An onnxruntime.SessionOptions.

    Returns:
        The library's path.

    Raises:
        OnnxruntimeError: The library cannot be used.
    """
    path = library_path()
    try:
        ctypes.CDLL(str(path))  # onnxruntime's message does not say what a library lacks
        options.register_custom_ops_library(str(path))
    except Exception as error:  # onnxruntime's exceptions share no base class
        raise OnnxruntimeError(f"{path}: cannot be registered; got {first_line(error)}") from error
    return path


CUDA, CPU = "CUDAExecutionProvider", "CPUExecutionProvider"
Providers = Sequence[str | tuple[str, Mapping[str, Any]]]
"""Execution providers as onnxruntime takes them: names, or names with options."""
_FOLDER = "session.model_external_initializers_file_folder_path"
_LOCKS: WeakKeyDictionary[Any, Lock] = WeakKeyDictionary()
"""Locks of given options: while these name a folder, no session of another model is made."""


def session(
    model: Model,
    providers: Providers | None = None,
    *,
    options: Any = None,
    device: int = 0,
    use_tf32: bool = True,
    prefer_nhwc: bool = False,
    cuda_graph: bool = False,
) -> Any:
    """Return an onnxruntime.InferenceSession that runs the operators by the library's kernels.

    The arguments from device on are options of the CUDA provider; they do not count where
    `providers` gives its options.

    Args:
        model: A path, serialised bytes, an onnx.ModelProto or an onnx_graphsurgeon.Graph.
        providers: Default: the CUDA provider, with the CPU provider for what it does not have.
            Without the CUDA provider the library is not registered, and the model runs by its
            functions.
        options: An onnxruntime.SessionOptions, for one model or several; the library is registered
            with it once.
        device: The GPU's number.
        use_tf32: Form float32 products in TF32, onnxruntime's default.
        prefer_nhwc: Let onnxruntime run its own convolutions channels last.
        cuda_graph: Capture and replay runs; they need io binding, and inputs and outputs that stay
            where they are.

    Raises:
        OnnxruntimeError: The library or the CUDA provider is missing, or onnxruntime refuses the
            model.
    """
    runtime = runtime_module()
    given = {"device_id": device, "use_tf32": use_tf32, "prefer_nhwc": prefer_nhwc, "enable_cuda_graph": cuda_graph}
    own = {name: str(int(value)) for name, value in given.items()}
    wanted: list[Any] = [CUDA, CPU] if providers is None else list(providers)
    wanted = [(CUDA, own) if provider == CUDA else provider for provider in wanted]
    names = [provider if isinstance(provider, str) else provider[0] for provider in wanted]
    settings = options if options is not None else runtime.SessionOptions()
    if CUDA in names:
        require_cuda(runtime)
        register(settings)
    source, folder = _source(model)
    try:
        with _data_from(folder, settings, shared=options is not None):
            made = runtime.InferenceSession(source, settings, providers=wanted)
    except Exception as error:  # onnxruntime's exceptions share no base class
        raise OnnxruntimeError(f"model: onnxruntime refuses it; got {first_line(error)}") from error
    if CUDA in names and CUDA not in made.get_providers():
        raise OnnxruntimeError(
            f"onnxruntime {runtime.__version__}: CUDA provider; got {', '.join(made.get_providers())}, expected {CUDA}; "
            "its log says which library of CUDA or cuDNN is missing"
        )
    return made


def _source(model: Model) -> tuple[Any, Path | None]:
    """A model as onnxruntime takes it, and the folder of the data of one that is no file."""
    if isinstance(model, (str, bytes)):
        return model, None
    if isinstance(model, os.PathLike):
        return os.fspath(model), None
    loaded = load(model)
    return serialize(loaded.proto), loaded.base_dir if loaded.data_files else None


@contextmanager
def _data_from(folder: Path | None, settings: Any, shared: bool) -> Iterator[None]:
    """Name the folder of a model's data in session options; in shared ones, which go on to other models, only meanwhile.  A model
    that is a path has its data beside it, but some releases of onnxruntime look where the entry says."""
    with _LOCKS.setdefault(settings, Lock()):
        if folder is None:
            yield
            return
        try:
            before = settings.get_session_config_entry(_FOLDER)
        except RuntimeError:  # there is no such entry, which is the same as an empty one
            before = ""
        settings.add_session_config_entry(_FOLDER, str(folder))
        try:
            yield
        finally:
            if shared:  # a session reads its data again where its providers change
                settings.add_session_config_entry(_FOLDER, before)


def runtime_module() -> Any:
    """onnxruntime.  Raises OnnxruntimeError if it is not installed."""
    try:
        import onnxruntime
    except ImportError as error:
        raise OnnxruntimeError("onnxruntime: not installed; pip install onnxruntime-gpu") from error
    return onnxruntime


def require_cuda(runtime: Any) -> None:
    """Load CUDA and cuDNN where pip has put them.  Raises OnnxruntimeError if this onnxruntime has no CUDA provider."""
    available = runtime.get_available_providers()
    if CUDA not in available:
        raise OnnxruntimeError(
            f"onnxruntime {runtime.__version__}: CUDA provider; got {', '.join(available)}, expected {CUDA}; "
            "pip uninstall onnxruntime, then pip install onnxruntime-gpu"
        )
    runtime.preload_dlls()


class CudaRunner(Runner):
    """A model in onnxruntime on the CUDA provider, the operators by the library; a `convpool.check.session.Runner`.  what: the
    model, in messages.  layers: inner tensors become outputs too.  precision: by the model's types, "tf32" where it is float32.
    arguments: those of `convpool.onnxruntime.session`.  Raises OnnxruntimeError if the model cannot be loaded."""

    runtime = "onnxruntime's CUDA provider"

    def __init__(self, model: LoadedModel, what: str, *, layers: bool = False, **arguments: Any) -> None:
        self.what, self.model = what, model.proto
        types = model.float_types
        narrow = types - {TensorProto.FLOAT, TensorProto.DOUBLE}
        tf32 = not narrow and arguments.get("use_tf32", True)
        self.precision = "tf32" if tf32 else precision_of(map(helper.tensor_dtype_to_np_dtype, types))
        self.session = session(with_layers(model) if layers else model, **arguments)
        self.input_names = [value.name for value in self.session.get_inputs()]
        self.output_names = [value.name for value in self.session.get_outputs()]

    def run(self, arrays: Arrays) -> dict[str, Any]:
        """All outputs by name.  Raises OnnxruntimeError if onnxruntime fails."""
        try:
            values = self.session.run(None, arrays)
        except Exception as error:  # onnxruntime's exceptions share no base class
            raise OnnxruntimeError(f"onnxruntime cannot run {self.what}: {first_line(error)}") from error
        return dict(zip(self.output_names, values, strict=True))
