# SPDX-License-Identifier: Apache-2.0
"""Trains LeNet-5 in its 1998 order on scikit-learn's digits and writes models/lenet5_digits.onnx.

Run from the repository's root: ``python -m models.train_lenet5``. It needs PyTorch (``pip install torch==2.13.0``), a
tool for this script only; the project does not depend on it. About half a minute on one core.

The network (LeCun, Bottou, Bengio, Haffner, Proc. IEEE 1998, section II-B): C1 is 6 convolutions of 5x5, S2 averages
2x2 and applies a trainable gain and bias per map, then tanh; C3 (16 maps, 5x5) and S4 the same; C5 is a convolution of
5x5 to 120 values, F6 has 84 units. Departures: C3 reads all maps of S2 (the original leaves some connections out), the
squashing function is tanh instead of 1.7159 tanh(2x / 3), and the output is linear with softmax instead of Euclidean
distances to bitmaps (RBF), as in later practice.

Training: Adam, cosine decay, cross-entropy; every image shifted by up to 2 pixels and scaled in contrast at random.
One thread and a fixed seed make it repeatable on one machine and PyTorch version; other versions may round otherwise,
so the committed file, not the script, is the reference, and its accuracy stands in the manifest.
"""

from __future__ import annotations

import argparse
import io

import numpy as np
import onnx
import torch
from torch import nn
from torch.nn import functional as F

from models.digits import MODEL_PATH, load_test_set, load_train_set

SEED = 1998
EPOCHS = 60
BATCH = 64
OPSET = 17


class Subsample(nn.Module):
    """S2 and S4: the mean of 2x2, times a trainable gain, plus a trainable bias, per map; then tanh."""

    def __init__(self, channels: int):
        super().__init__()
        self.pool = nn.AvgPool2d(2)
        self.gain = nn.Parameter(torch.ones(1, channels, 1, 1))
        self.bias = nn.Parameter(torch.zeros(1, channels, 1, 1))

    def forward(self, x):
        return torch.tanh(self.pool(x) * self.gain + self.bias)


class LeNet5(nn.Module):
    """[N, 1, 32, 32] to logits [N, 10]."""

    def __init__(self):
        super().__init__()
        self.c1, self.s2 = nn.Conv2d(1, 6, 5), Subsample(6)
        self.c3, self.s4 = nn.Conv2d(6, 16, 5), Subsample(16)
        self.c5, self.f6 = nn.Conv2d(16, 120, 5), nn.Linear(120, 84)
        self.output = nn.Linear(84, 10)

    def forward(self, x):
        x = self.s4(self.c3(self.s2(self.c1(x))))
        x = torch.tanh(self.c5(x)).flatten(1)
        return self.output(torch.tanh(self.f6(x)))


def augment(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Shifts each image by -2 to 2 pixels per axis and scales its contrast by 0.8 to 1.2; the background is -0.1."""
    padded = F.pad(x, (2, 2, 2, 2), value=-0.1)
    shifts = torch.randint(0, 5, (len(x), 2), generator=generator).tolist()
    x = torch.stack([image[:, i : i + 32, j : j + 32] for image, (i, j) in zip(padded, shifts, strict=True)])
    contrast = 0.8 + 0.4 * torch.rand(len(x), 1, 1, 1, generator=generator)
    return (x + 0.1) * contrast - 0.1


def train(epochs: int, seed: int) -> LeNet5:
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    generator = torch.Generator().manual_seed(seed)
    inputs, labels = map(torch.from_numpy, load_train_set())
    model = LeNet5()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    for epoch in range(1, epochs + 1):
        total = 0.0
        for batch in torch.randperm(len(inputs), generator=generator).split(BATCH):
            loss = F.cross_entropy(model(augment(inputs[batch], generator)), labels[batch], label_smoothing=0.05)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item() * len(batch)
        schedule.step()
        if epoch % 10 == 0:
            print(f"epoch {epoch}: loss {total / len(inputs):.4f}")
    return model.eval()


def export(model: LeNet5) -> onnx.ModelProto:
    """The ONNX model as PyTorch's TorchScript exporter writes it, batch N dynamic."""
    buffer = io.BytesIO()
    torch.onnx.export(
        model,
        (torch.zeros(1, 1, 32, 32),),
        buffer,
        dynamo=False,
        opset_version=OPSET,
        input_names=["image"],
        output_names=["logits"],
        dynamic_axes={"image": {0: "N"}, "logits": {0: "N"}},
    )
    exported = onnx.load_from_string(buffer.getvalue())
    exported.graph.name = "lenet5_digits"
    exported.doc_string = "LeNet-5 in its 1998 order, trained on scikit-learn's digits by models/train_lenet5.py."
    onnx.checker.check_model(exported, full_check=True)
    return exported


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", default=str(MODEL_PATH))
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--seed", type=int, default=SEED)
    args = parser.parse_args()
    model = train(args.epochs, args.seed)
    inputs, labels = load_test_set()
    with torch.no_grad():
        correct = int(np.sum(model(torch.from_numpy(inputs)).argmax(1).numpy() == labels))
    onnx.save(export(model), args.output)
    print(f"{args.output}: {correct} of {len(labels)} test images right ({correct / len(labels):.2%})")


if __name__ == "__main__":
    main()
