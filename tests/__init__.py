# SPDX-License-Identifier: Apache-2.0
"""The tests by layer, and in `support` what they share."""
