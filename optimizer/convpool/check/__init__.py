# SPDX-License-Identifier: Apache-2.0
"""Running models and judging what they give: inputs, sessions, runners, comparison, timing."""
