# SPDX-License-Identifier: Apache-2.0
"""Turn a PyTorch module into an ONNX model, an optimized model and a TensorRT engine.

    python examples/02_pytorch_to_tensorrt.py [MODEL.onnx]

Needs, step by step:
1. export: PyTorch (torch, onnxscript).  With MODEL.onnx this step is skipped.
2. optimize: convpool.
3. build: TensorRT, pycuda, the CUDA library (pip install ./plugin '.[tensorrt]') and a GPU.  Without them the script says
   what is missing and ends after step 2.
"""

import sys
from pathlib import Path

import convpool
from convpool.tensorrt import build

EXPORTED = Path("discriminator.onnx")
OPTIMIZED = Path("discriminator.convpool.onnx")
ENGINE = Path("discriminator.engine")


def export(path: Path) -> None:
    """Write a small discriminator as ONNX.  Raises ImportError without PyTorch."""
    import torch
    from torch import nn

    # No activation stands between a Conv2d and the AvgPool2d behind it: that is a pair.
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.AvgPool2d(2),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.AvgPool2d(2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 8 * 8, 1),
    ).eval()
    images = torch.zeros(4, 3, 32, 32)
    # dynamo=False uses the exporter that needs no onnxscript.  convpool reads the models of both exporters.
    torch.onnx.export(model, (images,), str(path), dynamo=False, input_names=["images"], output_names=["score"], opset_version=17)


def optimize(model: Path) -> None:
    """Write the model with the plugin's operators."""
    result = convpool.optimize(model)
    for site in result.report.sites:
        print(f"{site.conv} -> {site.pool}: {site.operator or site.lowering or site.reason}")
    result.save(OPTIMIZED)
    print(f"optimized: {OPTIMIZED}")


def build_engine(model: Path) -> bool:
    """Build, check and write an engine; False if this machine cannot."""
    # `build` optimizes by itself, so give it the original.  It raises EngineMismatchError if the engine's outputs differ
    # from onnxruntime's, and then no engine is written.
    try:
        built = build(model, precision="fp16")
    except convpool.VerificationError:
        raise
    except convpool.ConvpoolError as error:
        print(f"no engine: {error}")
        return False
    built.save(ENGINE)
    print(f"engine: {ENGINE}, nodes on the plugin: {built.plugin_nodes}")
    return True


def main(model: Path | None = None) -> int:
    """Run the steps that this machine can run; the exit status."""
    if model is None:
        try:
            export(EXPORTED)
        except ImportError as error:
            print(f"no export: {error}; install PyTorch (pip install torch), or name an exported model", file=sys.stderr)
            return 2
        model = EXPORTED
        print(f"exported: {EXPORTED}")
    optimize(model)
    build_engine(model)
    return 0


if __name__ == "__main__":
    sys.exit(main(*map(Path, sys.argv[1:])))
