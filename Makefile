# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEMO_STAMP := $(VENV)/.demo
# What the extension is built from: it is built anew when one of them changes.
NATIVE := CMakeLists.txt $(wildcard native/*.*)
# An installation without extras and without the native extensions.
PLAIN := .venv-plain
# Test files side by side; what is done takes from what is not. One process of pytest more than there
# are cores, because tests that wait for ranks and programs leave a core idle.
SIDE_BY_SIDE := -n $(shell expr $$(nproc) + 1) --maxprocesses 4 --dist worksteal
BENCHMARKS := $(basename $(notdir $(filter-out benchmarks/_% benchmarks/gpu.py,$(wildcard benchmarks/*.py))))

.PHONY: demo test test-all stress lint types contracts budgets bench parity docs plain clean install

install: $(STAMP)

# `make demo` on a fresh machine installs only what the demo needs.
$(STAMP): EXTRAS := all
$(DEMO_STAMP): EXTRAS := video train

# torch goes first and alone: with it in place, nothing that follows pulls another build of it. The
# extension compiles while the other packages are installed. Python files are compiled when they are
# imported: most of what these packages hold never is.
$(STAMP) $(DEMO_STAMP): pyproject.toml constraints.txt $(NATIVE)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -c "import torch" 2>/dev/null || $(BIN)/pip install -q --no-compile -c constraints.txt torch
	$(BIN)/python tools/requirements.py $(EXTRAS) > $(VENV)/requirements.txt
	$(BIN)/pip install -q --no-compile --no-deps -e . & build=$$!; \
	  $(BIN)/pip install -q --no-compile -c constraints.txt -r $(VENV)/requirements.txt; packages=$$?; \
	  wait $$build && exit $$packages
	touch $@

demo: $(if $(wildcard $(STAMP)),$(STAMP),$(DEMO_STAMP))
	$(BIN)/gulliver demo --out out/demo

test: $(STAMP)
	$(BIN)/python -m pytest $(SIDE_BY_SIDE)

# The full grids, with coverage, and a saving job that is killed 200 times.
test-all: $(STAMP)
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) --full --cov --cov-report=term:skip-covered
	$(BIN)/python -m tests.killtest --kills 200

# The native I/O engine under ThreadSanitizer and AddressSanitizer, at length.
stress: $(STAMP)
	$(BIN)/python -m tests.native_stress

lint: $(STAMP)
	$(BIN)/ruff check src tests benchmarks examples tools
	$(BIN)/ruff format --check src tests benchmarks examples tools
	$(BIN)/python tools/words.py

types: $(STAMP)
	$(BIN)/pyright

contracts: $(STAMP)
	$(BIN)/lint-imports

# Sizes and shape of the code base; fails when one has risen.
budgets: $(STAMP)
	$(BIN)/python tools/budgets.py

bench: $(STAMP)
	set -e; for name in $(BENCHMARKS); do $(BIN)/python -m benchmarks.$$name --keep; done
	$(BIN)/python -m benchmarks._index docs/benchmarks.md

parity: $(STAMP)
	$(BIN)/python -m tests.parity docs/parity.md

docs: $(STAMP)
	$(BIN)/python -m tools.draw_docs
	$(BIN)/python -m benchmarks._index docs/benchmarks.md
	$(BIN)/python tools/reference.py
	$(BIN)/python tools/notebooks.py
	$(BIN)/mkdocs build --strict

$(PLAIN)/.installed: constraints.txt
	$(PYTHON) -m venv $(PLAIN)
	$(PLAIN)/bin/pip install -q -c constraints.txt torch
	touch $@

# The README's commands in an installation without extras.
plain: $(PLAIN)/.installed
	$(PLAIN)/bin/pip install -q -c constraints.txt --config-settings=wheel.cmake=false .
	$(PLAIN)/bin/python tests/plain_installation.py

clean:
	rm -rf $(VENV) $(PLAIN) build site .coverage $(shell find src/gulliver -name '*.so')
