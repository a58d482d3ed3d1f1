# SPDX-License-Identifier: Apache-2.0
"""References, measures and limits for whole models."""
