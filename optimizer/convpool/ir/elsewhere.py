# SPDX-License-Identifier: Apache-2.0
"""Shape inference in another process, because it may end the process that does it.

onnx's shape inference is C++ that trusts the model: sizes that fit no operator end the process, by an assertion or a memory
fault, and sizes beyond memory make it run for hours.  One process serves all models, until one of them ends it.  Its results are
used, and not only its survival: what reads beside an array fails at one time and not at another.
"""

from __future__ import annotations

import atexit
import signal
import threading
import time

import onnx
from onnx import ModelProto, TensorProto, onnx_cpp2py_export

from convpool.algebra.parts import LAYOUTS
from convpool.errors import ModelError
from convpool.ir import inference_process
from convpool.ir.inference_process import DONE, FAILED, GROWTH_BYTES, MEMORY, READY, SIZE_BYTES
from convpool.ir.process import EndedError, OtherProcess, ended
from convpool.ir.protos import model_nodes
from convpool.ir.schema import (
    DOMAIN,
    OP_TYPES,
    POOL_DILATIONS_OPSET,
    complete_layouts,
    functions_for,
    is_operator,
    layout_of,
    used_in,
)

START_S = 20
ANSWER_S = 50
"""Limits on a loaded machine; processor time is limited by the other process itself."""


class InferenceProcess(OtherProcess):
    """The other process; it ends when this one does."""

    def __init__(self) -> None:
        """Start it.  Raises OSError."""
        super().__init__(inference_process.__file__, str(onnx_cpp2py_export.__file__))
        try:
            ready = self.read(1, time.monotonic() + START_S)
        except TimeoutError:
            ready = bytearray()
        if ready != READY:
            self.end()
            raise OSError("the process for shape inference does not start")

    def ask(self, model: bytes) -> bytes:
        """The model with shapes.  Raises onnx's InferenceError, and EndedError where it ends the process."""
        until = time.monotonic() + ANSWER_S
        self.write([len(model).to_bytes(SIZE_BYTES, "little"), model])
        try:
            kind = self.read(1, until)
            size = int.from_bytes(self.read(SIZE_BYTES, until), "little")
            content = bytes(self.read(size, until))
        except TimeoutError:
            self.end()
            raise EndedError("does not end") from None
        if kind == DONE and len(content) == size:
            return content
        if kind == FAILED:
            raise onnx.shape_inference.InferenceError(content.decode(errors="replace"))
        code = self.end()
        if kind == MEMORY:
            raise EndedError(f"takes more than {GROWTH_BYTES // 2**30} GiB of memory")
        if code == -signal.SIGXCPU:
            raise EndedError("does not end")
        raise ended(code)


_lock = threading.Lock()
_running: InferenceProcess | None = None


def infer(model: bytes) -> bytes | None:
    """A serialised model with shapes; None where no other process can be started.  Raises as `InferenceProcess.ask`."""
    global _running
    with _lock:
        if _running is not None and not _running.is_own:
            _running = None
        if _running is None:
            try:
                _running = InferenceProcess()
            except OSError:
                return None
        asked, _running = _running, None
        try:
            found = asked.ask(model)
        except onnx.shape_inference.InferenceError:
            _running = asked
            raise
        except BaseException:
            asked.end()
            raise
        _running = asked
        return found


def infer_elsewhere(model: ModelProto) -> ModelProto:
    """onnx's shape inference, with the values of small tensors, node for node.

    Raises onnx's InferenceError, EncodeError for a model beyond 2 GB, and ModelError where it would end the process.
    """
    try:
        found = infer(with_own_functions(model).SerializeToString())
    except EndedError as error:
        raise ModelError(f"the model is not valid ONNX: shape inference of onnx {onnx.__version__} {error}") from None
    if found is None:
        return onnx.shape_inference.infer_shapes(model, data_prop=True)
    return ModelProto.FromString(found)


def with_own_functions(model: ModelProto) -> ModelProto:
    """The model with functions for all its nodes of convpool's operators, in place of those that it may have for them.

    The other process has not the schemas of these operators, and a model may lack their functions or have wrong ones.
    """
    if not used_in(model):
        return model
    copy = ModelProto()
    copy.CopyFrom(model)
    nodes = [node for node in model_nodes(copy) if is_operator(node)]
    for node in nodes:
        if layout_of(node) not in LAYOUTS or not any(item.name == "kernel_shape" and item.ints for item in node.attribute):
            node.op_type += "Unusable"  # has no function: its result stays unknown
    permuting = complete_layouts([node for node in nodes if is_operator(node)])
    others = [function for function in copy.functions if function.domain != DOMAIN or function.name not in OP_TYPES]
    del copy.functions[:]
    copy.functions.extend((*others, *functions_for(used_in(copy), POOL_DILATIONS_OPSET, permuting)))
    return copy


def _end() -> None:
    if _running is not None and _running.is_own:
        _running.end()


atexit.register(_end)


def mark_layers(model: ModelProto, inferred: ModelProto | None = None) -> None:
    """Make every intermediate float tensor of known type an output of the model.

    inferred: the model after shape inference, where there is one.
    """
    inferred = inferred or infer_elsewhere(model)
    known = {value.name: value for value in inferred.graph.value_info}
    outputs = {value.name for value in model.graph.output}
    for node in model.graph.node:
        for name in node.output:
            value = known.get(name)
            if value is not None and name not in outputs and value.type.tensor_type.elem_type == TensorProto.FLOAT:
                model.graph.output.append(value)
