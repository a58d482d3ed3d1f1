# SPDX-License-Identifier: Apache-2.0
"""The shapes that every tactic is tried on: chosen ones, then random ones from a fixed seed.

A case is the keyword arguments of `convpool.cuda.Problem` without type and layout.
"""

import math
import random

CHANNELS = (1, 2, 3, 4, 5, 7, 8, 9, 12, 15, 16, 17, 24, 31, 32, 33, 40, 48, 63, 64, 65, 72, 96, 130)
PROLOGUES = [(a, b) for a in (True, False) for b in ("relu", "leaky_relu", None) if a or b]
"""Pairs: X is scaled and shifted or not, and the activation after that."""
MOST_PRODUCTS = 3e7  # keeps the float64 reference to some milliseconds


def rewritten(n, c, m, spatial, kernel, pool, *, pads=0, stride=1, **options):
    """The case that Conv(kernel, pads, stride) then AveragePool(pool, stride pool) is rewritten to."""
    rank = len(spatial)
    case = dict(n=n, c=c, m=m, spatial=tuple(spatial), kernel_shape=(kernel,) * rank, pool_kernel_shape=(pool,) * rank)
    taken = min(pads, stride * (pool - 1))
    case["pool_dilations"] = (stride,) * rank
    case["pool_pads"] = (taken,) * (2 * rank)
    case["pads"] = (pads - taken,) * (2 * rank)
    if kernel == 1 and pads == 0:
        case["pool_strides"] = (stride * pool,) * rank
    else:
        case["strides"] = (stride * pool,) * rank
    return case | options


def chosen() -> list[dict]:
    cases = []
    for kernel in (1, 3, 5, 7):
        for pool in (2, 3):
            for c, m in ((1, 8), (3, 16), (32, 32), (33, 17), (64, 128)):
                cases.append(rewritten(2, c, m, (19, 23), kernel, pool, pads=kernel // 2, bias=True))
    for size in (8, 9, 16, 17, 32):  # one image per tile, several images per tile, ragged tiles
        for n in (1, 3, 7):
            cases.append(rewritten(n, 40, 72, (size, size), 3, 2, pads=1, residual=True, activation="relu"))
    for activation, alpha, beta in (("relu", 0, 0), ("leaky_relu", 0.5, 0), ("tanh", 0, 0), ("sigmoid", 0, 0), ("clip", -2, 3)):
        for m in (24, 31):
            epilogue = dict(bias=True, residual=True, activation=activation, alpha=alpha, beta=beta)
            cases.append(rewritten(2, 24, m, (12, 14), 3, 2, pads=1, **epilogue))
    for c in (256, 512, 520):  # enough slices for every split
        cases.append(rewritten(1, c, 130, (8, 8), 3, 2, pads=1))
        cases.append(rewritten(2, c, 64, (16, 16), 1, 2))
    cases.append(rewritten(1, 72, 264, (20, 20), 3, 2, pads=1, bias=True))  # a tile of 256 channels and some
    cases += [rewritten(1, 40, m, (16, 16), 3, 2, pads=1, bias=True) for m in (96, 160)]  # boxes of 32 channels
    for kernel in (1, 3):  # more tiles than multiprocessors; images of 4 x 4 output pixels, some groups of four ragged
        cases.append(rewritten(21, 40, 136, (64, 50), kernel, 2, pads=kernel // 2, bias=True, activation="relu"))
        for n, size in ((3, 8), (9, 7), (8, 6)):
            epilogue = dict(bias=True, residual=True, activation="leaky_relu", alpha=0.5)
            cases.append(rewritten(n, 296, 72, (size, size), kernel, 2, pads=kernel // 2, **epilogue))
    for kernel, c, m in ((3, 32, 64), (1, 72, 120)):  # the same, with few enough weights to stay in shared memory
        cases.append(rewritten(21, c, m, (64, 50), kernel, 2, pads=kernel // 2, bias=True))
    for pads in (0, 1, 2, 3):  # columns of X that start even and odd
        cases.append(rewritten(2, 24, 40, (18, 21), 3, 2, pads=pads))
    for group in (2, 3):
        cases.append(rewritten(2, 24, 24, (11, 13), 3, 2, pads=1, group=group, bias=True))
    cases.append(rewritten(1, 12, 12, (16, 16), 3, 2, pads=1, group=12))
    for rank, size in ((1, 37), (3, 9)):
        for kernel in (1, 3):
            cases.append(rewritten(2, 9, 10, (size,) * rank, kernel, 2, pads=kernel // 2, bias=True))
    cases.append(dict(n=1, c=16, m=16, spatial=(30, 30), kernel_shape=3, pool_kernel_shape=2, dilations=3, pads=(3,) * 4))
    cases.append(dict(n=1, c=8, m=8, spatial=(21, 22), kernel_shape=3, pool_kernel_shape=1, pads=(1,) * 4, strides=2))
    cases.append(dict(n=1, c=8, m=8, spatial=(9, 9), kernel_shape=3, pool_kernel_shape=3, pads=(5, 0, 0, 6)))
    cases.append(dict(n=2, c=16, m=16, spatial=(1, 40), kernel_shape=(1, 5), pool_kernel_shape=(1, 2), strides=(1, 2)))
    for affine, before in PROLOGUES:
        prologue = dict(prologue_affine=affine, prologue_activation=before, prologue_alpha=0.25)
        both = dict(bias=True, residual=True, activation="relu")
        cases.append(rewritten(3, 40, 72, (34, 33), 3, 2, pads=1, **prologue, **both))  # tiles inside and at borders
        cases.append(rewritten(2, 24, 40, (18, 21), 3, 2, pads=0, **prologue, **both))
        cases.append(rewritten(2, 72, 40, (19, 34), 1, 2, **prologue, **both))
        cases.append(rewritten(2, 136, 72, (16, 16), 3, 2, pads=1, residual=True, activation="leaky_relu", alpha=0.5, **prologue))
        cases.append(rewritten(2, 33, 17, (13, 17), 3, 3, pads=2, **prologue))
        cases.append(rewritten(1, 264, 64, (16, 16), 3, 2, pads=1, **prologue))
        cases.append(rewritten(2, 9, 10, (9, 9, 9), 3, 2, pads=1, **prologue))
        cases.append(rewritten(2, 24, 24, (11, 13), 3, 2, pads=1, group=3, **prologue))
        # No pooling: steps of the implicit GEMM by TMA even and odd in number, and what follows.
        cases.append(dict(n=1, c=16, m=16, spatial=(15, 16), kernel_shape=3, pool_kernel_shape=1, pads=(1,) * 4) | prologue)
        cases.append(dict(n=1, c=136, m=72, spatial=(17, 16), kernel_shape=3, pool_kernel_shape=1, pads=1) | prologue | both)
        apart = dict(strides=2, dilations=2)
        cases.append(dict(n=2, c=72, m=136, spatial=(9, 21), kernel_shape=2, pool_kernel_shape=1) | apart | prologue)
        shrunk = dict(pool_kernel_shape=2, pool_strides=2, pool_pads=1, pads=1)  # zeros of two kinds around f(X)
        cases.append(dict(n=1, c=16, m=16, spatial=(15, 16), kernel_shape=3) | shrunk | prologue)
    # The loops of direct_tma's box means, inside X and at its borders, and the ends of its tiles, the last of which have 8
    # channels of 32 to 256; two of each, since every third case is not for it.
    for (affine, before, slope), activation, m in (
        ((False, "relu", 0), "clip", 136),
        ((False, "leaky_relu", 0.25), "leaky_relu", 264),
        ((False, "leaky_relu", 1.5), "relu", 72),
        ((False, "leaky_relu", -0.5), None, 40),
        ((False, "leaky_relu", 0), "clip", 264),
        ((True, None, 0), "leaky_relu", 136),
    ):
        prologue = dict(prologue_affine=affine, prologue_activation=before, prologue_alpha=slope)
        both = dict(residual=True, activation=activation, alpha=0.5 if activation == "leaky_relu" else -2, beta=3)
        for bias in (True, False):
            cases.append(rewritten(1, 24, m, (34, 33), 3, 2, pads=1, bias=bias, **prologue, **both))
        for bias in (True, False):
            cases.append(rewritten(2, 40, m, (18, 33), 1, 2, bias=bias, **prologue, **both))
    # Box means of channels first: rows longer and shorter than a warp, ragged groups of channels and strips of rows.
    for c, spatial in ((36, (3, 301)), (20, (70, 2)), (33, (5, 62)), (20, (515,)), (130, (2, 2))):
        cases.append(rewritten(2, c, 16, spatial, 3, 2, pads=1, bias=True))
    tall = dict(kernel_shape=(3, 1), pool_kernel_shape=(2, 1), pads=(1, 0, 1, 0), strides=(2, 1))
    cases.append(dict(n=2, c=12, m=8, spatial=(70, 1)) | tall)
    for h in (3, 4, 5):  # places of windows that are no multiple of four
        cases.append(dict(n=3, c=6, m=8, spatial=(h, 9), kernel_shape=1, pool_kernel_shape=(3, 1)))
    apart = dict(pool_kernel_shape=3, pool_strides=2, pool_dilations=2, pool_pads=2)
    cases.append(dict(n=2, c=18, m=8, spatial=(12, 37), kernel_shape=1) | apart)
    # Y channels first: images of whole runs of pixels whose rows are not.
    cases.append(rewritten(3, 24, 24, (12, 12), 3, 2, pads=1, bias=True, residual=True, activation="leaky_relu", alpha=0.5))
    cases.append(dict(n=65, c=8, m=8, spatial=(2, 2), kernel_shape=2, pool_kernel_shape=1))  # one output pixel each
    # TMA's im2col mode, as far as its 8 bits reach: windows from 128 before an image's start on, whose last tap is 255 from the
    # first, and to 128 before the last pixel or 127 behind it.
    for axes in (1, -1):
        far = dict(n=2, c=24, m=16, pool_kernel_shape=1, bias=True)
        wide = dict(spatial=(3, 150)[::axes], kernel_shape=(3, 2)[::axes], dilations=(1, 255)[::axes])
        cases.append(far | wide | dict(pads=(0, 128)[::axes] + (0, 127)[::axes]))
        padded = dict(spatial=(3, 20)[::axes], kernel_shape=(1, 3)[::axes], dilations=(1, 64)[::axes])
        cases.append(far | padded | dict(pads=(0, 128)[::axes] + (0, 255)[::axes]))
        cases.append(far | dict(spatial=(2, 61)[::axes], kernel_shape=(1, 3)[::axes], strides=(1, 8)[::axes]))
    # Few channels: up to 16, 32 and 64 taps and channels, parts of 64 channels of Y, more pixels than warps hold.
    for c, kernel, pool, m in (
        (3, 3, 1, 64),
        (4, 3, 1, 200),
        (1, 5, 1, 72),
        (1, 7, 1, 24),
        (3, 1, 2, 136),
        (4, 2, 2, 40),
        (2, 3, 3, 64),
    ):
        both, affine = dict(bias=True, activation="relu"), dict(prologue_affine=True, prologue_activation="relu")
        cases.append(rewritten(3, c, m, (33, 34), kernel, pool, pads=kernel // 2) | both)
        cases.append(rewritten(2, c, m, (12, 20), kernel, pool, pads=kernel // 2, residual=True))
        cases.append(rewritten(2, c, m, (13, 17), kernel, pool, stride=2) | affine | both)
    for m in (40, 48):  # everything at once; two, since every third case moves Y
        cases.append(rewritten(2, 3, m, (12, 20), 1, 2, residual=True) | affine | both)
    cases.append(dict(n=9, c=3, m=8, spatial=(130, 150), kernel_shape=3, pool_kernel_shape=1, pads=1))
    cases.append(dict(n=2, c=3, m=16, spatial=(9, 11), kernel_shape=2, pool_kernel_shape=1, pool_strides=3, pads=2))
    cases.append(dict(n=1, c=8, m=8, spatial=(70001,), kernel_shape=3, pool_kernel_shape=2, strides=2))  # past 16 bits
    return cases


def _legal(case: dict) -> bool:
    rank = len(case["spatial"])

    def values(name, default, count):
        v = case.get(name, default)
        return [v] * count if isinstance(v, int) else list(v)

    size = [a * b for a, b in zip(case["spatial"], values("upsample", 1, rank), strict=True)]
    for k, s, d, p in (
        ("pool_kernel_shape", "pool_strides", "pool_dilations", "pool_pads"),
        ("kernel_shape", "strides", "dilations", "pads"),
    ):
        kernel, stride, dilation = (values(name, 1, rank) for name in (k, s, d))
        pads = values(p, 0, 2 * rank)
        size = [(size[i] + pads[i] + pads[i + rank] - dilation[i] * (kernel[i] - 1) - 1) // stride[i] + 1 for i in range(rank)]
        if min(size) < 1:
            return False
    taps = math.prod(values("kernel_shape", 1, rank))
    return case["n"] * case["m"] * math.prod(size) * taps * case["c"] / case.get("group", 1) <= MOST_PRODUCTS


def random_cases(count: int, seed: int = 20) -> list[dict]:
    rng = random.Random(seed)
    cases: list[dict] = []
    while len(cases) < count:
        rank = rng.choice((1, 2, 2, 2, 2, 2, 2, 3))
        spatial = tuple(rng.randint(1, 14 if rank == 3 else 33) for _ in range(rank))
        n, c, m = rng.randint(1, 5), rng.choice(CHANNELS), rng.choice(CHANNELS)
        kernel, pool = rng.choice((1, 1, 2, 3, 3, 3, 4, 5, 7)), rng.choice((1, 2, 2, 2, 3, 4))
        options = dict(bias=rng.random() < 0.5, residual=rng.random() < 0.2)
        options["activation"] = rng.choice((None, None, None, "relu", "leaky_relu", "tanh", "sigmoid", "clip"))
        if options["activation"] == "leaky_relu":
            options["alpha"] = 0.25
        if options["activation"] == "clip":
            options["alpha"], options["beta"] = -1.0, 2.0
        if rng.random() < 0.1:
            options["group"] = rng.choice([g for g in range(1, min(c, m) + 1) if c % g == 0 and m % g == 0])
        if rng.random() < 0.5:
            case = rewritten(n, c, m, spatial, kernel, pool, pads=rng.randint(0, kernel), stride=rng.choice((1, 1, 2)), **options)
        else:
            case = dict(n=n, c=c, m=m, spatial=spatial) | options
            for name, low, high, numbers in (
                ("kernel_shape", 1, kernel, rank),
                ("pool_kernel_shape", 1, pool, rank),
                ("strides", 1, 4, rank),
                ("dilations", 1, 3, rank),
                ("pads", 0, 3, 2 * rank),
                ("pool_strides", 1, 3, rank),
                ("pool_dilations", 1, 2, rank),
                ("pool_pads", 0, 2, 2 * rank),
            ):
                case[name] = tuple(rng.randint(low, high) for _ in range(numbers))
        if _legal(case):
            cases.append(case)
    return cases


def tiled_cases(kernel: int, count: int, pool: int = 2, chunk: int = 0) -> list[dict]:
    """Windows side by side, whole chunks of channels: what the tactics by TMA are made for.  Of columns too, so many in a chunk,
    where they take channels first."""
    seed = kernel if pool == 2 else f"{kernel}, {pool}"
    rng = random.Random(f"{seed}, channels first" if chunk else seed)
    cases: list[dict] = []
    while len(cases) < count:
        n, c, m = rng.randint(1, 5), 8 * rng.randint(1, 17), 8 * rng.randint(1, 17)
        spatial = (rng.randint(pool, 20 * pool), rng.randint(pool, 20 * pool))
        if chunk:
            c, m, spatial = c * chunk // 8, m - rng.randint(0, 7), (spatial[0], chunk * rng.randint(1, 80 // chunk))
        options = dict(bias=rng.random() < 0.5, residual=rng.random() < 0.3)
        options["activation"] = rng.choice((None, "relu", "leaky_relu"))
        if options["activation"] == "leaky_relu":
            options["alpha"] = 0.25
        case = rewritten(n, c, m, spatial, kernel, pool, pads=rng.randint(0, 2) if kernel > 1 else 0, **options)
        if _legal(case):
            cases.append(case)
    return cases


def upsampled_cases(count: int) -> list[dict]:
    """Nearest upsampling, then Conv: kernels of even and odd size, factors that differ, pads beyond the kernel, strides and
    dilations now and then; first the layers that networks have, and enough channels for every split."""
    usual = dict(kernel_shape=3, pool_kernel_shape=1, pads=1, upsample=2)
    both = dict(bias=True, residual=True)
    cases: list[dict] = []
    for activation, alpha in ((None, 0), ("relu", 0), ("leaky_relu", 0.25), ("tanh", 0)):
        cases.append(usual | both | dict(n=3, c=72, m=136, spatial=(9, 11), activation=activation, alpha=alpha))
    cases.append(usual | dict(n=21, c=64, m=264, spatial=(16, 24), bias=True))  # more tiles than multiprocessors
    activated = dict(prologue_activation="relu", residual=True)
    cases.append(usual | activated | dict(n=20, c=72, m=136, spatial=(16, 16)))  # and of those that activate X in the kernel
    # More tiles than multiprocessors, whose sums go to Y by copies, each in 1, 2 or 4 parts.
    cases += [
        usual | dict(n=75, c=24, m=136, spatial=(5, 12), bias=True, activation="leaky_relu", alpha=0.25),
        usual | dict(n=24, c=16, m=264, spatial=(6, 32), activation="relu"),
        usual | dict(n=288, c=24, m=200, spatial=(4, 4), bias=True),
        usual | dict(n=72, c=8, m=48, spatial=(5, 8), bias=True, kernel_shape=5, upsample=(3, 2), pads=2),
        usual | dict(n=9, c=24, m=20, spatial=(3, 40), bias=True, kernel_shape=1, upsample=4, pads=0),
        usual | dict(n=420, c=24, m=72, spatial=(7, 2), upsample=(1, 3)),
        usual | dict(n=20, c=24, m=136, spatial=(16, 16), bias=True, prologue_activation="relu"),
        # By differences: tiles that Y ends in, and more steps than stages.
        usual | dict(n=2, c=328, m=136, spatial=(19, 13), bias=True, pads=(1, 3, 2, 1)),
        usual | dict(n=12, c=200, m=72, spatial=(33, 9), activation="relu"),
    ]
    cases += [usual | both | dict(n=2, c=40, m=m, spatial=(7, 10)) for m in (96, 160, 192, 384)]  # tiles of W in several boxes
    cases.append(usual | both | dict(n=2, c=520, m=72, spatial=(4, 4), activation="relu"))
    cases.append(usual | dict(n=1, c=264, m=40, spatial=(8, 8), activation="clip", alpha=-2, beta=3))
    cases.append(usual | dict(n=2, c=24, m=24, spatial=(6, 7), group=3, bias=True))
    for affine, before in PROLOGUES:
        prologue = dict(prologue_affine=affine, prologue_activation=before, prologue_alpha=0.25)
        cases.append(usual | both | prologue | dict(n=3, c=136, m=72, spatial=(9, 17)))
        cases.append(usual | prologue | dict(n=2, c=33, m=17, spatial=(5, 6), upsample=(3, 2)))
    for size, scale, pads in ((1, 2, 0), (2, 2, (0, 0, 1, 1)), (2, 2, 1), (4, 2, 2), (5, 2, 2), (3, 3, 1), (5, 4, 2), (7, 2, 3)):
        cases.append(usual | dict(n=2, c=40, m=48, spatial=(7, 10), kernel_shape=size, upsample=scale, pads=pads))
    cases.append(usual | dict(n=2, c=16, m=16, spatial=(3, 5), pads=(9, 0, 4, 6)))
    cases.append(usual | dict(n=2, c=16, m=16, spatial=(1, 1), upsample=(4, 3), pads=0))
    rng = random.Random(44)
    while len(cases) < count:
        rank = rng.choice((1, 2, 2, 2, 2, 3))
        case = dict(n=rng.randint(1, 4), c=rng.choice(CHANNELS), m=rng.choice(CHANNELS), pool_kernel_shape=1)
        case["spatial"] = tuple(rng.randint(1, 5 if rank == 3 else 17) for _ in range(rank))
        case["upsample"] = tuple(rng.randint(1, 4) for _ in range(rank - 1)) + (rng.randint(2, 4),)
        case["kernel_shape"] = tuple(rng.randint(1, 5) for _ in range(rank))
        case["pads"] = tuple(rng.randint(0, 3) for _ in range(2 * rank))
        if rng.random() < 0.2:
            case["strides"], case["dilations"] = rng.randint(1, 2), rng.randint(1, 2)
        case |= dict(bias=rng.random() < 0.5, residual=rng.random() < 0.3, activation=rng.choice((None, "relu", "sigmoid")))
        if _legal(case):
            cases.append(case)
    return cases


def cases_by_differences(count: int) -> list[dict]:
    """Layers of 3x3 behind an upsampling by 2: sizes around tiles of 16 x 8 places and 128 channels, odd pads before them."""
    rng = random.Random(12)
    sizes = dict(n=(1, 2, 3), c=(8, 16, 56, 64, 72, 136, 200), m=(8, 64, 120, 128, 136, 248, 264))
    usual, cases = dict(kernel_shape=3, pool_kernel_shape=1, upsample=2, alpha=0.25), []
    for i in range(count):
        case = usual | {name: rng.choice(values) for name, values in sizes.items()} | dict(bias=i % 2 == 0)
        case["spatial"] = rng.choice((1, 2, 7, 15, 16, 17, 33)), rng.choice((1, 2, 5, 8, 9, 17, 24))
        case["pads"] = rng.choice((1, 1, 3)), rng.choice((1, 1, 3, 5)), rng.randint(0, 3), rng.randint(0, 3)
        cases.append(case | dict(activation=(None, "relu", "leaky_relu")[i // 2 % 3]))
    return cases


def with_prologues(cases: list[dict]) -> list[dict]:
    """The cases, each with one of the prologues."""
    rng = random.Random(len(cases))
    described = (dict(prologue_affine=a, prologue_activation=b, prologue_alpha=0.25) for a, b in PROLOGUES * len(cases))
    return [case | prologue for case, prologue in zip(rng.sample(cases, len(cases)), described, strict=False)]


def all_cases() -> list[dict]:
    plain = random_cases(360) + tiled_cases(3, 30) + tiled_cases(1, 55)
    special = with_prologues(plain[::6] + tiled_cases(3, 30) + tiled_cases(1, 30))
    tiled = tiled_cases(5, 60) + tiled_cases(3, 60, 3) + tiled_cases(5, 60, 3)
    chunks = tiled_cases(3, 60, chunk=4) + tiled_cases(3, 60, chunk=8)
    return chosen() + plain + special + tiled + chunks + upsampled_cases(120) + cases_by_differences(66)
