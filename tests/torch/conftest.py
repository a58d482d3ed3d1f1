# SPDX-License-Identifier: Apache-2.0
"""Eager training steps on a GPU run the plans, however small they are."""

from __future__ import annotations

import importlib.util

import pytest


@pytest.fixture(autouse=True)
def eager_steps_run_plans(monkeypatch):
    if importlib.util.find_spec("torch") is not None:
        for name in ("HOST", "HOST_OF_A_PENALTY"):
            monkeypatch.setattr(f"convpool.torch.rewrite.waiting.{name}", 0.0)
