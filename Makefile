# make demo: the default against FedAvg and FLrce on the embedded digits, with a report. make test: everything a change must pass.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt
TEST := FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest

# what `make test` reports one by one: quick parts first, each run whatever became of the others
PARTS := lint types docs unit walks research numbers wheel faults flower crashes
# tests of arithmetic, run a second time by PyTorch's plainest kernels: another processor must not change what they show
NUMBERS := core/test_relations core/test_sketch core/test_loop methods/test_selectors \
	methods/test_turns methods/test_robust methods/test_fleet_clip methods/test_submodels \
	methods/test_workload methods/test_compressors methods/test_servers training/test_trainer \
	training/cpu/test_pooling training/cpu/test_native training/cpu/test_residual training/cpu/test_gru \
	training/gpu/test_batch_trainer simulation/test_gpu_scheduler simulation/test_simulator

CRASHES := tests/faults/test_journal.py tests/faults/test_signals.py
# whole paths: every page of the documentation run as written, the first runs, the first commands, pages in a browser
WALKS := tests/newcomer/test_reading.py tests/newcomer/test_runs.py tests/newcomer/test_start.py tests/report/test_browser.py

.PHONY: demo test check unit quick walks research numbers wheel browser flower faults nightly fuzz crashes docs versioned release bench lint types clean

demo: $(VENV)/.core
	rm -rf runs/demo
	$(BIN)/flrce compare experiments/digits.toml --recipes fedavg,flrce,frugal --seeds 0-4 --out runs/demo
	@echo "open runs/demo/report.html"

test: $(VENV)/.dev
	@.ci/parts $(PARTS)

# all of it but slow tests
check: $(VENV)/.dev
	@.ci/parts lint types quick

UNIT := $(TEST) tests --ignore tests/deployment --ignore tests/faults --ignore tests/newcomer/wheel \
	$(WALKS:%=--ignore %) -n 2 --dist loadfile --no-loadscope-reorder

unit: $(VENV)/.dev browser
	$(UNIT)

# without tests marked slow: whole crossings of recipes, and processes that start processes
quick: $(VENV)/.dev
	$(UNIT) -m "not slow and not nightly"

walks: $(VENV)/.dev browser
	$(TEST) $(WALKS) -n 2

# the arena, the reproduction of the paper, and the tables of the studies, made anew from all committed runs
research: $(VENV)/.dev browser
	$(TEST) research/tests -n 2 --dist loadfile --no-loadscope-reorder

numbers: $(VENV)/.dev
	ATEN_CPU_CAPABILITY=default $(TEST) $(NUMBERS:%=tests/%.py) -n 2 --dist loadfile

# the wheels of flrce and of its client in empty environments outside the checkout, without pins
wheel: $(VENV)/.dev
	$(TEST) tests/newcomer/wheel

# the page's tests want Debian's Chromium and skip without it
browser:
	@command -v chromium >/dev/null || ! command -v apt-get >/dev/null || test "$$(id -u)" != 0 || \
		(apt-get -qq update && apt-get -qq install -y chromium chromium-driver) >/dev/null 2>&1 || true

flower: $(VENV)/.dev
	$(TEST) tests/deployment

faults: $(VENV)/.dev
	$(TEST) tests/faults $(CRASHES:%=--ignore %)

# the slowest faults apart, so that a failure among the others is seen early
crashes: $(VENV)/.dev
	$(TEST) $(CRASHES)

# long deployments, which `make test` leaves out
nightly: $(VENV)/.dev
	$(TEST) tests -m nightly

# damaged experiments, run directories, payloads and .npz files, a minute each; FUZZ = "--seconds 600 --seed 3 npz"
fuzz: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -W ignore tests/faults/long_fuzz.py $(FUZZ)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev
	$(BIN)/mypy

docs: $(VENV)/.dev
	$(BIN)/codespell
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# the documentation of this version beside those of others, on the branch gh-pages of this clone; nothing is pushed
VERSION ?= $(shell sed -n 's/^__version__ = "\([0-9]*\.[0-9]*\).*/\1/p' src/flrce/version.py)
versioned: $(VENV)/.dev
	$(PIP) 'mike>=2.1,<3'
	NO_MKDOCS_2_WARNING=1 DOCS_VERSIONS=mike $(BIN)/mike deploy --update-aliases $(VERSION) latest
	$(BIN)/mike set-default latest

# wheels, sdists, hashes and a bill of materials in dist/, built twice and compared; nothing is uploaded
release: $(VENV)/.dev
	$(PIP) 'build>=1.2' 'twine>=6' 'cyclonedx-bom>=7'
	.ci/release

bench: $(VENV)/.dev
	$(BIN)/python benchmarks/bench.py
	$(BIN)/python benchmarks/growth.py
	$(BIN)/python benchmarks/relations.py --out benchmarks/results/relations.json
	$(BIN)/python benchmarks/native.py
	$(BIN)/python benchmarks/page.py

clean:
	rm -rf $(VENV) .bench runs site

# torch first and alone: the pin in constraints.txt then holds for whatever depends on it
$(VENV)/.core: pyproject.toml research/pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch
	$(PIP) --editable . --editable ./research
	touch $@

$(VENV)/.dev: $(VENV)/.core
	$(PIP) --editable '.[dev,docs,energy,flower,ray,report,images,llm,onnx,privacy,track]' --editable './research[advise]'
	touch $@
