"""Convolution followed by 2x2 average pooling on a GPU: convpool's tactics beside cuDNN, in one run.

    python benchmarks/gpu_conv_avgpool.py --json benchmarks/results/h200_f16_nhwc.json

Batch 64, 3x3 kernel, padding 1, pooling 2x2, stride 2 (Suita et al. 2020, tables 1 and 2), fp16, channels last, no bias.
The baseline is cuDNN's convolution (PyTorch, channels last, benchmark mode) followed by a pooling kernel written here
that reads and writes 16 bytes a thread. Every method runs as a replayed CUDA graph over inputs rotated beyond the L2; a
figure is the median of the replays, in microseconds a call. Outputs are compared before anything is timed. Weights stay
the same, as in inference: what filter_fused makes of them is made once, before. "default" is the tactic that the library
picks, with no measurement; "best" the fastest. Needs PyTorch and CuPy.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import statistics
import subprocess
import sys

import cupy
import torch

from convpool import cuda

POOL_SOURCE = r"""
#include <cuda_fp16.h>
extern "C" __global__ void __launch_bounds__(256) pool2x2(const uint4 *x, uint4 *y, int items, int out_w, int chunks) {
    int item = blockIdx.x * 256 + threadIdx.x;
    if (item >= items) return;
    int chunk = item % chunks, pixel = item / chunks, column = pixel % out_w, row = pixel / out_w;
    const uint4 *src = x + ((long long)row * 2 * out_w * 2 + column * 2) * chunks + chunk;
    uint4 v[4] = {src[0], src[chunks], src[(long long)2 * out_w * chunks], src[(long long)2 * out_w * chunks + chunks]};
    uint4 r;
    for (int i = 0; i < 4; ++i) {
        float2 s = make_float2(0.f, 0.f);
        for (int j = 0; j < 4; ++j) {
            float2 f = __half22float2(((const __half2 *)&v[j])[i]);
            s.x += f.x;
            s.y += f.y;
        }
        ((__half2 *)&r)[i] = __floats2half2_rn(s.x * 0.25f, s.y * 0.25f);
    }
    y[item] = r;
}
"""
BATCH = 64
L2_BYTES = 60 * 2**20


class Timer:
    """Times a callable of one input set as a CUDA graph over all sets."""

    def __init__(self, replays: int) -> None:
        self.replays = replays
        self.stream = torch.cuda.Stream()

    def measure(self, call, sets: int) -> tuple[float, float]:
        """Median and spread (largest minus smallest quartile) of microseconds a call."""
        with torch.cuda.stream(self.stream):
            for i in range(min(sets, 3)):
                call(i)
            self.stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=self.stream):
                for i in range(sets):
                    call(i)
            for _ in range(2):
                graph.replay()
            times = []
            for _ in range(self.replays):
                start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                start.record(self.stream)
                graph.replay()
                stop.record(self.stream)
                stop.synchronize()
                times.append(start.elapsed_time(stop) * 1000 / sets)
        quartiles = statistics.quantiles(times, n=4)
        return statistics.median(times), quartiles[2] - quartiles[0]


def machine() -> dict:
    query = "name,driver_version,clocks.sm,clocks.mem,clocks.max.sm,clocks.max.mem"
    out = subprocess.run(["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"], capture_output=True, text=True)
    values = dict(zip(query.split(","), (v.strip() for v in out.stdout.strip().split(",")), strict=False))
    return {
        **values,
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version(),
        "cuda": torch.version.cuda,
        "time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def row(size: int, channels: int, timer: Timer, pool, wanted: str) -> dict:
    one_set = BATCH * size * size * channels * 2
    sets = max(4, min(64, math.ceil(4 * L2_BYTES / one_set)))
    generator = torch.Generator(device="cuda").manual_seed(size * 1000 + channels)
    xs = [
        torch.randn(BATCH, channels, size, size, device="cuda", generator=generator).half().contiguous(
            memory_format=torch.channels_last
        )
        for _ in range(sets)
    ]
    w = (torch.randn(channels, channels, 3, 3, device="cuda", generator=generator) / math.sqrt(9 * channels)).half()
    w_last = w.contiguous(memory_format=torch.channels_last)
    w_ours = w.permute(0, 2, 3, 1).contiguous()
    xs_ours = [x.permute(0, 2, 3, 1) for x in xs]
    half = size // 2
    out = torch.empty(BATCH, half, half, channels, device="cuda", dtype=torch.half)
    items = out.numel() // 8

    def conv(i):
        return torch.nn.functional.conv2d(xs[i], w_last, padding=1)

    def pooled(y):
        with cupy.cuda.Stream.from_external(torch.cuda.current_stream()):
            pool(((items + 255) // 256,), (256,), (y.data_ptr(), out.data_ptr(), items, half, channels // 8))

    def baseline(i):
        pooled(conv(i))

    problem = cuda.Problem(
        n=BATCH, c=channels, m=channels, spatial=(size, size), kernel_shape=3, pool_kernel_shape=2, pool_pads=1,
        strides=2, layout="NHWC",
    )  # fmt: skip
    usable = [t for t in cuda.tactics() if t.family != "generic" and problem.why_not(t) is None]
    chosen = problem.default_tactic(max_workspace_bytes=2**40)
    if wanted == "default":
        usable = [chosen]
    elif wanted != "all":
        usable = [t for t in usable if str(t.id) in wanted.split(",")]
    need = max([problem.workspace_bytes(t) for t in usable], default=0)
    workspace = torch.empty(max(need, 4) // 4, dtype=torch.float32, device="cuda")

    def ours(tactic, prepared=False):
        # As in inference, weights stay: what a tactic makes of them is made by the first call.
        def call(i):
            cuda.conv_avg_pool(
                xs_ours[i], w_ours, pool_kernel_shape=2, pool_pads=1, strides=2, layout="NHWC", out=out,
                workspace=workspace, weights_prepared=prepared, tactic=tactic,
                stream=torch.cuda.current_stream().cuda_stream,
            )  # fmt: skip

        return call

    reference = torch.nn.functional.conv2d(xs[0].float(), w.float(), padding=1)
    reference = torch.nn.functional.avg_pool2d(reference, 2).permute(0, 2, 3, 1)
    scale = reference.norm()
    result = {"size": size, "channels": channels, "input_sets": sets, "tactics_us": {}, "errors": {}}
    baseline(0)
    torch.cuda.synchronize()
    result["errors"]["cudnn_conv_then_pool"] = float((out.float() - reference).norm() / scale)
    conv_us, _ = timer.measure(conv, sets)
    result["cudnn_conv_us"] = conv_us
    result["cudnn_conv_then_pool_us"], result["cudnn_conv_then_pool_spread_us"] = timer.measure(baseline, sets)
    result["torch_conv_then_torch_pool_us"], _ = timer.measure(
        lambda i: torch.nn.functional.avg_pool2d(conv(i), 2), sets
    )
    for tactic in usable:
        out.fill_(float("nan"))
        try:
            ours(tactic)(0)
            torch.cuda.synchronize()
        except cuda.CudaError as error:
            print(size, channels, tactic.name, "failed:", error)
            raise
        error = float((out.float() - reference).norm() / scale)
        result["errors"][tactic.name] = error
        if not error < 2e-3:
            print(f"WRONG {size} {channels} {tactic.name}: relative error {error}")
            result["wrong"] = True
            continue
        result["tactics_us"][tactic.name], spread = timer.measure(ours(tactic, prepared=True), sets)
        if tactic == chosen:
            result["default_us"], result["default_spread_us"] = result["tactics_us"][tactic.name], spread
    result["default"] = chosen.name
    if result["tactics_us"]:
        result["best"] = min(result["tactics_us"], key=result["tactics_us"].get)
        result["best_us"] = result["tactics_us"][result["best"]]
    return result


def geometric_mean(values: list[float]) -> float:
    return math.exp(statistics.fmean(math.log(v) for v in values))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", help="where to write the figures")
    parser.add_argument("--commit", default="", help="commit to record")
    parser.add_argument("--tactics", default="all", help="all, default, or ids separated by commas")
    parser.add_argument("--sizes", default="8,16,32,64")
    parser.add_argument("--channels", default="32,64,128,256,512")
    parser.add_argument("--replays", type=int, default=15)
    arguments = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_tf32 = False
    pool = cupy.RawKernel(POOL_SOURCE, "pool2x2")
    timer = Timer(arguments.replays)
    rows = []
    short = {t.name: str(t.id) for t in cuda.tactics()}
    for size in map(int, arguments.sizes.split(",")):
        for channels in map(int, arguments.channels.split(",")):
            r = row(size, channels, timer, pool, arguments.tactics)
            rows.append(r)
            base, default_us, best = r["cudnn_conv_then_pool_us"], r.get("default_us"), r.get("best_us", math.nan)
            print(
                f"{size:3} {channels:4} conv {r['cudnn_conv_us']:7.1f} base {base:7.1f} "
                f"torch {r['torch_conv_then_torch_pool_us']:7.1f} | default {short[r['default']]} "
                f"{default_us or math.nan:7.2f} x{base / (default_us or math.nan):5.2f} | best "
                f"{short.get(r.get('best'), '-')} {best:7.2f} x{base / best:5.2f} | "
                + " ".join(f"{short[n]}:{v:.1f}" for n, v in r["tactics_us"].items()),
                flush=True,
            )
    summary = {}
    for key in ("default_us", "best_us"):
        ratios = [r["cudnn_conv_then_pool_us"] / r[key] for r in rows if key in r]
        if ratios:
            summary[f"geomean_speedup_{key[:-3]}"] = geometric_mean(ratios)
            print(f"{key[:-3]}: geometric mean {geometric_mean(ratios):.3f} over {len(ratios)} rows, "
                  f"least {min(ratios):.2f}")
    if arguments.json:
        record = {"command": " ".join(sys.argv), "commit": arguments.commit, "machine": machine(), **summary, "rows": rows}
        with open(arguments.json, "w") as file:
            json.dump(record, file, indent=1)
            file.write("\n")
    return 1 if any("wrong" in r for r in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
