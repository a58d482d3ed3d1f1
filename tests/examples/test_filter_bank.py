# SPDX-License-Identifier: Apache-2.0
"""The filter bank: every backend gives the same bytes, the kernels too; folders go through whole, and in order."""

import ctypes
import importlib.util
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tests.support.gpu import skip_or_fail

Image = pytest.importorskip("PIL.Image")
FOLDER = Path(__file__).parents[2] / "examples" / "filter_bank"


@pytest.fixture(scope="module")
def parts():
    """The example's modules, by name; they import one another by name, so its folder is on the path for a while."""
    names = ("bank", "loop", "runtime", "gpu", "files")
    sys.path.insert(0, str(FOLDER))
    try:
        yield {name: __import__(name) for name in names}
    finally:
        sys.path.remove(str(FOLDER))
        for name in names:
            del sys.modules[name]


def images(n: int, height: int, width: int) -> np.ndarray:
    return np.random.default_rng(height).integers(0, 256, (n, height, width), dtype=np.uint8)


def by_definition(x: np.ndarray, parts: dict, kind: str, window: int) -> np.ndarray:
    """Filter, then pool, in Python's own whole numbers, an output at a time."""
    bank = parts["bank"]
    pooling = bank.Pooling(kind, window)
    rows, columns = pooling.out_size(*x.shape[1:])
    y = np.zeros((len(x), 9, rows, columns), np.uint8)
    for n, f, p, q in np.ndindex(y.shape):
        divisor, values = int(bank.DIVISORS[f]), []
        for i in range(p * pooling.stride, p * pooling.stride + window):
            for j in range(q * pooling.stride, q * pooling.stride + window):
                values.append(sum(int(bank.FILTERS[f, a, b]) * int(x[n, i + a, j + b]) for a in range(3) for b in range(3)))
        if kind == "max":
            value = max(min(max((one + divisor // 2) // divisor, 0), 255) for one in values)
        else:
            parts_of = divisor * window**2
            value = min(max((sum(values) + parts_of // 2) // parts_of, 0), 255)
        y[n, f, p, q] = value
    return y


POOLINGS = [(kind, window) for kind in ("average", "box", "max") for window in (2, 3)]


@pytest.mark.parametrize("size", [(11, 14), (5, 5), (10, 9)])
@pytest.mark.parametrize(("kind", "window"), POOLINGS)
def test_every_backend_gives_the_definition_to_the_bit(parts, kind, window, size):
    x = images(2, *size)
    wanted, pooling = by_definition(x, parts, kind, window), parts["bank"].Pooling(kind, window)
    assert np.array_equal(parts["bank"].run_numpy(x, pooling), wanted)
    assert np.array_equal(parts["runtime"].run_onnxruntime(x, pooling), wanted)
    if shutil.which("cc"):
        assert np.array_equal(parts["loop"].run_loop(x, pooling), wanted)


def test_convpool_rewrites_the_pair_that_onnxruntime_runs(parts):
    import convpool

    report = convpool.optimize(parts["runtime"].model(parts["bank"].Pooling()), target="cpu").report
    assert [site.status for site in report.sites] == ["rewritten"]
    assert convpool.optimize(parts["runtime"].model(parts["bank"].Pooling("max"))).report.sites == []


SHIM = """
#include <cstdint>
#include <cstddef>
#include <algorithm>
using std::max;
#define __constant__
#define __device__
#define __global__
struct Index { int x, y, z; };
static Index blockIdx, blockDim{5, 3, 1}, threadIdx;
#include "kernel.cu"
template <class Body> static void everywhere(int n, int p, int q, Body body) {
    for (blockIdx.z = 0; blockIdx.z < n; ++blockIdx.z)
        for (blockIdx.y = 0; blockIdx.y * blockDim.y < p; ++blockIdx.y)
            for (blockIdx.x = 0; blockIdx.x * blockDim.x < q; ++blockIdx.x)
                for (threadIdx.y = 0; threadIdx.y < blockDim.y; ++threadIdx.y)
                    for (threadIdx.x = 0; threadIdx.x < blockDim.x; ++threadIdx.x) body();
}
extern "C" void run_bank(const int *f, const int *d, const uint8_t *x, uint8_t *y, int n, int h, int w, int p, int q, int window,
                         int stride) {
    for (int i = 0; i < 81; ++i) (&filters[0][0][0])[i] = f[i];
    for (int i = 0; i < 9; ++i) divisors[i] = d[i];
    everywhere(n, p, q, [&] { bank(x, y, h, w, p, q, window, stride); });
}
extern "C" void run_largest(const uint8_t *x, uint8_t *y, int n, int h, int w, int p, int q, int window) {
    everywhere(n, p, q, [&] { largest(x, y, h, w, p, q, window); });
}
"""


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    """The kernels as functions of the CPU, a thread after the other."""
    if shutil.which("c++") is None:
        pytest.skip("no C++ compiler")
    folder = tmp_path_factory.mktemp("kernels")
    (folder / "shim.cpp").write_text(SHIM)
    command = "c++ -std=c++17 -O1 -w -shared -fPIC".split()
    subprocess.run([*command, f"-I{FOLDER}", "-o", folder / "kernels.so", folder / "shim.cpp"], check=True)
    return ctypes.CDLL(str(folder / "kernels.so"))


@pytest.mark.parametrize(("kind", "window"), POOLINGS)
def test_the_kernels_give_the_same(parts, kernels, kind, window):
    bank, x = parts["bank"], images(2, 13, 17)
    pooling = bank.Pooling(kind, window)
    rows, columns = pooling.out_size(13, 17)
    y = np.zeros((2, 9, rows, columns), np.uint8)

    def run(function, arrays, *numbers):
        function(*(array.ctypes.data_as(ctypes.c_void_p) for array in arrays), *numbers)

    if kind == "max":  # as `gpu.Gpu` launches them
        between = np.zeros((2, 9, 11, 15), np.uint8)
        run(kernels.run_bank, (bank.FILTERS, bank.DIVISORS, x, between), 2, 13, 17, 11, 15, 1, 1)
        run(kernels.run_largest, (between, y), 2, 11, 15, rows, columns, window)
    else:
        run(kernels.run_bank, (bank.FILTERS, bank.DIVISORS, x, y), 2, 13, 17, rows, columns, window, pooling.stride)
    assert np.array_equal(y, bank.run_numpy(x, pooling))


class PretendedGpu:
    """Computes late: what was submitted is done only when it is waited for."""

    def __init__(self, bank, pooling, batch, slots, size):
        rows, columns = pooling.out_size(*size)
        self.bank, self.pooling, self.batch, self.pending = bank, pooling, batch, []

        class Slot:
            def __init__(self):
                self.x, self.y = np.zeros((batch, *size), np.uint8), np.zeros((batch, 9, rows, columns), np.uint8)

        self.slots = [Slot() for _ in range(slots)]

    def submit(self, slot, count):
        assert all(slot is not other for other, _ in self.pending), "a slot is used before its results are out"
        self.pending.append((slot, count))

    def wait(self, slot):
        found, count = self.pending.pop(0)
        assert found is slot
        slot.y[:count] = self.bank.run_numpy(slot.x[:count], self.pooling)


@pytest.fixture
def source(tmp_path):
    """A folder of eleven images, and of a file that is none."""
    folder = tmp_path / "in"
    folder.mkdir()
    for i, image in enumerate(images(11, 12, 10)):
        Image.fromarray(image).save(folder / f"{i:02}.{'png' if i % 2 else 'pgm'}")
    (folder / "notes.txt").write_text("no image")
    return folder


def check_results(parts, source, out, pooling):
    bank, paths = parts["bank"], sorted(source.glob("*.p*"))
    assert [path.stem for path in sorted(out.iterdir())] == [path.stem for path in paths]
    for path in paths:
        maps = bank.run_numpy(np.asarray(Image.open(path))[None], pooling)[0]
        rows, columns = maps.shape[1:]
        picture = np.asarray(Image.open(out / f"{path.stem}.png"))
        for f in range(9):
            top, left = f // 3 * rows, f % 3 * columns
            assert np.array_equal(picture[top : top + rows, left : left + columns], maps[f])


@pytest.mark.parametrize(("batch", "slots"), [(1, 3), (2, 3), (4, 4), (3, 5), (16, 3)])
def test_a_folder_goes_through_slots_that_are_used_again(parts, source, tmp_path, monkeypatch, batch, slots):
    files, bank = parts["files"], parts["bank"]
    pooling, told = bank.Pooling("average", 3), []

    def slowly(original):  # files take as long as they like
        return lambda *arguments: (time.sleep(random.random() / 200), original(*arguments))[1]

    for name in ("read_into", "write"):
        monkeypatch.setattr(files, name, slowly(getattr(files, name)))
    (tmp_path / "out").mkdir()
    gpu = PretendedGpu(bank, pooling, batch, slots, (12, 10))
    files.run_folder_on_gpu(files.find(source), tmp_path / "out", gpu, told.append)
    check_results(parts, source, tmp_path / "out", pooling)
    assert told[-1] == 11 and told == sorted(told)


def command(*arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(FOLDER), *map(str, arguments)], cwd=cwd, capture_output=True, text=True)


def test_the_command_filters_a_folder_and_draws_a_contact_sheet(parts, source, tmp_path):
    done = command(source, "-o", "out", "--backend", "onnxruntime", "--sheet", "sheet.png", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "11 images to out, by onnxruntime"
    check_results(parts, source, tmp_path / "out", parts["bank"].Pooling())
    assert Image.open(tmp_path / "sheet.png").size == (10 * 136, 2 * 152)


def test_the_command_tells_what_is_wrong(tmp_path):
    (tmp_path / "none").mkdir()
    for arguments, message in ((["none"], "filter_bank: none: no image"), ([], "FOLDER: none given")):
        done = command(*arguments, cwd=tmp_path)
        assert done.returncode and message in done.stderr and "Traceback" not in done.stderr
    folder = tmp_path / "small"
    folder.mkdir()
    Image.fromarray(images(1, 3, 9)[0]).save(folder / "a.png")
    done = command("small", cwd=tmp_path)
    assert "filter_bank: image; got 9x3, expected at least 4 pixels each way" in done.stderr


def test_on_a_gpu(parts):
    if importlib.util.find_spec("pycuda") is None:
        skip_or_fail("no pycuda")
    import pycuda.driver as driver

    try:
        driver.init()
    except driver.Error as error:
        skip_or_fail(f"no GPU: {error}")
    bank = parts["bank"]
    for kind, window in POOLINGS:
        pooling, x = bank.Pooling(kind, window), images(37, 66, 130)
        assert np.array_equal(parts["gpu"].Gpu((66, 130), pooling, batch=4, slots=3).run(x), bank.run_numpy(x, pooling))
