# SPDX-License-Identifier: Apache-2.0
"""The commands: each parses its options, calls the package, and prints.  `python -m convpool.cli` is convpool-optimize."""
