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

.PHONY: venv demo drafter test lint clean system-packages

venv: $(VENV)/.installed ## everything, into .venv

# what building, serving and load-testing need; no torch
$(VENV)/.serving: pyproject.toml setup.py
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check "pip>=25.1"
	$(PY) -m pip install -qq --editable ".[onnxruntime,client,openai]"
	touch $@

# what tests and lint need besides; torch first and alone, so that nothing else chooses another build of it
$(VENV)/.installed: $(VENV)/.serving
	$(PY) -m pip install --quiet torch==2.13.0
	$(PY) -m pip install -qq --editable ".[onnxruntime,client,openai,reference,tensorrt-rtx]" --group dev
	$(PY) -m pip install --quiet --no-deps --group kernels
	touch $@

system-packages: $(VENV)/.serving ## Debian packages that serving and load tests need, where apt-get may install them
	build_scripts/install_system_packages.sh

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

test: venv system-packages $(TARGET) ## everything that can run on a CPU, a real tritonserver included
	$(PY) -m pytest

lint: venv
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

clean:
	rm -rf build/smollm2 .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
