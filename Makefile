# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
BUILD := build/smollm2
TARGET := build/downloads/SmolLM2-135M-Instruct.Q4_1.gguf
DRAFTER := examples/smollm2-135m-dspark
PROMPTS ?= dspark_trt/calibration/prompts.jsonl
MINUTES ?= 60
RECIPE := build/recipe

# From a lock: the versions and sha256 that stand there, nothing besides. One package has no wheel; setuptools is there to build it.
LOCKED := -m pip install -qq --disable-pip-version-check --require-hashes --no-deps --no-build-isolation \
	--only-binary=:all: --no-binary=tensorrt-rtx-cu13

.PHONY: venv demo drafter test pair test-rooms test-engines test-units test-pythons fuzz lint lock bom audit clean \
	system-packages test-packages

venv: $(VENV)/.installed ## everything, into .venv

# what building, serving and load-testing need; no torch
$(VENV)/.serving: pyproject.toml setup.py locks/serve.txt
	$(PYTHON) -m venv $(VENV)
	$(PY) $(LOCKED) --requirement locks/serve.txt
	$(PY) -m pip install -qq --no-deps --no-build-isolation --editable .
	touch $@

# what tests and lint need besides; torch is for a CPU or for CUDA, as the index has it, and then needs CUDA's libraries
$(VENV)/.installed: $(VENV)/.serving locks/test.txt locks/torch.txt locks/cuda.txt locks/kernels.txt
	$(PY) $(LOCKED) --requirement locks/test.txt
	$(PY) $(LOCKED) --requirement locks/torch.txt
	if $(PY) -c 'import importlib.metadata as m, sys; sys.exit("+cpu" in m.version("torch"))'; then \
		$(PY) $(LOCKED) --requirement locks/cuda.txt; fi
	$(PY) $(LOCKED) --requirement locks/kernels.txt
	touch $@

lock: ## choose versions and sha256 again, after a change of pyproject.toml; UPGRADE=--upgrade: the newest that fit
	$(PYTHON) -m venv build/lock
	build/lock/bin/python $(LOCKED) --requirement locks/uv.txt
	PATH="build/lock/bin:$$PATH" $(PYTHON) build_scripts/lock.py $(UPGRADE)

bom: $(VENV)/.serving ## bill of materials (CycloneDX) of what serving needs, into build/bom.json
	$(PY) build_scripts/bill_of_materials.py build/bom.json

audit: bom ## known vulnerabilities of what is locked or bundled; ADVISORIES=FILE: without a network; IGNORE="--ignore=ID"
	$(PY) build_scripts/audit.py $(if $(ADVISORIES),--advisories=$(ADVISORIES)) $(IGNORE)

system-packages: $(VENV)/.serving ## Debian packages that serving and load tests need, where apt-get may install them
	build_scripts/install_system_packages.sh

test-packages: $(VENV)/.serving ## and the browser that looks at the live page
	build_scripts/install_system_packages.sh chromium

$(TARGET): | $(VENV)/.serving
	$(PY) build_scripts/fetch_demo_target.py build/downloads

demo: system-packages $(TARGET) ## build, serve, chat, load-test and print the table
	$(PY) perf/demo.py --target $(TARGET) --drafter $(DRAFTER) --output $(BUILD)

drafter: venv $(TARGET) ## train the demonstration drafter further on PROMPTS for MINUTES, into build/recipe (see its README)
	PYTHONPATH=$(DRAFTER) $(PY) -m recipe.write_answers --target $(TARGET) --prompts $(PROMPTS) --output $(RECIPE)/data \
		--unseen-source humaneval mt-bench
	PYTHONPATH=$(DRAFTER) $(PY) -m recipe.train --target $(TARGET) --start $(DRAFTER) --data $(RECIPE)/data \
		--output $(RECIPE)/run --minutes $(MINUTES)
	PYTHONPATH=$(DRAFTER) $(PY) -m recipe.evaluate --target $(TARGET) --drafters $(DRAFTER) $(RECIPE)/run/drafter \
		--prompts $(PROMPTS) --unseen-source humaneval mt-bench --draft-vocab 8192 --cache $(RECIPE)/evaluation

test: venv test-packages $(TARGET) ## everything that can run on a CPU, a real tritonserver included; two halves side by side
	$(MAKE) pair
	$(MAKE) --jobs=2 --output-sync=target test-rooms test-engines

pair: venv $(TARGET) ## the build of the demonstration pair that tests use: by itself, for it times its engines
	$(VENV)/bin/dspark-trt build --target $(TARGET) --drafter $(DRAFTER) --output $(BUILD)

test-rooms: venv $(TARGET) ## rooms by themselves, and the demonstration pair against transformers
	$(PY) -m pytest tests/unit tests/property tests/fuzz tests/golden

test-engines: venv test-packages $(TARGET) ## engines, and a real tritonserver
	$(PY) -m pytest tests/engine tests/triton

test-units: venv
	$(PY) -m pytest tests/unit

test-pythons: ## unit tests under each of Python 3.11, 3.12 and 3.13 that is found, in environments of their own
	for python in $$($(PYTHON) build_scripts/find_pythons.py); do \
		version=$$($$python -c 'import sys; print("{}.{}".format(*sys.version_info))'); echo "$$python"; \
		$(MAKE) VENV=build/python$$version PYTHON=$$python test-units || exit 1; done

fuzz: venv ## hostile files and requests, new ones for MINUTES (60); tests/fuzz in `make test` tries the same few hundred
	$(PY) build_scripts/fuzz.py $(MINUTES)

lint: venv
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

clean:
	rm -rf build/smollm2 .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
