# Two commands for a newcomer, each works alone on a machine with Python >= 3.10, gcc and make:
#   make demo    three nodes on this machine, every byte checked
#   make test    lint, types and tests; SGLang's too where its environment exists
PYTHON ?= python3
VENV := .venv
SIMS_MINUTES ?= 5
STAMP := $(VENV)/.installed
BIN := $(VENV)/bin

.DEFAULT_GOAL := help
.PHONY: help demo test test-rdma lint format types unit slow sims sglang docs clean
.DELETE_ON_ERROR:
# The tests measure time, and two cores are soon full.
.NOTPARALLEL:

help:
	@sed -n 's/^#   //p' Makefile

demo: $(STAMP)
	@$(BIN)/peercache demo $(DEMO_FLAGS)

test: lint unit sglang

lint: types
	$(BIN)/ruff check
	$(BIN)/ruff format --check

# Checked for the oldest Python, too, where its stubs can be read: numpy's newest need 3.12.
types: $(STAMP)
	$(BIN)/mypy
	@$(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 12))' \
		|| $(BIN)/mypy --python-version 3.10 --cache-dir .mypy_cache/oldest

format: $(STAMP)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

unit: $(STAMP)
	@# The switch is for the next target, not for this one.
	env -u PEERCACHE_TEST_SGLANG $(BIN)/python -m pytest \
		-m "not sglang and not slow and not soak and not rdma" $(PYTEST_FLAGS)

# What takes longer than a newcomer waits: endurance, floods, the model of the read protocol.
slow: $(STAMP)
	env -u PEERCACHE_TEST_SGLANG $(BIN)/python -m pytest -m "slow and not sglang and not rdma" $(PYTEST_FLAGS)

# Whole clusters, simulated: fresh seeds, and planted bugs that must be found.
sims: $(STAMP)
	$(BIN)/python -m sims sweep --kept --minutes $(SIMS_MINUTES)
	$(BIN)/python -m sims canaries

# The SGLang tests run in an environment of their own (2.6 GB, in the user's cache folder): where it
# exists, and where PEERCACHE_TEST_SGLANG=1 asks for it.
sglang: export PYTHON := $(PYTHON)
sglang: $(STAMP)
	@bash tests/integration/run_sglang_tests.sh $(PYTEST_FLAGS)

# Real verbs in a guest kernel with Soft-RoCE (tests/rdma/README.md): no adapter is needed. What it
# is made of is kept in the user's cache folder; the first time takes some minutes.
test-rdma: $(STAMP)
	@$(BIN)/python -m tests.rdma.rig test $(PYTEST_FLAGS)

# Pages of docs/reference that are made from the code.
docs: $(STAMP)
	$(BIN)/python tests/house/reference_pages.py

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist

$(STAMP): pyproject.toml setup.py $(wildcard src/peercache/*/*.c src/peercache/*/*/*.c)
	@command -v $(PYTHON) >/dev/null || { echo "There is no $(PYTHON): PYTHON=/path/to/python3 make ..."; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "PeerCache needs Python 3.10 or later."; exit 1; }
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $(STAMP)
