# luna.h is one file and needs no build; this makes its examples, its tests and its tables. GNU make and a C compiler are enough.
#   make run                 trains a Luna language model on luna.h itself, about a minute
#   make examples            builds examples/*.c
#   make test                everything that is checked; last line: N passed, N failed
#   make sanitize            the same tests under the address, undefined and thread sanitizers
#   make golden DIR=folder   compares with a folder of golden files
#   make headers             compiles luna.h strictly, in every language, mode and build switch
#   make fuzz                mutates the corpus tests/data/fuzz for FUZZ_SECONDS (clang); make test only replays it
#   make size                object sizes by build switch
#   make bench               speed, as shares of this machine's peak: tests/bench_*.c, under 3 minutes; rows also in build/bench.json
CC ?= cc
CFLAGS ?= -O2
LIBS ?= -lm -lpthread
BUILD ?= build
TEXT ?= luna.h
CLANG ?= clang
FUZZ_SECONDS ?= 60
JOBS ?= $(shell getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)

WARN = -Wall -Wextra
NAMES = $(filter-out bench_%,$(patsubst tests/%.c,%,$(wildcard tests/*.c)))
EXAMPLES = $(patsubst examples/%.c,$(BUILD)/%,$(wildcard examples/*.c))
PROGRAMS = $(NAMES:%=$(BUILD)/tests/%)
SCRIPTS = tests/cli.sh tests/classifiers.sh tests/examples_more.sh
PUBLIC = $(patsubst tests/%.c,$(BUILD)/tests/%,$(shell grep -L 'lunai_\|LUNAI_\|kernels.h' tests/*.c))
BENCHES = $(patsubst tests/%.c,$(BUILD)/tests/%,$(wildcard tests/bench_*.c))
ASAN = -O1 -g1 -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer
TSAN = -O1 -g1 -fsanitize=thread
FUZZ = -O1 -g1 -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all -DFUZZ_LIBFUZZER -DLUNA_NO_SIMD

run: $(BUILD)/lm
	$(BUILD)/lm train $(TEXT) --out $(BUILD)/lm.safetensors

examples: $(EXAMPLES)

programs: $(EXAMPLES) $(PROGRAMS)

# Examples, and the tests that look at nothing private, share one compiled implementation; LUNAI_IMPLEMENTED says that they have it.
$(BUILD)/luna.o: luna.h
	@mkdir -p $(BUILD)
	@printf '#define LUNA_IMPLEMENTATION\n#include "luna.h"\n' >$(BUILD)/luna.c
	$(CC) $(CFLAGS) $(WARN) -I. -c $(BUILD)/luna.c -o $@

$(BUILD)/%: examples/%.c $(BUILD)/luna.o $(wildcard examples/*.h)
	@rm -f $@
	$(CC) $(CFLAGS) $(WARN) -DLUNAI_IMPLEMENTED -I. $< $(BUILD)/luna.o -o $@ $(LIBS)

$(PUBLIC): $(BUILD)/tests/%: tests/%.c $(BUILD)/luna.o $(wildcard tests/*.h)
	@mkdir -p $(BUILD)/tests && rm -f $@
	$(CC) $(CFLAGS) $(WARN) -DLUNAI_IMPLEMENTED -I. $< $(BUILD)/luna.o -o $@ $(LIBS)

$(BUILD)/tests/%: tests/%.c luna.h $(wildcard tests/*.h)
	@mkdir -p $(BUILD)/tests && rm -f $@
	$(CC) $(CFLAGS) $(WARN) -I. $< -o $@ $(LIBS)

test:
	-@$(MAKE) -k -j$(JOBS) programs
	@BUILD=$(BUILD) CC='$(CC)' sh tests/run.sh $(PROGRAMS) $(SCRIPTS) tests/convert.sh tests/compile.sh

sanitize:
	-@$(MAKE) -k -j$(JOBS) programs BUILD=$(BUILD)/asan CFLAGS='$(ASAN)'
	-@$(MAKE) $(BUILD)/tsan/tests/threads BUILD=$(BUILD)/tsan CFLAGS='$(TSAN)'
	@BUILD=$(BUILD)/asan sh tests/run.sh $(NAMES:%=$(BUILD)/asan/tests/%) $(BUILD)/tsan/tests/threads $(SCRIPTS)

golden: $(BUILD)/tests/golden
	$(BUILD)/tests/golden $(DIR)

headers:
	@BUILD=$(BUILD) CC='$(CC)' sh tests/compile.sh

$(BUILD)/fuzz/fuzz_safetensors: tests/fuzz_safetensors.c luna.h $(wildcard tests/*.h)
	@mkdir -p $(BUILD)/fuzz
	$(CLANG) $(FUZZ) $(WARN) -I. $< -o $@ $(LIBS)

fuzz: $(BUILD)/fuzz/fuzz_safetensors
	@mkdir -p $(BUILD)/fuzz/corpus && cp tests/data/fuzz/* $(BUILD)/fuzz/corpus
	$< -max_total_time=$(FUZZ_SECONDS) -max_len=16384 -timeout=20 -artifact_prefix=$(BUILD)/fuzz/ $(BUILD)/fuzz/corpus

size:
	@BUILD=$(BUILD) CC='$(CC)' sh tests/size.sh

# each benchmark leaves a line of JSON a row; build/bench.json holds them all
bench: $(BENCHES)
	@for bench in $(BENCHES); do $$bench $$bench.json || exit 1; done
	@{ echo '['; cat $(BENCHES:%=%.json) | sed '$$!s/$$/,/'; echo ']'; } >$(BUILD)/bench.json
	@echo "every row is in $(BUILD)/bench.json"

clean:
	rm -rf build $(BUILD)

.PHONY: run examples programs test sanitize golden headers fuzz size bench clean
