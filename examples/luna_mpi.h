/* luna_mpi.h: the luna_collective of luna_ranks.h from calls of MPI. A program that includes it is built by mpicc:

     static mpi_ranks mpi;                         lives as long as the luna_ranks
     mpi_open(&mpi, &argc, &argv);
     luna_ranks_open(&ranks, params, optimizer, &mpi.collective);
     ...
     mpi_close(&mpi, status);                      a status that is not 0 ends all ranks

   Sums are added up in rank order, each part of them on one rank: the same bits on all ranks, in every run and with any
   MPI. */
#ifndef LUNA_MPI_H
#define LUNA_MPI_H
#include "luna_ranks.h"

#include <limits.h>
#include <mpi.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>

#define MPI_BLOCK ((int64_t)1 << 24)   /* numbers of a sum that go at once: MPI's counts are ints */

typedef struct mpi_ranks {
  luna_collective collective;
  MPI_Comm comm;
  int64_t calls, bytes;                /* of luna_ranks.h, and bytes that this rank has handed over in them */
} mpi_ranks;

/* Waits for a call that has begun, and lets others run meanwhile: ranks may be more than cores. */
static inline bool mpi_wait(int begun, MPI_Request *request) {
  int done = 0;
  if (begun != MPI_SUCCESS) return false;
  while (MPI_Test(request, &done, MPI_STATUS_IGNORE) == MPI_SUCCESS && !done) sched_yield();
  return done != 0;
}

/* rank r's part of n numbers begins here */
static inline int mpi_begin(int64_t n, int r, int ranks) { return (int)(n * r / ranks); }

/* Each rank gets its part from all, adds it up, and gives the sum to all. `memory`: bytes of n numbers and 4 ints a
   rank. */
static inline bool mpi_sum(const mpi_ranks *m, char *buffer, int n, luna_reduction what, char *memory) {
  const bool wide = what == LUNA_REDUCTION_SUM_F64;
  const int ranks = m->collective.ranks, rank = m->collective.rank, size = wide ? 8 : 4;
  const int own = mpi_begin(n, rank + 1, ranks) - mpi_begin(n, rank, ranks);
  MPI_Request request;
  const MPI_Datatype type = wide ? MPI_DOUBLE : MPI_FLOAT;
  int *counts = (int *)(void *)memory, *starts = counts + ranks, *own_counts = starts + ranks,
      *own_starts = own_counts + ranks;
  char *got = memory + 4 * (size_t)ranks * sizeof(int);    /* [ranks, own] */
  for (int r = 0; r < ranks; r++) {
    starts[r] = mpi_begin(n, r, ranks), counts[r] = mpi_begin(n, r + 1, ranks) - starts[r];
    own_starts[r] = own * r, own_counts[r] = own;
  }
  if (!mpi_wait(MPI_Ialltoallv(buffer, counts, starts, type, got, own_counts, own_starts, type, m->comm, &request),
                &request)) return false;
  for (int r = 1; r < ranks; r++)
    for (int i = 0; i < own; i++) {
      if (wide) ((double *)(void *)got)[i] += ((double *)(void *)got)[r * own + i];
      else ((float *)(void *)got)[i] += ((float *)(void *)got)[r * own + i];
    }
  memcpy(buffer + (size_t)starts[rank] * (size_t)size, got, (size_t)own * (size_t)size);
  return mpi_wait(MPI_Iallgatherv(MPI_IN_PLACE, 0, type, buffer, counts, starts, type, m->comm, &request), &request);
}

static inline bool mpi_reduce(void *user, void *buffer, int64_t count, luna_reduction what) {
  mpi_ranks *m = (mpi_ranks *)user;
  const int64_t size = what == LUNA_REDUCTION_SUM_F64 ? 8 : 4, most = count < MPI_BLOCK ? count : MPI_BLOCK;
  const size_t ranks = (size_t)m->collective.ranks;        /* a part is rounded up: room for one number more a rank */
  char *memory = (char *)malloc(4 * ranks * sizeof(int) + ((size_t)most + ranks * ranks) * (size_t)size);
  bool good = memory != NULL;
  m->calls++, m->bytes += count * size;
  for (int64_t at = 0; at < count && good; at += most)
    good = mpi_sum(m, (char *)buffer + at * size, (int)(count - at < most ? count - at : most), what, memory);
  free(memory);
  return good;
}

static inline bool mpi_gather(void *user, const void *mine, void *all, size_t bytes) {
  mpi_ranks *m = (mpi_ranks *)user;
  MPI_Request request;
  m->calls++, m->bytes += (int64_t)bytes;
  return bytes <= INT_MAX &&
         mpi_wait(MPI_Iallgather(mine, (int)bytes, MPI_BYTE, all, (int)bytes, MPI_BYTE, m->comm, &request), &request);
}

/* False: MPI could not be started. Its own errors come back as failed calls, so that luna_ranks.h says a sentence. */
static inline bool mpi_open(mpi_ranks *m, int *count, char ***given) {
  int threads;
  memset(m, 0, sizeof *m);
  m->collective.all_reduce = mpi_reduce, m->collective.all_gather = mpi_gather, m->collective.user = m;
  return MPI_Init_thread(count, given, MPI_THREAD_FUNNELED, &threads) == MPI_SUCCESS &&
      threads >= MPI_THREAD_FUNNELED &&
         MPI_Comm_dup(MPI_COMM_WORLD, &m->comm) == MPI_SUCCESS &&
         MPI_Comm_set_errhandler(m->comm, MPI_ERRORS_RETURN) == MPI_SUCCESS &&
         MPI_Comm_rank(m->comm, &m->collective.rank) == MPI_SUCCESS &&
             MPI_Comm_size(m->comm, &m->collective.ranks) == MPI_SUCCESS;
}

/* One rank that failed would leave the others waiting: it ends them. */
static inline void mpi_close(mpi_ranks *m, int status) {
  if (status != 0) MPI_Abort(MPI_COMM_WORLD, status);
  MPI_Comm_free(&m->comm);
  MPI_Finalize();
}
#endif
