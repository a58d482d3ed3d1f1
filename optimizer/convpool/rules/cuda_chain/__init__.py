# SPDX-License-Identifier: Apache-2.0
"""Chains of convolutions and poolings with channels last, for onnxruntime's CUDA provider."""
