# SPDX-License-Identifier: Apache-2.0
"""Models of PyTorch's exporters; `python -m tests.exporters` prints how many of their pairs are rewritten."""
