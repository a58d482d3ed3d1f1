# SPDX-License-Identifier: Apache-2.0
"""Real networks in which a convolution meets an average pooling: seeded generators, one trained model, a manifest.

``generators`` builds the networks (no network access, the same seed gives the same bytes), ``digits`` holds the trained
LeNet-5 and its test set, ``light`` loads onnx's own DenseNet-121. Not part of the installed package: it is used by the
tests, the benchmarks and ``make demo``.
"""
