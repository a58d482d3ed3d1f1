# SPDX-License-Identifier: Apache-2.0
"""The rule for nearest upsampling, then a convolution."""
