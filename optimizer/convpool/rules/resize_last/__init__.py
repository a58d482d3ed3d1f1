# SPDX-License-Identifier: Apache-2.0
"""The rules for 1x1 convolutions beside any linear resampling."""
