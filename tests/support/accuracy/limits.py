# SPDX-License-Identifier: Apache-2.0
"""How far outputs may be from float64, with the reason for each limit.  Every limit of `tests/accuracy` is here.

The error of an output is max |y - y64| / max |y64|, over all elements and inputs of a case.

One rounding to a type with unit u (half the gap above 1) is off by at most u relative.  A layer rounds its input, its
weights, what lies between convolution and pooling, and its output; each sum then averages many independent errors, so
one layer adds about 2 u, and layers that each keep the variance add up like a random walk: 2 u sqrt(layers).  Random
walks exceed their deviation now and then and the maximum over the outputs is taken, so 16-bit types get half as much
again; float32 sums round partial sums too, some dozens of them in a row, and get 4 times as much:

    limit = c u sqrt(layers) * gain,   c = 3 for 16-bit types and TF32, 12 for float32

`layers` counts the longest chain of convolutions and matrix products.  `gain` is 1 unless the table says why not, and
`engine_fp32_gain` stands in its place where something of TensorRT's other than rounding decides in float32.
"""

import math
from dataclasses import dataclass

UNITS = {"fp32": 2.0**-24, "tf32": 2.0**-11, "fp16": 2.0**-11, "bf16": 2.0**-8}
"""Half a unit in the last place; TF32 rounds the operands of products to 10 stored bits and keeps the rest in float32."""


@dataclass(frozen=True)
class Limit:
    """The limit of one model's outputs, from its depth."""

    layers: int
    gain: float
    reason: str
    engine_fp32_gain: float | None = None

    def relative(self, precision: str, *, engine: bool = False) -> float:
        """Largest allowed max |y - y64| / max |y64|; engine: of a TensorRT engine."""
        factor, gain = (12 if precision == "fp32" else 3), self.gain
        if engine and precision == "fp32" and self.engine_fp32_gain:
            gain = self.engine_fp32_gain
        return factor * UNITS[precision] * math.sqrt(self.layers) * gain


LIMITS = {
    "lenet5_digits": Limit(
        5,
        1,
        "three convolutions and two products, Tanh between them; behind TensorRT 8.6's first Tanh "
        "values that were 3e-7 off are 7.9e-6 off, and the logits of the original's own engine, with "
        "every tensor an output, 3.8e-6 (docs/results.md)",
        engine_fp32_gain=3,
    ),
    "lenet5": Limit(5, 1, "as lenet5_digits, of random weights and inputs", engine_fp32_gain=3),
    "sngan64": Limit(11, 1, "five residual blocks of two convolutions, one product; the sum over places adds no error"),
    "sngan64_in_place": Limit(11, 1, "as sngan64"),
    "wgan_gp": Limit(9, 2, "four residual blocks of two, one product; the mean over places cancels to about half"),
    "stargan_v2": Limit(
        15,
        2,
        "stem, six residual blocks of two, two convolutions; the two logits of an untrained network "
        "cancel to a part of their terms: the original's own engine is 3.7e-6 and 7.4e-3 off",
    ),
    "biggan128": Limit(
        15,
        2,
        "stem, six residual blocks of two, two products of the attention in one chain; the logit of an untrained network cancels "
        "to a part of its terms",
    ),
    "sngan_generator": Limit(10, 1, "one product, four residual blocks of two convolutions, one more"),
    "biggan_generator": Limit(12, 1, "one product, five residual blocks of two convolutions, one more"),
    "stargan_v2_generator": Limit(9, 1, "four residual blocks of two convolutions, one more"),
    "unet_nearest": Limit(15, 1, "seven pairs of convolutions, one more"),
    "vae_decoder": Limit(29, 1, "twelve residual blocks of two convolutions, three behind upsamplings, two more"),
    "densenet121": Limit(
        120,
        0.26,
        "120 layers in one chain, but dense blocks add what each layer gives to what is "
        "there: the chain's share is small, and normalisation keeps it so; TensorRT's engine "
        "of the original is 4.02e-3 off in float16",
    ),
    "upsampled": Limit(3, 1, "a convolution behind an upsampling, between two of 1x1"),
    "densenet_transition1": Limit(1, 1, "one convolution of 256 terms"),
    "densenet_transition2": Limit(1, 1, "one convolution of 512 terms"),
    "densenet_transition3": Limit(1, 1, "one convolution of 1024 terms"),
}

RATIOS = {"fp16": 1.1, "fp32": 2.0}
"""An engine with the plugin may be this much further from float64, in the root mean square over many inputs, than the
engine of the original model.  In fp16 both round the same tensors once, the one pooled before the convolution, the other
convolved before the pooling.  In fp32 pooling last averages the errors of four sums, which halves them."""
