# Each works alone on a machine with Python >= 3.10, gcc and make:
#   make demo      three nodes on this machine, every byte checked
#   make fast      lint, types and the pure tests: within a minute after set-up
#   make test      all tests that a change needs; SGLang's too where its environment exists
#   make gate      what CI runs, with a table: all that is deterministic, one run of each real part
#   make full      everything, before a release: long tests, all engines, RDMA, simulations
#   make lmcache   LMCache's server over two nodes; make vllm: vLLM's engine; make dynamo: its indexer
#   make vllm-newer  vLLM's engine in a newer version, which has no build for a CPU
#   make sims      whole clusters, simulated from seeds that follow from the code, and planted bugs
#   make faults    five hosts with bad networks, disks and clocks (SEED=7 MINUTES=1), as root
#   make kill-points a node and a client killed before each system call that changes something
#   make soak      an hour of kills and pauses in which no process may grow (MINUTES=60)
#   make evictions a billion hits, compared while pages are evicted and a node is killed (HITS=1000000000)
#   make fuzz      what reads bytes of others, guided by coverage (FUZZ="codec tcp" MINUTES=10 each)
#   make test-rdma RDMA with real queue pairs, in a guest kernel that it makes
#   make aarch64   unit tests with the C parts for aarch64, in qemu's user mode
#   make sanitize  the tests of the C sources, with sanitizers; wants gcc's libasan and libubsan
#   make ttft      measures SGLang's time to first token, and writes what docs/ shows of it
#   make peers     compares PeerCache with other stores, and writes what docs/ shows of it
#   make peers-faults kills and pauses owners of these stores, fills them, and judges what they answer
#   make docs      writes the pages of docs/ that are made from the code
#   make docs-site builds the documentation site in site/, strictly, and tries it in a browser
#   make release-check  builds sdist and wheel, and uses the wheel in a fresh environment
#   make wheels    builds what a release uploads in dist/: the sdist, wheels for x86-64 and aarch64
#   make format    formats the sources
PYTHON ?= python3
VENV := .venv
SIMS_SEEDS ?= 250
# Where the project is published, for the links of the documentation site: no address is built in.
PROJECT_URL ?=
STAMP := $(VENV)/.installed
BIN := $(VENV)/bin
# Two more than cores: many tests wait for a process or a deadline.
WORKERS ?= $(shell expr $$(nproc) + 2)
# The switch of the SGLang tests is for their own target.
PYTEST := env -u PEERCACHE_TEST_SGLANG $(BIN)/python -m pytest
# A worker that crashed is not replaced: with groups, pytest-xdist 3.8 waits for ever for its tests.
PARALLEL := -q --max-worker-restart=0 --dist loadgroup -n
# Of the pure layers, by the tests that tests/conftest.py names. Flags may leave tests out: with any,
# nothing is measured.
COVERAGE_MIN := 95
COVERAGE = $(if $(PYTEST_FLAGS),,--cov --cov-report=term --cov-fail-under=$(COVERAGE_MIN))

# Tests start hundreds of Python processes; each would compile the whole package again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo fast test gate full test-rdma aarch64 sanitize lint format types types-oldest unit properties slow \
	soak evictions faults kill-points fuzz spec sims sglang sglang-engines lmcache vllm vllm-newer dynamo ttft peers peers-faults docs docs-site release-check wheels clean
.DELETE_ON_ERROR:
# The tests measure time, and two cores are soon full.
.NOTPARALLEL:

help:
	@sed -n 's/^#   //p' Makefile

demo: $(STAMP)
	@$(BIN)/peercache demo $(DEMO_FLAGS)

# mypy needs one core for half of the time, so it runs in parallel with the tests. Pure tests wait for nothing,
# and each worker reads all of them first: as many workers as cores.
fast: lint
	@$(BIN)/mypy & types=$$!; tests=0; \
	$(PYTEST) $(PARALLEL) $$(nproc) --hypothesis-profile=fast -m "not slow" \
		tests/unit tests/house $(PYTEST_FLAGS) || tests=$$?; \
	wait $$types && exit $$tests

# mypy in parallel with the tests here, too.
test: lint
	@$(BIN)/mypy & types=$$!; tests=0; \
	$(MAKE) --no-print-directory --keep-going unit sglang || tests=$$?; \
	wait $$types && exit $$tests

# Both print a table of their parts, which .ci/gate.py names.
gate:
	@bash .ci/run

full:
	@bash .ci/run --full

lint: $(STAMP)
	@$(BIN)/ruff check --quiet
	@$(BIN)/ruff format --check --quiet

types: $(STAMP)
	$(BIN)/mypy

# The same for the oldest Python, where its stubs can be read: numpy's newest need 3.12.
types-oldest: $(STAMP)
	@$(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 12))' \
		|| $(BIN)/mypy --python-version 3.10 --cache-dir .mypy_cache/oldest

format: $(STAMP)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

unit: $(STAMP)
	$(PYTEST) $(PARALLEL) $(WORKERS) -m "not sglang and not lmcache and not vllm and not dynamo and not slow and not rdma" \
		$(COVERAGE) $(PYTEST_FLAGS)

# Every property with eight times as many examples as in `make test`.
properties: $(STAMP)
	$(PYTEST) $(PARALLEL) $(WORKERS) --hypothesis-profile=thorough \
		-m "hypothesis and not sglang and not slow and not rdma" tests/unit tests/rdma $(PYTEST_FLAGS)

# What takes too long for each change: endurance, floods, live demos, benchmarks, the model of the
# read protocol. One after the other: floods take all descriptors, benchmarks all cores.
slow: $(STAMP)
	$(PYTEST) -m "slow and not sglang and not rdma" $(PYTEST_FLAGS)

# The models of the protocols, the litmus tests of the barriers, and each bug planted into them.
spec: $(STAMP)
	$(PYTEST) -q tests/contracts/test_spec.py tests/contracts/test_litmus.py $(PYTEST_FLAGS)

# An hour in which nodes and engines are killed, paused and started again, and every byte is checked;
# what each process takes is sampled, and must not grow.
soak: MINUTES ?= 60
soak: $(STAMP)
	@$(BIN)/python -m tests.system.endurance --minutes $(MINUTES) $(SOAK_FLAGS)

# Reads at the speed of the machine, of pages that writers evict all the time: every byte is compared.
evictions: HITS ?= 1000000000
evictions: $(STAMP)
	@$(BIN)/python -m tests.system.endurance.evictions --hits $(HITS) $(if $(SEED),--seed $(SEED))

# Five hosts in network namespaces, with faults that follow from a seed, which it prints.
faults fuzz: MINUTES ?= 1
faults: $(STAMP)
	@$(BIN)/python -m tests.faults --minutes $(MINUTES) $(if $(SEED),--seed $(SEED)) $(FAULTS_FLAGS)

# A node and a client, killed before each system call that changes something: a quarter of an hour.
kill-points: $(STAMP)
	@$(BIN)/python -m tests.faults.kill_points $(FAULTS_FLAGS)

# Readers of bytes, so many minutes each: atheris is no part of the environment before. gcc builds the
# C parts in a copy, with coverage and sanitizers. FUZZ="tls --keep" keeps inputs for the tests.
fuzz: $(STAMP)
	@$(BIN)/pip install -q atheris
	@$(BIN)/python -m tests.fuzz $(FUZZ) --minutes $(MINUTES)

# Whole clusters, simulated: planted bugs that must be found, and seeds that follow from the code, so
# that CI can be run again; `python -m sims sweep --minutes 60` tries fresh ones.
sims: $(STAMP)
	@swept=0; $(BIN)/python -m sims sweep --kept --derived --seeds $(SIMS_SEEDS) || swept=$$?; \
	$(BIN)/python -m sims canaries && exit $$swept

# The SGLang tests run in an environment of their own (2.6 GB, in the user's cache folder): where it
# exists, and where PEERCACHE_TEST_SGLANG=1 asks for it. Whole files go to two workers: the engines of
# one file start while the others' tests run.
SGLANG := bash tests/integration/run_sglang_tests.sh -q
sglang sglang-engines: export PYTHON := $(PYTHON)
sglang: $(STAMP)
	@$(SGLANG) -n 2 --max-worker-restart=0 --dist loadfile -m "sglang and not slow" $(PYTEST_FLAGS)

# Whole engines, and a live one whose nodes fail: importing SGLang takes 45 seconds of a core for each.
sglang-engines: $(STAMP)
	@$(SGLANG) -m "sglang and slow" $(PYTEST_FLAGS)

# LMCache's server and vLLM's engine over two nodes, each in an environment of its own (1.4 and 3.5 GB,
# in the user's cache folder) that tests/integration/install_engine.sh makes; without it they are
# skipped.
lmcache vllm dynamo: $(STAMP)
	$(PYTEST) -q -m $@ tests/integration $(PYTEST_FLAGS)

# The same tests as `make vllm` with the Python of a newer version, over the environment of vLLM.
VLLM_NEWER ?= 0.33.0
vllm-newer: $(STAMP)
	PEERCACHE_VLLM_FIRST="$$($(BIN)/python -m tests.integration.newer_vllm $(VLLM_NEWER))" \
		$(PYTEST) -q -m vllm tests/integration $(PYTEST_FLAGS)

# The figures of docs/explanation/performance.md, with SGLang's environment, on a quiet machine: four
# minutes. A run that fails leaves the old figures.
PEERS := benchmarks/peers.json
TTFT := benchmarks/ttft_sglang.json
SGLANG_PYTHON := $${PEERCACHE_SGLANG_VENV:-$${XDG_CACHE_HOME:-$$HOME/.cache}/peercache/sglang-0.5.23}/bin/python
ttft: $(STAMP)
	@"$(SGLANG_PYTHON)" setup.py -q build_ext --inplace
	@PYTHONPATH=src "$(SGLANG_PYTHON)" -m benchmarks.ttft_sglang --json > $(TTFT).new \
		|| { rm -f $(TTFT).new; exit 1; }
	@mv $(TTFT).new $(TTFT)
	@$(MAKE) --no-print-directory docs

# The figures of docs/explanation/performance.md compared with Mooncake, PyPI's peercache and Redis, on a
# quiet machine: nine minutes. Their environments are made in the user's cache folder the first time.
peers: $(STAMP)
	@$(BIN)/python -m benchmarks.peers --json $(PEERS).new $(PEERS_FLAGS) \
		|| { rm -f $(PEERS).new; exit 1; }
	@mv $(PEERS).new $(PEERS)
	@$(MAKE) --no-print-directory docs

# What the same stores answer while owners of pages are killed or paused, and while pages are evicted:
# a quarter of an hour. Only a violation of ours fails, and then the old figures stay.
PEERS_FAULTS := benchmarks/peers_faults.json
peers-faults: $(STAMP)
	@$(BIN)/python -m tests.faults.peers --json $(PEERS_FAULTS).new $(if $(SEED),--seed $(SEED)) $(FAULTS_FLAGS) \
		|| { rm -f $(PEERS_FAULTS).new; exit 1; }
	@mv $(PEERS_FAULTS).new $(PEERS_FAULTS)
	@$(MAKE) --no-print-directory docs

# Real verbs in a guest kernel with Soft-RoCE (tests/rdma/README.md): no adapter is needed. What it
# is made of is kept in the user's cache folder; the first time takes some minutes.
test-rdma: $(STAMP)
	@$(BIN)/python -m tests.rdma.rig test $(PYTEST_FLAGS)

# A Debian for arm64 is made in the user's cache folder the first time (tests/aarch64/__main__.py).
# Without PYTEST_FLAGS all unit tests run, in parts; with them one emulator runs what they name.
aarch64: $(STAMP)
	@$(BIN)/python -m tests.aarch64 $(PYTEST_FLAGS)

sanitize: $(STAMP)
	@bash tests/sanitize.sh $(PYTEST_FLAGS)

# Pages of docs/reference that are made from the code.
docs: $(STAMP)
	$(BIN)/python -m tests.house.reference_pages

docs-site: $(VENV)/.docs
	PEERCACHE_PROJECT_URL=$(PROJECT_URL) NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	PEERCACHE_TEST_SITE=site $(PYTEST) -q tests/system/test_site.py

$(VENV)/.docs: $(STAMP) pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[docs]'
	@touch $@

release-check: $(STAMP)
	PYTHON=$(PYTHON) bash tests/release/check.sh

# zig compiles for both processors and an old C library; OpenSSL is built once, and kept in the user's
# cache folder.
wheels:
	PYTHON=$(PYTHON) bash deploy/wheels/make.sh dist

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage build dist site

$(STAMP): pyproject.toml setup.py $(wildcard src/peercache/*/*.c src/peercache/*/*/*.c)
	@command -v $(PYTHON) >/dev/null || { echo "There is no $(PYTHON): PYTHON=/path/to/python3 make ..."; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "PeerCache needs Python 3.10 or later."; exit 1; }
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $(STAMP)
