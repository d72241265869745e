# The page. The Makefile reads this.
#   make web                 build/luna.html, one file that needs no server and no network (clang, lld, wasi-libc)
#   make web-test            its tests, by node and by Chromium where it is here; last line: N passed, N failed

$(BUILD)/luna.html: luna.h $(wildcard examples/web/*) examples/models/english.safetensors
	@CLANG='$(CLANG)' sh examples/web/build.sh $@

web: $(BUILD)/luna.html

web-test: web
	@BUILD=$(BUILD) CC='$(CC)' sh tests/programs/web.sh

.PHONY: web web-test
