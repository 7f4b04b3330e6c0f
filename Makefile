# Everything runs in .venv, made on first use. PYTHON picks the interpreter it is made with.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DEMO_FLAGS ?=

.PHONY: demo test lint format clean

demo: $(VENV)/.installed
	$(BIN)/topotuner demo $(DEMO_FLAGS)

test: $(VENV)/.installed
	$(BIN)/python tests/run.py

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
