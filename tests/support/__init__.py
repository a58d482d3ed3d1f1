# SPDX-License-Identifier: Apache-2.0
"""What tests share: models, references, cases, limits, and programs that a test runs as a process of its own."""
