# From a bare Python 3.11+ to a running demo or a test run: `make demo`, `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# setuptools warns of every editable installation
PIP := PYTHONWARNINGS="ignore:Editable installation" $(BIN)/python -m pip install --quiet --no-compile -c constraints.txt
# pip would compile on one core, and libraries' tests, too; of others Python compiles what it needs
SELDOM := /tests/|/(chardet|narwhals|networkx|nltk|pandas|pip|playwright|scipy|setuptools|sklearn|sympy)/|/torch/(_inductor|onnx|testing)/|/transformers/models/(?!auto|qwen)
COMPILE := $(BIN)/python -m compileall -qq -j 0 -x '$(SELDOM)' $(VENV)/lib || true
MODEL := examples/models/tiny-qwen3
EVAL := examples/data/stories-eval.txt
PACKED := demo-out/tiny-qwen3-int4
PINNED := $(VENV)/compressed-tensors-0.17
DOCS := $(VENV)/docs
export LAUNCHES ?= usual
export PYTHONDONTWRITEBYTECODE :=  # tests start Python many times: it need not compile all again
# A test that hangs fails after five minutes, with the stacks of its threads: the longest takes one
PYTEST := OMP_NUM_THREADS=1 $(BIN)/pytest -o faulthandler_timeout=300 -o faulthandler_exit_on_timeout=true
USUAL := not gpu and not kernels and not clients and not scripts and not commands
marked = $(shell grep -rl --include='test_*.py' 'mark\.$(1)\>\|\<in_$(1)\>' tests)# files with tests of a mark: others need no import

.PHONY: demo docs test quick test-nightly test-scripts test-commands test-kernels test-every-kernel test-memory test-clients check install-check install-check-quick fix clean

demo: $(VENV)/.installed
	$(BIN)/lowbit-convert $(MODEL) $(PACKED) --method rtn --overwrite --report --eval-text $(EVAL)
	$(BIN)/lowbit-run $(PACKED) --raw --max-new-tokens 200 --seed 1 "Once upon a time, a little robot"

test: $(VENV)/.installed-dev  # a thread a process: those of several wait for each other's cores
	$(PYTEST) -n auto --dist worksteal -m "$(USUAL)"

quick: $(VENV)/.installed-dev  # about a minute: what mirrors the files that differ from main, the rooms' order, the docs
	$(BIN)/python examples/maintenance/mirrored_tests.py | xargs env $(PYTEST) -n auto --dist worksteal -x -m "$(USUAL) and not slow"

test-nightly: $(VENV)/.installed-dev  # 400 examples of each property in place of 25
	$(PYTEST) -n auto --dist worksteal --hypothesis-profile nightly -m "hypothesis and $(USUAL)"

test-kernels: $(VENV)/.installed-dev  # compiles every kernel for Hopper and for one of the other cards, in one of 64 launches, which LAUNCHES=WORD draws anew; KERNELS=DIR keeps what is compiled; emulates the shapes that make test leaves out; one at a time, since they are few and long
	OMP_NUM_THREADS=1 $(BIN)/pytest -n auto --dist load --maxschedchunk 1 -m "kernels and not every_kernel" $(call marked,kernels)

test-every-kernel: $(VENV)/.installed-dev  # before a release: every launch of every kernel
	OMP_NUM_THREADS=1 $(BIN)/pytest -n auto --dist load --maxschedchunk 1 -m kernels $(call marked,kernels)

test-scripts: $(VENV)/.installed-dev  # those of examples/
	$(PYTEST) -n auto --dist worksteal -m scripts $(call marked,scripts)

test-commands: $(VENV)/.installed-dev  # whole commands: chats, servers with suites of clients, calibrations, reports, interruptions, completion, extremes of every number, a peak of memory, combinations that make test leaves out
	$(PYTEST) -n auto --dist loadfile -m "commands and not memory" $(call marked,commands)

test-memory: $(VENV)/.installed-dev  # before a release: all peaks of memory
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 1 -m memory $(call marked,memory)

test-clients: $(VENV)/.installed-clients $(PINNED)  # lm-evaluation-harness, the compressed-tensors that vLLM pins, and the chat page in Chromium
	$(PYTEST) -n auto -m clients $(call marked,clients)

docs: $(DOCS)/.installed  # the site of docs/, into site/; a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict

check: $(VENV)/.installed-dev  # never rewrites
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --num-workers auto || $(BIN)/mypy  # on a busy machine a worker may start too late
	for script in image/start image/steps .ci/run .ci/install-check; do bash -n $$script || exit; done

install-check: $(VENV)/.installed-dev  # the wheel in an empty environment, away from the clone
	.ci/install-check $(BIN)/python

install-check-quick: $(VENV)/.installed-dev  # the same with the libraries of .venv
	.ci/install-check $(BIN)/python borrow

fix: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "lowbit needs Python 3.11 or newer; try make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1"

# an installation by `pip install .` stays as it is, and is what the demo runs
KEPT := from importlib.metadata import distribution; exit("editable" in (distribution("lowbit").read_text("direct_url.json") or ""))
$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -c '$(KEPT)' 2>/dev/null || $(PIP) -e .
	$(COMPILE)
	touch $@

# installs lowbit itself, too, as the demo needs it
$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -e '.[serve]' --group dev
	$(COMPILE)
	touch $(VENV)/.installed $@

$(VENV)/.installed-clients: $(VENV)/.installed-dev
	$(PIP) -e '.[evaluate]' --group clients
	$(COMPILE)
	touch $@

$(PINNED): | $(BIN)/python  # beside the environment's own, which stays as it is
	$(BIN)/python -m pip install --quiet --no-deps --target $@ compressed-tensors==0.17.0

$(DOCS)/.installed: pyproject.toml constraints.txt | $(BIN)/python  # an environment of its own, which may be made beside the other
	$(BIN)/python -m venv --without-pip $(DOCS)
	$(BIN)/python -m pip --python $(DOCS)/bin/python install --quiet -c constraints.txt --group docs
	touch $@

clean:
	rm -rf $(VENV) demo-out build dist site *.egg-info
