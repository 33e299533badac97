# Every target sets up .venv by itself; see scripts/venv.
PYTHON := .venv/bin/python
export JAX_COMPILATION_CACHE_DIR ?= $(CURDIR)/.cache/jax
# Small programs too: two workers need many of the same ones, and a second start all of them.
export JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS ?= 0.02
WORKERS ?= 2

.PHONY: help demo gateway test test-slow soak fuzz lint format clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

demo: ## stream text from the shipped checkpoint
	@scripts/venv
	@$(PYTHON) -m k3jax.demo

gateway: ## serve the shipped checkpoint to OpenAI and Anthropic clients, with a chat page
	@scripts/venv gateway
	@$(PYTHON) -m serving.gateway $(FLAGS)

test: ## the tests that a change must pass
	@scripts/venv test
	@$(PYTHON) -m pytest -q -n $(WORKERS) --dist worksteal

test-slow: ## the tests that take minutes
	@scripts/venv test
	@# Twice: compiled programs are memory maps, of which Linux allows a process 65,530; the serving tests alone take 38,000.
	@$(PYTHON) -m pytest -q -n $(WORKERS) -m slow --timeout 3600 --ignore tests/serving
	@$(PYTHON) -m pytest -q -n $(WORKERS) -m slow --timeout 3600 tests/serving

soak: ## ten minutes of mixed clients against the service: nothing may grow
	@scripts/venv serving
	@$(PYTHON) -m serving.service.soak --minutes 10

fuzz: ## a quarter of an hour: 100,000 mutated requests against the service
	@scripts/venv serving
	@$(PYTHON) -m serving.service.fuzz --requests 100000

lint: ## style and types
	@scripts/venv lint
	@$(PYTHON) -m ruff check .
	@$(PYTHON) -m ruff format --check .
	@$(PYTHON) -m basedpyright

format: ## rewrite the style
	@scripts/venv lint
	@$(PYTHON) -m ruff check --fix-only --quiet .
	@$(PYTHON) -m ruff format .

clean: ## remove what the targets created
	rm -rf .venv .cache .pytest_cache .ruff_cache
