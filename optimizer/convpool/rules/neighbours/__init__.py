# SPDX-License-Identifier: Apache-2.0
"""Nodes beside a node of the operator, fused into it."""
