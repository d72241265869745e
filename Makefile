# luna.h is one file and needs no build; this makes its examples, its tests and its tables. GNU make and a C compiler
# are enough.
#   make run                 trains a Luna language model on 0.4 MB of source text, one to two minutes
#   make examples            builds the programs of examples/
#   make test                the main tests, in three to four minutes on two cores; last line: N passed, N failed
#   make install PREFIX=/usr/local   luna.h, luna_cuda.cuh, libluna.a (the implementation, compiled), luna.pc for
#                            pkg-config and lunaConfig.cmake for CMake; DESTDIR before it
#   make docs                build/luna_reference.html: one page of the public part and the guide's programs (Python 3)
#   make clean               removes what was built
# For maintainers:
#   make dist                build/luna-VERSION.tar.gz, the same bytes wherever it is made (GNU tar)
#   make test-all            everything that is checked: every case of every test
#   make test-long           what make test leaves out: luna_cuda.cuh's kernels without a GPU, emulated tiles, packages;
#                            every case of five tests of which make test takes a part (the others' are in test-all);
#                            make coverage, and make soak in short
#   make test-clang          numbers, their bits and threads, built by clang
#   make sanitize            the same tests under the address, undefined and thread sanitizers; CC=clang: and memory's
#   make cross               tests on other machines, emulated; ROWS="s390x musl", TESTS="golden stream": these rows of
#                            tests/tools/cross.sh, these tests
#   make golden DIR=folder   compares with a folder of golden files
#   make headers             compiles luna.h strictly, in every language, mode and build switch
#   make fuzz                mutates the corpus tests/data/fuzz for FUZZ_SECONDS (clang), FUZZ_FLAGS: of libFuzzer; make
#                            test replays it and a few hundred mutations. A million executions, which go on from the
#                            last ones: make fuzz FUZZ_SECONDS=0 FUZZ_FLAGS='-runs=1000000'
#   make faults              plants a wrong sign, a wrong index and a wrong order in every op's forward pass, one after
#                            the other, and tells which no check notices; OPS="cumsum rotary": in these (python3)
#   make coverage            the lines and branches of luna.h that tests run, by chapter, and what is not run of those
#                            that must be; part of make test-long (gcc, gcov, python3): tests/tools/coverage.py
#   make fuzz-coverage       the lines of each chapter of luna.h that its corpus runs (gcc, gcov)
#   make mcu                 exports the gesture detector of examples/models and one of random weights, and runs them on
#                            microcontrollers in qemu: examples/mcu; STEPS=10000
#   make analyze             clang-tidy's bugprone checks, clang's analyser and gcc's over luna.h: what
#                            tests/tools/analyze.txt does not explain fails. Four minutes on a quiet core: not in the
#                            gate, but before releases
#   make soak                streams of 2^26 steps and a training of 10^7, of tiny models: tests/robust/soak.c, ten
#                            minutes on a quiet core; make test-long has a short form
#   make size                bytes of luna.h by chapter, of objects by build switch, and of a streaming detector;
#                            PART=chapters: the first alone, in a moment
#   make bench               speed, as shares of this machine's peak: tests/bench, under 3 minutes; rows also in
#                            build/bench.json; it warns where other programs or machines had the processors
#   make arena               Luna and what it is compared with: speed and memory (Table 2 of the paper), in
#                            build/arena.md and .svg; 10 minutes at most
#   make compare REF=revision   time and peak memory of every row of make bench, before (luna.h at that git revision)
#                            and now: tests/bench/compare.sh. While it, bench or arena times, there is a file
#                            /tmp/luna.timing.lock
# The files at the end have the targets of CUDA, PTX, MPI and the page, and say there what these do.
CC ?= cc
CFLAGS ?= -O2
LIBS ?= -lm -lpthread
BUILD ?= build
TEXT ?= tests/data/excerpt.txt
PREFIX ?= /usr/local
CLANG ?= clang
FUZZ_SECONDS ?= 60
JOBS ?= $(shell getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)

WARN = -Wall -Wextra
# tests/*/NAME.c becomes build/tests/NAME; headers are included from their folder or from tests/
TEST_C = $(wildcard tests/*.c tests/*/*.c)
TEST_H = $(wildcard tests/*.h tests/*/*.h)
TEST_I = -I. -Itests
vpath %.c $(sort $(dir $(TEST_C)))
# tests/private.c includes these: they are no programs of their own
CHAPTERS = $(shell sed -n 's/^\#include "\(.*\.c\)".*/\1/p' tests/private.c)
NAMES = $(filter-out bench_% cuda ptx mpi% soak tiles tiles_emulated $(basename $(notdir $(CHAPTERS))),\
  $(basename $(notdir $(TEST_C))))
EXAMPLES = $(patsubst examples/%.c,$(BUILD)/%,$(wildcard examples/*.c)) $(BUILD)/lra
EXAMPLE_H = $(wildcard examples/*.h examples/*/*.h)
PROGRAMS = $(NAMES:%=$(BUILD)/tests/%)
SCRIPTS = $(addprefix tests/programs/,cli.sh classifiers.sh examples_more.sh series.sh arena.sh lra.sh export.sh \
  export_options.sh models.sh long_line.sh recall.sh) tests/tools/flags.sh tests/bench/busy.sh
PUBLIC_C = $(shell grep -L 'li_\|LI_\|kernels.h' $(filter-out tests/private.c,$(TEST_C)))
PUBLIC = $(patsubst %.c,$(BUILD)/tests/%,$(filter-out cuda.c ptx.c mpi.c,$(notdir $(PUBLIC_C))))
BENCHES = $(patsubst tests/bench/%.c,$(BUILD)/tests/%,$(wildcard tests/bench/*.c))
ASAN = -O1 -g1 -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer -DTEST_QUICK=1
# what need not run again with a second compiler: compile.sh itself takes all that are here
ONCE = tests/tools/compile.sh tests/tools/form.sh tests/programs/convert.sh $(SCRIPTS) tests/programs/torch.sh \
  tests/tools/promises.sh tests/cuda/gpu_check.sh
# what takes too long for make test: make test-long, test-all and sanitize run it
LATER_SCRIPTS = $(addprefix tests/programs/,export.sh export_options.sh examples_more.sh)
LATER = $(HOST:%=$(BUILD)/tests/%) $(BUILD)/tests/tiles
LATER_SANITIZED = $(filter-out $(if $(GATE),%/cuda_forgetting),$(LATER))
# what make test-long runs: what make test leaves out, and every case of what make test runs a part of. What takes
# longest begins first.
LONG = tests/tools/coverage.sh $(LATER_SCRIPTS) $(BUILD)/tests/private $(LATER) tests/tools/install.sh \
  tests/cuda/peers_check.sh $(addprefix $(BUILD)/tests/,causality out_of_memory arguments soak)
TSAN = -O1 -g1 -fsanitize=thread -DTEST_QUICK=1
# Of clang alone, in scalar C: it does not know all vector instructions, nor a C++ library that was built without it.
# It leaves out the oracles of ops, which run the same passes once more.
MSAN = -O1 -g1 -fsanitize=memory -DLUNA_NO_SIMD -DTEST_QUICK=1 -DTEST_ORACLES=0
MSAN_TESTS = $(if $(findstring clang,$(CC)),arguments attention_layers checkpoints classifier dead_results device \
  empty features forgetting golden hooks masked_lm model_files ops private profile resume scopes setup state stream \
  trainer translation)
# Comparisons are not traced, since the mutations know the format: it takes a third of the time. Rare features are not
# counted (-entropic=0): it takes half, and more as the corpus grows. More than two mutations (-mutate_depth) seldom
# load. The address sanitizer finds null pointers.
FUZZ = -O1 -g1 -fsanitize=fuzzer,address,undefined -fno-sanitize=null -fno-sanitize-coverage=trace-cmp \
  -fno-sanitize-recover=all -DFUZZ_LIBFUZZER

# $(call build,COMPILER AND FLAGS,LIBRARIES): the target, made beside its place and moved there when it is whole, so
# that two builds of one folder do no harm to each other. Its time is when its compilation began: what changes during
# it is newer.
define build
@echo "$(1) -o $@ $(2)"
@new=$@.new.$$$$; mkdir -p $$new && : >$$new.time && $(1) -o $$new/$(@F) $(2) && touch -r $$new.time $$new/* && \
  rm -rf $@.dSYM && mv -f $$new/* $(@D); status=$$?; rm -rf $$new $$new.time; exit $$status
endef

PARTS = tests/cuda/cuda.mk tests/cuda/ptx.mk tests/ranks/mpi.mk examples/web/web.mk
# make alone prints what the comments at the head of these files say
help:
	@awk 'FNR == 1 { on = NR > 1 } /^#   make run / { on = 1 } !/^#/ { on = 0 } \
	  on && sub(/^#   /, "") { print } on && sub(/^# For /, "\nFor ") { print }' Makefile $(PARTS)

run: $(BUILD)/lm
	$(BUILD)/lm train $(TEXT) --out $(BUILD)/lm.safetensors

examples: $(EXAMPLES)

# Examples, and the tests that look at nothing private, share one compiled implementation, luna.o; LI_IMPLEMENTED says
# that they have it. It has the backward pass of the tests' reference, too, which the installed one does not have.
REFERENCE = '\#define LI_BACKWARD_REFERENCE "tests/kernels/backward_reference.h"\n'
$(BUILD)/luna.o: luna.h tests/kernels/backward_reference.h
$(BUILD)/luna.o $(BUILD)/libluna.o: $(BUILD)/%.o: luna.h
	@mkdir -p $(BUILD)
	@printf $(if $(filter luna,$*),$(REFERENCE))'#define LUNA_IMPLEMENTATION\n#include "luna.h"\n' >$@.$$PPID.c
	@mv $@.$$PPID.c $(BUILD)/$*.c
	$(call build,$(CC) $(CFLAGS) $(WARN) -I. -c $(BUILD)/$*.c)

$(BUILD)/%: examples/%.c $(BUILD)/luna.o $(EXAMPLE_H)
	$(call build,$(CC) $(CFLAGS) $(CALLER_OPT) $(WARN) -DLI_IMPLEMENTED -I. $< $(BUILD)/luna.o,$(LIBS))

$(BUILD)/%: examples/lra/%.c $(BUILD)/luna.o $(EXAMPLE_H)
	$(call build,$(CC) $(CFLAGS) $(CALLER_OPT) $(WARN) -DLI_IMPLEMENTED -I. $< $(BUILD)/luna.o,$(LIBS))

# GATE=1: without what other stages of the gate run in full: test-long, headers, sanitize
export TEST_FULL
test:
	-@$(MAKE) -k -j$(JOBS) programs $(if $(TEST_FULL),$(LATER))
	@BUILD=$(BUILD) CC='$(CC)' JOBS=$(JOBS) sh tests/run.sh $(filter-out $(if $(GATE),tests/tools/compile.sh $(LONG)) \
	  $(if $(TEST_FULL),,$(LATER_SCRIPTS)),$(BUILD)/tests/private $(ONCE) \
	  $(if $(TEST_FULL),$(LATER) tests/tools/install.sh) $(filter-out %/private,$(PROGRAMS)))

VERSION = $(shell sed -n 's/^.define LUNA_VERSION "\(.*\)"/\1/p' luna.h)
# A program that links libluna.a only includes luna.h: it does not define LUNA_IMPLEMENTATION.
install: $(BUILD)/libluna.o
	mkdir -p $(DESTDIR)$(PREFIX)/include $(DESTDIR)$(PREFIX)/lib/pkgconfig $(DESTDIR)$(PREFIX)/lib/cmake/luna
	cp luna.h luna_cuda.cuh $(DESTDIR)$(PREFIX)/include
	rm -f $(DESTDIR)$(PREFIX)/lib/libluna.a
	$(AR) rcs $(DESTDIR)$(PREFIX)/lib/libluna.a $(BUILD)/libluna.o
	printf '%s\n' prefix=$(PREFIX) 'Name: luna' 'Description: Luna attention' 'Version: $(VERSION)' \
	  'Cflags: -I$${prefix}/include' 'Libs: -L$${prefix}/lib -lluna $(LIBS)' \
	  >$(DESTDIR)$(PREFIX)/lib/pkgconfig/luna.pc
	for file in lunaConfig lunaConfigVersion; do \
	  sed 's/@PROJECT_VERSION@/$(VERSION)/; s/@LIBRARIES@/$(strip $(LIBS))/' examples/packaging/cmake/$$file.cmake.in \
	    >$(DESTDIR)$(PREFIX)/lib/cmake/luna/$$file.cmake || exit 1; done

docs: $(BUILD)/luna_reference.html
$(BUILD)/luna_reference.html: luna.h README.md examples/guide.md tests/tools/docs.py
	@mkdir -p $(@D)
	python3 tests/tools/docs.py luna.h README.md $@

clean:
	rm -rf build $(BUILD)

# ---- for maintainers: programs and their rules
# those that take longest to compile first, so that all cores have work to the end
programs: $(filter %/private,$(PROGRAMS)) $(filter $(BUILD)/%,$(ONCE)) $(EXAMPLES) $(filter-out $(SKIP),$(PROGRAMS)) \
  $(BUILD)/mcu/models

# null for each pointer of each public function
NULLS = tests/robust/nulls.awk tests/tools/api.txt examples/luna_ops.h
$(BUILD)/tests/arguments: TEST_OPT = -O1 -I$(BUILD)/tests
$(BUILD)/tests/arguments: $(BUILD)/tests/nulls.h
$(BUILD)/tests/nulls.h: $(NULLS)
	@mkdir -p $(@D)
	awk -f $(NULLS) >$@.$$PPID
	@mv $@.$$PPID $@

# what exported models are compared with
$(BUILD)/mcu/models: examples/mcu/models.c $(BUILD)/luna.o
	$(call build,$(CC) $(CFLAGS) $(WARN) -DLI_IMPLEMENTED -I. $< $(BUILD)/luna.o,$(LIBS))

# Most tests take longer to compile than to run; a benchmark's loops are as a user's. The attentions of examples/, which
# tests/attentions holds, compute much themselves, and so do ops and arguments where sanitizers watch them.
TEST_OPT = $(or $(CALLER_OPT),-O1)
$(BUILD)/tests/attentions: CALLER_OPT =
$(BUILD)/tests/ops: TEST_OPT = -O1
$(BENCHES): TEST_OPT =
$(PUBLIC): $(BUILD)/tests/%: %.c $(BUILD)/luna.o $(TEST_H)
	$(call build,$(CC) $(CFLAGS) $(TEST_OPT) $(WARN) -DLI_IMPLEMENTED $(TEST_I) $< $(BUILD)/luna.o,$(LIBS))

$(addprefix $(BUILD)/tests/,attention_layers attentions out_of_memory golden lra memory model_files) \
  $(addprefix $(BUILD)/tests/,translation device ops mistakes empty masked_lm profile collective): $(EXAMPLE_H)
$(BUILD)/tests/lra: examples/lra/lra.c
$(BUILD)/tests/model_files: tests/data/old/use.h
$(BUILD)/tests/private: $(CHAPTERS:%=tests/%)
# GATE=1: what has luna.h's implementation to itself, and the kernels of luna_cuda.cuh, go without the sanitizer for
# undefined behaviour. With both sanitizers each takes a minute longer to compile; build/luna.o has both.
$(addprefix $(BUILD)/tests/,private stream_bytes tiles tiles_emulated.o cuda_device.o): \
  OWN_OPT = $(if $(GATE),$(if $(findstring undefined,$(CFLAGS)),-fno-sanitize=undefined))
# these take longer to compile than to run
$(BUILD)/tests/gradients $(BUILD)/tests/stream_bytes: CFLAGS += -O1

$(BUILD)/tests/%: %.c luna.h $(TEST_H)
	$(call build,$(CC) $(CFLAGS) $(OWN_OPT) $(WARN) $(TEST_I) $<,$(LIBS))

$(BUILD)/tests/tiles_emulated.o: tiles_emulated.c luna.h $(TEST_H) bf16.c gemm.c int8.c bf16_models.c
	$(call build,$(CC) $(CFLAGS) $(OWN_OPT) -O1 $(WARN) $(TEST_I) -c $<)
$(BUILD)/tests/tiles: tiles.c luna.h $(TEST_H) $(BUILD)/tests/tiles_emulated.o
	$(call build,$(CC) $(CFLAGS) $(OWN_OPT) -O1 $(WARN) $(TEST_I) $< $(BUILD)/tests/tiles_emulated.o,$(LIBS))

# ---- for maintainers: what is run
test-all:
	@$(MAKE) --no-print-directory TEST_FULL=1 test

# GATE=1: without coverage, and without what sanitize runs too
LONG_HERE = $(filter-out $(if $(GATE),tests/tools/coverage.sh $(LATER_SANITIZED)),$(LONG))
test-long:
	-@$(MAKE) -k -j$(JOBS) $(filter $(BUILD)/%,$(LONG_HERE)) $(if $(HOST),$(BUILD)/peers_host.so) \
	  $(EXAMPLES) $(BUILD)/mcu/models
	@$(if $(HOST),,echo "$(CXX_HERE) is not here: the tests of luna_cuda.cuh are skipped")
	@TEST_FULL=1 BUILD=$(BUILD) CC='$(CC)' JOBS=$(JOBS) sh tests/run.sh $(LONG_HERE)

# what make test and make test-long run, but for the chapters of private
names:
	@echo $(ONCE) $(PROGRAMS) $(LONG)

# numbers, their bits and threads: what the optimiser of another compiler may change
CLANG_TESTS = private golden gradients stream_bytes ops forgetting int8_models bf16_models threads
test-clang:
	@$(MAKE) CC='$(CLANG)' BUILD=$(BUILD)/clang ONCE= EXAMPLES= NAMES='$(CLANG_TESTS)' GATE= test

# GATE=1: scripts and programs that take longest run in other stages alone
NO_ASAN = %/gradients $(if $(GATE),%/causality)
MSAN_HERE = $(filter-out $(if $(GATE),private),$(MSAN_TESTS))
# gradients is the reference in double, which ops and others run in float. The one program of the thread sanitizer and
# luna.o of memory's take a minute to compile, each on one core, beside the others. What only calls luna.o is not
# optimised: with the sanitizers that takes clang five times as long, and the program is hardly faster.
sanitize: export CALLER_OPT = -O0
sanitize:
	-@$(MAKE) $(BUILD)/tsan/tests/threads BUILD=$(BUILD)/tsan CFLAGS='$(TSAN)' & \
	$(if $(MSAN_HERE),$(MAKE) $(BUILD)/msan/luna.o BUILD=$(BUILD)/msan CFLAGS='$(MSAN)' &) \
	$(MAKE) -k -j$(JOBS) programs $(LATER_SANITIZED:$(BUILD)/%=$(BUILD)/asan/%) BUILD=$(BUILD)/asan CFLAGS='$(ASAN)' \
	  SKIP='$(NO_ASAN)'; wait
	-@$(if $(MSAN_HERE),$(MAKE) -k -j$(JOBS) $(MSAN_HERE:%=$(BUILD)/msan/tests/%) BUILD=$(BUILD)/msan CFLAGS='$(MSAN)')
	@BUILD=$(BUILD)/asan CFLAGS='$(ASAN)' JOBS=$(JOBS) sh tests/run.sh \
	  $(filter-out $(if $(GATE),$(addprefix tests/programs/,arena.sh cli.sh examples_more.sh export.sh \
	  export_options.sh lra.sh recall.sh)),$(SCRIPTS)) $(BUILD)/asan/tests/private \
	  $(LATER_SANITIZED:$(BUILD)/%=$(BUILD)/asan/%) $(MSAN_HERE:%=$(BUILD)/msan/tests/%) $(BUILD)/tsan/tests/threads \
	  $(filter-out %/private $(NO_ASAN),$(NAMES:%=$(BUILD)/asan/tests/%))

mcu: $(BUILD)/export $(BUILD)/mcu/models
	@BUILD=$(BUILD) CC='$(CC)' STEPS=$(STEPS) sh examples/mcu/mcu.sh

cross:
	@BUILD=$(BUILD) MAKE='$(MAKE)' ROWS='$(ROWS)' TESTS='$(TESTS)' JOBS=$(JOBS) sh tests/tools/cross.sh

golden: $(BUILD)/tests/golden
	$(BUILD)/tests/golden $(DIR)

headers:
	@BUILD=$(BUILD) CC='$(CC)' TEST_FULL=1 sh tests/tools/compile.sh

$(BUILD)/fuzz/fuzz_safetensors: fuzz_safetensors.c luna.h $(TEST_H)
	@mkdir -p $(BUILD)/fuzz
	$(CLANG) $(FUZZ) $(WARN) $(TEST_I) $< -o $@ $(LIBS)

fuzz: $(BUILD)/fuzz/fuzz_safetensors
	@mkdir -p $(BUILD)/fuzz/corpus && cp tests/data/fuzz/* $(BUILD)/fuzz/corpus
	$< -max_total_time=$(FUZZ_SECONDS) -max_len=16384 -timeout=20 -entropic=0 -mutate_depth=2 \
	  -artifact_prefix=$(BUILD)/fuzz/ $(FUZZ_FLAGS) $(BUILD)/fuzz/corpus

fuzz-coverage:
	@BUILD=$(BUILD) sh tests/tools/fuzz_coverage.sh \
	  $(if $(wildcard $(BUILD)/fuzz/corpus),$(BUILD)/fuzz/corpus,tests/data/fuzz)

faults:
	@BUILD=$(BUILD) CC='$(CC)' python3 tests/tools/faults.py $(OPS)

coverage:
	@BUILD=$(BUILD) JOBS=$(JOBS) sh tests/tools/coverage.sh

analyze:
	@python3 tests/tools/analyze.py $(BUILD)/analyze

soak: $(BUILD)/tests/soak
	$< --full

size:
	@BUILD=$(BUILD) CC='$(CC)' sh tests/tools/size.sh $(PART)

# each benchmark leaves a line of JSON a row; build/bench.json holds them all
bench: $(BENCHES)
	@. tests/bench/timing.sh; for bench in $(BENCHES); do $$bench $$bench.json || exit 1; done
	@{ echo '['; cat $(BENCHES:%=%.json) | sed '$$!s/$$/,/'; echo ']'; } >$(BUILD)/bench.json
	@echo "every row is in $(BUILD)/bench.json"

arena: $(BUILD)/arena
	. tests/bench/timing.sh; $(BUILD)/arena table $(TEXT) --plot $(BUILD)/arena.svg >$(BUILD)/arena.md
	@cat $(BUILD)/arena.md

REF ?= HEAD
compare:
	@BUILD=$(BUILD) CC='$(CC)' CFLAGS='$(CFLAGS)' LIBS='$(LIBS)' sh tests/bench/compare.sh $(REF)

# The tarball holds all that git knows but the gate, so that each command of README works in it: tests are most of its
# 6 MB. In an unpacked one, where git knows nothing, all of these parts but what was built. Names are sorted, owners and
# modes fixed; the time is the last commit's, which unpacked files have.
DIST_PARTS = .github LICENSE Makefile README.md examples luna.h luna_cuda.cuh tests
DIST = luna-$(VERSION)
dist:
	@mkdir -p $(BUILD)
	@tar --version 2>/dev/null | grep -q GNU || { echo "make dist needs GNU tar"; exit 1; }
	@files=$$(git ls-files -- $(DIST_PARTS) 2>/dev/null); time=$${files:+$$(git log -1 --format=%ct)}; \
	files=$${files:-$$(find $(DIST_PARTS) -type f ! -path '*/__pycache__/*')}; \
	time=$${time:-$$(date -r luna.h +%s)}; echo "$$files" | LC_ALL=C sort | \
	  tar -c --format=ustar --no-recursion --owner=0 --group=0 --numeric-owner --mode=u=rwX,go=rX --mtime=@$$time \
	    --transform 's,^,$(DIST)/,' -T - -f $(BUILD)/$(DIST).tar
	@gzip -n -9 -f $(BUILD)/$(DIST).tar
	@echo "$(BUILD)/$(DIST).tar.gz: $$(wc -c <$(BUILD)/$(DIST).tar.gz) bytes"

include $(PARTS)

.PHONY: help run examples test install docs clean dist programs names test-clang test-all test-long mcu sanitize cross \
  golden headers fuzz fuzz-coverage coverage analyze faults soak size bench arena compare
