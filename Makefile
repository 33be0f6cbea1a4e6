# `make` lists the targets. All of them work in .venv, which `setup` makes first where needed (see tools/setup.sh).
FRAMEWORKS ?=
# Tests often wait for other processes, so one worker more than cores keeps the cores busy.
TEST_WORKERS ?= $(shell expr $$(nproc) + 1)
SHELL := bash

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all test-failed lint bench bench-strategies chaos horovod-suite install-matrix gpu-check docs clean

help:  ## this list
	@grep -hE '^[a-z%-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 18

setup:  ## make .venv, or bring it up to date: FRAMEWORKS=torch|tensorflow|torch,tensorflow PYTHON=... TORCH=cpu HVDTRAIN_MPI=system
	@tools/setup.sh $(FRAMEWORKS)

demo:  ## train ResNet-34 on real handwritten digits with two Horovod ranks: DEMO_ARGS='--framework tensorflow'
	@tools/setup.sh $(if $(findstring tensorflow,$(DEMO_ARGS)),,--demo) $(FRAMEWORKS)
	. .venv/bin/activate && if command -v horovodrun >/dev/null; then run='horovodrun -np 2 -H localhost:2 python'; \
	else run='torchrun --nproc-per-node 2' strategy='--strategy hierarchical'; fi && \
	$$run -m hvdtrain.resnet --epochs 6 --seed 1 $$strategy $(DEMO_ARGS)

test: setup  ## run the tests that are not marked slow, or some: TEST_ARGS='tests/test_setup.py -k disk'
	@# Containers set PYTHONDONTWRITEBYTECODE; then each of some thousand processes would compile the package anew.
	.venv/bin/python -m compileall -q hvdtrain
	@# A worker that crashed is not replaced: pytest-xdist 3.8 then waits for ever (its issues 1323 and 1327).
	. .venv/bin/activate && pytest -n $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder --max-worker-restart 0 \
		$(or $(TEST_ARGS),-m 'not slow')

test-all:  ## run all tests, as CI does
	@$(MAKE) --no-print-directory test TEST_ARGS='-m "slow or not slow"'

test-failed:  ## repeat the tests that failed in the last run
	@$(MAKE) --no-print-directory test TEST_ARGS='--last-failed --last-failed-no-failures none -m "slow or not slow"'

lint: setup  ## ruff, mypy, import contracts, lines per folder, imports of the tests, and the syntax of the shell scripts
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/lint-imports
	.venv/bin/python tools/lines.py
	@# mypy does not read the tests; a broken import in one would show only when it runs
	. .venv/bin/activate && pytest --collect-only -q tests >/dev/null
	for script in $(wildcard tools/*.sh launch/*.sh launch/*.sbatch .ci/run); do bash -n $$script || exit; done

bench: bench-loop  ## measure the training loop against a bare Horovod loop: BENCH_ARGS='--rounds 1'

bench-%: setup  ## one of the benchmarks that tools/bench.py lists: BENCH_ARGS='--rates 10mbit' (root, most of them)
	. .venv/bin/activate && python tools/bench.py $* $(BENCH_ARGS)

bench-strategies: setup  ## every strategy to a test accuracy at 10, 100, 1000 Mbit/s (root): BENCH_ARGS='--set seed=1'
	. .venv/bin/activate && hvdtrain sweep strategies $(BENCH_ARGS)
	. .venv/bin/activate && hvdtrain results strategies results/strategies

chaos: setup  ## lose hosts of elastic jobs on virtual hosts, and check what is left (root): CHAOS_ARGS='--faults 20 --seed 1'
	. .venv/bin/activate && python tools/chaos.py $(CHAOS_ARGS)

horovod-suite: setup  ## Horovod's own tests of PyTorch on hvdtrain.torch: SUITE_ARGS='--source CHECKOUT'
	. .venv/bin/activate && python tools/horovod_suite.py $(SUITE_ARGS)

install-matrix:  ## run `make demo` in minimal Debian systems (root, debootstrap; 15 minutes each)
	@tools/install_matrix.sh

docs:  ## build the documentation site into site/, which opens offline
	@tools/setup.sh $(FRAMEWORKS)
	.venv/bin/python -m pip install --quiet --disable-pip-version-check --no-build-isolation \
		--constraint tools/constraints.txt --editable '.[docs]'
	.venv/bin/python tools/docs_reference.py
	NO_MKDOCS_2_WARNING=1 .venv/bin/python -m mkdocs build

gpu-check:  ## run the GPU tests, no network needed: PYTHON=python3 WHEELS=dir
	@tools/gpu_check.sh $(WHEELS)

clean:  ## remove .venv and the tools' caches; results and ~/.cache/hvdtrain stay
	rm -rf .venv build site *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
