# SPDX-License-Identifier: Apache-2.0
"""The suites of layers that the literature measures, and rows from a file."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

from benchmarks.layers.rows import Row
from convpool.errors import OptionError


def _suita(table: int) -> list[Row]:
    return [Row(64, c, c, size, size, suite=f"suita-table{table}") for size in (8, 16, 32, 64) for c in (32, 64, 128, 256, 512)]


def _tokura() -> list[Row]:
    channels = (32, 64, 128, 256, 512)
    return [Row(1, c, m, 32, 32, suite="tokura") for c in channels for m in channels]


def _densenet() -> list[Row]:
    # Transitions of DenseNet-121, 169 and 201 (growth 32, compression 0.5); the first two are the same in all.
    sizes = (
        (256, 56, "121/169/201 1"),
        (512, 28, "121/169/201 2"),
        (1024, 14, "121 3"),
        (1280, 14, "169 3"),
        (1792, 14, "201 3"),
    )
    return [
        Row(n, c, c // 2, size, size, kernel=1, pad=0, suite="densenet", label=f"DenseNet-{label}")
        for n in (1, 32)
        for c, size, label in sizes
    ]


def _batch1() -> list[Row]:
    # (c, m, size) of stride-1 convolutions, as they stand in the networks.
    spatial = {
        "VGG-16": ((64, 64, 224), (128, 128, 112), (256, 256, 56), (512, 512, 28), (512, 512, 14)),
        "ResNet-50": ((64, 64, 56), (128, 128, 28), (256, 256, 14), (512, 512, 7)),
        "GoogLeNet": ((96, 128, 28), (112, 224, 14), (160, 320, 7)),
        "SqueezeNet": ((16, 64, 55), (48, 192, 27)),
    }
    pointwise = {
        "ResNet-50": ((64, 256, 56), (256, 64, 56), (512, 128, 28), (1024, 256, 14), (2048, 512, 7)),
        "GoogLeNet": ((192, 64, 28), (480, 192, 14), (832, 256, 7)),
        "SqueezeNet": ((128, 16, 55), (512, 64, 13)),
    }
    return [
        Row(1, c, m, size, size, kernel=kernel, pad=kernel // 2, suite="batch1", label=network)
        for kernel, networks in ((3, spatial), (1, pointwise))
        for network, layers in networks.items()
        for c, m, size in layers
    ]


def _networks() -> list[Row]:
    # (batch, c, m, size, kernel, prologue): the pairs of models.generators' discriminators as the optimizer leaves them.
    layers = {
        "SNGAN": ((64, 64, 64, 64, 3, False), *((64, 2048 // n, 4096 // n, n, k, False) for n in (32, 16, 8, 4) for k in (1, 3))),
        "WGAN-GP": ((64, 128, 128, 32, 3, False), (64, 128, 128, 16, 1, False), (64, 128, 128, 16, 3, False)),
        "StarGAN v2": (
            (1, 64, 64, 256, 3, True),
            (1, 64, 128, 256, 1, False),
            (1, 128, 128, 128, 3, True),
            (1, 128, 256, 128, 1, False),
            (1, 256, 256, 64, 3, True),
            (1, 256, 512, 64, 1, False),
            (1, 512, 512, 32, 3, True),
            (1, 512, 512, 16, 3, True),
            (1, 512, 512, 8, 3, True),
        ),
    }
    return [
        Row(n, c, m, size, size, kernel=kernel, pad=kernel // 2, suite="networks", label=network, prologue=prologue)
        for network, rows in layers.items()
        for n, c, m, size, kernel, prologue in rows
    ]


def _plain() -> list[Row]:
    # (batch, c, m, size, kernel, pad, stride): what `--enable plain_conv` gives the plugin in the discriminators,
    # and 3x3 layers of ResNet-50 and VGG-16.
    layers = {
        "SNGAN": ((64, 64, 64, 32, 3, 1, 1), (64, 128, 128, 16, 3, 1, 1), (64, 256, 256, 8, 3, 1, 1), (64, 512, 512, 4, 3, 1, 1)),
        "WGAN-GP": ((64, 128, 128, 8, 3, 1, 1),),  # and one as SNGAN
        "StarGAN v2": (
            (1, 64, 128, 128, 3, 1, 1),
            (1, 128, 256, 64, 3, 1, 1),
            (1, 256, 512, 32, 3, 1, 1),
            (1, 512, 512, 16, 3, 1, 1),
            (1, 512, 512, 8, 3, 1, 1),
            (1, 512, 512, 4, 3, 1, 1),
            (1, 512, 512, 4, 4, 0, 1),
        ),
        "ResNet-50": tuple(
            (n, c, c, size * stride, 3, 1, stride)
            for n in (1, 32)
            for c, size, strides in ((64, 56, (1,)), (128, 28, (1, 2)), (256, 14, (1, 2)), (512, 7, (1, 2)))
            for stride in strides
        ),
        "VGG-16": tuple((8, c, c, size, 3, 1, 1) for c, size in ((64, 224), (128, 112), (256, 56), (512, 28), (512, 14))),
    }
    return [
        Row(n, c, m, size, size, kernel, pad, stride, pool=1, pool_stride=1, suite="plain", label=network)
        for network, rows in layers.items()
        for n, c, m, size, kernel, pad, stride in rows
    ]


def _cuconv() -> list[Row]:
    # (c, m, size) by kernel, of stride 1, as they stand in the networks.
    layers = {
        1: {
            "GoogLeNet": ((192, 64, 28), (480, 192, 14), (512, 24, 14), (832, 32, 7), (832, 256, 7)),
            "SqueezeNet": ((128, 16, 55), (16, 64, 55), (256, 48, 27), (512, 64, 13)),
            "ResNet-50": ((64, 256, 56), (256, 64, 56), (512, 128, 28), (1024, 256, 14), (2048, 512, 7)),
        },
        3: {
            "GoogLeNet": ((64, 192, 56), (96, 128, 28), (160, 320, 7)),
            "SqueezeNet": ((16, 64, 55), (48, 192, 27), (64, 256, 13)),
            "ResNet-50": ((64, 64, 56), (128, 128, 28), (256, 256, 14), (512, 512, 7)),
            "AlexNet": ((192, 384, 13), (384, 256, 13), (256, 256, 13)),
            "VGG-16": ((64, 64, 224), (256, 256, 56), (512, 512, 14)),
        },
        5: {
            "GoogLeNet": ((16, 32, 28), (32, 96, 28), (24, 64, 14), (32, 128, 7), (48, 128, 7)),
            "AlexNet": ((64, 192, 27),),
        },
    }
    return [
        Row(n, c, m, size, size, kernel, kernel // 2, pool=1, pool_stride=1, suite="cuconv", label=network)
        for kernel, networks in layers.items()
        for network, shapes in networks.items()
        for c, m, size in shapes
        for n in (1, 8, 64)
    ]


def _windows() -> list[Row]:
    squares = [
        Row(64, c, c, size, size, kernel, kernel // 2, pool=pool, pool_stride=pool, suite="windows")
        for kernel, pools, channels in ((3, (3, 4), (64, 128, 256)), (5, (2, 3), (64, 128)))
        for pool in pools
        for size in (24, 48)
        for c in channels
    ]
    lenet = [Row(64, c, m, size, size, 5, 0, suite="windows", label="LeNet-5") for c, m, size in ((1, 6, 32), (6, 16, 14))]
    alexnet = [Row(n, 64, 192, 27, 27, 5, 2, pool=3, pool_stride=2, suite="windows", label="AlexNet") for n in (1, 64)]
    return [*squares, *lenet, *alexnet]


SUITES = {
    "suita-table1": (_suita(1), ("fp32",), "Suita et al. 2020, table 1: batch 64, 3x3, pooling 2x2, fp32 in the paper"),
    "suita-table2": (_suita(2), ("fp16",), "Suita et al. 2020, table 2: the same layers, fp16 in the paper"),
    "tokura": (_tokura(), ("fp32", "fp16"), "Tokura et al. 2018, tables II and III: 32x32, batch 1, 25 pairs of channels"),
    "densenet": (_densenet(), ("fp16",), "1x1 transitions of DenseNet-121, 169 and 201, batch 1 and 32"),
    "batch1": (_batch1(), ("fp16",), "1x1 and 3x3 layers of known networks at batch 1, the case that cuConv studies"),
    "networks": (_networks(), ("fp16",), "SNGAN's and WGAN-GP's discriminators, batch 64, and StarGAN v2's, batch 1"),
    "plain": (_plain(), ("fp16",), "convolutions that no pooling follows, of the same networks, ResNet-50 and VGG-16"),
    "cuconv": (_cuconv(), ("fp32",), "cuConv's question: 1x1, 3x3 and 5x5 convolutions without pooling, batch 1, 8 and 64"),
    "windows": (_windows(), ("fp16",), "pooling windows of 3 and 4, and 5x5 convolutions"),
}
"""Name: rows, precisions unless others are asked for, what it is."""

_NUMBERS = ("n", "c", "m", "h", "w", "kernel", "pad", "stride", "pool", "pool_stride")


def load_rows(path: str) -> list[Row]:
    """Rows from a JSON file: a list of objects, or an object with that list as `rows`.

    Fields: c, m, size (one number or [h, w]) or h and w; n (1), kernel (3), pad (kernel // 2), stride (1), pool (2),
    pool_stride (pool), label (""), prologue and packed (false).  Raises OptionError with file, row and field.
    """
    try:
        data = json.loads(Path(path).read_text())
    except OSError as error:
        expected = f"expected one of {', '.join(SUITES)} or a JSON file"
        raise OptionError(f"{path}: cannot be read; got {error.strerror or error}, {expected}") from error
    except (ValueError, RecursionError) as error:
        raise OptionError(f"{path}: cannot be read as JSON; got {error}, expected a list of rows") from error
    entries = data.get("rows") if isinstance(data, dict) else data
    if not isinstance(entries, list) or not entries:
        raise OptionError(f"{path}: no rows; got {type(entries).__name__}, expected a list of objects")
    return [_row(f"{path}: row {number}", entry, Path(path).name) for number, entry in enumerate(entries, 1)]


def _row(where: str, entry: Any, suite: str) -> Row:
    if not isinstance(entry, dict):
        raise OptionError(f"{where}: got {type(entry).__name__}, expected an object")
    values = dict(entry)
    if "size" in values:
        size = values.pop("size")
        values["h"], values["w"] = size if isinstance(size, list) and len(size) == 2 else (size, size)
    values.setdefault("n", 1)
    values.setdefault("kernel", 3)
    values.setdefault("pad", values["kernel"] // 2 if isinstance(values["kernel"], int) else 0)
    values.setdefault("pool", 2)
    values.setdefault("pool_stride", values["pool"])
    known = {field.name for field in fields(Row)}
    for name in values:
        if name not in known:
            raise OptionError(f"{where}: unknown field '{name}'; expected {', '.join(sorted(known - {'suite'} | {'size'}))}")
    for name in ("c", "m", "h", "w"):
        if name not in values:
            raise OptionError(f"{where}: no '{name}'; expected c, m and size")
    for name in _NUMBERS:
        value, least = values.get(name, 1), 0 if name == "pad" else 1
        if type(value) is not int or not least <= value <= 1 << 20:
            raise OptionError(f"{where}: {name}; got {value!r}, expected a whole number from {least} to {1 << 20}")
    for name in ("prologue", "packed"):
        if type(values.get(name, False)) is not bool:
            raise OptionError(f"{where}: {name}; got {values[name]!r}, expected true or false")
    row = Row(**{**values, "label": str(values.get("label", "")), "suite": values.get("suite") or suite})
    if min(row.conv_size) < 1 or min(row.out_size) < 1:
        raise OptionError(f"{where}: no output; got {row.name}, expected a pooling window that fits")
    return row
