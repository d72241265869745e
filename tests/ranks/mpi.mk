# Several processes by MPI: examples/luna_ranks.h and luna_mpi.h. The Makefile reads this.
#   make mpi                 lm, classify, listops, series and lra with mpicc, for several processes or machines:
#                            build/mpi/lm
#   make mpi-test            their tests, with mpirun on this machine; last line: N passed, N failed

MPICC ?= mpicc
MPIRUN ?= mpirun
MPI_EXAMPLES = $(addprefix $(BUILD)/mpi/,lm classify listops series lra)

$(BUILD)/mpi/tests/%: %.c $(BUILD)/luna.o examples/luna_mpi.h $(TEST_H)
	@mkdir -p $(BUILD)/mpi/tests && rm -f $@
	$(MPICC) $(CFLAGS) $(WARN) -DLI_IMPLEMENTED $(TEST_I) $< $(BUILD)/luna.o -o $@ $(LIBS)

$(BUILD)/mpi/%: examples/%.c $(BUILD)/luna.o $(EXAMPLE_H)
	@mkdir -p $(BUILD)/mpi && rm -f $@
	$(MPICC) $(CFLAGS) $(WARN) -DLI_IMPLEMENTED -DEXAMPLE_MPI -I. $< $(BUILD)/luna.o -o $@ $(LIBS)
$(BUILD)/mpi/lra: examples/lra/lra.c $(BUILD)/luna.o $(EXAMPLE_H)
	@mkdir -p $(BUILD)/mpi && rm -f $@
	$(MPICC) $(CFLAGS) $(WARN) -DLI_IMPLEMENTED -DEXAMPLE_MPI -I. $< $(BUILD)/luna.o -o $@ $(LIBS)

mpi:
	@if command -v $(MPICC) >/dev/null 2>&1; then $(MAKE) -j$(JOBS) $(MPI_EXAMPLES); \
	  else echo "$(MPICC) is not here (Debian: openmpi-bin libopenmpi-dev): nothing is built"; fi

mpi-test:
	@$(MAKE) -j$(JOBS) $(MPI_EXAMPLES) $(BUILD)/mpi/tests/mpi
	@BUILD=$(BUILD) LOGS=$(BUILD)/mpi MPIRUN='$(MPIRUN)' sh tests/run.sh tests/ranks/mpi.sh

.PHONY: mpi mpi-test
