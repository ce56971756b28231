# make demo: FLrce against FedAvg on the embedded digits, with a report. make test: everything a change must pass.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt
TEST := FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1 $(BIN)/python -m pytest

.PHONY: demo test check unit browser flower faults docs bench lint types clean

demo: $(VENV)/.core
	rm -rf runs/demo
	$(BIN)/flrce compare experiments/digits.toml --recipes fedavg,flrce --seeds 0-4 --out runs/demo
	@echo "open runs/demo/report.html"

test: check flower faults

check: lint types unit

unit: $(VENV)/.dev
	$(TEST) tests --ignore tests/flower --ignore tests/faults

flower: $(VENV)/.dev
	$(TEST) tests/flower

faults: $(VENV)/.dev
	$(TEST) tests/faults

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev
	$(BIN)/mypy

bench: $(VENV)/.dev
	$(BIN)/python benchmarks/relations.py
	$(BIN)/python benchmarks/native.py

clean:
	rm -rf $(VENV) runs site

# torch first and alone: the pin in constraints.txt then holds for whatever depends on it
$(VENV)/.core: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch
	$(PIP) --editable .
	touch $@

$(VENV)/.dev: $(VENV)/.core
	$(PIP) --editable '.[dev,flower,report,images]'
	touch $@
