# Three commands: `make demo`, `make case-study` and `make test`. Each sets up all that it needs in .venv and build/.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
JOBS ?= $(shell nproc)

.PHONY: demo case-study conformance test lint test-cpp test-python soak fuzz clean
.DELETE_ON_ERROR:

# SIZES="64 80" compares other image sides.
demo: $(VENV)/ready
	$(BIN)/python -m benchmarks.unet3d.demo $(SIZES)

# SIZES="144 192" for the full one; ARGUMENTS="--data DIR" and the like go to python -m benchmarks.case_study.
case-study: $(VENV)/ready
	$(BIN)/python -m benchmarks.case_study $(if $(SIZES),--sizes $(SIZES)) $(ARGUMENTS)

# Models of other packages, which only this installs. ARGUMENTS="--packages timm" and the like choose some.
conformance: $(VENV)/conformance-ready
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.conformance $(ARGUMENTS)

test: lint test-cpp test-python

# The editable install builds the C++ extension; C++ sources are listed so that a change builds it again.
$(VENV)/ready: pyproject.toml constraints.txt $(shell find csrc -type f -not -name '.*')
	@echo "Setting up $(VENV) with $(PYTHON)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --upgrade pip
	@echo "Setting up $(VENV): torch, 200 MB, or some 3 GB where it comes with CUDA; a minute or more"
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	@echo "Setting up $(VENV): lmswap, its C++ extension compiled, and its tools, 200 MB; two minutes"
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

$(VENV)/conformance-ready: $(VENV)/ready
	@echo "Setting up $(VENV): packages of foreign models; a minute"
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev,conformance]'
	@touch $@

lint: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	git ls-files -z '*.h' '*.cpp' '*.cu' | xargs -0 $(BIN)/clang-format --dry-run --Werror

# The C++ tests run plain, under ThreadSanitizer, and under AddressSanitizer with UBSan.
test-cpp: $(VENV)/ready
	@tests/cpp/get_googletest.sh build/googletest || exit 0; set -e; for sanitizer in "" thread address; do \
	  echo "C++ tests, sanitizer: $${sanitizer:-none}; built in build/cpp$$sanitizer, a minute or two"; \
	  $(BIN)/cmake -S csrc -B build/cpp$$sanitizer -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN)/ninja) \
	    -DCMAKE_PREFIX_PATH=$(abspath build/googletest/usr) --log-level=WARNING \
	    -DLMSWAP_BUILD_TESTS=ON -DLMSWAP_SANITIZER=$$sanitizer; \
	  $(BIN)/cmake --build build/cpp$$sanitizer --parallel $(JOBS) -- --quiet; \
	  $(BIN)/ctest --test-dir build/cpp$$sanitizer --output-on-failure --parallel $(JOBS); \
	done

# One thread each: two processes of two threads on two cores take twice the time for waiting in loops.
test-python: $(VENV)/ready
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 --dist worksteal

# STEPS=10000 training steps with random faults; the figures go to benchmarks/results/soak_cpu.json.
soak: $(VENV)/ready
	$(BIN)/python -m benchmarks.soak $(if $(STEPS),--steps $(STEPS))

# TIMES as many random models, plans and files as CI tries; the counts go to benchmarks/results/fuzz_cpu.json.
TIMES ?= 50
fuzz: $(VENV)/ready
	$(BIN)/python -m benchmarks.fuzz --times $(TIMES)

clean:
	rm -rf $(VENV) build demo-output case-study-output
