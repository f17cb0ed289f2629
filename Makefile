# Python 3.11 or newer and pip are all that a machine needs. `make PYTHON=python3.12 test` chooses another.
PYTHON ?= python3
VENV := .venv
INSTALLED := $(VENV)/installed
OMP_NUM_THREADS ?= 2
export OMP_NUM_THREADS

.PHONY: demo test nightly gpu-check lint install owners clean

# Bench, quantize, verify and compare the bundled model; writes a report under runs/.
demo: $(INSTALLED)
	$(VENV)/bin/llmopt run recipes/quickstart.yaml

# The models of the tests are too small for a second thread to pay; a second process does. What measures the
# machine comes first, alone.
test nightly: export OMP_NUM_THREADS = 1

test: $(INSTALLED)
	$(VENV)/bin/python -m pytest -m alone
	$(VENV)/bin/python -m pytest -m "not alone" -n 2 --dist loadfile

# The random walk over scheduler and block pool, of more than 20,000 steps.
nightly: $(INSTALLED)
	LLMOPT_WALK_EXAMPLES=2000 $(VENV)/bin/python -m pytest tests/engine/test_scheduler_walk.py

# The Triton kernels on this machine's GPU: the sweeps that CI runs interpreted, and real sizes.
gpu-check: $(INSTALLED)
	$(VENV)/bin/python -m pytest -rs tests/gpu tests/engine/test_triton_*.py

lint: $(INSTALLED)
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/pyright

# Checkpoints of every format in the packages that own the formats, each in an environment of its own;
# gigabytes of downloads the first time, and about half an hour on two cores.
owners: $(INSTALLED)
	$(VENV)/bin/python tools/owners.py --environments $(VENV)/owners --install

install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt tools/install.py
	$(PYTHON) tools/install.py $(VENV)
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
