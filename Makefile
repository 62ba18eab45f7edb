# Set-up and everyday commands. Two of them do all the work on a fresh machine: `make demo` and `make test`.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
BIN := $(VENV)/bin
SOAK ?= 1
CORE := $(addprefix tests/,api client node transport pool history view setup/env machines e2e/test_calls.py e2e/test_streams.py e2e/test_shared.py)

FAST := $(addprefix tests/,api client transport pool history machines node/shared test_architecture.py test_map.py test_exports.py)

.DEFAULT_GOAL := demo
.PHONY: help docs docs-serve pictures demo test test-fast test-core test-lowest soak hosts test-vm test-peers check bench clean

help:                            ## this list
	@sed -n 's/^\([a-z-]*\):[^#]*## */\1\t/p' $(firstword $(MAKEFILE_LIST)) | awk -F '\t' '{ printf "%-12s %s\n", $$1, $$2 }'

demo: $(VENV)/core.done          ## set up, then train on four nodes of this computer
	$(BIN)/python examples/hello_nodes.py

test: $(VENV)/all.done hosts     ## set up, then run every test, in lanes side by side
	$(BIN)/python tests/lanes.py --durations=15

test-fast: $(VENV)/dev.done      ## the inner loop: logic, messages, values; about a minute, no root, no framework
	$(BIN)/pytest -q --ignore-glob='*/frameworks' $(FAST) $(wildcard tests/node/test_agent*.py tests/node/test_runner_calls.py)

test-core: $(VENV)/dev.done hosts ## the tests that need no framework (also for other Pythons: make test-core PYTHON=python3.13 VENV=.venv-313)
	$(BIN)/pytest tests --ignore-glob='*/frameworks'

test-lowest: $(VENV)/dev.done hosts ## the core tests with the oldest versions that pyproject.toml allows
	$(BIN)/uv venv --quiet --clear --python $(BIN)/python .venv-lowest
	$(BIN)/uv pip install --quiet --python .venv-lowest --resolution lowest-direct -e '.[aws,otel]' --group test
# What the tests need asks for newer versions of some
	$(BIN)/uv pip install --quiet --python .venv-lowest --no-deps $$(sed -n '/^dependencies/,/^]/s/^ *"\([a-z]*\)>=\([0-9.]*\).*/\1==\2/p' pyproject.toml)
	.venv-lowest/bin/pytest --ignore-glob='*/frameworks' $(CORE)

soak: $(VENV)/all.done hosts     ## what is too long for every day, about two hours on two cores; SOAK=10 runs ten times as much
	SKYWARD_SIM_SEEDS=$$((20000 * $(SOAK))) $(BIN)/pytest --timeout=$$((7200 * $(SOAK))) tests/simulation
	SKYWARD_STRESS_SECONDS=$$((900 * $(SOAK))) $(BIN)/pytest -v --timeout=$$((1800 * $(SOAK))) tests/stress
	SKYWARD_FUZZ_SECONDS=$$((600 * $(SOAK))) $(BIN)/pytest --timeout=$$((7200 * $(SOAK))) tests/fuzz
	SKYWARD_FLOOD_MB=$$((1000 * $(SOAK))) $(BIN)/pytest --timeout=$$((3600 * $(SOAK))) tests/e2e/test_output_flood.py
	SKYWARD_SOAK=$(SOAK) SKYWARD_SOAK_SEEDS=$$((200 * $(SOAK))) $(BIN)/pytest tests/cloud/test_crashes.py tests/ssh/test_faults.py tests/ssh/test_kept_results.py tests/providers/aws/test_crashes.py \
	  tests/e2e/test_leftovers.py tests/e2e/test_detached_submission.py tests/e2e/test_resume.py tests/e2e/frameworks/test_torch_ports.py tests/ssh/frameworks/test_added_packages.py tests/seeds
	SKYWARD_SWEEP_SEEDS=$$((50 * $(SOAK))) $(BIN)/pytest tests/ssh/test_detached_sweep.py tests/slurm/test_detached_sweep.py tests/cloud/test_detached_sweep.py

hosts:                           ## what tests need of the system: sshd, network tools, cloud-init's package, a browser
	$(BIN)/python -m tests.support.hosts install
	$(BIN)/python -m tests.support.cloud_init
	$(BIN)/python -m tests.support.browser

test-vm: $(VENV)/all.done hosts  ## real Ubuntu machines in QEMU behind the test cloud; builds them first; about twenty minutes
	$(BIN)/python -m tests.vm.image 24.04 22.04
	SKYWARD_VM=1 $(BIN)/pytest -v -s --timeout=3600 tests/vm

test-peers: $(VENV)/all.done     ## the peers' own tests on pools: joblib, scikit-learn, Keras, accelerate, the Trainer, programs for torchrun
	$(BIN)/python tests/peers/run.py

check: $(VENV)/all.done          ## format, lint, strict types, import floors
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(BIN)/lint-imports

docs: $(VENV)/dev.done           ## the documentation site, into build/site
	$(BIN)/python docs/make_pages.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

docs-serve: docs                 ## the same, shown at http://127.0.0.1:8000 and built again when a page changes
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

pictures: $(VENV)/all.done hosts ## the pictures of the documentation, from real runs in a terminal, a notebook and a browser
	$(BIN)/python docs/record_view.py
	$(BIN)/python docs/record_run.py
	$(BIN)/python docs/record_notebook.py
	$(BIN)/python docs/record_page.py
	$(BIN)/python docs/record_site.py

bench: $(VENV)/all.done          ## side by side with dask, ray, loky, Monarch, joblib and torchrun; prints ratios
	$(PYTHON) -m venv .venv-bench
	.venv-bench/bin/pip install --quiet -e . -r benchmarks/requirements.txt
	.venv-bench/bin/pip install --quiet torchmonarch || echo "torchmonarch cannot be installed here: rows without Monarch"
	SKYWARD_BENCH_TORCH=$(abspath $(BIN)/python) .venv-bench/bin/python benchmarks/run.py
	.venv-bench/bin/python benchmarks/joblib_backends.py

clean:                           ## removes the environments and what was built
	rm -rf $(VENV) .venv-bench .venv-lowest build dist .pytest_cache .ruff_cache .import_linter_cache .hypothesis

# A Debian Python may come without venv; anything else missing is said by Python itself.
$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
	  SUDO=$$( [ "$$(id -u)" = 0 ] || echo sudo ); $$SUDO apt-get update -q && \
	  $$SUDO apt-get install -qy python3-venv && $(PYTHON) -m venv $(VENV); }
	$(BIN)/python -m pip install --quiet --upgrade pip

$(VENV)/core.done: pyproject.toml | $(VENV)/bin/python
	$(BIN)/pip install --quiet -e .
	touch $@

$(VENV)/dev.done: $(VENV)/core.done
	$(BIN)/pip install --quiet --group dev
	touch $@

# torch by itself first: the pinned build is the one the others then accept
$(VENV)/all.done: $(VENV)/dev.done
	$(BIN)/pip install --quiet torch==2.13.0
	$(BIN)/pip install --quiet --group frameworks
	touch $@
