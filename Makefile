# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/pip install --disable-pip-version-check -c constraints.txt
CONFIGS := $(addprefix examples/flux_lora/configs/,none.json layer.json layer-keep.json interval2.json \
	seg2-stride4.json)

export HF_HUB_OFFLINE = 1

.PHONY: demo test slow floors newest check lint sweep bench trainers clean

demo: .venv/installed
	@echo "Five short training runs: about two minutes on 2 idle cores."
	$(BIN)/segckpt validate --blocks transformer_blocks=6 --blocks single_transformer_blocks=10 $(CONFIGS)
	$(BIN)/python examples/flux_lora/train.py $(CONFIGS)

test: .venv/quantized
	$(BIN)/pytest -n auto --dist worksteal -m "not slow"

# What takes a compiler, or every family at its real width; and DeepSpeed, which builds an operator as it starts.
slow: .venv/quantized .venv/deepspeed
	$(BIN)/pytest -n auto --dist worksteal -m slow

# The families, then the tests, on the oldest and on the newest versions that pyproject.toml admits, each in an
# environment of its own (several GB). docs/versions.md has what came of it.
floors: .venv-floors/installed
	$(call all_of,.venv-floors)

newest: .venv-newest/installed
	$(call all_of,.venv-newest)

define all_of
	$(1)/bin/python -m simpletuner_segckpt.check --all
	$(1)/bin/python -m pytest -n auto --dist worksteal -m "not slow"
	$(1)/bin/python -m pytest tests/test_compiled.py
endef

# The type checker wants the package as it is installed: under one name, in one tree.
lint: .venv/installed
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	rm -rf .typecheck && mkdir -p .typecheck/simpletuner_segckpt
	ln -s $(CURDIR)/simpletuner_segckpt/* $(CURDIR)/config_schema $(CURDIR)/model_families .typecheck/simpletuner_segckpt
	cd .typecheck && ../$(BIN)/mypy --config-file ../pyproject.toml -p simpletuner_segckpt

check: .venv/installed
	$(BIN)/python -m simpletuner_segckpt.check --all

# The page on the estimator is what is predicted now.
sweep: .venv/sweep
	$(BIN)/pytest -n auto benchmarks/sweep

bench: .venv/installed
	$(BIN)/python benchmarks/validate_start.py
	$(BIN)/python benchmarks/estimate_cost.py
	$(BIN)/python benchmarks/layer_overhead.py
	$(BIN)/python benchmarks/host_time.py
	$(BIN)/python benchmarks/keep_attention.py

# Scripts of trainers with and without `launch`, from a checkout of diffusers and from an environment with SimpleTuner
# and this package; docs/trainers/proven.md is what came of it:
#     make trainers DIFFUSERS=path/to/checkout SIMPLETUNER_PYTHON=path/to/python
trainers: .venv/installed $(if $(DIFFUSERS),.venv/trainers)
	$(BIN)/python tests/trainers $(if $(DIFFUSERS),--diffusers $(DIFFUSERS) --packages .venv/trainers) \
		$(if $(SIMPLETUNER_PYTHON),--simpletuner $(SIMPLETUNER_PYTHON)) --page docs/trainers/proven.md

# torch first and by itself: it is what the constraints pin to a build for this machine. pip shows its progress.
.venv/installed: pyproject.toml constraints.txt
	@echo "Installing torch, diffusers and more into .venv: on a first start one to several minutes, depending on the network."
	@echo "Later starts skip this. Then, on 2 idle cores, the demo takes about two minutes, the tests eight."
	$(PYTHON) -m venv .venv
	$(PIP) torch
	$(PIP) -e ".[dev]"
	touch $@

.venv-floors/installed .venv-newest/installed: .venv-%/installed: pyproject.toml constraints-%.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --disable-pip-version-check --upgrade -c constraints-$*.txt torch
	$(@D)/bin/pip install --disable-pip-version-check --upgrade -c constraints-$*.txt -e ".[dev]"
	$(@D)/bin/pip install --disable-pip-version-check --upgrade -c constraints-$*.txt --no-deps --target $(@D)/quantized torchao bitsandbytes
	touch $@

# In a folder of their own: wherever they are installed PEFT imports them, which takes seconds each time.
.venv/quantized: .venv/installed
	@echo "Installing torchao and bitsandbytes for the tests; later starts skip it."
	rm -rf $@
	$(PIP) --no-deps --target $@ torchao bitsandbytes

# Likewise in a folder of its own. DeepSpeed builds what it needs when it runs.
.venv/deepspeed: .venv/installed
	@echo "Installing DeepSpeed for the slow tests; later starts skip it."
	rm -rf $@
	$(PIP) setuptools wheel
	DS_BUILD_OPS=0 $(PIP) --no-deps --no-build-isolation --target $@ "deepspeed>=0.19.8" hjson msgpack py-cpuinfo ninja

# What only the scripts of trainers need, without torch once more.
.venv/trainers: .venv/installed
	@echo "Installing torchvision, datasets and decord for the scripts of trainers; later starts skip it."
	rm -rf $@
	$(PIP) --no-deps --target $@ torchvision datasets decord pandas pyarrow dill multiprocess xxhash python-dateutil six

# By itself: with SciPy, transformers takes a third of a second longer to import.
.venv/sweep: .venv/installed
	$(PIP) -e ".[sweep]"
	touch $@

clean:
	rm -rf .venv .venv-floors .venv-newest .typecheck runs build *.egg-info
