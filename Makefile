# Everything a newcomer needs. `make demo` and `make test` do their own set-up; nothing but Python 3.11+ is assumed.
VENV    ?= .venv
PYTHON  ?= $(shell for p in python3.13 python3.12 python3.11 python3; do \
             $$p -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' 2>/dev/null \
             && { echo $$p; break; }; done)
TORCH   ?= 2.13.0
BIN     := $(VENV)/bin
STAMP   := $(VENV)/.installed
PINS    := $(VENV)/constraints.txt
TYPED   := .cache/typed
SOURCES := hap cost_models search codegen tests benchmarks examples docs setup.py

.PHONY: help venv test unit test-long lint format demo docs readme golden wheel clean
.DEFAULT_GOAL := help

help:
	@echo "make demo    measure four unequal devices, plan GPT-2 for them and train it here (no GPU needed)"
	@echo "make test    lint, type-check, run the tests"
	@echo "make test-long   the tests that make test leaves out, as they take minutes"
	@echo "make lint    ruff and mypy only"
	@echo "make format  let ruff rewrite imports and layout"
	@echo "make docs    build the documentation into .cache/site"
	@echo "make readme  put the benchmarks' results into README.md"
	@echo "make golden  rewrite the golden plans of the project's own models, where they changed on purpose"
	@echo "make wheel   build dist/hap-*.whl"
	@echo "make venv    only the set-up: $(VENV), pinned dependencies, hap itself (editable)"
	@echo "make clean   remove what was built (not $(VENV))"

venv: $(STAMP)

# torch comes first and alone: the largest download fails early and by itself. Its build (CPU or CUDA) is pip's choice.
# Releases before the pinned one demand an older setuptools. Of all that is installed a part is imported: only that is
# compiled, here and by who imports more.
$(STAMP): constraints.txt pyproject.toml setup.py
	@test -n "$(PYTHON)" || { echo "error: no Python 3.11 to 3.14 with the venv module found; set PYTHON=..." >&2; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@sed -e 's/^torch==.*/torch==$(TORCH)/' $(if $(filter 2.13.0,$(TORCH)),,-e 's/^setuptools==.*/setuptools<82/') constraints.txt > $(PINS)
	$(BIN)/python -m pip install --quiet --no-compile torch==$(TORCH) -c $(PINS)
	$(BIN)/python -m pip install --quiet --no-compile --upgrade setuptools wheel -c $(PINS)
	$(BIN)/python -m pip install --quiet --no-compile --no-build-isolation -e '.[dev]' -c $(PINS)
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -c 'import hap.api'
	@touch $@

# mypy knows one core. A file's tests stay together, as they share what was made for them.
test: $(STAMP)
	@$(MAKE) --no-print-directory -j 2 lint unit

# Dozens of processes import what is tested: it is compiled once.
unit: $(STAMP)
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n auto --maxprocesses 8 --dist loadfile -m "not long" $(ARGS)

test-long: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n auto --maxprocesses 8 -m long $(ARGS)

# mypy sees the rooms as the one package that they install as: a tree of links, checked from inside so that nothing else
# named `hap` is found first. The benchmarks are checked, too; the tests are there for what those take from them.
lint: $(STAMP)
	$(BIN)/ruff check $(SOURCES)
	@rm -rf $(TYPED) && mkdir -p $(TYPED)/hap
	@for f in hap/*; do ln -s "$(CURDIR)/$$f" $(TYPED)/hap/; done
	@for room in cost_models search codegen; do ln -s "$(CURDIR)/$$room" $(TYPED)/hap/$$room; done
	@ln -s "$(CURDIR)/benchmarks" "$(CURDIR)/tests" $(TYPED)/
	cd $(TYPED) && $(abspath $(BIN))/mypy --config-file $(CURDIR)/pyproject.toml --cache-dir ../mypy

format: $(STAMP)
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

demo: $(STAMP)
	@mkdir -p .cache
	$(BIN)/hap profile examples/train_gpt2.py:build --cluster examples/cluster-4.yaml --emulate -o .cache/demo.profile.json
	$(BIN)/hap run --cluster examples/cluster-4.yaml examples/train_gpt2.py --profile .cache/demo.profile.json $(ARGS)

docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

readme: $(STAMP)
	$(BIN)/python benchmarks/readme.py

golden: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q tests/plans/test_zoo.py --hap-update
	git --no-pager diff --stat -- tests/plans/plans

wheel: $(STAMP)
	rm -rf build
	$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .
	rm -rf build

clean:
	rm -rf build dist out .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
	find hap cost_models search codegen tests benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} +
