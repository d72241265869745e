# luna_cuda.cuh: its tests without a GPU, by an emulator of CUDA, and what nvcc makes of it for one. The Makefile reads
# this.
#   make cuda                compiles luna_cuda.cuh with nvcc (its tests, and lm as build/cuda/lm) and prints registers
#                            and spills; and all else that make gpu runs
#   make gpu                 all that a GPU is wanted for, in nine minutes (GPU_SECONDS=540): tests, sanitizers, speed,
#                            PyTorch beside it, profiles. It compiles nothing: run make cuda before it, or carry
#                            build/cuda to that machine. Its files go to OUT (build/gpu): tests/cuda/gpu.sh
#   make cuda-test           the tests of luna_cuda.cuh on this machine's GPU; make test-long runs them without one
#   make cuda-bench          speed on the GPU: tests/cuda/bench_cuda.cu; rows also in build/bench_cuda.json

# what tests the kernels without a GPU, where there is a C++ compiler
CXX_HERE = $(if $(findstring clang,$(CC)),$(subst clang,clang++,$(CC)),$(CXX))
HOST = $(shell command -v $(CXX_HERE) >/dev/null 2>&1 && \
  echo cuda_forgetting $(if $(TEST_FULL),cuda cuda_host_check,cuda_small))
NVCC ?= $(firstword $(wildcard /usr/local/cuda/bin/nvcc) nvcc)
# machine code for 8.x and 9.0; PTX, which the driver compiles, for newer devices
NVCC_ARCHS = -gencode arch=compute_80,code=sm_80 -gencode arch=compute_90,code=sm_90
NVCC_ARCHS += -gencode arch=compute_90,code=compute_90
# smaller programs, of a compiler that knows how (12.8 or newer): they are carried to machines with a GPU
NVCC_SMALL = $(shell $(NVCC) --help 2>/dev/null | grep -q -- --compress-mode && echo -compress-mode=size)
NVCC_FLAGS = -std=c++17 -O3 -Werror all-warnings -Xcompiler -Wall,-Wextra,-Wno-unused-function $(NVCC_ARCHS) \
  $(NVCC_SMALL)

# ---- without a GPU: tests/cuda/cuda_host.h runs the kernels
# these take longer to compile than to run
$(addprefix $(BUILD)/,tests/cuda.o tests/cuda_device.o peers_host.so): CFLAGS += -O1
$(BUILD)/tests/cuda.o $(BUILD)/tests/cuda_small.o: $(EXAMPLE_H)

$(BUILD)/tests/cuda_device.o: tests/cuda/cuda_device.cu luna_cuda.cuh luna.h $(wildcard tests/cuda/*.h)
	$(call build,$(CXX_HERE) -std=c++17 $(CFLAGS) $(OWN_OPT) $(WARN) -Wno-unused-function $(TEST_I) -x c++ -c $<)

$(BUILD)/tests/cuda.o: cuda.c luna.h $(TEST_H) golden.c features.c
	$(call build,$(CC) $(CFLAGS) $(WARN) $(TEST_I) -c $<)

$(BUILD)/tests/cuda_small.o: cuda.c luna.h $(TEST_H) golden.c features.c
	$(call build,$(CC) $(CFLAGS) $(WARN) -DLI_IMPLEMENTED -DCUDA_SMALL=1 $(TEST_I) -c $<)

$(BUILD)/tests/cuda_small: $(BUILD)/tests/cuda_small.o $(BUILD)/tests/cuda_device.o $(BUILD)/luna.o
	$(call build,$(CXX_HERE) $(CFLAGS) $^,$(LIBS))

$(BUILD)/tests/cuda_forgetting.o: forgetting.c luna.h $(TEST_H)
	$(call build,$(CC) $(CFLAGS) $(WARN) -DLI_IMPLEMENTED -DFORGETTING_CUDA $(TEST_I) -c $<)

$(BUILD)/tests/cuda_forgetting: $(BUILD)/tests/cuda_forgetting.o $(BUILD)/tests/cuda_device.o $(BUILD)/luna.o
	$(call build,$(CXX_HERE) $(CFLAGS) $^,$(LIBS))

$(BUILD)/tests/cuda: $(BUILD)/tests/cuda.o $(BUILD)/tests/cuda_device.o
	$(call build,$(CXX_HERE) $(CFLAGS) $^,$(LIBS))

$(BUILD)/tests/cuda_host_check: tests/cuda/cuda_host_check.cpp tests/cuda/cuda_host.h tests/test.h $(BUILD)/luna.o
	$(call build,$(CXX_HERE) -std=c++17 $(CFLAGS) $(WARN) $(TEST_I) $< $(BUILD)/luna.o,$(LIBS))

# ---- by nvcc
# objects lie beside what is carried to a machine with a GPU, build/cuda
$(BUILD)/nvcc/%.o: tests/cuda/%.cu luna_cuda.cuh luna.h tests/cuda/cuda_device.h tests/cuda/registers.sh
	@mkdir -p $(BUILD)/cuda/tests $(BUILD)/nvcc
	$(NVCC) $(NVCC_FLAGS) -Xptxas -v $(TEST_I) -c $< -o $@ 2>$@.log || { cat $@.log; exit 1; }
	@sh tests/cuda/registers.sh $@.log

# CUDA's own library is linked statically; cuBLAS is not, being far larger than all else
NVCC_LINK = $(NVCC) -cudart static -Xcompiler -static-libgcc,-static-libstdc++
NVCC_LIBS = -lcublas -lcublasLt $(LIBS)
$(BUILD)/nvcc/luna_cuda.o: luna_cuda.cuh luna.h
	@mkdir -p $(BUILD)/cuda $(BUILD)/nvcc
	@printf '#include "luna_cuda.cuh"\n' >$(BUILD)/nvcc/luna_cuda.cu
	$(NVCC) $(NVCC_FLAGS) -Xcompiler -fPIC -I. -c $(BUILD)/nvcc/luna_cuda.cu -o $@

$(BUILD)/cuda/tests/cuda: $(BUILD)/tests/cuda.o $(BUILD)/nvcc/cuda_device.o
	$(NVCC_LINK) $^ -o $@ $(NVCC_LIBS)

$(BUILD)/cuda/tests/cuda_small $(BUILD)/cuda/tests/cuda_forgetting: $(BUILD)/cuda/tests/%: $(BUILD)/tests/%.o \
  $(BUILD)/luna.o $(BUILD)/nvcc/cuda_device.o
	$(NVCC_LINK) $^ -o $@ $(NVCC_LIBS)

$(BUILD)/cuda/lm: examples/lm.c $(BUILD)/luna.o $(BUILD)/nvcc/luna_cuda.o $(EXAMPLE_H)
	$(CC) $(CFLAGS) $(WARN) -DLI_IMPLEMENTED -DEXAMPLE_CUDA -I. -c $< -o $(BUILD)/nvcc/lm.o
	$(NVCC_LINK) $(BUILD)/nvcc/lm.o $(BUILD)/luna.o $(BUILD)/nvcc/luna_cuda.o -o $@ $(NVCC_LIBS)

# luna.h's side of tests/cuda/bench_cuda_peers.py: for a GPU, and by the emulator, to try it without one
$(BUILD)/luna_pic.o: luna.h
	@mkdir -p $(BUILD) && printf '#define LUNA_IMPLEMENTATION\n#include "luna.h"\n' >$(BUILD)/luna_pic.c
	$(CC) $(CFLAGS) $(WARN) -fPIC -I. -c $(BUILD)/luna_pic.c -o $@

$(BUILD)/cuda/peers.so: tests/cuda/peers.cpp $(BUILD)/luna_pic.o $(BUILD)/nvcc/luna_cuda.o
	$(NVCC_LINK) -std=c++17 -O2 -Xcompiler -fPIC,-Wall,-Wextra -DLI_IMPLEMENTED -I. -shared $^ -o $@ $(NVCC_LIBS)

$(BUILD)/peers_host.so: tests/cuda/peers.cpp $(BUILD)/luna_pic.o luna_cuda.cuh tests/cuda/cuda_host.h
	$(CXX_HERE) -std=c++17 $(CFLAGS) $(WARN) -Wno-unused-function -fPIC -shared -DPEERS_HOST -DLI_IMPLEMENTED \
	  $(TEST_I) $< $(BUILD)/luna_pic.o -o $@ $(LIBS)

# the hook of examples/luna_nccl.h, where NCCL's header is beside the CUDA Toolkit's or the system's
NCCL = $(if $(wildcard $(dir $(NVCC))../include/nccl.h /usr/include/nccl.h),$(BUILD)/nvcc/nccl.o)
$(BUILD)/nvcc/nccl.o: examples/luna_nccl.h luna.h
	@mkdir -p $(BUILD)/nvcc
	@printf '%s\n' '#include "luna.h"' '#include "examples/luna_nccl.h"' \
	  'bool opens(nccl_ranks *n, ncclComm_t c) { bool good = nccl_open(n, c); nccl_close(n); return good; }' \
	  >$(BUILD)/nvcc/nccl.cu
	$(NVCC) $(NVCC_FLAGS) -I. -c $(BUILD)/nvcc/nccl.cu -o $@

CUDA_TESTS = cuda_small cuda_forgetting cuda
CUDA_PROGRAMS = $(CUDA_TESTS:%=$(BUILD)/cuda/tests/%) $(BUILD)/cuda/lm $(BUILD)/cuda/bench $(BUILD)/cuda/peers.so
cuda:
	@if command -v $(NVCC) >/dev/null 2>&1; \
	  then $(MAKE) $(CUDA_PROGRAMS) $(NCCL) && du -sm $(BUILD)/cuda | sed 's/\t.*/ MB in build\/cuda/'; \
	  else echo "nvcc is not here: luna_cuda.cuh is not compiled"; fi

cuda-test: cuda
	@BUILD=$(BUILD) JOBS=1 sh tests/run.sh $(CUDA_TESTS:%=$(BUILD)/cuda/tests/%)

gpu:
	@BUILD=$(BUILD) sh tests/cuda/gpu.sh

$(BUILD)/cuda/bench: $(BUILD)/nvcc/bench_cuda.o $(BUILD)/luna.o
	$(NVCC_LINK) $^ -o $@ $(NVCC_LIBS)

cuda-bench:
	@if command -v $(NVCC) >/dev/null 2>&1; \
	  then $(MAKE) $(BUILD)/cuda/bench && $(BUILD)/cuda/bench $(BUILD)/bench_cuda.json; \
	  else echo "nvcc is not here: nothing is measured"; fi

.PHONY: cuda cuda-test gpu cuda-bench
