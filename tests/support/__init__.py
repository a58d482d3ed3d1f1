# SPDX-License-Identifier: Apache-2.0
"""Shared by tests: models, references, cases, limits, and programs run as other processes."""
