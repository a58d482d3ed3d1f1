# SPDX-License-Identifier: Apache-2.0
"""Random modules in float64: the rewritten module against the original, through changes of mode, parameters and batch."""

import copy
import random

from tests.support.torch import require_torch, results

torch = require_torch()

from torch import nn  # noqa: E402
from torch.nn.utils import parametrizations, spectral_norm  # noqa: E402

from convpool.torch import optimize, upsampling  # noqa: E402

SEEDS = 45
LEAST_PAIRS = 20
LEAST_UPSAMPLED = 3
CALLS = 3


class Residual(nn.Module):
    """x + body(x), both pooled if a pool is given."""

    def __init__(self, body: nn.Module, pool: nn.Module | None) -> None:
        super().__init__()
        self.body, self.pool = body, pool

    def forward(self, x):
        h = self.body(x)
        return x + h if self.pool is None else self.pool(h) + self.pool(x)


class Generator:
    """Draws layers for inputs of `rank` spatial axes, and follows the channels."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        torch.manual_seed(seed)
        self.rank = self.rng.choice((1, 2, 2, 2, 2))
        self.channels = self.rng.choice((6, 8, 16))

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


def test_random_modules_keep_their_results(monkeypatch):
    monkeypatch.setattr(upsampling, "SUM_MACS", {"cpu": 0, "cuda": 0})
    pairs = upsampled = 0
    for seed in range(SEEDS):
        generator = Generator(seed)
        rng, original = generator.rng, generator.module()
        first = next(iter(original.modules()))
        channels = next((m.in_channels for m in first.modules() if hasattr(m, "in_channels")), generator.channels)
        size = rng.choice((12, 14, 15))
        x = torch.randn(2, channels, *[size] * generator.rank, dtype=torch.float64)
        try:
            with torch.no_grad():
                copy.deepcopy(original).eval()(x.clone())
        except RuntimeError:  # smaller than a window
            continue
        rewritten, report = optimize(copy.deepcopy(original), *rng.choice(((), (x,))))
        for call in range(CALLS):
            order, training = rng.choice((0, 1, 2)), rng.choice((True, False))
            given = x if call == 0 else torch.randn(rng.choice((2, 3)), *x.shape[1:], dtype=x.dtype)
            for module in (original, rewritten):
                module.train(training)
            try:
                expected = results(original, given, order)
            except (RuntimeError, ValueError):  # BatchNorm of one value
                continue
            found = results(rewritten, given, order)
            largest = max(float(tensor.detach().abs().max()) for tensor in expected)  # BatchNorms magnify
            for mine, own in zip(expected, found, strict=True):
                torch.testing.assert_close(own, mine, rtol=1e-7, atol=1e-7 * largest, msg=lambda text: f"{seed=}: {text}")  # noqa: B023
            with torch.no_grad():
                for mine, own in zip(original.parameters(), rewritten.parameters(), strict=True):
                    for parameter in (mine, own):
                        parameter.mul_(0.9)
        rules = [site.rule for site in report.sites if site.status == "rewritten"]
        pairs, upsampled = pairs + rules.count("pool_first"), upsampled + rules.count("upsample_last")
    assert pairs >= LEAST_PAIRS and upsampled >= LEAST_UPSAMPLED, (pairs, upsampled)
