# make test   sets up everything and runs all tests
# make demo   sets up everything and trains a model with zero-sized parameters
PYTHON ?= python3
BIN := .venv/bin
unexport PYTHONDONTWRITEBYTECODE
# DeepSpeed compiles its C++ ops at first use. One cache for each tree: its entries depend on the source's path.
OPS := $(CURDIR)/build/ops
STOCK := build/stock

.PHONY: test demo lint red load-bearing features bench clean

test: .venv/fork $(STOCK)
	TORCH_EXTENSIONS_DIR=$(OPS)/fork $(BIN)/python -m pytest $(TESTS)

demo: .venv/fork $(STOCK)
	TORCH_EXTENSIONS_DIR=$(OPS)/fork $(BIN)/python examples/train_digits.py
	$(BIN)/python examples/compare.py --stock $(STOCK)

lint: .venv/tools
	$(BIN)/yapf --diff --recursive fork tests examples benchmarks setup.py
	$(BIN)/flake8

# Every unit test has to fail on the release without the patch set.
red: .venv/fork $(STOCK)
	$(BIN)/python tests/fork/red.py --stock $(STOCK)

# Every rule of the patch set has to be missed by a test when it is left out. PATCHES names patches, or --whole too.
load-bearing: .venv/tools
	$(BIN)/python tests/fork/load_bearing.py $(PATCHES)

# Writes docs/features.md.
features: .venv/fork $(STOCK)
	$(BIN)/python tests/fork/features.py --stock $(STOCK)

bench: .venv/fork $(STOCK)
	$(BIN)/python benchmarks/fetch.py --stock $(STOCK)
	TORCH_EXTENSIONS_DIR=$(OPS)/fork $(BIN)/python benchmarks/quantizer_cpu.py

.venv/tools: $(wildcard requirements/*.txt)
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --requirement requirements/test.txt
	touch $@

.venv/fork: .venv/tools setup.py pyproject.toml $(wildcard fork/*.py patches/*) \
            $(shell find deepspeed csrc op_builder -type f)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check .
	touch $@

$(STOCK): .venv/tools requirements/upstream.txt
	rm -rf $@
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes \
	    --target $@ --requirement requirements/upstream.txt
	touch $@

clean:
	rm -rf .venv build dist
