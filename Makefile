# Everything a checkout needs, on a machine that has nothing but Rust (stable) and Python >= 3.10.
#
#   PYTHON         the interpreter to build the virtual environment with    (python3)
#   HYPATIA_VENV   where that environment lives                             (.venv)
#   JOBS           processes that the Python suites run in                  (2)

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.NOTPARALLEL:

PYTHON ?= python3
HYPATIA_VENV ?= .venv
JOBS ?= 2
REQUIREMENTS ?= requirements/dev.txt

MIN_PYTHON := 3.10
comma := ,
HOST = $(shell rustc -vV | sed -n 's/^host: //p')
MIN_RUST := $(shell sed -n 's/^rust-version *= *"\(.*\)"/\1/p' Cargo.toml)

BIN := $(abspath $(HYPATIA_VENV))/bin
PYTEST := $(BIN)/python -m pytest -n $(JOBS) --dist worksteal
RUST_SOURCES := $(shell find crates -path '*/src/*' -type f -o -name Cargo.toml) Cargo.toml Cargo.lock

# Where Rust tests find the compiler of CUDA kernels, if torch has brought it.
CUDA_LIBRARIES = $(subst $(eval) ,:,$(wildcard $(abspath $(HYPATIA_VENV))/lib/python*/site-packages/nvidia/*/lib))

# Cargo and the extension build must see the same interpreter, or pyo3 is compiled again and again.
export PYO3_PYTHON := $(BIN)/python
export PIP_DISABLE_PIP_VERSION_CHECK := 1

##@ Start here

.PHONY: demo
demo: build ## set everything up, then compile a model and show what was done to it
	@$(BIN)/python -m hypatia.tools.demo

.PHONY: test
test: check-format lint test-rust test-python ## set everything up, then formatting, lints, Rust and Python tests

.PHONY: help
help: ## this list
	@awk 'BEGIN { FS = ":.*## " } \
		/^##@ / { printf "\n%s\n", substr($$0, 5) } \
		/^[a-z][a-z-]*:.*## / { printf "  make %-18s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

##@ Build

.PHONY: build
build: $(HYPATIA_VENV)/.native ## make the environment and build the extension into it (release)

.PHONY: wheel
wheel: $(HYPATIA_VENV)/.requirements ## build a wheel into dist/
	@$(BIN)/maturin build --release --out dist

.PHONY: docs
docs: build ## regenerate the tables, the API reference and the picture in docs/
	@$(BIN)/python docs/generate.py

.PHONY: docs-site
docs-site: docs ## build the documentation site into bench/out/site
	@$(BIN)/mkdocs build --strict --quiet

.PHONY: clean
clean: ## remove what was built (the environments stay; `rm -r .venv*` removes those)
	@rm -rf target dist bench/out .pytest_cache .ruff_cache .hypothesis
	@rm -f python/hypatia/*.so $(HYPATIA_VENV)/.native .venv-oldest/.native
	@find python tests bench docs -name __pycache__ -prune -exec rm -rf {} +

##@ Check

.PHONY: fmt
fmt: $(HYPATIA_VENV)/.requirements ## format Rust and Python, and mend what the lints can mend
	@cargo fmt --all
	@$(BIN)/ruff check --fix --quiet . || true
	@$(BIN)/ruff format --quiet .

.PHONY: check-format
check-format: $(HYPATIA_VENV)/.requirements ## check the formatting of Rust and Python
	@cargo fmt --all --check
	@$(BIN)/ruff format --check .

.PHONY: lint
lint: $(HYPATIA_VENV)/.requirements ## clippy, ruff and mypy; a warning is an error
	@cargo clippy --workspace --all-targets --locked -- -D warnings
	@$(BIN)/ruff check .
	@$(BIN)/mypy

.PHONY: test-rust
test-rust: | toolchain ## Rust tests (the binding crate has none: its tests are the Python ones)
	@HYPATIA_CUDA_LIBRARIES="$(CUDA_LIBRARIES)" cargo test --workspace --locked

.PHONY: test-python
test-python: build ## Python tests: a tenth of the op database and the quick part of the zoo among them
	@$(PYTEST)

.PHONY: deny
deny: ## licenses, versions, sources and known faults of the crates that are used; needs cargo-deny and a network
	@if command -v cargo-deny >/dev/null; then cargo deny check; \
		else echo "cargo-deny is missing: cargo install cargo-deny --locked"; exit 1; fi

##@ Full suites

.PHONY: test-opinfo
test-opinfo: build ## all of PyTorch's op database; summary in bench/out/opinfo.{json,md}
	@HYPATIA_OPINFO=all $(PYTEST) tests/test_opinfo.py

.PHONY: test-modules
test-modules: build ## all of PyTorch's module database, in inference
	@HYPATIA_MODULES=all $(PYTEST) tests/test_modules.py

.PHONY: test-zoo
test-zoo: build ## the whole zoo of architectures, slow ones included
	@$(PYTEST) -m "slow or not slow" tests/test_zoo.py

.PHONY: test-slow
test-slow: build ## what `make test` leaves out for its length
	@$(PYTEST) -m slow

.PHONY: test-torch-oldest
test-torch-oldest: ## the Python tests on the oldest torch that is supported
	@$(MAKE) --no-print-directory test-python HYPATIA_VENV=.venv-oldest REQUIREMENTS=requirements/oldest.txt

.PHONY: test-memory
test-memory: ## plans of the CPU runtime under AddressSanitizer; needs a nightly Rust
	@if rustc +nightly --version >/dev/null 2>&1; then \
		RUSTFLAGS=-Zsanitizer=address cargo +nightly test --locked --target $(HOST) --target-dir target/memory \
			-p hypatia-runtime --lib --test plan plan; \
		else echo "a nightly Rust is missing: rustup toolchain install nightly"; exit 1; fi

.PHONY: test-gpu
test-gpu: build ## checks on a GPU; one line where there is none
	@$(BIN)/python tests_gpu/run.py

##@ Fuzzing: SEED is the first seed, printed and new each time if none is given

COUNT ?= 10000
SECONDS ?= 180
DEVICE ?= cpu
FUZZ = PYTHONPATH=$(CURDIR) $(BIN)/python -m fuzz --jobs $(JOBS) --device $(DEVICE) $(if $(SEED),--seed $(SEED))

.PHONY: fuzz
fuzz: build ## random programs for SECONDS (180); what fails is made small and written to bench/out/fuzz
	@$(FUZZ) --seconds $(SECONDS)

.PHONY: fuzz-long
fuzz-long: build ## COUNT (10000) of them, from SEED (0) on; goes on where an earlier run was stopped
	@$(FUZZ) --count $(COUNT) --resume $(if $(SEED),,--seed 0)

.PHONY: fuzz-nnsmith
fuzz-nnsmith: $(HYPATIA_VENV)/.nnsmith build ## COUNT (200) models that NNSmith makes, from SEED (0) on; installs it
	@PYTHONPATH=$(CURDIR) $(BIN)/python -m fuzz.nnsmith --count $(if $(filter command line,$(origin COUNT)),$(COUNT),200) --seed $(or $(SEED),0)

.PHONY: test-mutations
test-mutations: build ## faults put into the source one by one: tests or the fuzzer must find each (about three quarters of an hour)
	@$(BIN)/python tests/mutations.py

##@ Diagnostics: each prints a table and exits with 1 when it falls short

.PHONY: diagnostics
diagnostics: kernel-only mlp-sweep dual-mode fused-modules without-pytorch ## all five

.PHONY: kernel-only
kernel-only: build ## the fused linear + ReLU on its own: error, time
	@$(BIN)/python bench/kernel_only.py

.PHONY: mlp-sweep
mlp-sweep: build ## the nine MLPs, compiled and eager: error, time
	@$(BIN)/python bench/mlp_sweep.py

.PHONY: dual-mode
dual-mode: build ## planted faults under the modes strict, soft and off
	@$(BIN)/python bench/dual_mode.py

.PHONY: fused-modules
fused-modules: build ## hypatia.nn against float64: forward and gradients
	@$(BIN)/python bench/fused_modules.py

.PHONY: without-pytorch
without-pytorch: $(HYPATIA_VENV)/.requirements ## programs and proofs through hypatia-opt, no PyTorch
	@cargo build --release --quiet --locked -p hypatia-core
	@$(BIN)/python bench/without_pytorch.py

##@ Benchmarks

.PHONY: bench-cpu
bench-cpu: build $(HYPATIA_VENV)/.peers ## speed on this CPU beside all peers; results in bench/out/cpu.json
	@$(BIN)/python bench/cpu.py

.PHONY: bench-gpu
bench-gpu: build ## products, models and training on a GPU beside their peers; one line where there is none
	@$(BIN)/python tests_gpu/bench.py
	@$(BIN)/python tests_gpu/models.py
	@$(BIN)/python tests_gpu/training.py
	@$(BIN)/python tests_gpu/counts.py

# The suites take ARGS, such as ARGS="--small --check-only --only bert"; bench/suite.py --help explains them.
.PHONY: bench-hf
bench-hf: build ## models of transformers beside eager and Inductor, by PyTorch's own list; ARGS="--help" explains
	@$(BIN)/python bench/suite.py hf $(ARGS)

.PHONY: bench-timm
bench-timm: build ## image models of timm, likewise
	@$(BIN)/python bench/suite.py timm $(ARGS)

.PHONY: bench-conv
bench-conv: build ## convolutional nets of torchvision in several layouts, batches and dtypes, likewise
	@$(BIN)/python bench/suite.py conv $(ARGS)

.PHONY: bench-graphnet
bench-graphnet: build ## samples of GraphNet in the folder SAMPLES, likewise; runs the code of the samples
	@$(BIN)/python bench/suite.py graphnet --samples "$(SAMPLES)" $(ARGS)

.PHONY: bench-decode
bench-decode: build ## a decode step and generate with a static cache on a GPU, beside eager and Inductor
	@$(BIN)/python bench/decode.py $(ARGS)

.PHONY: bench-compile
bench-compile: build ## how long optimizing takes: growth by depth, published graphs, the nine MLPs
	@$(BIN)/python bench/compile.py

.PHONY: bench-first-calls
bench-first-calls: build ## where the first call of four whole models goes, without caches and with them; ARGS="--device cuda"
	@$(BIN)/python bench/first_calls.py $(ARGS)

.PHONY: bench-against
bench-against: build ## this version beside that of the checkout OTHER, whose extension is built: calls and first calls
	@$(BIN)/python bench/against.py $(OTHER) $(ARGS)

.PHONY: bench-calls
bench-calls: build ## what keywords, dictionaries and results of transformers' own cost beside plain calls
	@$(BIN)/python bench/calls.py $(ARGS)

.PHONY: bench-cost
bench-cost: build ## what steps of plans were expected to take over what they take, for the zoo; ARGS="--device cuda"
	@$(BIN)/python bench/cost.py $(ARGS)

# What the targets above stand on.

.PHONY: toolchain
toolchain:
	@:$(if $(shell $(PYTHON) -c 'import sys; print(sys.version_info >= ($(subst .,$(comma),$(MIN_PYTHON))) or "")' 2>/dev/null),,\
		$(error Python $(MIN_PYTHON) or newer is needed, and "$(PYTHON)" is missing or older (set PYTHON=...)))
	@:$(if $(shell $(PYTHON) -c 'import venv, ensurepip; print(1)' 2>/dev/null),,\
		$(error "$(PYTHON)" lacks the modules venv and ensurepip (the system package python3-venv has them)))
	@:$(if $(shell printf '%s\n' $(MIN_RUST) "$$(cargo --version 2>/dev/null | cut -d' ' -f2)" | sort -CV && echo 1),,\
		$(error Rust $(MIN_RUST) or newer is needed, and cargo is missing or older (rustup installs and updates it)))

$(HYPATIA_VENV)/.requirements: $(REQUIREMENTS) requirements/common.txt | toolchain
	@echo "installing $(REQUIREMENTS) into $(HYPATIA_VENV)"
	@[ -x $(BIN)/python ] || $(PYTHON) -m venv $(HYPATIA_VENV)
	@$(BIN)/python -m pip install --quiet -r $(REQUIREMENTS)
	@touch $@

# The benchmark runs without its peers, too.
$(HYPATIA_VENV)/.peers: requirements/bench.txt | $(HYPATIA_VENV)/.requirements
	@echo "installing requirements/bench.txt into $(HYPATIA_VENV)"
	@$(BIN)/python -m pip install --quiet -r requirements/bench.txt && touch $@ \
		|| echo "the peers could not be installed and are left out"

$(HYPATIA_VENV)/.nnsmith: requirements/nnsmith.txt | $(HYPATIA_VENV)/.requirements
	@$(BIN)/python -m pip install --quiet -r requirements/nnsmith.txt && touch $@

$(HYPATIA_VENV)/.native: $(HYPATIA_VENV)/.requirements $(RUST_SOURCES) pyproject.toml | toolchain
	@echo "building the extension"
	@VIRTUAL_ENV=$(abspath $(HYPATIA_VENV)) $(BIN)/maturin develop --release --quiet
	@touch $@
