/* What the tests of files share: bytes in memory in a file's place, the same in a file, and a folder for files. Include
   it after test.h, luna.h and common.h. */
#ifndef FILES_H
#define FILES_H
#include <dirent.h>
#include <sys/stat.h>

/* ---- bytes; limit: how many a writer takes, a reader gives ---- */
typedef struct buffer {
  uint8_t *at;
  size_t size, room, read, limit;
} buffer;
TEST_UNUSED static bool buffer_write(void *user, const void *bytes, size_t size) {
  buffer *b = (buffer *)user;
  if (b->size + size > b->limit) return false;
  if (b->size + size > b->room) {
    b->room = 2 * (b->size + size);
    b->at = (uint8_t *)realloc(b->at, b->room);
    if (!b->at) exit(2);
  }
  if (size) memcpy(b->at + b->size, bytes, size);
  b->size += size;
  return true;
}
TEST_UNUSED static bool buffer_read(void *user, void *bytes, size_t size) {
  buffer *b = (buffer *)user;
  if (b->read + size > b->limit) return false;
  memcpy(bytes, b->at + b->read, size);
  b->read += size;
  return true;
}
TEST_UNUSED static luna_io io_of(buffer *b, size_t limit) {
  luna_io io = {buffer_read, buffer_write, b, b->size};
  b->limit = limit, b->read = 0;
  return io;
}
TEST_UNUSED static bool same(const buffer *a, const buffer *b) {
  return a->size == b->size && (a->size == 0 || memcmp(a->at, b->at, a->size) == 0);
}

TEST_UNUSED static buffer saved(const luna_params *params) {
  buffer b = {NULL, 0, 0, 0, 0};
  const luna_io io = io_of(&b, SIZE_MAX);
  CHECK(luna_save(params, luna_callbacks(&io)) == LUNA_OK, "luna_save fails");
  return b;
}
TEST_UNUSED static buffer saved_training(const luna_optimizer *optimizer) {
  buffer b = {NULL, 0, 0, 0, 0};
  const luna_io io = io_of(&b, SIZE_MAX);
  CHECK(luna_save_training(optimizer, luna_callbacks(&io)) == LUNA_OK, "luna_save_training fails");
  return b;
}
/* the file with the first `from` of its header replaced */
TEST_UNUSED static buffer edited(const buffer *file, const char *from, const char *to) {
  uint64_t size = 0;
  buffer out = {NULL, 0, 0, 0, SIZE_MAX};
  for (int i = 0; i < 8; i++) size |= (uint64_t)file->at[i] << 8 * i;
  char *header = (char *)common_alloc((size_t)size + 1);
  memcpy(header, file->at + 8, (size_t)size);
  const char *found = strstr(header, from);
  if (CHECK(found != NULL, "the header has no %s", from)) {
    const uint64_t length = size - strlen(from) + strlen(to);
    for (int i = 0; i < 8; i++) buffer_write(&out, &(uint8_t){(uint8_t)(length >> 8 * i)}, 1);
    buffer_write(&out, header, (size_t)(found - header));
    buffer_write(&out, to, strlen(to));
    buffer_write(&out, found + strlen(from), (size_t)size - (size_t)(found - header) - strlen(from));
    buffer_write(&out, file->at + 8 + size, file->size - 8 - (size_t)size);
  }
  free(header);
  return out;
}

/* ---- files ---- */
/* all of a file; none where it cannot be read */
TEST_UNUSED static buffer read_file(const char *name) {
  buffer b = {NULL, 0, 0, 0, SIZE_MAX};
  uint8_t piece[4096];
  FILE *file = fopen(name, "rb");
  for (size_t size = 1; file && size > 0;) {
    size = fread(piece, 1, sizeof piece, file);
    buffer_write(&b, piece, size);
  }
  if (file) fclose(file);
  return b;
}
TEST_UNUSED static bool holds(const char *name, const buffer *want) {
  FILE *file = fopen(name, "rb");
  if (!file) return false;
  fclose(file);
  buffer got = read_file(name);
  const bool result = same(&got, want);
  free(got.at);
  return result;
}

static char folder[200], path[300]; /* of files that a test writes, and of the one that it saves */
static const char *path_name;
/* the files in the folder, but for the one that is saved */
TEST_UNUSED static int leftovers(void) {
  int count = 0;
  struct dirent *entry;
  DIR *dir = opendir(folder);
  while (dir && (entry = readdir(dir)) != NULL)
    count += strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0 &&
        strcmp(entry->d_name, path_name) != 0;
  if (dir) closedir(dir);
  return count;
}
TEST_UNUSED static void paths_open(const char *own, const char *file) {
  path_name = file;
  mkdir(common_build(), 0777);
  snprintf(folder, sizeof folder, "%s/%s", common_build(), own);
  mkdir(folder, 0777);
  snprintf(path, sizeof path, "%s/%s", folder, file);
  remove(path);
  CHECK(leftovers() == 0, "%s is not empty", folder);
}

#endif
