# SPDX-License-Identifier: Apache-2.0
"""The recipes of docs/extending.md work: each is followed on a copy of the sources, and its example is put to use.  Those that
change the library are followed on one copy, which is built once.  No GPU: kernels of the examples are compiled, and planned,
named, ranked and refused on a pretended CUDA runtime."""

import json
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from tests.support.recipes import follow, recipe

ROOT = Path(__file__).parents[2]
DOCUMENT = (ROOT / "docs" / "extending.md").read_text()
OPTIMIZE = """
import json, numpy as np, onnx, onnxruntime
from onnx import helper, numpy_helper
import convpool

def answer(body, **options):
    "What became of a model, and how far its output is from the original's, by the largest output."
    text = f'''<ir_version: 8, opset_import: ["": 17]>
    main (float[1,4,8,8] x) => (float[a,b,c,d] y) <float[8,4,3,3] w> {{ {body} }}'''
    model, draw = onnx.parser.parse_model(text.replace("<float[8,4,3,3] w>", "")), np.random.default_rng(7)
    model.graph.initializer.append(numpy_helper.from_array(draw.standard_normal((8, 4, 3, 3), np.float32), "w"))
    result = convpool.optimize(model, **options)
    onnx.checker.check_model(result.model, full_check=True)
    x = draw.standard_normal((1, 4, 8, 8), np.float32)
    one, other = (
        onnxruntime.InferenceSession(m.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, {"x": x})[0]
        for m in (model, result.model)
    )
    again = convpool.optimize(result.model, **options).model
    return {
        "operators": [node.op_type for node in result.model.graph.node],
        "reasons": [site.reason for site in result.report.sites],
        "error": float(abs(one - other).max() / abs(one).max()),
        "stable": again.SerializeToString(deterministic=True) == result.model.SerializeToString(deterministic=True),
    }
"""
POOL = "AveragePool<kernel_shape=[2,2], strides=[2,2]>"
ROUNDING = 1e-5
"""A share of the largest output: sums of 4 * 9 * 4 float32 products in another order."""
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
    """The library of the sources at `root`, made in `folder` in seconds: host code unoptimized, on the pretended CUDA runtime.
    It plans, names, ranks and refuses as the real library does.  kernels: objects of `compile_kernel`; lookups of the others
    find a function that does nothing, and launches of theirs return 0."""
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
    program = f"{PRELUDE}\n{code}\nprint(json.dumps(answer))"
    return python(root, program, CONVPOOL_LIBRARY=str(library), CONVPOOL_TUNED="off")


def copied(folder: Path) -> Path:
    """Copy the sources into a folder."""
    for part in ("optimizer", "plugin"):
        shutil.copytree(ROOT / part, folder / "convpool" / part, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    return folder / "convpool"


@pytest.fixture
def copy(tmp_path):
    """A copy of the sources, to follow recipes on."""
    return copied(tmp_path)


@pytest.fixture(scope="module")
def extended(tmp_path_factory):
    """The answer to code by the package and library of a copy with all that (b) to (e) add, and the names in its kernels."""
    nvcc()
    folder = tmp_path_factory.mktemp("extended")
    root = copied(folder)
    for letter in "bcde":
        follow(recipe(DOCUMENT, f"({letter})"), root)
    row, scale, generic = folder / "row.cu", folder / "scale.cu", root / "plugin/src/families/generic/kernel.cu"
    row.write_text(INSTANCE)
    template = (root / "plugin/src/families/instance.cu.in").read_text()
    scale.write_text(template.replace("@family@", "scale").replace("@precision@", "F16"))
    kernels = [compile_kernel(root, source, folder, "sm_80") for source in (row, scale, generic)]
    library = build(root, folder / "build", *kernels[1:])
    return partial(ask, root, library), [run("nm", "-C", kernel) for kernel in kernels]


def python(root: Path, code: str, **variables: str) -> dict:
    """Run code with the Python package of the copy; return what it prints as JSON."""
    environment = {**os.environ, "PYTHONPATH": str(root / "optimizer"), **variables}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=root)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def optimized(root: Path, body: str, **options: str) -> dict:
    """Optimize a small model with the optimizer of the copy."""
    return python(root, f"{OPTIMIZE}\nprint(json.dumps(answer({body!r}, **{options!r})))")


# ---- (a) an operator between convolution and pooling ----------------------------------------------------------------

CLIP = f"h = Conv<pads=[1,1,1,1]>(x, w) n = Clip(h) y = {POOL}(n)"


def test_a_linear_operator(copy):
    before = optimized(copy, CLIP, lowering="direct")
    assert before["operators"] == ["Conv", "Clip", "AveragePool"]
    assert "between convolution and pooling; got Clip, expected linear operators only" in before["reasons"][0]
    follow(recipe(DOCUMENT, "(a)"), copy)
    after = optimized(copy, CLIP, lowering="direct")
    assert after["operators"] == ["AveragePool", "Conv"] and after["stable"]
    assert after["error"] < ROUNDING


# ---- (f) a rule -------------------------------------------------------------------------------------------------------

RESIZE = """s = Constant<value_floats=[1.0, 1.0, 2.0, 3.0]>()
    r = Resize<mode="nearest", coordinate_transformation_mode="{how}", nearest_mode="floor">(x, , s) y = GlobalAveragePool(r)"""


def test_a_rule(copy):
    body = RESIZE.format(how="asymmetric")
    assert "Resize" in optimized(copy, body)["operators"]
    follow(recipe(DOCUMENT, "(f)"), copy)
    after = optimized(copy, body)
    assert after["operators"] == ["GlobalAveragePool"] and after["stable"] and after["error"] < ROUNDING
    other = optimized(copy, RESIZE.format(how="half_pixel"))
    assert "Resize" in other["operators"]
    assert other["reasons"] == ["Resize 'r': positions; got nearest half_pixel floor, expected nearest asymmetric floor"]
    assert "Resize" in optimized(copy, body, disable="mean_of_repeated")["operators"]


# ---- (b) a tactic ---------------------------------------------------------------------------------------------------

INSTANCE = """#include "families/implicit_gemm/kernel.cuh"
const void *made() { return convpool::implicit_gemm::Instances::kernel<6>(0); }
static_assert(convpool::implicit_gemm::kRows[6].id == 1003);
"""


def test_a_tactic(extended):
    ask, names = extended
    assert "implicit_gemm_kernel" in names[0]
    answer = ask(
        """
new = find_tactic(1003)
try:
    unknown = find_tactic(new.name + "_split2").name
except ProblemError as error:
    unknown = str(error)
answer = dict(
    unknown=unknown,
    row=[new.name, new.family, new.dtype, new.min_cc],
    listed=new in tactics(),
    us=[expected_us(Problem(**LAYER), tactic) for tactic in (1001, 1003, 1002)],
    reasons=[why_not(Problem(**LAYER | fields), new) for fields in (dict(), dict(dtype="bfloat16"), dict(group=2))],
)
""",
    )
    name = "conv_avgpool_direct_gemm_sm75_f16_m128n64k32_s4"
    assert answer["row"] == [name, "direct_gemm", "float16", 75] and answer["listed"]
    assert all(1 < us < 1e4 for us in answer["us"])
    assert answer["unknown"] == f"tactic: unknown; got '{name}_split2', expected an id or name of convpool.cuda.tactics()"
    assert answer["reasons"] == [
        None,
        f"{name}: dtype; got BF16, expected F16; use a tactic of that type",
        f"{name}: group; got 2, expected 1; use the tactic generic",
    ]


# ---- (c) a kernel family --------------------------------------------------------------------------------------------


def test_a_family(extended):
    answer = extended[0](
        """
new, factor = find_tactic(5001), dict(n=4, c=1, m=1, spatial=(32, 32), kernel_shape=1, pool_kernel_shape=1)
described = dict(cc=90, multiprocessors=132, shared_bytes=232448)
answer = dict(
    row=[new.name, new.family, new.dtype, new.min_cc],
    listed=new in tactics(),
    us=expected_us(Problem(**factor), new),
    chosen=Problem(**factor).default_tactic(**described).id,
    others=Problem(**LAYER).default_tactic(**described).id,
    reasons=[why_not(Problem(**factor | fields), new) for fields in (
        dict(), dict(bias=True, activation="tanh"), dict(c=2), dict(pool_kernel_shape=2), dict(residual=True),
        dict(prologue_activation="relu"), dict(dtype="float32"))],
)
""",
    )
    name = "conv_avgpool_direct_fused_sm75_f16_m256n1k1_scale"
    assert answer["row"] == [name, "direct_fused", "float16", 75] and answer["listed"]
    assert 1 < answer["us"] < 10 and answer["chosen"] == 5001 != answer["others"]
    runs, epilogue, *refused = answer["reasons"]
    assert runs is None and epilogue is None
    assert refused == [
        f"{name}: input channels; got 2, expected 1; use the tactic generic",
        f"{name}: pooling window; got 4, expected 1; use the tactic generic",
        f"{name}: residual; got one, expected none; use the tactic generic",
        f"{name}: prologue; got one, expected none; use the tactic generic",
        f"{name}: dtype; got F32, expected F16; use a tactic of that type",
    ]


# ---- (d) an operator variant ----------------------------------------------------------------------------------------

SOFTSIGN = f"h = Conv<pads=[1,1,1,1]>(x, w) p = {POOL}(h) y = Softsign(p)"
REFERENCE = """
import json, numpy as np, onnx, onnx.reference
from convpool.algebra.geometry import ConvSpec, PoolSpec
from convpool.algebra.parts import OPERATORS
from convpool.ir import schema
from convpool.algebra.reference import conv_avg_pool
parts = OPERATORS["ReluConvAvgPoolSoftsign"]
pool, conv = PoolSpec((2, 2), (2, 2), (0, 0, 0, 0), (1, 1)), ConvSpec((3, 3), (1, 1), (0, 0, 0, 0), (1, 1))
node = schema.make_node(["X", "W", "B"], "Y", pool, conv)
schema.give_parts(node, parts)
draw = np.random.default_rng(1)
x, w, b = (draw.standard_normal(shape) for shape in ((1, 2, 8, 8), (3, 3, 3, 2), (3,)))
function = schema.function_proto(parts.op_type, 19)
session = onnx.reference.ReferenceEvaluator(node, functions=[function])
got = session.run(None, {"X": x, "W": w, "B": b})[0]
print(json.dumps({"error": float(abs(got - conv_avg_pool(x, w, b, pool, conv, parts)).max()),
                  "names": list(schema.OP_TYPES)}))
"""
LIST = """#include <cstdio>
#include "nodes/operators.h"
int main() {
    for (const auto &op : convpool::nodes::operators()) std::puts(op.name.c_str());
}
"""


def variants_of_the_plugin(root: Path, folder: Path) -> list[str]:
    """The operators that the TensorRT plugin of the copy has."""
    (folder / "list.cpp").write_text(LIST)
    places = [f"-I{root / 'plugin/include'}", f"-I{root / 'plugin'}"]
    run(
        compiler(), "-std=c++20", *places, folder / "list.cpp", root / "plugin/nodes/operators.cpp",
        "-o", folder / "list",
    )  # fmt: skip
    return run(folder / "list").split()


def test_a_variant(copy, tmp_path):
    assert optimized(copy, SOFTSIGN)["operators"] == ["ConvAvgPool", "Softsign"]
    follow(recipe(DOCUMENT, "(d)"), copy)
    after = optimized(copy, SOFTSIGN)
    assert after["operators"] == ["ConvAvgPoolSoftsign"] and after["stable"]
    assert after["error"] < ROUNDING
    checked = python(copy, REFERENCE)
    assert checked["error"] < 1e-12
    assert sorted(variants_of_the_plugin(copy, tmp_path)) == sorted(checked["names"]) and len(checked["names"]) == 448


def test_the_kernels_of_a_variant(extended):
    """The C API plans it, names it, and leaves out the families that lack it; the kernel compiles."""
    answer = extended[0](
        """
problem = Problem(**LAYER, activation="softsign")
answer = dict(us=expected_us(problem), number=problem.struct.activation,
              families=sorted({t.family for t in tactics() if why_not(problem, t) is None}))
problem.struct.activation = 8
status = lib.convpool_output_shape(problem.struct, (ctypes.c_int64 * 3)())
answer["unknown"] = lib.convpool_last_error().decode()
""",
    )
    assert 1 < answer["us"] < 1e6 and answer["number"] == 7
    assert "generic" in answer["families"]
    assert answer["unknown"] == "problem: activation; got 8, expected 0 to 7"


# ---- (e) an element type --------------------------------------------------------------------------------------------


def test_a_type(extended):
    ask, names = extended
    assert "UInt8" in names[2]
    answer = ask(
        """
from convpool.cuda import arrays
def refusal(**fields):
    try:
        return expected_us(Problem(**LAYER | fields))
    except ProblemError as error:
        return str(error)
problem = Problem(**LAYER, dtype="uint8")
answer = dict(
    us=expected_us(problem, 1),
    y=problem.dtypes[2],
    runs=[tactic.id for tactic in tactics() if why_not(problem, tactic) is None],
    reason=why_not(problem, 1001),
    mixed=refusal(dtype="int8", x_dtype="uint8"),
    of_y=refusal(dtype="float16", y_dtype="uint8"),
    array=arrays._DL_TYPES[1, 8, 1],
)
problem.struct.x_dtype = 6
status = lib.convpool_output_shape(problem.struct, (ctypes.c_int64 * 3)())
answer["unknown"] = lib.convpool_last_error().decode()
""",
    )
    assert 1 < answer["us"] < 1e6 and answer["y"] == "float32" and answer["array"] == "uint8"
    assert answer["runs"] == [1]
    assert re.search(r"dtype; got U8, expected F16; use the tactic generic$", answer["reason"])
    assert answer["mixed"] == "problem: x_dtype; got U8, expected I8, which W has"
    assert answer["of_y"] == "problem: y_dtype; got U8, expected F16, which W has"
    assert answer["unknown"] == "problem: x_dtype; got 6, expected 0 (F16), 1 (BF16), 2 (F32), 3 (I8), 4 (F8E4M3) or 5 (U8)"
