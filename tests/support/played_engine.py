# SPDX-License-Identifier: Apache-2.0
"""pycuda and TensorRT as `Engine` uses them, played: without a GPU."""

import enum
import types

# As pycuda: a stack of contexts for each thread, which must be empty when the thread ends.
PYCUDA = """
import sys, threading, types

class Error(Exception): pass
class Buffer:
    def __init__(self, size): self.data, self.address = bytearray(size), id(self)
    def __int__(self): buffers[self.address] = self.data; return self.address
class Stream:
    handle = 7
    def synchronize(self):
        if broken: raise Error("an illegal memory access was encountered")
class Context:
    def __init__(self, device): self.device = device
    def push(self): stacks.setdefault(threading.get_ident(), []).append(self)
    @staticmethod
    def pop():
        if not stacks.get(threading.get_ident()): raise Error("cannot pop non-current context")
        stacks[threading.get_ident()].pop()
    @staticmethod
    def get_current(): return (stacks.get(threading.get_ident()) or [None])[-1]
    @staticmethod
    def get_device(): return Device(Context.get_current().device)
class Device:
    def __init__(self, number):
        if number > 1: raise Error("invalid device ordinal")
        self.number = number
    def __eq__(self, other): return self.number == other.number
    def retain_primary_context(self): return Context(self.number)
def init(): pass
def mem_alloc(size): return Buffer(size)
def memcpy_htod_async(to, array, stream): buffers[to][:array.nbytes] = array.tobytes()
def memcpy_dtoh_async(array, to, stream):
    if broken: raise Error("an illegal memory access was encountered")
    array[:] = list(buffers[to][:array.nbytes])
stacks, buffers, broken = {}, {}, []
"""


def played_pycuda() -> types.ModuleType:
    driver = types.ModuleType("pycuda.driver")
    exec(PYCUDA, driver.__dict__)
    return driver


class ILogger:
    Severity = enum.Enum("Severity", "ERROR INTERNAL_ERROR WARNING")

    def __init__(self) -> None:
        pass


class TensorIOMode(enum.Enum):
    INPUT, OUTPUT = 0, 1


class TensorLocation(enum.Enum):
    DEVICE, HOST = 0, 1


class TensorFormat(enum.Enum):
    LINEAR, HWC8 = 0, 1


class Played:
    """A TensorRT whose engine copies input x to output y; changed by the tests."""

    __name__, __version__ = "played", "10.0.0"
    TensorIOMode, TensorLocation, ILogger = TensorIOMode, TensorLocation, ILogger

    def __init__(self, driver, shape=(-1, 3), dtype="FLOAT", order=TensorFormat.LINEAR, location=TensorLocation.DEVICE):
        self.driver, self.shape, self.dtype, self.order, self.location = driver, shape, dtype, order, location
        self.refuse, self.addresses, self.shape_now = "", {}, None
        self.streams, self.profiles = [], []
        self.num_io_tensors, self.num_optimization_profiles = 2, 1

    def Runtime(self, log):
        self.log = log
        if self.refuse == "runtime":
            raise TypeError("pybind11::init(): factory function returned nullptr")
        return self

    def deserialize_cuda_engine(self, plan):
        return None if self.refuse == "engine" else self

    def create_execution_context(self):
        return None if self.refuse == "context" else self

    def set_optimization_profile_async(self, number, stream):
        self.profiles.append((number, stream))

    def get_tensor_name(self, index):
        return "xy"[index]

    def get_tensor_mode(self, name):
        return TensorIOMode.INPUT if name == "x" else TensorIOMode.OUTPUT

    def get_tensor_profile_shape(self, name, number):
        """Up to 4, and 5 to 8 in the second profile."""
        return [tuple(size if size >= 0 else n for size in self.shape) for n in ((0, 2, 4), (5, 6, 8))[number]]

    def get_tensor_shape(self, name):
        return self.shape if self.shape_now is None else self.shape_now

    def get_tensor_dtype(self, name):
        return f"DataType.{self.dtype}"  # as an enumeration's text

    def get_tensor_location(self, name):
        return self.location

    def get_tensor_format(self, name):
        return self.order

    def get_tensor_format_desc(self, name):
        return self.order.name

    def get_tensor_vectorized_dim(self, name):
        return 1 if self.order is TensorFormat.HWC8 else -1

    def get_tensor_components_per_element(self, name):
        return 8 if self.order is TensorFormat.HWC8 else -1

    def set_input_shape(self, name, shape):
        self.shape_now = shape
        return self.refuse != "shape"

    def set_tensor_address(self, name, address):
        self.addresses[name] = address
        return self.refuse != "address"

    def execute_async_v3(self, stream):
        self.streams.append(stream)
        if self.refuse == "run":
            return False
        buffers = self.driver.buffers
        buffers[self.addresses["y"]][:] = buffers[self.addresses["x"]]
        return True
