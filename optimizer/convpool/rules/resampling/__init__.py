# SPDX-License-Identifier: Apache-2.0
"""Convolutions that move across a resampling.  `rule` is the front."""
