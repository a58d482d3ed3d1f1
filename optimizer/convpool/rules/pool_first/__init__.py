# SPDX-License-Identifier: Apache-2.0
"""Convolution, then average pooling: the pooling goes first.  `rule` is the front."""
