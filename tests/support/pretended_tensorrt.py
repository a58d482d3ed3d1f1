# SPDX-License-Identifier: Apache-2.0
"""A TensorRT 8.6 without a GPU: a module whose builder notes what it is told and gives the parsed model as the engine."""

import enum
from types import ModuleType, SimpleNamespace

import onnx


class Flag(enum.IntEnum):
    """The builder's flags of 8.6, as far as they are set here."""

    FP16 = 0
    TF32 = 1
    REFIT = 2
    PREFER_PRECISION_CONSTRAINTS = 3


class TacticSource(enum.IntEnum):
    """Libraries of kernels."""

    CUBLAS = 0
    CUBLAS_LT = 1
    CUDNN = 2
    EDGE_MASK_CONVOLUTIONS = 3


class Config:
    """A builder's config."""

    def __init__(self) -> None:
        self.flags = {Flag.TF32}  # as TensorRT has it at first
        self.pool_limits, self.profiles, self.sources = {}, [], 0b1111
        self.cache: bytes | None = None

    def set_flag(self, flag) -> None:
        self.flags.add(flag)

    def clear_flag(self, flag) -> None:
        self.flags.discard(flag)

    def get_flag(self, flag) -> bool:
        return flag in self.flags

    def set_memory_pool_limit(self, pool, size_bytes) -> None:
        self.pool_limits[pool] = size_bytes

    def create_timing_cache(self, data: bytes) -> bytes | None:
        """Return None for a damaged one, as TensorRT does."""
        return None if data == b"damaged" else data

    def set_timing_cache(self, cache: bytes, ignore_mismatch: bool) -> bool:
        if cache == b"another device" and not ignore_mismatch:
            return False
        self.cache = cache
        return True

    def get_timing_cache(self):
        return SimpleNamespace(serialize=lambda: memoryview((self.cache or b"") + b"+ timed"))

    def get_tactic_sources(self) -> int:
        return self.sources

    def set_tactic_sources(self, sources) -> None:
        self.sources = sources

    def add_optimization_profile(self, profile) -> None:
        self.profiles.append(profile.shapes)


class Network:
    """A network with the inputs of a model, and no layers."""

    num_layers = 0

    def __init__(self, flags: int) -> None:
        self.flags, self.model = flags, onnx.ModelProto()

    @property
    def num_inputs(self) -> int:
        return len(self.model.graph.input)

    def get_input(self, index: int):
        value = self.model.graph.input[index]
        dims = value.type.tensor_type.shape.dim
        return SimpleNamespace(name=value.name, shape=tuple(dim.dim_value if dim.HasField("dim_value") else -1 for dim in dims))


class Profile:
    """An optimization profile."""

    def __init__(self) -> None:
        self.shapes = {}

    def set_shape(self, name, *shapes) -> None:
        self.shapes[name] = shapes


class Parser:
    """Parses every model, unless there are errors."""

    errors: tuple[str, ...] = ()

    def __init__(self, network: Network, log) -> None:
        self._network = network

    @property
    def num_errors(self) -> int:
        return len(self.errors)

    def get_error(self, index: int):
        return SimpleNamespace(desc=lambda: self.errors[index])

    def parse(self, data: bytes) -> bool:
        self._network.model.ParseFromString(data)
        return not self.errors


def pretended_tensorrt(version: str = "8.6.1") -> ModuleType:
    """The module; `configs` and `networks` hold what was made, and an engine's plan is the model last parsed."""
    trt = ModuleType("pretended_tensorrt")  # the logger of a module is kept by its name
    configs, networks = [], []

    class Builder:
        def __init__(self, log) -> None:
            pass

        def create_network(self, flags: int) -> Network:
            networks.append(Network(flags))
            return networks[-1]

        def create_builder_config(self) -> Config:
            configs.append(Config())
            return configs[-1]

        def create_optimization_profile(self) -> Profile:
            return Profile()

        def build_serialized_network(self, network: Network, config: Config) -> bytes:
            return network.model.SerializeToString()

    class Logger:
        Severity = SimpleNamespace(ERROR=1, INTERNAL_ERROR=0)

    trt.__version__, trt.configs, trt.networks = version, configs, networks
    trt.Builder, trt.OnnxParser, trt.ILogger = Builder, Parser, Logger
    trt.BuilderFlag, trt.TacticSource = Flag, TacticSource
    trt.NetworkDefinitionCreationFlag = SimpleNamespace(EXPLICIT_BATCH=0)
    trt.MemoryPoolType = SimpleNamespace(WORKSPACE="workspace")
    trt.LayerType = SimpleNamespace(REDUCE="reduce", MATRIX_MULTIPLY="product")
    return trt
