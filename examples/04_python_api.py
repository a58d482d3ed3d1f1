# SPDX-License-Identifier: Apache-2.0
"""The Python interface: a model in memory, rules, exclusions, results and errors.

    python examples/04_python_api.py

Needs: convpool.
"""

import numpy as np
import onnx

import convpool

MODEL = """
<ir_version: 8, opset_import: ["" : 17]>
network (float[N, 3, 32, 32] x) => (float[N, 8, 8, 8] y)
{
    a = Conv <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (x, w1)
    b = AveragePool <kernel_shape = [2, 2], strides = [2, 2]> (a)
    c = Relu (b)
    d = Conv <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (c, w2)
    y = AveragePool <kernel_shape = [2, 2], strides = [2, 2]> (d)
}
"""


def make_model() -> onnx.ModelProto:
    """Two pairs, with random weights."""
    model = onnx.parser.parse_model(MODEL)
    random = np.random.default_rng(0)
    for name, shape in {"w1": (8, 3, 3, 3), "w2": (8, 8, 3, 3)}.items():
        weights = random.standard_normal(shape).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(weights, name))
    for number, node in enumerate(model.graph.node):
        node.name = f"{node.op_type}_{number}"
    return model


def operators(model: onnx.ModelProto) -> list[str]:
    """The operators of a model in order."""
    return [node.op_type for node in model.graph.node]


def main() -> None:
    """Optimize one model in several ways."""
    model = make_model()  # a path, bytes, a ModelProto or an onnx-graphsurgeon Graph; it is not changed
    print("original:     ", operators(model))

    # The default: each pair becomes one node of convpool's operator, together with its neighbours.
    print("default:      ", operators(convpool.optimize(model).model))

    # Standard operators: AveragePool, then Conv ("direct"), or one larger Conv ("fused").
    direct = convpool.optimize(model, lowering="direct")
    print("direct:       ", operators(direct.model))
    print("fused:        ", operators(convpool.optimize(model, lowering="fused").model))

    # Leave nodes unchanged by name, and switch rules off.
    part = convpool.optimize(model, exclude="Conv_0", disable=["fuse_prologue"])
    print("one pair only:", operators(part.model))

    # One report for each candidate says what became of it, and why.
    for site in part.report.sites:
        print(f"  {site.conv}: {site.status} {site.lowering or site.reason}")

    # The batch N is open.  The check takes a size of its own; `input_shapes` gives another.
    checked = convpool.optimize(model, input_shapes={"x": (4, 3, 32, 32)}, check=3)
    assert checked.report.verification is not None
    print("checked on:   ", checked.report.verification.inputs, "sets of inputs", checked.report.verification.input_shapes)

    # The result: a ModelProto, bytes, or files.
    print("bytes:        ", len(direct.to_bytes()))
    print("files:        ", *direct.save("direct.onnx"))

    # Unusable models and options have exceptions of their own; all are ConvpoolErrors.
    try:
        convpool.optimize("no_such_file.onnx")
    except convpool.ModelError as error:
        print("ModelError:   ", error)
    try:
        convpool.optimize(model, disable=["no_such_pass"])
    except convpool.OptionError as error:
        print("OptionError:  ", error)


if __name__ == "__main__":
    main()
