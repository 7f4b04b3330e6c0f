# Everything runs in .venv, made on first use. PYTHON picks the interpreter it is made with.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DEMO_FLAGS ?=
# Folder of JSON Lines files with the benchmark's data sets; without it they come from the Hub.
BENCH_DATA ?=
BENCH_GRIDS ?= benchmarks/finetune/configs/stage_a.yaml benchmarks/finetune/configs/stage_b.yaml

.PHONY: demo test lint format clean bench bench-smoke bench-report

demo: $(VENV)/.installed
	$(BIN)/topotuner demo $(DEMO_FLAGS)

test: $(VENV)/.installed
	$(BIN)/python tests/run.py

# Hours; finished cells are not run again.
bench: $(VENV)/.installed
	$(BIN)/python -m benchmarks.finetune run $(BENCH_GRIDS) $(if $(BENCH_DATA),--data-dir $(BENCH_DATA))

# Minutes: a step or two of every kind of cell, into a folder that is thrown away.
bench-smoke: $(VENV)/.installed
	rm -rf build/bench-smoke
	$(BIN)/python -m benchmarks.finetune run benchmarks/finetune/configs/smoke.yaml --results build/bench-smoke

bench-report: $(VENV)/.installed
	$(BIN)/python -m benchmarks.finetune report

lint: $(VENV)/.lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/.lint
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Where there is no GPU the CPU build of torch saves gigabytes of CUDA libraries; on Linux PyPI's own is a CUDA build.
$(VENV)/.installed: pyproject.toml tools/install.py
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python tools/install.py test
	touch $@

$(VENV)/.lint: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet "ruff==0.17.*"
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info
