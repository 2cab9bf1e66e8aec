# Four commands: `make demo`, `make case-study`, `make test` and `make test-gpu`. Each sets up all that it needs in .venv,
# .venv-gpu and build/.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
GPU_VENV := .venv-gpu
GPU_BIN := $(GPU_VENV)/bin
ON_EMULATED_GPU := PYTHONPATH=$(CURDIR)/tools/emulated_gpu/autostart:$(CURDIR) $(GPU_BIN)/python
JOBS ?= $(shell nproc)

.PHONY: demo case-study distributed conformance docs integrations wheel test test-all test-python-all lint test-cpp test-python test-gpu test-real-gpu test-emulated-gpu gpu-first-hour soak fuzz judge clean
.DELETE_ON_ERROR:

# SIZES="64 80" compares other image sides; DEVICE=emulated shows it on the emulated GPU, whose times are a CPU's.
ifeq ($(DEVICE),emulated)
demo: $(GPU_VENV)/ready
	$(ON_EMULATED_GPU) -m benchmarks.unet3d.demo $(SIZES)
else
demo: $(VENV)/ready
	$(BIN)/python -m benchmarks.unet3d.demo $(SIZES)
endif

# SIZES="144 192" for the full one; ARGUMENTS="--data DIR" and the like go to python -m benchmarks.case_study.
case-study: $(VENV)/ready
	$(BIN)/python -m benchmarks.case_study $(if $(SIZES),--sizes $(SIZES)) $(ARGUMENTS)

# The case studies' rows of several GPUs: RECIPE=resnet50, allreduce, unet3d, efficiency or scale. ARGUMENTS="--ranks 1 2 4"
# and the like go to it; DEVICE=emulated runs it on two emulated GPUs, over their NCCL.
RECIPE ?= unet3d
ifeq ($(DEVICE),emulated)
distributed: $(GPU_VENV)/ready
	EMULATED_GPU_DEVICES=2 $(ON_EMULATED_GPU) -m benchmarks.distributed $(RECIPE) $(ARGUMENTS)
else
distributed: $(VENV)/ready
	$(BIN)/python -m benchmarks.distributed $(RECIPE) $(ARGUMENTS)
endif

# Models of other packages, which only this installs. ARGUMENTS="--packages timm" and the like choose some.
conformance: $(VENV)/conformance-ready
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.conformance $(ARGUMENTS)

# The pages of docs/ as a site; a broken link is an error.
docs: $(VENV)/docs-ready
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "The site is in build/site: open build/site/index.html"

# The code of docs/integrations.md, and the callbacks of trainers, with the libraries that they are about.
integrations: $(VENV)/integrations-ready
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/integrations tests/test_readme.py -k integrations

# sdist and wheel, built one from the other, in build/dist. auditwheel names the oldest glibc that the wheel runs with.
wheel: $(VENV)/wheel-ready
	rm -rf build/dist
	$(BIN)/python -m build --outdir build/dist
	PATH=$(abspath $(BIN)):$$PATH $(BIN)/auditwheel repair --wheel-dir build/dist build/dist/*-linux_*.whl
	rm build/dist/*-linux_*.whl

# What each change must pass. test-all adds the slow tests, the other C++ builds and the emulated GPU's demo, and keeps
# when it passed in benchmarks/results/tests_cpu.json.
test: lint test-cpp test-python
test-all: lint test-python-all
	@$(MAKE) --no-print-directory test-cpp SANITIZERS="none thread address" CPP_TESTS=
	@$(MAKE) --no-print-directory demo DEVICE=emulated SIZES="48 64"
	$(BIN)/python -m benchmarks.tests_kept build/tests.xml

# The editable install builds the C++ extension; C++ sources are listed so that a change builds it again. What builds it
# lies in a folder for all environments, and is put there once: their objects are then each other's, and those of the
# wheel that tests/test_wheel.py makes.
# Modules are compiled as they are imported: all at once would be 53 of the 71 s that torch, scipy, matplotlib and the
# like take to install. Where the environment forbids that they are kept, as images for containers like to, each process
# compiles them anew: `import torch` takes 5.3 s instead of 1.6, and the demo's runs 10 s to begin.
unexport PYTHONDONTWRITEBYTECODE
INSTALL := -m pip install --quiet --no-compile --constraint constraints.txt
BUILD_TOOLS := scikit-build-core nanobind setuptools-scm cmake ninja
INSTALL_TOOLS := $(INSTALL) --no-warn-conflicts --target build/tools --upgrade $(BUILD_TOOLS)
get_tools = [ build/tools/ready -nt constraints.txt ] || { $(1)/python $(INSTALL_TOOLS) && touch build/tools/ready; }
BUILT_WITH_TOOLS := PYTHONPATH=$(CURDIR)/build/tools PATH=$(CURDIR)/build/tools/bin:$$PATH
$(VENV)/ready: pyproject.toml constraints.txt $(shell find csrc -type f -not -name '.*')
	@echo "Setting up $(VENV) with $(PYTHON)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python $(INSTALL) --upgrade pip
	@echo "Setting up $(VENV): torch, 200 MB, or some 3 GB where it comes with CUDA; a minute or more"
	@$(call get_tools,$(BIN))
	@$(BIN)/python $(INSTALL) torch
	@echo "Setting up $(VENV): lmswap, its C++ extension compiled, and its tools, 200 MB; a minute or two"
	@$(BUILT_WITH_TOOLS) $(BIN)/python $(INSTALL) --no-deps --no-build-isolation --editable .
	@$(BIN)/python $(INSTALL) 'lmswap[dev]'
	@touch $@

# What only some targets need: the extra of pyproject.toml that has this name.
$(VENV)/%-ready: $(VENV)/ready
	@echo "Setting up $(VENV): packages for $*; a minute"
	@$(BIN)/python $(INSTALL) 'lmswap[$*]'
	@touch $@

lint: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	git ls-files -z '*.h' '*.cpp' '*.cu' | xargs -0 $(BIN)/clang-format --dry-run --Werror

# Tests wait for each other's threads: on two cores they take 60 s two at a time, 51 four at a time. The quick ones run
# under ThreadSanitizer; SANITIZERS="thread address none" adds AddressSanitizer with UBSan, and none, and CPP_TESTS= the
# slow tests.
SANITIZERS ?= thread
CPP_TESTS ?= --label-exclude slow
test-cpp: $(VENV)/ready
	@tests/cpp/get_googletest.sh build/googletest || exit 0; set -e; for sanitizer in $(SANITIZERS); do \
	  echo "C++ tests, sanitizer: $$sanitizer; built in build/cpp$$sanitizer, a minute or two"; \
	  $(BIN)/cmake -S csrc -B build/cpp$$sanitizer -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN)/ninja) \
	    -DCMAKE_PREFIX_PATH=$(abspath build/googletest/usr) --log-level=WARNING \
	    -DLMSWAP_BUILD_TESTS=ON -DLMSWAP_SANITIZER=$$sanitizer; \
	  $(BIN)/cmake --build build/cpp$$sanitizer --parallel $(JOBS) -- --quiet; \
	  $(BIN)/ctest --test-dir build/cpp$$sanitizer --output-on-failure --parallel $$((2 * $(JOBS))) $(CPP_TESTS); \
	done

# One thread each: two processes of two threads on two cores take twice the time for waiting in loops.
test-python: $(VENV)/ready
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 --dist worksteal -m "not slow"

test-python-all: $(VENV)/ready
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 --dist worksteal --hypothesis-profile thorough \
	  --junitxml build/tests.xml

# On the GPU, or, where there is none, on an emulated one. TESTS="tests/gpu" and the like choose some.
test-gpu:
	@if nvidia-smi --list-gpus 2>/dev/null | grep -q GPU; \
	  then $(MAKE) --no-print-directory test-real-gpu; else $(MAKE) --no-print-directory test-emulated-gpu; fi

TESTS ?= tests/gpu tests/emulated_gpu tests/verify $(patsubst %,tests/%.py,$(ON_A_DEVICE))
ON_A_DEVICE := $(addprefix test_,distributed enable hard_cases plain_bits recompute reports unusual_uses warnings) \
  $(addprefix training_state/test_,generation graphs loading quantized uses_between_steps) \
  capture/test_guards runtime/test_faults runtime/test_fork \
  $(addprefix session/test_,plan_file cached_plans step_kinds)

test-real-gpu: $(VENV)/ready
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --device cuda $(TESTS)

test-emulated-gpu: $(GPU_VENV)/ready
	OMP_NUM_THREADS=1 $(GPU_BIN)/python -m pytest -p tools.emulated_gpu.plugin --device cuda --numprocesses 2 --dist worksteal $(TESTS)

# What decides most on a new GPU, in parts of at most ten minutes; it goes on where it was stopped. DEVICE=emulated
# rehearses it on the emulated one. DEVICE=bare uses what is installed for PYTHON, on a machine without a network.
# ARGUMENTS="--parts headline" and the like go to python -m benchmarks.first_hour.
ifeq ($(DEVICE),bare)
gpu-first-hour:
	$(PYTHON) -m pip install --quiet --no-index --no-deps --no-build-isolation --editable .
	$(PYTHON) -m benchmarks.first_hour $(ARGUMENTS)
else ifeq ($(DEVICE),emulated)
gpu-first-hour: $(GPU_VENV)/ready
	PYTEST_ADDOPTS="-p tools.emulated_gpu.plugin" $(ON_EMULATED_GPU) -m benchmarks.first_hour --sizes 48 64 $(ARGUMENTS)
else
gpu-first-hour: $(VENV)/ready
	$(BIN)/python -m benchmarks.first_hour $(ARGUMENTS)
endif

# torch's CUDA build, which is the default one, without NVIDIA's libraries; emulated ones are built into their place.
$(GPU_VENV)/packages: pyproject.toml constraints.txt
	@echo "Setting up $(GPU_VENV) with $(PYTHON): torch for CUDA, 530 MB; a minute or more"
	@$(PYTHON) -m venv $(GPU_VENV)
	@$(GPU_BIN)/python $(INSTALL) --upgrade pip
	@$(GPU_BIN)/python $(INSTALL) --no-deps torch===$$(sed -n 's/^torch==//p' constraints.txt)
	@echo "Setting up $(GPU_VENV): what torch and lmswap need, 400 MB; a minute"
	@mkdir -p build
	@$(GPU_BIN)/python tools/emulated_gpu/requirements.py > build/requirements-gpu.txt
	@$(GPU_BIN)/python $(INSTALL) --no-warn-conflicts --requirement build/requirements-gpu.txt
	@touch $@

$(GPU_VENV)/installed: $(GPU_VENV)/packages $(shell find csrc -type f -not -name '.*')
	@echo "Setting up $(GPU_VENV): lmswap itself; seconds, where .venv has it"
	@$(call get_tools,$(GPU_BIN))
	@$(BUILT_WITH_TOOLS) $(GPU_BIN)/python $(INSTALL) --no-warn-conflicts --no-deps --no-build-isolation --editable .
	@touch $@

$(GPU_VENV)/ready: $(GPU_VENV)/installed $(shell find tools/emulated_gpu -name '*.cpp' -o -name '*.h' -o -name CMakeLists.txt -o -name build.py)
	@echo "Setting up $(GPU_VENV): the emulated GPU, compiled; a minute"
	@$(GPU_BIN)/python -m tools.emulated_gpu.build
	@touch $@

# STEPS=10000 training steps with random faults; the figures go to benchmarks/results/soak_cpu.json.
soak: $(VENV)/ready
	$(BIN)/python -m benchmarks.soak $(if $(STEPS),--steps $(STEPS))

# TIMES as many random examples as CI tries, drawn anew; the counts go to benchmarks/results/fuzz_cpu.json.
TIMES ?= 50
fuzz: $(VENV)/ready
	$(BIN)/python -m benchmarks.fuzz --times $(TIMES)

# NETWORKS drawn at random, trained within budgets from the least to their peak; benchmarks/results/judge_cpu.json.
NETWORKS ?= 12
judge: $(VENV)/ready
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.judge --networks $(NETWORKS) $(ARGUMENTS)

clean:
	rm -rf $(VENV) $(GPU_VENV) build demo-output case-study-output first-hour-output distributed-output bundle-output
