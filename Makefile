# make demo: set up, optimize a bundled model, verify it, time it.   make test: set up, run every test.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
SOURCES := $(shell git ls-files optimizer plugin pyproject.toml 2>/dev/null)

.PHONY: demo test lint install bench-cpu bench-gpu clean

demo: install
	$(BIN)/python -m benchmarks.demo

test: install lint
	$(BIN)/python -m pytest

lint: install
	$(BIN)/ruff check .

install: $(VENV)/.installed

$(VENV)/.installed: $(SOURCES)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	$(BIN)/python -m pip install --quiet --disable-pip-version-check ".[test]"
	touch $@

bench-cpu: install
	$(BIN)/python -m benchmarks.cpu --json benchmarks/results/cpu.json
	$(BIN)/python -m benchmarks.plots benchmarks/results/cpu.json docs/speedup_cpu.png
	$(BIN)/python -m benchmarks.scale --json benchmarks/results/scale.json

# On a machine with a GPU.
bench-gpu: install
	$(BIN)/python -m pip install --quiet --disable-pip-version-check ".[bench,cuda]"
	$(BIN)/convpool-bench suita-table2 --commit $$(git rev-parse HEAD) --json benchmarks/results/h200_suita_table2_fp16.json \
		--plot docs/speedup_gpu_layers.png
	$(BIN)/python benchmarks/gpu_checks.py --commit $$(git rev-parse HEAD) --json benchmarks/results/h200_kernel_tests.json

clean:
	rm -rf $(VENV) build dist
