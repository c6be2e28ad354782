# libtinyllm: `make` builds the library, `make test` tests it, `make demo` runs a model on it,
# `make help` lists the rest.

CC      ?= cc
AR      ?= ar
PYTHON  ?= python3
VERSION := $(shell sed -n 's/^.define TL_VERSION "\(.*\)"$$/\1/p' c/include/tinyllm/abi.h)
SONAME  := libtinyllm.so.0
B       := c/build
SAN     :=
RUN     :=

# Flags under which results would differ are refused. float_flags.h refuses those that define a macro;
# clang has none for most of them, and in LDFLAGS some link start-up code that flushes subnormals.
OTHER_BITS := -Ofast -ffast-math -funsafe-math-optimizations -ffinite-math-only -fassociative-math \
              -freciprocal-math -fno-signed-zeros -fno-honor-nans -fno-honor-infinities -fapprox-func \
              -fsingle-precision-constant -ffp-model=fast -ffp-model=aggressive -mdaz-ftz -mfpmath=387 \
              -mpc32 -mpc64 -fdenormal-fp-math=preserve-sign -fdenormal-fp-math=positive-zero
ifneq ($(or $(filter-out help clean uninstall,$(MAKECMDGOALS)),$(if $(MAKECMDGOALS),,all)),)
ifeq ($(shell set -- $(CC); command -v "$$1" 2>/dev/null),)
$(error no C compiler '$(CC)': install one (Debian: apt-get install gcc libc6-dev) or say make CC=/path/to/cc)
endif
ifneq ($(filter $(OTHER_BITS),$(CC) $(CFLAGS) $(LDFLAGS) $(SAN)),)
$(error $(filter $(OTHER_BITS),$(CC) $(CFLAGS) $(LDFLAGS) $(SAN)) changes the results of the library: leave it out of \
CC, CFLAGS and LDFLAGS (-O3 is as fast here))
endif
endif
ifneq ($(words $(B)),1)
$(error B is one path without blanks, for make can have none in a target, not '$(B)': link that folder to one without)
endif

ARCH    := $(shell $(CC) -dumpmachine 2>/dev/null | sed 's/-.*//')
# $(call try,FLAG): FLAG, where the compiler has it.
try      = $(shell $(CC) -Werror -Wno-unused-command-line-argument $(1) -x c -fsyntax-only /dev/null 2>/dev/null && echo '$(1)')

# Uses every CPU, or as many as MAX_JOBS says, unless told otherwise: by -j, by MAKEFLAGS (which make
# does not show here before its version 4.4), or by the make that runs this one.
ifeq ($(MAKELEVEL)$(shell printf '%s' "$$MAKEFLAGS" | sed -nE '/(^| )(-?[A-Za-z]*j|--jobs)/p'),0)
MAKEFLAGS += -j$(or $(MAX_JOBS),$(CMAKE_BUILD_PARALLEL_LEVEL),$(shell nproc 2>/dev/null || echo 1))
endif

WARN    := -Wall -Wextra -Wshadow -Wstrict-prototypes -Wmissing-prototypes -Wvla -Wundef
WERROR  ?= # -Werror in the checks; elsewhere a new warning of a later compiler does not stop a build
CFLAGS  ?= -O3 -g
# A frame larger than a page touches each of its pages in turn, so that none is beyond the guard page.
GUARDS  := $(call try,-fstack-clash-protection)
override CFLAGS += -std=c11 $(WARN) $(WERROR) -D_GNU_SOURCE -Ic/include -Ic/src -fPIC -fvisibility=hidden \
           -include c/src/numerics/float_flags.h -ffp-contract=off -fno-math-errno -fno-trapping-math $(GUARDS) \
           -pthread $(SAN)
LDLIBS  := -lm -pthread
# Calls within the library are bound to it, whatever else in the process exports the same names.
SHARED  := -shared -Wl,-soname,$(SONAME) -Wl,-z,defs -Wl,-Bsymbolic

# Instruction sets: isas.def names the same ones. One that is only there fails to link; one that is
# only here is compiled and never runs.
ISAS_x86_64  := scalar avx2 avx512
ISAS_aarch64 := scalar neon
ISAS         := $(or $(ISAS_$(ARCH)),scalar)
FLAGS_scalar := -O2
FLAGS_avx2   := -mavx2 -mfma -mf16c
FLAGS_avx512 := $(FLAGS_avx2) -mavx512f -mavx512bw -mavx512dq -mavx512vl -mprefer-vector-width=512

SRC     := $(filter-out %.isa.c,$(wildcard c/src/*/*.c))
ISA_SRC := $(wildcard c/src/*/*.isa.c)
OBJ     := $(SRC:c/src/%.c=$(B)/obj/%.o) $(foreach i,$(ISAS),$(ISA_SRC:c/src/%.isa.c=$(B)/obj/%.$(i).o))
C_ROOMS := $(addprefix tests/L9.4/,runtime numerics kernels)
c_tests  = $(patsubst %.c,$(B)/tests/%,$(notdir $(wildcard $(addsuffix /$(1)_*.c,$(C_ROOMS)))))
C_TESTS := $(call c_tests,test) $(call c_tests,parity)
SWEEPS  := $(call c_tests,sweep)
vpath test_%.c $(C_ROOMS)
vpath parity_%.c $(C_ROOMS)
vpath sweep_%.c $(C_ROOMS)
say      = @printf '  %-5s %s\n' $(1) '$(2)'

.PHONY: all
all: $(B)/libtinyllm.so $(B)/libtinyllm.a ## build the shared and the static library (the default)

$(B)/libtinyllm.so: $(OBJ) Makefile
	$(call say,LD,$@)
	@$(CC) $(CFLAGS) $(SHARED) $(LDFLAGS) -o $@ $(OBJ) $(LDLIBS)
	@ln -sf libtinyllm.so $(@D)/$(SONAME)

$(B)/libtinyllm.a: $(OBJ)
	$(call say,AR,$@)
	@rm -f $@ && $(AR) rcs $@ $^

# Flags live in a stamp, so that changed flags rebuild.
stamp    = $(subst ','\'',$(CC) $(CFLAGS) $(LDFLAGS) $(ISAS))
$(B)/flags: FORCE
	@mkdir -p $(@D)
	@echo '$(stamp)' | cmp -s - $@ || echo '$(stamp)' > $@

$(B)/obj/%.o: c/src/%.c $(B)/flags
	$(call say,CC,$*.c)
	@mkdir -p $(@D)
	@$(CC) $(CFLAGS) -MMD -MP -c $< -o $@

define isa_rule
$(B)/obj/%.$(1).o: c/src/%.isa.c $(B)/flags
	$$(call say,CC,$$*.isa.c for $(1))
	@mkdir -p $$(@D)
	@$$(CC) $$(CFLAGS) $$(FLAGS_$(1)) -DTL_ISA=$(1) -DTL_ISA_$(1)=1 -MMD -MP -c $$< -o $$@
endef
$(foreach i,$(ISAS),$(eval $(call isa_rule,$(i))))

# C tests link the static library, so that they reach what the shared one hides. They are not
# vectorised: it gains nothing, and GCC 12 for aarch64 has an internal error with it.
$(B)/tests/%.o: %.c $(B)/flags
	$(call say,CC,$<)
	@mkdir -p $(@D)
	@$(CC) $(CFLAGS) -Wno-missing-prototypes -fno-tree-vectorize -Itests/L9.4/harness -MMD -MP -c $< -o $@
.PRECIOUS: $(B)/tests/%.o

$(B)/tests/%: $(B)/tests/%.o $(B)/libtinyllm.a
	@$(CC) $(CFLAGS) -o $@ $^ $(LDLIBS)

# What is installed is the library as it was built, under its full version, and three files for
# pkg-config and CMake. Everything goes below DESTDIR, which is not in those files.
PREFIX     ?= /usr/local
LIBDIR     ?= $(PREFIX)/lib
INCLUDEDIR ?= $(PREFIX)/include
DESTDIR    ?=
HEADERS    := $(patsubst c/include/%,%,$(wildcard c/include/*.h c/include/tinyllm/*.h))
INSTALLED   = $(addprefix $(INCLUDEDIR)/,$(HEADERS)) $(addprefix $(LIBDIR)/,libtinyllm.so.$(VERSION) $(SONAME) libtinyllm.so libtinyllm.a \
              pkgconfig/tinyllm.pc cmake/tinyllm/tinyllmConfig.cmake cmake/tinyllm/tinyllmConfigVersion.cmake)
absolute    = $(if $(filter-out /%,$(PREFIX) $(LIBDIR) $(INCLUDEDIR)),$(error PREFIX, LIBDIR and INCLUDEDIR are absolute paths without \
              blanks, not '$(PREFIX)' '$(LIBDIR)' '$(INCLUDEDIR)'; DESTDIR may be anything))
fill_in     = sed -e 's|@VERSION@|$(VERSION)|g; s|@SONAME@|$(SONAME)|g; s|@PREFIX@|$(PREFIX)|g' -e 's|@LIBDIR@|$(1)|g; s|@INCLUDEDIR@|$(2)|g'
in_prefix   = $(1:$(PREFIX)/%=$${prefix}/%)

.PHONY: install uninstall
install: all ## library, headers, pkg-config and CMake files; PREFIX=/usr/local LIBDIR= INCLUDEDIR= DESTDIR=
	$(absolute)
	@install -d "$(DESTDIR)$(INCLUDEDIR)/tinyllm" "$(DESTDIR)$(LIBDIR)/pkgconfig" "$(DESTDIR)$(LIBDIR)/cmake/tinyllm"
	@install -m 644 c/include/tinyllm.h "$(DESTDIR)$(INCLUDEDIR)"
	@install -m 644 c/include/tinyllm/*.h "$(DESTDIR)$(INCLUDEDIR)/tinyllm"
	@install -m 644 $(B)/libtinyllm.a "$(DESTDIR)$(LIBDIR)"
	@install -m 755 $(B)/libtinyllm.so "$(DESTDIR)$(LIBDIR)/libtinyllm.so.$(VERSION)"
	@ln -sf libtinyllm.so.$(VERSION) "$(DESTDIR)$(LIBDIR)/$(SONAME)"
	@ln -sf $(SONAME) "$(DESTDIR)$(LIBDIR)/libtinyllm.so"
	@$(call fill_in,$(call in_prefix,$(LIBDIR)),$(call in_prefix,$(INCLUDEDIR))) c/install/tinyllm.pc.in | \
	    install -m 644 /dev/stdin "$(DESTDIR)$(LIBDIR)/pkgconfig/tinyllm.pc"
	@for file in tinyllmConfig.cmake tinyllmConfigVersion.cmake; do \
	    $(call fill_in,$(LIBDIR),$(INCLUDEDIR)) c/install/$$file.in | \
	        install -m 644 /dev/stdin "$(DESTDIR)$(LIBDIR)/cmake/tinyllm/$$file"; done
	@for file in $(INSTALLED); do echo "  INST  $(DESTDIR)$$file"; done
	@[ -n "$(DESTDIR)" ] || echo "Programs find it once ldconfig has run (as root), or when linked with -Wl,-rpath,$(LIBDIR)"

uninstall: ## removes what install wrote, given the same directories
	$(absolute)
	@for file in $(INSTALLED); do rm -f "$(DESTDIR)$$file"; done
	@for dir in $(INCLUDEDIR)/tinyllm $(LIBDIR)/cmake/tinyllm; do rmdir "$(DESTDIR)$$dir" 2>/dev/null || true; done

.PHONY: test test-c test-py test-install asan tsan sweep fuzz mutants lint
test: ## every test: C, then Python (makes .venv)
	@$(MAKE) --no-print-directory test-c
	@$(MAKE) --no-print-directory test-py

test-c: $(C_TESTS) ## the C tests alone; needs nothing but a C compiler
	@tests/run_c.sh "$(RUN)" $(C_TESTS)

test-py: all $(C_TESTS) .venv/test.stamp ## the Python tests alone
	@TINYLLM_BUILD=$(B) .venv/bin/python -m pytest -q -n auto tests/L9.4

test-install: all .venv-install/install.stamp ## wheel, sdist, pkg-config and CMake, each used (needs cmake, pkg-config, g++)
	@.venv-install/bin/python -m pytest -q -p no:cacheprovider --rootdir tests/install -c /dev/null tests/install

.venv-install/install.stamp: tests/install/requirements.txt tests/venv.sh
	@tests/venv.sh "$(PYTHON)" .venv-install $<
	@touch $@

.PHONY: test-hf
test-hf: all .venv-hf/oldest.stamp .venv-hf/newest.stamp ## tinyllm.hf on the oldest and the newest transformers 5 (1.6 GB to install)
	@for version in oldest newest; do \
	    TINYLLM_LIB="$$(cd $(B) && pwd)/libtinyllm.so" PYTHONPATH=.venv-hf/$$version:python \
	        .venv-hf/bin/python -m pytest -q -W ignore tests/hf || exit 1; \
	done

.venv-hf/common.stamp: tests/hf/requirements.txt tests/venv.sh
	@tests/venv.sh "$(PYTHON)" .venv-hf $<
	@touch $@

.venv-hf/%.stamp: tests/hf/%.txt .venv-hf/common.stamp
	@tests/venv.sh "$(PYTHON)" .venv-hf $< --no-deps --upgrade --target .venv-hf/$*
	@touch $@

# With use-after-scope checks of every lane array the kernels take minutes to compile.
asan: ## the C tests under AddressSanitizer, UBSan and the leak check
	@$(MAKE) --no-print-directory test-c B=c/build/asan CFLAGS='-O1 -g -fno-omit-frame-pointer' \
	    SAN='-fsanitize=address,undefined -fno-sanitize-recover=all -fno-sanitize-address-use-after-scope'

tsan: ## the C tests under ThreadSanitizer
	@$(MAKE) --no-print-directory test-c B=c/build/tsan CFLAGS='-O1 -g' SAN='-fsanitize=thread'

sweep: $(SWEEPS) $(B)/tests/parity_attn ## the long sweeps: exp over every float, parity over every shape
	@PARITY_FULL=1 tests/run_c.sh "$(RUN)" $(SWEEPS) $(B)/tests/parity_attn

fuzz: ## libFuzzer on the import of envelopes, then on the prefix index (needs clang); SECONDS=60
	@for what in import prefix; do \
	    mkdir -p c/build/fuzz/$$what-corpus; \
	    clang -O1 -g -std=c11 -D_GNU_SOURCE -Ic/include -Ic/src -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all \
	        -o c/build/fuzz/$$what tests/L9.4/runtime/fuzz_$$what.c c/src/runtime/*.c -pthread && \
	    c/build/fuzz/$$what -max_total_time=$$(($(or $(SECONDS),60) / 2)) -max_len=4096 -print_final_stats=1 \
	        c/build/fuzz/$$what-corpus || exit 1; \
	done

mutants: .venv/test.stamp ## plant each known fault in turn; every one must be killed by its test
	@.venv/bin/python tests/L9.4/mutants/run.py $(MUTANTS)

lint: .venv/lint.stamp ## mypy --strict, ruff, and the layout of every text
	@.venv/bin/mypy
	@.venv/bin/ruff check .
	@.venv/bin/ruff format --check --quiet .
	@tests/tidy.sh

.PHONY: docs
docs: .venv-docs/docs.stamp ## the reference as HTML in c/build/docs: C (needs doxygen) and Python (makes .venv-docs)
	@command -v doxygen >/dev/null || { echo 'libtinyllm: needs doxygen: install it (Debian: apt-get install doxygen)' >&2; exit 1; }
	$(call say,DOC,c/build/docs/c/index.html)
	@mkdir -p c/build/docs && doxygen docs/Doxyfile
	$(call say,DOC,c/build/docs/python/index.html)
	@PYTHONPATH=python .venv-docs/bin/python -W error docs/reference/for_pdoc.py c/build/docs/python

.venv-docs/docs.stamp: requirements-docs.txt tests/venv.sh
	@tests/venv.sh "$(PYTHON)" .venv-docs $<
	@touch $@

$(B)/bench/%: bench/%.c $(wildcard bench/*.h) $(B)/libtinyllm.a $(B)/flags
	$(call say,CC,$<)
	@mkdir -p $(@D)
	@$(CC) $(CFLAGS) -Ibench -o $@ $< $(B)/libtinyllm.a $(LDLIBS)

.PHONY: bench bench-quick bench-prefill bench-python bench-quality bench-layers counts bench-formats bench-rows bench-runtime bench-prefix bench-numerics
bench: $(B)/bench/bench_decode ## a decode step beside the bandwidth of memory and a plain C loop; BENCH_ARGS='--group small' etc.
	@$< --plain $(BENCH_ARGS)

bench-quick: $(B)/bench/bench_decode ## the same in under a minute, without the plain loop
	@$< --quick --threads 1 $(BENCH_ARGS)

bench-prefill: $(B)/bench/bench_prefill ## attention of whole prompts beside the fma peak
	@$< $(BENCH_ARGS)

bench-formats: $(B)/bench/bench_formats ## a decode step over K and V of every format, beside f16
	@$< $(BENCH_ARGS)

bench-rows: $(B)/bench/bench_rows ## chunks, drafts, long sequences and shared prefixes, each beside the plain way
	@$< $(BENCH_ARGS)

bench-runtime: $(B)/bench/bench_runtime ## the pool, append, envelopes, checksum and huge pages beside memcpy and malloc
	@$< $(BENCH_ARGS)

bench-prefix: $(B)/bench/bench_prefix ## the prefix index beside block hashes, in time and in tokens not computed
	@$< $(BENCH_ARGS)

bench-numerics: $(B)/bench/bench_numerics ## conversions, exp and softmax beside memcpy
	@$< $(BENCH_ARGS)

bench-python: all .venv/test.stamp ## what the Python layer adds to a call
	@TINYLLM_LIB=$(B)/libtinyllm.so .venv/bin/python bench/bench_python.py $(BENCH_ARGS)

bench-quality: all .venv/demo.stamp ## what a model loses with K and V in each dtype (fetches the demo's model; some minutes)
	@TINYLLM_LIB=$(B)/libtinyllm.so PYTHONPATH=python:examples .venv/bin/python bench/kv_quality.py $(BENCH_ARGS)

bench-layers: all .venv/test.stamp ## memory of a long context where a cache knows the windows of its layers
	@TINYLLM_LIB=$(B)/libtinyllm.so .venv/bin/python bench/kv_layers.py $(BENCH_ARGS)

counts: $(B)/bench/count_step ## instructions of fixed steps beside those kept in bench/counts.txt; UPDATE=1 WHY='...' keeps them
	@$< > $(B)/bench/counts && $(PYTHON) bench/counts.py $(if $(UPDATE),--update) --why '$(WHY)' < $(B)/bench/counts

.PHONY: bench-peers
bench-peers: all .venv-peers/peers.stamp ## beside torch, vLLM, OpenVINO and ONNX Runtime (1.7 GB to install; BENCH_ARGS=--help)
	@TINYLLM_LIB=$(B)/libtinyllm.so PYTHONPATH=python .venv-peers/bin/python bench/peers/bench_peers.py $(BENCH_ARGS)

.venv-peers/peers.stamp: bench/peers/requirements.txt bench/peers/install.sh
	@bench/peers/install.sh "$(PYTHON)" .venv-peers $<
	@touch $@

.PHONY: demo
demo: all ## a real language model on the library (about 100 MB to fetch, under two minutes to run)
	@python=.venv/bin/python; \
	$(MAKE) --no-print-directory .venv/demo.stamp || { \
	    $(PYTHON) -c 'import numpy' 2>/dev/null || exit 1; \
	    echo "libtinyllm: going on with the numpy that $(PYTHON) has"; python=$(PYTHON); }; \
	PYTHONPATH=python $$python examples/demo.py $(DEMO_ARGS)

# One virtual environment, made once; what a target needs is installed into it from pinned requirements.
.venv/test.stamp: requirements-test.txt tests/venv.sh | .venv/demo.stamp
.venv/lint.stamp: requirements-dev.txt tests/venv.sh
.venv/demo.stamp: examples/requirements.txt tests/venv.sh
# tokenizers depends on a dozen packages for its hub, which the demo does not use
.venv/demo.stamp: PIP := --no-deps
.venv/%.stamp:
	@tests/venv.sh "$(PYTHON)" .venv $< $(PIP)
	@touch $@

.PHONY: help clean FORCE
help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## /  \1\t/p' Makefile | expand -t 18

clean: ## remove what was built; the virtual environment stays
	rm -rf c/build

-include $(OBJ:.o=.d) $(C_TESTS:=.d) $(SWEEPS:=.d)
