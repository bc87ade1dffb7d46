/* LD_PRELOAD: the clock of the day is CLOCK_SHIFT_S seconds off in every second interval of CLOCK_EVERY_MS
   milliseconds. The kernel's own times, as of files, are not. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>

static int (*real)(clockid_t, struct timespec *);

static long shift(void) {
    static long seconds, every;
    struct timespec now;
    if (!real) real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    if (!every) {
        const char *how_far = getenv("CLOCK_SHIFT_S"), *how_often = getenv("CLOCK_EVERY_MS");
        seconds = how_far ? atol(how_far) : 0;
        every = how_often ? atol(how_often) : 1000;
    }
    real(CLOCK_MONOTONIC, &now);
    return (now.tv_sec * 1000 + now.tv_nsec / 1000000) / every % 2 ? seconds : 0;
}

int clock_gettime(clockid_t clock, struct timespec *into) {
    long far = shift();
    int result = real(clock, into);
    if (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE) into->tv_sec += far;
    return result;
}

int gettimeofday(struct timeval *into, void *zone) {
    struct timespec now;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &now);
    into->tv_sec = now.tv_sec;
    into->tv_usec = now.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *into) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (into) *into = now.tv_sec;
    return now.tv_sec;
}
