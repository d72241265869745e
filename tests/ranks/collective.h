/* A luna_collective of threads inside one process, and what it has carried. Sums and gathers go by rank order, so that
   every rank gets the same bits. A failure, of a rank that gives up (hub_leave) or that a test plans (fail_at), ends
   the calls of all others.

     hub h;
     hub_open(&h, 4);
     hub_run(&h, rank_main, user);                 rank_main(user, &collective) in a thread a rank
     hub_close(&h); */
#ifndef COLLECTIVE_H
#define COLLECTIVE_H
#include "examples/luna_ranks.h"
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

enum { HUB_RANKS = 8 };
typedef struct hub hub;
typedef struct hub_rank {
  hub *h;
  luna_collective collective;
  int64_t gathers, reduces, bytes;   /* calls, and bytes that this rank has handed over */
  void (*main)(void *user, const luna_collective *collective);
  void *user;
  pthread_t thread;
} hub_rank;
struct hub {
  int ranks, waiting;
  unsigned round;
  bool failed;
  pthread_mutex_t mutex;
  pthread_cond_t all;
  const void *posted[HUB_RANKS];
  size_t size[HUB_RANKS];            /* of what each has posted: they must agree */
  bool mismatch;                     /* they did not */
  int64_t fail_at, garbage_at;       /* the call of rank 0 that fails; from which on all get noise; -1: none */
  hub_rank rank[HUB_RANKS];
};

/* waits for all ranks; false when one has failed */
static bool hub_meet(hub *h) {
  pthread_mutex_lock(&h->mutex);
  const unsigned round = h->round;
  if (!h->failed && ++h->waiting == h->ranks) {
    h->waiting = 0;
    h->round++;
    pthread_cond_broadcast(&h->all);
  }
  while (!h->failed && h->round == round) pthread_cond_wait(&h->all, &h->mutex);
  const bool good = h->round != round;
  pthread_mutex_unlock(&h->mutex);
  return good;
}
static void hub_leave(hub *h) {
  pthread_mutex_lock(&h->mutex);
  h->failed = true;
  pthread_cond_broadcast(&h->all);
  pthread_mutex_unlock(&h->mutex);
}
/* hands over `bytes` and waits until all have; false: one failed, or they have other sizes */
static bool hub_post(hub_rank *r, const void *at, size_t bytes) {
  hub *h = r->h;
  r->bytes += (int64_t)bytes;
  if (r->collective.rank == 0 && h->fail_at >= 0 && r->gathers + r->reduces > h->fail_at) hub_leave(h);
  h->posted[r->collective.rank] = at;
  h->size[r->collective.rank] = bytes;
  if (!hub_meet(h)) return false;
  for (int i = 0; i < h->ranks; i++)
    if (h->size[i] != bytes) {
      h->mismatch = true;
      hub_leave(h);
    }
  return hub_meet(h);
}
static void hub_noise(const hub_rank *r, void *at, size_t bytes) {
  if (r->h->garbage_at < 0 || r->gathers + r->reduces <= r->h->garbage_at) return;
  for (size_t i = 0; i < bytes; i++) ((char *)at)[i] = (char)(i * 37 + 91);
}
static bool hub_gather(void *user, const void *mine, void *all, size_t bytes) {
  hub_rank *r = (hub_rank *)user;
  r->gathers++;
  if (!hub_post(r, mine, bytes)) return false;
  for (int i = 0; i < r->h->ranks; i++) memcpy((char *)all + (size_t)i * bytes, r->h->posted[i], bytes);
  hub_noise(r, all, bytes * (size_t)r->h->ranks);
  return hub_meet(r->h);
}
static bool hub_reduce(void *user, void *buffer, int64_t count, luna_reduction what) {
  hub_rank *r = (hub_rank *)user;
  const bool wide = what == LUNA_REDUCTION_SUM_F64;
  const size_t bytes = (size_t)count * (wide ? sizeof(double) : sizeof(float));
  char *sum = (char *)calloc(bytes ? bytes : 1, 1);
  r->reduces++;
  bool good = sum && hub_post(r, buffer, bytes);
  for (int i = 0; good && i < r->h->ranks; i++)
    for (int64_t j = 0; j < count; j++) {
      if (wide) ((double *)(void *)sum)[j] += ((const double *)r->h->posted[i])[j];
      else ((float *)(void *)sum)[j] += ((const float *)r->h->posted[i])[j];
    }
  good = good && hub_meet(r->h);
  if (good) memcpy(buffer, sum, bytes);
  if (good) hub_noise(r, buffer, bytes);
  free(sum);
  return good;
}
static void hub_open(hub *h, int ranks) {
  memset(h, 0, sizeof *h);
  h->ranks = ranks;
  h->fail_at = h->garbage_at = -1;
  pthread_mutex_init(&h->mutex, NULL);
  pthread_cond_init(&h->all, NULL);
  for (int i = 0; i < ranks; i++) {
    luna_collective *c = &h->rank[i].collective;
    h->rank[i].h = h;
    c->rank = i, c->ranks = ranks;
    c->all_reduce = hub_reduce, c->all_gather = hub_gather;
    c->user = &h->rank[i];
  }
}
static void *hub_thread(void *argument) {
  hub_rank *r = (hub_rank *)argument;
  r->main(r->user, &r->collective);
  return NULL;
}
static void hub_run(hub *h, void (*rank_main)(void *user, const luna_collective *collective), void *user) {
  for (int i = 0; i < h->ranks; i++) {
    h->rank[i].main = rank_main, h->rank[i].user = user;
    if (pthread_create(&h->rank[i].thread, NULL, hub_thread, &h->rank[i]) != 0) exit(2);
  }
  for (int i = 0; i < h->ranks; i++) pthread_join(h->rank[i].thread, NULL);
}
static void hub_close(hub *h) {
  pthread_mutex_destroy(&h->mutex);
  pthread_cond_destroy(&h->all);
}
#endif
