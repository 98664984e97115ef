# Each target does the set-up it needs. `make demo` and `make test` work on a fresh clone.
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/installed
INSTALLED := pyproject.toml scripts/constraints.txt
GPU_VENV := .venv-gpu
GPU_STAMP := $(GPU_VENV)/installed

# Runs start many Pythons: whatever the environment says, canzona is compiled once and not by each of them.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: setup demo test test-sweep test-faults test-slurm fuzz mutations gpu-check published figures paper lint typecheck clean

setup: $(STAMP)

# The stamp is a copy of what decided what is installed. Dates do not show a change: `git checkout` may bring older files.
ifneq ($(shell cat $(INSTALLED) | cmp - $(STAMP) 2>&1),)
.PHONY: $(STAMP)
endif

$(STAMP):
	@python=$$(scripts/find-python) || exit $$?; \
	if [ ! -x $(BIN)/python ]; then echo "creating $(VENV) with $$python"; "$$python" -m venv $(VENV); fi
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint scripts/constraints.txt --editable '.[dev]'
	@cat $(INSTALLED) > $@

# qwen3-tiny on four CPU ranks, two-way tensor and two-way data parallel, on the standard library's own sources. At the end
# its loss is compared with the recipe's card, and the model writes a text.
demo: setup
	$(BIN)/canzona train recipe=qwen3-tiny gpus=4 parallel.tp=2
	$(BIN)/canzona generate "$$(ls -td runs/qwen3-tiny-*/ | head -n 1)" --prompt '    def test_' --temperature 0.8 --max-new-tokens 48

test: setup
	scripts/run-tests -m "not sweep and not slurm"

# What faults and attacks do to real runs. `make test` has these tests too.
test-faults: setup
	$(BIN)/python -m pytest tests/faults tests/attacks

# Jobs on a real Slurm of two nodes, which the tests start and stop themselves. Wants to be root: slurmd does.
test-slurm: setup
	scripts/need-slurm
	$(BIN)/python -m pytest -m slurm tests/slurm

# The slow sweeps, which CI runs too.
test-sweep: setup
	HAVING=mark.sweep scripts/run-tests -m sweep

# 300 random runs on real ranks against one process, and small wrong edits of the sources, which tests have to notice.
fuzz: setup
	FUZZED=0:300 $(BIN)/python -m pytest -m sweep tests/dist/test_fuzz.py

mutations: setup
	$(BIN)/python scripts/mutations.py

# Step times that others have published beside what the simulator says of their layouts.
published: setup
	PYTHONPATH=$(CURDIR) $(BIN)/python scripts/published.py

# Every simulated table of the README and the bench manual anew, in four minutes; ARGUMENTS=--check only compares.
figures: setup
	PYTHONPATH=$(CURDIR) $(BIN)/python scripts/figures.py $(or $(ARGUMENTS),--write)

# The claims of the paper beside what is simulated of its engine and of ours.
paper: setup
	PYTHONPATH=$(CURDIR) $(BIN)/python scripts/paper.py

# The first hour on a GPU machine, in ten minutes: what works there, what falls short, and why. With WHEELS=FOLDER, which
# scripts/pack_wheels fills, beside the torch of the machine's own Python and without network. Fails without a GPU.
gpu-check: $(if $(WHEELS),$(GPU_STAMP),setup)
	PYTHONPATH=$(CURDIR) $(if $(WHEELS),$(GPU_VENV),$(VENV))/bin/python -W ignore scripts/gpu_check.py $(ARGUMENTS)

$(GPU_STAMP): $(wildcard $(WHEELS)/*.whl)
	@scripts/beside-torch $(GPU_VENV)
	$(GPU_VENV)/bin/python -m pip install --quiet --no-index --no-deps $(wildcard $(WHEELS)/*.whl)
	@touch $@

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

typecheck: setup
	$(BIN)/mypy

clean:
	rm -rf $(VENV) $(GPU_VENV) build dist runs plans bench .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
