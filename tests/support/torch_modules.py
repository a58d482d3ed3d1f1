# SPDX-License-Identifier: Apache-2.0
"""Random modules of PyTorch's with pairs and near ones.  Importing it skips a module where there is no PyTorch."""

import random

from tests.support.torch import require_torch

torch = require_torch()
from torch import nn  # noqa: E402
from torch.nn.utils import parametrizations, spectral_norm  # noqa: E402


class Forward(nn.Module):
    """Layers and parameters by their names, tensors as buffers, and a forward that is given them and the input."""

    def __init__(self, forward, **layers: nn.Module | torch.Tensor) -> None:
        super().__init__()
        self._forward = forward
        for name, layer in layers.items():
            self.register_buffer(name, layer) if type(layer) is torch.Tensor else setattr(self, name, layer)

    def forward(self, x):
        return self._forward(self, x)


class Doubled(torch.autograd.Function):
    """A function whose gradient is not its derivative."""

    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        return 5 * grad


class Residual(nn.Module):
    """x + body(x), both pooled if a pool is given."""

    def __init__(self, body: nn.Module, pool: nn.Module | None) -> None:
        super().__init__()
        self.body, self.pool = body, pool

    def forward(self, x):
        h = self.body(x)
        return x + h if self.pool is None else self.pool(h) + self.pool(x)


class RandomModules:
    """Draws layers for inputs of `rank` spatial axes, and follows the channels."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        torch.manual_seed(seed)
        self.rank = self.rng.choice((1, 2, 2, 2, 2))
        self.channels = self.inputs = self.rng.choice((6, 8, 16))

    def layer(self, name: str, *arguments, **options) -> nn.Module:
        return getattr(nn, f"{name}{self.rank}d")(*arguments, **options)

    def conv(self, channels: int | None = None) -> nn.Module:
        """A convolution to so many channels without change of size, or to any, maybe with normalised weights."""
        pick, given = self.rng.choice, self.channels
        if channels is not None:
            return self.layer("Conv", given, channels, 3, padding=1, bias=pick((True, False)))
        self.channels, groups, kernel = pick((8, 12, 16)), pick((1, 1, 1, 1, 2)), pick((1, 2, 3, 3))
        options = {"stride": (1, 1, 1, 1, 2), "padding": (0, 1, 1), "bias": (True, False), "dilation": (1, 1, 1, 1, 2)}
        options["padding_mode"] = ("zeros", "zeros", "zeros", "circular", "replicate")
        drawn = {name: pick(values) for name, values in options.items()}
        made = self.layer("Conv", given, self.channels, kernel, groups=groups if given % groups == 0 else 1, **drawn)
        norms = (lambda m: m,) * 8 + (parametrizations.weight_norm, parametrizations.spectral_norm, spectral_norm)
        return pick(norms)(made)

    def pool(self) -> nn.Module:
        pick = self.rng.choice
        options = {
            "stride": pick((None, None, None, 2, 1)),
            "padding": pick((0, 0, 0, 0, 1)),
            "ceil_mode": self.rng.random() < 0.1,
        }
        return self.layer("AvgPool", pick((2, 2, 2, 3)), **options, count_include_pad=pick((True, False)))

    def activation(self) -> nn.Module:
        kinds = (nn.ReLU(), nn.ReLU(inplace=True), nn.LeakyReLU(self.rng.choice((0.1, 0.0, -0.5, 1.5))), nn.Tanh(), nn.Identity())
        return self.rng.choice(kinds)

    def norm(self) -> nn.Module:
        made = self.layer("BatchNorm", self.channels, affine=self.rng.random() < 0.8, track_running_stats=self.rng.random() < 0.8)
        for tensor in (*made.parameters(), *made.buffers()):
            if tensor.is_floating_point():
                tensor.data.uniform_(0.5, 1.5)
        return made

    def maybe(self, *kinds) -> list[nn.Module]:
        return [kind() for kind in kinds if self.rng.random() < 0.35]

    def pair(self) -> nn.Module:
        """A convolution and a pooling, with something in front, between and behind at times."""
        front, conv = self.maybe(self.norm, self.activation), self.conv()
        between = self.maybe(self.norm, nn.Identity, lambda: nn.Dropout(0.3)) if self.rng.random() < 0.4 else []
        return nn.Sequential(*front, conv, *between, self.pool(), *self.maybe(self.activation))

    def upsampled(self) -> nn.Module:
        """A nearest upsampling and a convolution, with something in front and between at times."""
        up = nn.Upsample(scale_factor=self.rng.choice((2, 2, 3)))
        front, between = (self.maybe(self.norm, self.activation) for _ in range(2))
        return nn.Sequential(*front, up, *between, self.conv(self.rng.choice((None, self.channels))))

    def residual(self) -> nn.Module:
        body = nn.Sequential(*self.maybe(self.activation), self.conv(self.channels))
        return Residual(body, self.rng.choice((None, self.layer("AvgPool", 2))))

    def shared(self) -> nn.Module:
        """One convolution and one pooling, each called twice."""
        conv, pool = self.conv(self.channels), self.layer("AvgPool", 2)
        return nn.Sequential(conv, pool, self.activation(), conv, pool)

    def module(self) -> nn.Module:
        kinds = (self.pair,) * 3 + (self.upsampled, self.residual, self.shared, self.norm, self.activation, self.conv, self.pool)
        return nn.Sequential(*[self.rng.choice(kinds)() for _ in range(self.rng.randint(1, 3))]).double()
