/* Preloaded into a run (clock.py): its wall clock is ahead by the seconds in the file DAGRL_CHAOS_CLOCK, now.
 *
 * Monotonic clocks stay. What waits until a wall time waits for what is left of it at the call, as the kernel's clock is right.
 * libfaketime does the same, but breaks clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME), which is Python's time.sleep.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const volatile int64_t *offset;

__attribute__((constructor)) static void map_offset(void)
{
    const char *path = getenv("DAGRL_CHAOS_CLOCK");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0)
        return;
    void *found = mmap(NULL, sizeof *offset, PROT_READ, MAP_SHARED, file, 0);
    if (found != MAP_FAILED)
        offset = found;
    close(file);
}

static int64_t ahead(void) { return offset ? *offset : 0; }

#define REAL(name)               \
    static __typeof__(name) *real; \
    if (!real)                   \
        real = dlsym(RTLD_NEXT, #name)

static int is_wall(clockid_t clock) { return clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE; }

/* Monotonic deadlines of conditions count from the machine's start, and are small. */
static struct timespec kernels(const struct timespec *until)
{
    struct timespec found = *until;
    if (found.tv_sec > 1000000000)
        found.tv_sec -= ahead();
    return found;
}

int clock_gettime(clockid_t clock, struct timespec *now)
{
    REAL(clock_gettime);
    int code = real(clock, now);
    if (!code && is_wall(clock))
        now->tv_sec += ahead();
    return code;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone)
{
    REAL(gettimeofday);
    int code = real(now, zone);
    if (!code)
        now->tv_sec += ahead();
    return code;
}

time_t time(time_t *at)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (at)
        *at = now.tv_sec;
    return now.tv_sec;
}

int timespec_get(struct timespec *now, int base)
{
    return base == TIME_UTC && !clock_gettime(CLOCK_REALTIME, now) ? base : 0;
}

int pthread_cond_timedwait(pthread_cond_t *restrict cond, pthread_mutex_t *restrict mutex,
                           const struct timespec *restrict until)
{
    static __typeof__(pthread_cond_timedwait) *real;
    if (!real) /* without a version, the one of old conditions is found */
        real = dlvsym(RTLD_NEXT, "pthread_cond_timedwait", "GLIBC_2.3.2");
    if (!real)
        real = dlsym(RTLD_NEXT, "pthread_cond_timedwait");
    struct timespec at = kernels(until);
    return real(cond, mutex, &at);
}

int sem_timedwait(sem_t *restrict sem, const struct timespec *restrict until)
{
    REAL(sem_timedwait);
    struct timespec at = kernels(until);
    return real(sem, &at);
}

int clock_nanosleep(clockid_t clock, int flags, const struct timespec *until, struct timespec *left)
{
    REAL(clock_nanosleep);
    if (!is_wall(clock) || !(flags & TIMER_ABSTIME))
        return real(clock, flags, until, left);
    struct timespec at = kernels(until);
    return real(clock, flags, &at, left);
}

/* Abseil, and gRPC with it, waits by futex(2) itself. */
long syscall(long number, ...)
{
    REAL(syscall);
    va_list rest;
    va_start(rest, number);
    long a = va_arg(rest, long), b = va_arg(rest, long), c = va_arg(rest, long);
    long d = va_arg(rest, long), e = va_arg(rest, long), f = va_arg(rest, long);
    va_end(rest);
    struct timespec at;
    if (number == SYS_futex && (b & FUTEX_CLOCK_REALTIME) && d) {
        at = kernels((const struct timespec *)d);
        d = (long)&at;
    }
    return real(number, a, b, c, d, e, f);
}
