# SPDX-License-Identifier: Apache-2.0
"""The trained LeNet-5 and its data: scikit-learn's handwritten digits, brought to LeNet-5's 32x32 input.

Data: ``sklearn.datasets.load_digits``, 1,797 images of 8x8 with values 0 to 16 (the test part of UCI's "Optical
Recognition of Handwritten Digits", Alpaydin, Kaynak 1998; bundled with scikit-learn, so nothing is downloaded).

Preparation, in exactly rounded arithmetic: every pixel becomes a block of 3x3, the 24x24 result gets a border of 4
(LeNet-5 asks for a border too, since its features live in the centre), and values are scaled as in the paper
(section II-B: background -0.1, foreground 1.175, so that the mean is near 0 and the variance near 1).

Split: images 0-1346 train, the last 450 (25%) test. The split is by position, not shuffled: scikit-learn's order keeps
a writer's digits together, so the test writers are mostly unseen in training.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

MODEL_PATH = Path(__file__).with_name("lenet5_digits.onnx")
TEST_SIZE = 450


def load_train_set() -> tuple[np.ndarray, np.ndarray]:
    """Inputs [1347, 1, 32, 32] float32 and labels [1347] int64. Needs scikit-learn."""
    inputs, labels = _load()
    return inputs[:-TEST_SIZE], labels[:-TEST_SIZE]


def load_test_set() -> tuple[np.ndarray, np.ndarray]:
    """Inputs [450, 1, 32, 32] float32 and labels [450] int64, never seen in training. Needs scikit-learn."""
    inputs, labels = _load()
    return inputs[-TEST_SIZE:], labels[-TEST_SIZE:]


def _load() -> tuple[np.ndarray, np.ndarray]:
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = digits.images.astype(np.float32) / np.float32(16)
    images = images.repeat(3, axis=1).repeat(3, axis=2)
    images = np.pad(images, ((0, 0), (4, 4), (4, 4)))
    inputs = images * np.float32(1.275) - np.float32(0.1)
    return inputs[:, None], digits.target.astype(np.int64)
