# SPDX-License-Identifier: Apache-2.0
"""Digests of what the optimizer makes of every generated model, in every lowering.  ``python -m tests.golden.optimized`` compares
the optimizer with the digests on record and names what differs; ``--write`` records anew. A refactoring leaves them as they are;
a change on purpose is recorded in the commit that makes it."""

import argparse
import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import onnx

from models import digits, generators

PATH = Path(__file__).with_name("optimized.json")
LOWERINGS = ("convavgpool", "direct", "fused", "auto")
# Options of `convpool.optimize` besides the default ones, by the name under which the digest is kept.
OPTIONS = {
    "pool_conv": {"enable": "fuse_pool_conv"}, "stem": {"enable": "image_conv"},
    "plain_conv": {"enable": ("image_conv", "plain_conv")}, "pairs_alone": {"disable": ("fuse_prologue", "fuse_epilogue")},
    "no_concat": {"disable": "chain_concats"}, "cuda": {"target": "cuda"},
}  # fmt: skip
# Digests of these models are a second or more each; the tests leave them to the command.
LARGE = ("biggan128", "biggan256", "densenet121_3d", "sparcnet")


def cases(names: list[str]) -> Iterator[tuple[str, str, dict]]:
    """(case, model, options of `convpool.optimize`) of every digest of the models named."""
    for name in names:
        for lowering in LOWERINGS:
            yield f"{name} {lowering}", name, {"lowering": lowering}
        for label, options in OPTIONS.items():
            yield f"{name} {label}", name, options


def model_of(name: str) -> onnx.ModelProto:
    """A generated model, or the trained LeNet-5; a name ending in :float16 gives the model in that type."""
    if name == digits.MODEL_PATH.stem:
        return onnx.load(digits.MODEL_PATH)
    name, _, dtype = name.partition(":")
    return generators.generate(name, **({"dtype": dtype} if dtype else {}))


def names() -> list[str]:
    """Every model, and the small ones in float16 too."""
    small = [f"{name}:float16" for name in generators.names() if name.endswith("_small") or name == "lenet5"]
    return [digits.MODEL_PATH.stem, *generators.names(), *small]


def digest(model: onnx.ModelProto, options: dict) -> str:
    """SHA-256 of the optimized model's bytes and of its report's sites."""
    import convpool

    result = convpool.optimize(model, check=0, **options)
    sites = [[site.conv, site.pool, site.pattern, site.status, site.lowering] for site in result.report.sites]
    return hashlib.sha256(result.model.SerializeToString(deterministic=True) + json.dumps(sites).encode()).hexdigest()[:32]


def compute(of: list[str]) -> dict[str, str]:
    """Digests by case."""
    found, last, model = {}, None, None
    for case, name, options in cases(of):
        if name != last:
            last, model = name, model_of(name)
        found[case] = digest(model, options)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.golden.optimized", description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="record the digests of this optimizer")
    parser.add_argument("--small", action="store_true", help="leave out the models that take long")
    options = parser.parse_args()
    found = compute([name for name in names() if not (options.small and name.startswith(LARGE))])
    if options.write:
        PATH.write_text(json.dumps(found, indent=0) + "\n")
        print(f"{PATH.name}: {len(found)} digests")
        return 0
    wanted = json.loads(PATH.read_text())
    differing = [case for case in found if found[case] != wanted.get(case)]
    for case in differing:
        print(case)
    print(f"{len(found)} cases, {len(differing)} differ")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
