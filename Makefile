# Needs Python 3.11 or newer and make. Every target first builds .venv from requirements.lock.
PYTHON ?= python3
CONFIG ?= config.yaml

VENV  := .venv
BIN   := $(VENV)/bin
READY := $(VENV)/.ready
PIP   := $(BIN)/python -m pip --disable-pip-version-check --no-input --quiet
PARTS := core kernels kvpool router workers simulator evals loadgen deployments cli
SLOW  := slow or integration or e2e or gpu
OWN   := interpreter or conformance
LONG  := $(addprefix tests/e2e/test_,endings.py replicas.py nodes.py autoscaling.py)
SLOWEST := --durations=20 --durations-min=5
# There while pyright has found an error. It may end after the tests have begun.
WRONG := $(VENV)/types.wrong

# Ray sends nothing home unless it is asked to.
export RAY_USAGE_STATS_ENABLED ?= 0

.DEFAULT_GOAL := help
.PHONY: help setup serve check test interpreter conformance explore bench clients abuse deaths endings cluster stalls repeats storm images load adaptive wheel readme docs proto lock clean

help: ## list the targets
	@sed -n 's/^\([a-z]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 16

setup: $(READY) ## build the environment and install the git hooks
	@echo "==> git hooks"
	@! git rev-parse --git-dir >/dev/null 2>&1 || $(BIN)/pre-commit install --hook-type pre-commit --hook-type pre-push >/dev/null

serve: $(READY) ## fetch the model if it is missing, and serve config.yaml
	@exec $(BIN)/triptych serve $(CONFIG)

check: $(READY) ## format, lint, types, architecture, unit tests
	@echo "==> ruff"
	@$(BIN)/ruff format --check --quiet .
	@$(BIN)/ruff check --quiet .
	@echo "==> pyright, import-linter; kernels are compiled meanwhile"
	@rm -f $(WRONG); { $(BIN)/pyright || touch $(WRONG); } & \
		$(BIN)/lint-imports --no-logo >$(VENV)/imports.log || { cat $(VENV)/imports.log; exit 1; }; \
		$(BIN)/python -m triptych.kernels.precompile || exit 1; \
		test ! -e $(WRONG) || exit 1; \
		echo "==> architecture and unit tests, examples in docstrings"; \
		$(BIN)/pytest -q -n logical --maxprocesses 8 --dist worksteal $(SLOWEST) --doctest-modules \
			tests/arch tests/unit $$(grep -rl --include='*.py' '>>> ' $(PARTS)) \
			-m "not ($(SLOW) or $(OWN))" && \
		wait && test ! -e $(WRONG)

test: $(READY) ## the slower tests: integration and end to end, with the real model
	@echo "==> model, prometheus"
	@$(BIN)/python -m tests.prometheus & $(BIN)/triptych model fetch || exit 1; wait $$!
	@echo "==> browser"
	@command -v chromium >/dev/null || $(PIP) install -r requirements-browser.lock
	@echo "==> slow and integration tests"
	@$(BIN)/pytest -q -n logical --maxprocesses 8 --dist loadscope --no-loadscope-reorder $(SLOWEST) \
		tests/integration $$(grep -rlE 'mark\.(slow|gpu)\b' tests/unit) \
		-m "($(SLOW)) and not conformance"
	@echo "==> end-to-end tests"
	@$(BIN)/pytest -q $(SLOWEST) $(addprefix --ignore=,$(LONG)) tests/e2e -m "not cluster"

interpreter: $(READY) ## run the longest tests of GPU code in Triton's interpreter (6 minutes)
	@$(BIN)/pytest -q -n logical --maxprocesses 8 $(SLOWEST) tests/unit/test_gpu.py -m interpreter

conformance: $(READY) ## run all methods, more deaths, and the bounds of each method on the real model (10 minutes)
	@$(BIN)/pytest -q -n logical --maxprocesses 8 $(SLOWEST) tests/unit/conformance \
		tests/unit/core/test_methods.py tests/unit/workers/test_methods_together.py -m "not conformance"
	@$(BIN)/pytest -q $(SLOWEST) tests/unit/test_gpu.py -k test_gpu_methods
	@$(BIN)/triptych model fetch
	@$(BIN)/pytest -q -n logical --maxprocesses 8 --dist loadscope $(SLOWEST) \
		tests/unit tests/integration -m conformance

explore: $(READY) ## property tests on examples that differ at every run
	@$(BIN)/pytest -q -n logical --maxprocesses 8 --hypothesis-profile explore \
		tests/unit -m "hypothesis and not ($(SLOW))"

bench: $(READY) ## measure attention and serving into benchmarks/results (an hour on two cores)
	@echo "==> the kernels that are measured are right"
	@$(BIN)/pytest -q tests/unit/kernels
	@echo "==> attention"
	@$(BIN)/triptych bench attention --json benchmarks/results/attention.json
	@echo "==> serving, in turns with transformers"
	@$(BIN)/python benchmarks/serving/serve.py

clients: $(READY) ## litellm, langchain, three agent frameworks, instructor, llm, guidellm, lm-eval and schemathesis against the real server
	@$(BIN)/python -m tests.clients.run

abuse: $(READY) ## send hostile requests of three seeds to a server, beside a well-behaved client (4 minutes)
	@$(BIN)/python -m tests.e2e.abuse.attack --seeds 3 --json benchmarks/results/abuse.json

deaths: $(READY) ## end processes before and after each thing that they do, with pages in arenas of devices of a fake driver (10 minutes)
	@$(BIN)/python -m tests.integration.faults --devices --seeds 2 --json benchmarks/results/fail_points_devices.json

endings: $(READY) ## stop, redeploy and interrupt servers with streams open (4 minutes)
	@$(BIN)/pytest -q $(SLOWEST) tests/e2e/test_endings.py

cluster: $(READY) ## kill and freeze workers, pools and nodes among several replicas and nodes, and scale a stage (9 minutes)
	@$(BIN)/pytest -q $(SLOWEST) $(addprefix tests/e2e/test_,replicas.py nodes.py autoscaling.py deaths.py)

stalls: $(READY) ## stop each process of a server for 1 to 30 s under load (15 minutes)
	@$(BIN)/python -m tests.e2e.stalls --json benchmarks/results/stalls.json

repeats: $(READY) ## send 64 prompts three times, not cached, cached in part and cached whole (40 minutes)
	@$(BIN)/python -m tests.e2e.repeats --json benchmarks/results/repeats.json

storm: $(READY) ## abort 1,000 requests beside twelve victims, with 20 seeds (2 hours)
	@$(BIN)/python -m tests.e2e.abort_storm --json benchmarks/results/abort_storm.json

load: $(READY) ## offer a server twice its capacity for ten minutes, with slow and broken clients
	@$(BIN)/python -m tests.e2e.mixed_load --json benchmarks/results/mixed_load.json

images: $(READY) ## serve a tiny LLaVA, compare chats with transformers, and kill encode workers (5 minutes)
	@$(BIN)/python -m tests.e2e.served_images

adaptive: $(READY) ## serve adaptive methods out of a small pool, under load and rude clients (5 minutes)
	@$(BIN)/python -m tests.e2e.adaptive_load --json benchmarks/results/adaptive_served.json

wheel: $(READY) ## install the wheel elsewhere, with an empty home, and use it
	@$(BIN)/python -m tests.clients.wheel

readme: $(READY) ## run the commands of the README, as written, in a fresh clone with an empty home
	@$(BIN)/python -m tests.clients.readme

docs: $(READY) ## write the parts of the documents that come from the code
	@$(BIN)/python -m tests.arch.generate_docs

proto: $(READY) ## write what protoc makes of the gRPC schema
	@$(BIN)/python -m tests.arch.generate_rpc

lock: ## resolve the ranges of pyproject.toml anew and pin what came out
	@echo "==> resolving into .venv-lock"
	@$(PYTHON) -m venv --clear .venv-lock
	@.venv-lock/bin/python -m pip install -q "pip>=25.1"
	@.venv-lock/bin/python -m pip install -q ".[eval,vision]" --group dev --group lock
	@sed '/^#/!d' requirements.lock > .venv-lock/lock
	@.venv-lock/bin/python -m pip freeze --all | grep -vE '^(#|pip==|triptych)' | sed 's/+cpu$$//' >> .venv-lock/lock
	@mv .venv-lock/lock requirements.lock
	@.venv-lock/bin/python -m pip install -q --group browser
	@sed '/^#/!d' requirements-browser.lock > .venv-lock/browser
	@.venv-lock/bin/python -m pip freeze | grep -i '^pyqt6' >> .venv-lock/browser
	@mv .venv-lock/browser requirements-browser.lock
	@rm -rf .venv-lock

clean: ## remove the environment and every cache
	@rm -rf $(VENV) .venv-lock .venv-clients* build dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The build tools are in the lock too, so that installing the project itself needs no network.
$(READY): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Triptych needs Python 3.11 or newer: make PYTHON=python3.12 ...")'
	@echo "==> building $(VENV) from requirements.lock (takes minutes, once)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) install -r requirements.lock
	@$(PIP) install --no-deps --no-build-isolation -e .
	@touch $@
