/* luna_nccl.h: the luna_collective of luna_ranks.h from calls of NCCL, a rank a GPU. luna_ranks.h hands over host
   memory: it goes through a buffer on the device. A program that includes this file links with -lnccl, and makes the
   communicator as it likes:

     cudaSetDevice(device);                        before ncclCommInitRank and what follows: the current one is used
     static nccl_ranks nccl;                       lives as long as the luna_ranks
     if (!nccl_open(&nccl, communicator)) ...
     luna_options options = {0};
     options.backend = luna_cuda_backend(device);
     luna_ctx *ctx = luna_open(&options);
     luna_ranks_open(&ranks, params, optimizer, &nccl.collective);
     ...                                           where a rank fails, ncclCommAbort frees the others
     luna_close(ctx), nccl_close(&nccl);

   Sums are added up in rank order from what all ranks have sent: the same bits on all ranks and in every run, which
   NCCL's own reduction leaves to its choice of algorithm. Compiled only: it has not run. */
#ifndef LUNA_NCCL_H
#define LUNA_NCCL_H
#include "luna_ranks.h"

#include <cuda_runtime.h>
#include <nccl.h>
#include <stdlib.h>
#include <string.h>

typedef struct nccl_ranks {
  luna_collective collective;
  ncclComm_t communicator;
  cudaStream_t stream;
  char *device;                        /* [ranks + 1, room]: all, and this rank's */
  char *host;                          /* [ranks, room], page-locked */
  size_t room;
} nccl_ranks;

#define NCCL_PIECE ((size_t)4 << 20)   /* bytes of a sum that go at once */

/* `room` bytes a rank; what was there is given back first */
static inline bool nccl_grow(nccl_ranks *n, size_t room) {
  const size_t ranks = (size_t)n->collective.ranks;
  if (room <= n->room) return true;
  cudaFree(n->device), cudaFreeHost(n->host);
  n->device = n->host = NULL, n->room = 0;
  if (cudaMalloc((void **)&n->device, (ranks + 1) * room) != cudaSuccess ||
      cudaMallocHost((void **)&n->host, ranks * room) != cudaSuccess)
    return false;
  n->room = room;
  return true;
}

static inline bool nccl_gather(void *user, const void *mine, void *all, size_t bytes) {
  nccl_ranks *n = (nccl_ranks *)user;
  const size_t ranks = (size_t)n->collective.ranks;
  if (!nccl_grow(n, bytes)) return false;
  char *own = n->device + ranks * n->room;
  return cudaMemcpyAsync(own, mine, bytes, cudaMemcpyHostToDevice, n->stream) == cudaSuccess &&
         ncclAllGather(own, n->device, bytes, ncclChar, n->communicator, n->stream) == ncclSuccess &&
         cudaMemcpyAsync(all, n->device, ranks * bytes, cudaMemcpyDeviceToHost, n->stream) == cudaSuccess &&
         cudaStreamSynchronize(n->stream) == cudaSuccess;
}

static inline bool nccl_reduce(void *user, void *buffer, int64_t count, luna_reduction what) {
  nccl_ranks *n = (nccl_ranks *)user;
  const bool wide = what == LUNA_REDUCTION_SUM_F64;
  const size_t bytes = (size_t)count * (wide ? sizeof(double) : sizeof(float));
  for (size_t at = 0; at < bytes; at += NCCL_PIECE) {
    char *piece = (char *)buffer + at;
    const size_t size = bytes - at < NCCL_PIECE ? bytes - at : NCCL_PIECE;
    if (!nccl_grow(n, size) || !nccl_gather(n, piece, n->host, size)) return false;
    memcpy(piece, n->host, size);
    for (int r = 1; r < n->collective.ranks; r++) {
      const char *other = n->host + (size_t)r * size;
      for (size_t i = 0; wide && i < size / sizeof(double); i++)
        ((double *)(void *)piece)[i] += ((const double *)(const void *)other)[i];
      for (size_t i = 0; !wide && i < size / sizeof(float); i++)
        ((float *)(void *)piece)[i] += ((const float *)(const void *)other)[i];
    }
  }
  return true;
}

static inline bool nccl_open(nccl_ranks *n, ncclComm_t communicator) {
  memset(n, 0, sizeof *n);
  n->communicator = communicator;
  n->collective.all_reduce = nccl_reduce, n->collective.all_gather = nccl_gather, n->collective.user = n;
  return ncclCommUserRank(communicator, &n->collective.rank) == ncclSuccess &&
         ncclCommCount(communicator, &n->collective.ranks) == ncclSuccess &&
             cudaStreamCreate(&n->stream) == cudaSuccess;
}

static inline void nccl_close(nccl_ranks *n) {
  cudaFree(n->device), cudaFreeHost(n->host);
  cudaStreamDestroy(n->stream);
}
#endif
