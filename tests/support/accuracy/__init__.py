# SPDX-License-Identifier: Apache-2.0
"""References and limits for whole models."""
