/* A slow drive, by LD_PRELOAD: what is read of files below SLOW_DISK_FOLDER comes late.

   SLOW_DISK_DELAY_MS   each read waits so long, as on a network drive that is far away
   SLOW_DISK_MB_PER_S   all processes together get so many megabytes per second
   SLOW_DISK_CLOCK      a file of 8 bytes that they share, with the time at which the drive is free again

   Seen are read, pread, mmap and what opens a stream by a name; not streams of a descriptor (numpy.fromfile).

   gcc -shared -fPIC -O2 slow_disk.c -o slow_disk.so -ldl */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>

#define FILES 65536
static char slow[FILES]; /* by file descriptor */
static const char *folder;
static size_t folder_length;
static double delay_s, seconds_per_byte;
static _Atomic int64_t *free_at; /* nanoseconds of the monotonic clock */

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static int (*real_open)(const char *, int, ...);
static ssize_t (*real_read)(int, void *, size_t);

__attribute__((constructor)) static void start(void) {
  const char *delay = getenv("SLOW_DISK_DELAY_MS"), *rate = getenv("SLOW_DISK_MB_PER_S");
  const char *clock_file = getenv("SLOW_DISK_CLOCK");
  real_open = REAL(open);
  real_read = REAL(read);
  folder = getenv("SLOW_DISK_FOLDER");
  folder_length = folder ? strlen(folder) : 0;
  delay_s = delay ? atof(delay) / 1e3 : 0;
  if (rate && clock_file) {
    int file = real_open(clock_file, O_RDWR);
    void *shared = mmap(NULL, 8, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (shared == MAP_FAILED) abort();
    free_at = shared;
    seconds_per_byte = 1 / (atof(rate) * 1e6);
  }
}

static int64_t now(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * 1000000000LL + time.tv_nsec;
}

static void wait_for(size_t bytes) {
  int64_t ready = now() + (int64_t)(delay_s * 1e9);
  if (free_at) { /* this read begins when the drive is free, and keeps it busy for its bytes */
    int64_t cost = (int64_t)(bytes * seconds_per_byte * 1e9), before = atomic_load(free_at), after;
    do {
      int64_t begins = before > now() ? before : now();
      after = begins + cost;
    } while (!atomic_compare_exchange_weak(free_at, &before, after));
    ready = after + (int64_t)(delay_s * 1e9);
  }
  struct timespec until = {ready / 1000000000LL, ready % 1000000000LL};
  while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, NULL)) {
  }
}

static int is_slow(const char *path) {
  return folder_length && strncmp(path, folder, folder_length) == 0;
}

static int marked(const char *path, int file) {
  if (file >= 0 && file < FILES) slow[file] = is_slow(path);
  return file;
}

static mode_t mode_of(int flags, va_list *rest) {
  return flags & (O_CREAT | __O_TMPFILE) ? va_arg(*rest, mode_t) : 0;
}

#define OPEN(name)                                                                                 \
  int name(const char *path, int flags, ...) {                                                     \
    va_list rest;                                                                                  \
    va_start(rest, flags);                                                                         \
    mode_t mode = mode_of(flags, &rest);                                                           \
    va_end(rest);                                                                                  \
    return marked(path, real_open ? real_open(path, flags, mode) : REAL(open)(path, flags, mode)); \
  }
OPEN(open)
OPEN(open64)

#define OPENAT(name)                                              \
  int name(int at, const char *path, int flags, ...) {            \
    va_list rest;                                                 \
    va_start(rest, flags);                                        \
    mode_t mode = mode_of(flags, &rest);                          \
    va_end(rest);                                                 \
    return marked(path, REAL(openat)(at, path, flags, mode));     \
  }
OPENAT(openat)
OPENAT(openat64)

/* C's streams open by a private name: all of their bytes are paid for here. */
#define FOPEN(name)                                                      \
  FILE *name(const char *path, const char *mode) {                       \
    struct stat found;                                                   \
    if (is_slow(path) && mode[0] == 'r' && stat(path, &found) == 0)      \
      wait_for((size_t)found.st_size);                                   \
    return REAL(fopen)(path, mode);                                      \
  }
FOPEN(fopen)
FOPEN(fopen64)

int close(int file) {
  if (file >= 0 && file < FILES) slow[file] = 0;
  return REAL(close)(file);
}

static int is_marked(int file) { return file >= 0 && file < FILES && slow[file]; }

ssize_t read(int file, void *buffer, size_t count) {
  ssize_t bytes = real_read ? real_read(file, buffer, count) : REAL(read)(file, buffer, count);
  if (bytes > 0 && is_marked(file)) wait_for((size_t)bytes);
  return bytes;
}

#define PREAD(name)                                                         \
  ssize_t name(int file, void *buffer, size_t count, off_t offset) {        \
    ssize_t bytes = REAL(pread)(file, buffer, count, offset);               \
    if (bytes > 0 && is_marked(file)) wait_for((size_t)bytes);              \
    return bytes;                                                           \
  }
PREAD(pread)
PREAD(pread64)

#define MMAP(name)                                                                     \
  void *name(void *at, size_t length, int protection, int flags, int file, off_t offset) { \
    if (!(flags & MAP_ANONYMOUS) && is_marked(file)) wait_for(length);                 \
    return REAL(mmap)(at, length, protection, flags, file, offset);                    \
  }
MMAP(mmap)
MMAP(mmap64)
