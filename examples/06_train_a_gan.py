# SPDX-License-Identifier: Apache-2.0
"""WGAN-GP on handwritten digits: the plain loop, the same with an optimized critic, compiled, and captured in a CUDA graph.

Run: `python 06_train_a_gan.py`.  Needs PyTorch and scikit-learn, whose digits are the images.  It prints milliseconds a step; a
GPU is used if there is one, and the capture needs one.
"""

import copy
import time

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import convpool.torch

BATCH, STEPS, DEVICE = 32, 10, "cuda" if torch.cuda.is_available() else "cpu"


def new_critic() -> nn.Module:
    """Three convolutions; the average pooling behind two of them halves the image."""
    layers: list[nn.Module] = [nn.Conv2d(1, 32, 3, padding=1), nn.AvgPool2d(2), nn.LeakyReLU(0.2)]
    layers += [nn.Conv2d(32, 64, 3, padding=1), nn.AvgPool2d(2), nn.LeakyReLU(0.2)]
    layers += [nn.Conv2d(64, 64, 3), nn.LeakyReLU(0.2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 1)]
    return nn.Sequential(*layers).to(DEVICE)


def loss_of(critic: nn.Module, real: torch.Tensor, fake: torch.Tensor, mix: torch.Tensor) -> torch.Tensor:
    """The critic's loss; with the penalty the gradient at images between real and fake ones is to have length 1."""
    images = (real + mix * (fake - real)).requires_grad_()
    (slope,) = torch.autograd.grad(critic(images).sum(), images, create_graph=True)
    return critic(fake).mean() - critic(real).mean() + 10 * (slope.flatten(1).norm(dim=1) - 1).square().mean()


def train(critic: nn.Module, captured: bool = False) -> tuple[float, float]:
    """Milliseconds a step and the last loss.  captured: the step, but for drawing images, is one CUDA graph."""
    torch.manual_seed(0)
    digits = torch.from_numpy(load_digits().images).float().div(8).sub(1)[:, None]
    digits = F.interpolate(digits, size=32).to(DEVICE)
    generator = nn.Sequential(nn.Linear(16, 1024), nn.Unflatten(1, (1, 32, 32)), nn.Tanh()).to(DEVICE)
    adam = torch.optim.Adam(critic.parameters(), 1e-4, (0.0, 0.9), capturable=captured)
    real, fake = torch.zeros(BATCH, 1, 32, 32, device=DEVICE), torch.zeros(BATCH, 1, 32, 32, device=DEVICE)
    mix, result = torch.zeros(BATCH, 1, 1, 1, device=DEVICE), torch.zeros((), device=DEVICE)

    def step() -> None:
        adam.zero_grad()
        loss = loss_of(critic, real, fake, mix)
        loss.backward()
        adam.step()
        result.copy_(loss.detach())

    if captured:  # PyTorch's recipe: some steps on another stream, then the capture
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        step = graph.replay
    start = 0.0
    for number in range(STEPS + 3):
        if number == 3:
            start = time.perf_counter()
        with torch.no_grad():
            real.copy_(digits[torch.randint(len(digits), (BATCH,))])
            fake.copy_(generator(torch.randn(BATCH, 16, device=DEVICE)))
            mix.uniform_()
        step()
    return (time.perf_counter() - start) / STEPS * 1e3, result.item()


def main() -> None:
    """Train in each way."""
    torch.manual_seed(1)
    critic = new_critic()
    optimized, report = convpool.torch.optimize(copy.deepcopy(critic), torch.zeros(BATCH, 1, 32, 32, device=DEVICE))
    print(report)
    compiled = torch.compile(copy.deepcopy(critic), backend=convpool.torch.backend.convpool)
    ways = {"plain": (critic, False), "optimized": (optimized, False), "compiled": (compiled, False)}
    if DEVICE == "cuda":
        ways["captured"] = (convpool.torch.optimize(copy.deepcopy(critic))[0], True)
    for name, (module, captured) in ways.items():
        milliseconds, loss = train(module, captured)
        print(f"{name:10} {milliseconds:8.2f} ms a step, loss {loss:.4f}")


if __name__ == "__main__":
    main()
