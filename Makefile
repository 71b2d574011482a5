# make serve   set everything up in .venv and serve the built-in tiny model, or MODEL=FILE.gguf
# make test    set everything up in .venv and run the tests
# make test-clients   the same with Claude Code, Codex, opencode and Pi, from npm (1.5 GB in the user's cache);
#              with ARGS='-m slow' what they make of a minute without a token
# make test-wheel   set everything up in .venv, build the package, install it into an empty environment and ask it
# make notebooks   run the notebooks again and keep what they show; ARGS='03 05' some of them
# make soak    set everything up in .venv and ask a server at random for ten minutes, or ARGS='--minutes 60'
# make docs    set everything up in .venv and render the documentation into build/site
# Needs Python 3.11 or newer and the network for packages. Written for the make 3.81 of macOS.

MODEL = tiny
HOST = 127.0.0.1
PORT = 8000
ARGS =
PYTHON =
VENV = .venv
NATIVE = src/ds4mlx/ops/native.cpp src/ds4mlx/ops/native_lanes.h src/ds4mlx/ops/native_products.h \
	src/ds4mlx/ops/native_rows.h src/ds4mlx/ops/native_hyper.h src/ds4mlx/ops/native_sample.h \
	src/ds4mlx/quant/search.cpp src/ds4mlx/quant/search_blocks.h

.PHONY: help serve test test-clients notebooks test-wheel soak docs clean

help:
	@sed -n -e '/^$$/q' -e 's/^# //p' Makefile
	@echo "options      MODEL=FILE.gguf HOST=$(HOST) PORT=$(PORT) PYTHON=python3.x ARGS='further flags'"

serve: $(VENV)/.ready
	@exec $(VENV)/bin/ds4mlx serve --model "$(MODEL)" --host "$(HOST)" --port "$(PORT)" $(ARGS)

test: $(VENV)/.ready-to-test
	$(VENV)/bin/python -m pytest -n auto $(ARGS)

test-clients: $(VENV)/.ready-to-test
	$(VENV)/bin/python tests/clients/agents.py
	sh .ci/loopback-only $(VENV)/bin/python -m pytest tests/clients -m "not slow" -rA $(ARGS)

notebooks: $(VENV)/.ready-to-test
	$(VENV)/bin/python tests/notebooks/execution.py $(ARGS)

test-wheel: $(VENV)/.ready-to-test
	$(VENV)/bin/python -m pytest tests/test_wheel.py -m wheel $(ARGS)

soak: $(VENV)/.ready
	$(VENV)/bin/python tests/bench/soak.py $(ARGS)

docs: $(VENV)/.ready-to-test
	$(VENV)/bin/python docs/build.py build/site

clean:
	rm -rf $(VENV)

# The stamps make the second call quick; a change of the dependencies or of compiled sources makes them old.
$(VENV)/.ready: pyproject.toml setup.py constraints.txt $(NATIVE) $(VENV)/.made
	$(VENV)/bin/python -m pip install --quiet --constraint constraints.txt --editable .
	@touch $@

$(VENV)/.ready-to-test: $(VENV)/.ready .ci/get-clang .ci/get-hip .ci/get-chromium
	$(VENV)/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[test]'
	@sh .ci/get-clang "$(VENV)"
	@sh .ci/get-hip "$(VENV)"
	@sh .ci/get-chromium
	@touch $@

$(VENV)/.made: .ci/make-venv
	@sh .ci/make-venv "$(VENV)" $(PYTHON)
	@touch $@
