# SPDX-License-Identifier: Apache-2.0
"""libconvpool.so for machines without a GPU, in seconds: the host code unoptimized, on the pretended CUDA runtime.  It plans,
names, ranks and refuses as the real library does.  Kernels are compiled only where a test asks for them, for one architecture;
lookups of the others find a function that does nothing, and launches of theirs return 0."""

import json
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DEFINITIONS = ("-DCONVPOOL_HAS_SM90A=1", '-DCONVPOOL_ARCHITECTURES="90"')
PRELUDE = """
import ctypes, json
from convpool.cuda import Problem, ProblemError, find_tactic, library, tactics

lib = library.load()
lib.pretended_set_device(0, ctypes.c_uint64(1))
LAYER = dict(n=8, c=64, m=64, spatial=(16, 16), kernel_shape=3, pool_kernel_shape=2, strides=2, layout="NHWC")

def expected_us(problem, tactic=0):
    "What the cost rule expects of a plan; the refusal as an error."
    plan = ctypes.c_void_p()
    library.check(lib.convpool_plan_create(problem.struct, tactic and find_tactic(tactic).id, library.ANY_BYTES, 0, plan))
    properties = library.PlanStruct(struct_size=ctypes.sizeof(library.PlanStruct))
    library.check(lib.convpool_plan_info(plan, properties))
    lib.convpool_plan_destroy(plan)
    return properties.expected_us

def why_not(problem, tactic):
    return problem.why_not(tactic, cc=90, shared_bytes=232448)
"""


def nvcc() -> str:
    """The CUDA compiler; skips the test where there is none."""
    names = [shutil.which("nvcc"), "/usr/local/cuda/bin/nvcc"]
    try:
        import nvidia
    except ImportError:
        pass
    else:
        names += [os.path.join(root, part, "bin", "nvcc") for root in nvidia.__path__ for part in ("cu13", "cuda_nvcc")]
    found = next((name for name in names if name and os.path.exists(name)), None)
    if found is None:
        pytest.skip("no nvcc: install a CUDA toolkit, or pip install 'nvidia-cuda-nvcc==13.0.*'")
    return found


def compiler() -> str:
    """The C++ compiler; skips the test where there is none."""
    found = shutil.which("c++") or shutil.which("g++")
    if found is None:
        pytest.skip("no C++ compiler")
    return found


def run(*command: object, fails: bool = False) -> str:
    """Return what a program prints, on stdout and stderr.  fails: its status may not be 0."""
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    assert (done.returncode != 0) == fails, f"{' '.join(map(str, command))}\n{(done.stdout + done.stderr)[-4000:]}"
    return done.stdout + done.stderr


def cuda_headers() -> str:
    """The folder of cuda_runtime_api.h, as nvcc finds it."""
    dry = run(nvcc(), "--dryrun", "-x", "cu", "-c", "none.cu")
    roots = [
        *(root for line in dry.splitlines() if "INCLUDES=" in line for root in re.findall(r'-I"?([^"\s]+)', line)),
        str(Path(nvcc()).parents[1] / "include"),
        "/usr/local/cuda/include",
    ]
    return next(root for root in roots if Path(root, "cuda_runtime_api.h").exists())


def compile_kernel(root: Path, source: Path, folder: Path, architecture: str) -> Path:
    """A .cu file of the sources at `root` as an object in `folder`."""
    made = folder / f"{source.stem}.cu.o"
    flags = ["-std=c++20", "-O1", f"-arch={architecture}", "-Xcompiler=-fPIC,-fvisibility=hidden"]
    run(nvcc(), *flags, f"-I{root / 'plugin/include'}", f"-I{root / 'plugin/src'}", "-c", source, "-o", made)
    return made


def build(root: Path, folder: Path, *kernels: Path) -> Path:
    """The library of the sources at `root`, made in `folder`.  kernels: objects of `compile_kernel`."""
    folder.mkdir(parents=True, exist_ok=True)
    sources = [*sorted((root / "plugin" / "src").rglob("*.cpp")), ROOT / "tests/support/pretended_cuda/cuda.cpp"]
    flags = ["-std=c++20", "-O0", "-fPIC", "-fvisibility=hidden", *DEFINITIONS]
    places = [f"-I{root / 'plugin/include'}", f"-I{root / 'plugin/src'}", "-isystem", cuda_headers()]

    standard = folder / "standard.h"  # what most of them include, compiled once
    standard.write_text("".join(f"#include <{name}>\n" for name in "algorithm memory mutex set span string vector".split()))
    run(compiler(), *flags, "-x", "c++-header", standard, "-o", f"{standard}.gch")

    def compiled(source: Path) -> Path:
        made = folder / f"{source.parent.name}_{source.stem}.o"
        run(compiler(), *flags, "-include", standard, *places, "-c", source, "-o", made)
        return made

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = [*pool.map(compiled, sources), *kernels]
    symbols = [line.split() for line in run("nm", *objects).splitlines() if line.startswith(" ") or line[:1].isalnum()]
    defined = {words[-1] for words in symbols if len(words) == 3}
    missing = {words[1] for words in symbols if len(words) == 2 and words[0] == "U" and "8convpool" in words[1]} - defined
    nothing = folder / "nothing.c"
    nothing.write_text("long stub(void) { return 0; }\nvoid *kernel_stub(void) { return kernel_stub; }\n")
    library = folder / "libconvpool.so"
    stubs = [f"-Wl,--defsym,{name}={'kernel_stub' if 'kernel_of_precision' in name else 'stub'}" for name in sorted(missing)]
    run(compiler(), "-x", "c", "-c", "-fPIC", nothing, "-o", folder / "nothing.o")
    run(compiler(), "-shared", *objects, folder / "nothing.o", *stubs, "-Wl,-Bsymbolic", "-ldl", "-o", library)
    return library


def ask(root: Path, library: Path, code: str) -> object:
    """Run code after `PRELUDE`, package at `root`, library of `build`; return its `answer`."""
    environment = {**os.environ, "PYTHONPATH": str(root / "optimizer"), "CONVPOOL_LIBRARY": str(library), "CONVPOOL_TUNED": "off"}
    program = f"{PRELUDE}\n{code}\nprint(json.dumps(answer))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)
