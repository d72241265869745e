# What nvcc makes of luna_cuda.cuh, run as PTX on the CPU. The Makefile reads this.
#   make ptx                 runs what nvcc makes of luna_cuda.cuh without a GPU, compares it with the kernels in C++
#                            and counts it: a table, kernel by kernel; TEST_FULL=1 with all of tests/cuda/cuda.c

# vectors of 32 lanes, bytes seen as many types, and no multiply-add but where the PTX says so
$(BUILD)/ptx/ptx_host.o: tests/cuda/ptx_host.cpp tests/cuda/ptx_host.h tests/cuda/ptx.h tests/cuda/cuda_host.h
	@mkdir -p $(BUILD)/ptx
	$(CXX) -std=c++17 -O3 -march=native -ffp-contract=off -fno-strict-aliasing $(WARN) -Wno-unused-function -I. -c $< \
	  -o $@

# ptx_faults breaks kernels in their text
$(BUILD)/tests/ptx.o $(BUILD)/tests/ptx_faults.o: ptx.c luna.h $(TEST_H)
	$(call build,$(CC) $(CFLAGS) $(if $(findstring faults,$@),-DPTX_FAULTS=1) $(WARN) -DLI_IMPLEMENTED $(TEST_I) -c $<)

# the kernels' names are looked up in the program itself
$(BUILD)/ptx/%: $(BUILD)/tests/%.o $(BUILD)/ptx/ptx_host.o $(BUILD)/tests/cuda_device.o $(BUILD)/luna.o
	$(CXX) -rdynamic $(filter-out $(if $(findstring /tests/cuda.o,$<),%/luna.o),$^) -o $@ $(LIBS) -ldl

$(BUILD)/ptx/cuda_device.ptx: tests/cuda/cuda_device.cu luna_cuda.cuh luna.h tests/cuda/cuda_device.h
	@mkdir -p $(BUILD)/ptx
	$(NVCC) -std=c++17 -O3 -lineinfo -arch=compute_80 -ptx -I. $< -o $@

$(BUILD)/ptx/registers.log: $(BUILD)/ptx/cuda_device.ptx
	$(NVCC) -cubin -arch=sm_80 -Xptxas -v $< -o $(BUILD)/ptx/cuda_device.cubin >$@ 2>&1 || { cat $@; rm -f $@; exit 1; }

PTX_TESTS = ptx ptx_faults $(if $(TEST_FULL),cuda,cuda_small)
.SECONDARY: $(PTX_TESTS:%=$(BUILD)/tests/%.o)
ptx:
	@if command -v $(NVCC) >/dev/null 2>&1; \
	  then $(MAKE) -j$(JOBS) $(PTX_TESTS:%=$(BUILD)/ptx/%) $(BUILD)/ptx/registers.log && PTX=$(BUILD)/ptx/cuda_device.ptx \
	    PTX_REGISTERS=$(BUILD)/ptx/registers.log BUILD=$(BUILD) sh tests/run.sh $(PTX_TESTS:%=$(BUILD)/ptx/%); \
	  else echo "nvcc is not here: its PTX is not run"; fi

.PHONY: ptx
