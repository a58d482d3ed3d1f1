# SPDX-License-Identifier: Apache-2.0
"""Check an optimized model with inputs of your own, and handle a difference.

    python examples/03_check_with_own_data.py [MODEL.onnx DATA.npz]

Needs: convpool.  DATA.npz has one array for each input of the model, by name:

    numpy.savez("data.npz", image=images)

Without arguments it takes the bundled LeNet-5 and writes a data.npz for it.
On a shell: convpool optimize MODEL.onnx --data DATA.npz
"""

import sys
from pathlib import Path

import numpy as np

import convpool

BUNDLED = Path(__file__).parents[1] / "models" / "lenet5_digits.onnx"


def write_data(path: Path) -> None:
    """Write 8 images for the bundled model.  Put your own data here: real inputs find what random ones do not."""
    rows, columns = np.mgrid[-1:1:32j, -1:1:32j]
    rings = [np.cos(frequency * np.hypot(rows, columns)) for frequency in range(8)]
    np.savez(path, image=np.stack(rings)[:, None].astype(np.float32))


def main(model: Path = BUNDLED, data: Path = Path("data.npz")) -> None:
    """Optimize, check with the data, then compare once more with a tolerance of our own."""
    if model == BUNDLED and not data.exists():
        write_data(data)

    # 1. `optimize` runs the original and the result on the data.  If they differ it raises VerificationError.
    try:
        result = convpool.optimize(model, data=data)
    except convpool.VerificationError as error:
        sys.exit(f"the rewritten model differs, nothing is written: {error}")
    assert result.report.verification is not None
    for output in result.report.verification.outputs:
        print(f"{output.name}: largest error {output.max_rel_error:.2g} relative, {output.max_abs_error:.2g} absolute")
    result.save("checked.onnx")

    # 2. `verify` compares any two models.  It returns the outcome and raises nothing for a difference.
    verification = convpool.verify(model, "checked.onnx", data=data, rtol=1e-4, atol=1e-5)
    print("within our own tolerance:", verification.passed)

    # 3. A tolerance of 0 asks for equal bits.  Sums in another order round differently, so this may fail.
    exact = convpool.verify(model, "checked.onnx", data=data, rtol=0, atol=0)
    print("equal to the bit:", exact.passed or exact.difference)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
