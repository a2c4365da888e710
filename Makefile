# One-liners for people; everything runs in .venv, which the first target makes.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed
SOURCES := $(shell find csrc -name '*.cpp' -o -name '*.h' -o -name '*.map' -o -name '*.cu' -o -name '*.cuh' -o -name atoms.txt) setup.py build_tools.py pyproject.toml python/int4_emu/schemas.inc

.PHONY: run test bench lint dev clean amd-check cuda-check host-check image-check sanitize

run: $(STAMP)  ## let the embedded model speak
	$(PY) -m int4_emu run

test: $(STAMP)  ## the default suite
	$(PY) -m pytest -n auto

bench: $(STAMP)  ## layers of real models on the CPU beside other libraries' (BENCH="--shapes ... --tokens ..."): a table, JSON and a plot in build/
	mkdir -p build
	$(PY) benchmarks/cpu_layers.py --json build/bench.json --plot build/bench.png $(BENCH)

lint: $(STAMP)
	$(PY) -m ruff check . && $(PY) -m mypy

$(STAMP): $(SOURCES)
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install -q torch==2.13.0
	$(PY) -m pip install -q "setuptools>=77" wheel ninja pybind11
	INT4_EMU_NATIVE_TESTS=1 $(PY) -m pip install -q --no-build-isolation -e ".[test]"
	touch $@

amd-check:  ## the AMD build without an AMD GPU: needs Debian 12 and root, no .venv for most of it (docs/amd.md)
	$(PYTHON) tests/amd/check.py

cuda-check: $(STAMP)  ## the CUDA build without a GPU: needs nvcc
	! command -v nvcc >/dev/null || $(PY) -m pip install -q nvidia-cuda-cuobjdump || true
	$(PY) tests/cuda_check.py

host-check: $(STAMP)  ## the vLLM plug-in in vLLM 0.32 itself, on the CPU: builds its environment in .hosts, 3 GB (docs/serving.md)
	$(PY) tests/host_check.py $(HOST_CHECK)

sanitize:  ## the torch-free check programs under ASan, UBSan and, with an NVIDIA GPU, compute-sanitizer's four tools
	tests/sanitize.sh

dev:  ## incremental rebuild after a change in csrc
	INT4_EMU_NATIVE_TESTS=1 flock $(VENV)/build.lock $(PY) setup.py -q build_ext --inplace

image-check: $(STAMP)  ## every step of Dockerfile.rocm with buildah, as root on Debian 12 (IMAGE_CHECK=--install fetches what is missing)
	$(PY) tests/amd/image.py $(IMAGE_CHECK)

clean:
	rm -rf build dist python/int4_emu/*.so
