/* Steps the date of an emulated host, whose processes preload this: /tmp/clock holds the seconds.
 *
 * As after a step of a real clock, CLOCK_REALTIME jumps and the monotonic clocks go on, so deadlines by the
 * date reach the kernel as if its clock had jumped, too. Time namespaces have no date of their own, and
 * libfaketime fails sleeps by the monotonic clock with EINVAL when only the date is to change.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define DATE 1000000000 /* seconds of monotonic clocks are smaller, those of dates larger */
#define REAL(name, version) \
  static __typeof__(name) *real; \
  if (!real) real = (__typeof__(name) *)dlvsym(RTLD_NEXT, #name, version); \
  if (!real) real = (__typeof__(name) *)dlsym(RTLD_NEXT, #name)

static int real_clock(clockid_t clock, struct timespec *now) {
  REAL(clock_gettime, "GLIBC_2.17");
  return real(clock, now);
}

static long step(void) {
  static _Atomic long seconds, checked;
  struct timespec now;
  real_clock(CLOCK_MONOTONIC, &now);
  long tick = now.tv_sec * 4 + now.tv_nsec / 250000000;
  if (atomic_exchange(&checked, tick) != tick) {
    char text[32] = "0";
    int error = errno, file = open("/tmp/clock", O_RDONLY | O_CLOEXEC);
    if (file >= 0) {
      if (read(file, text, sizeof text - 1) < 0) text[0] = '0';
      close(file);
    }
    seconds = atol(text);
    errno = error;
  }
  return seconds;
}

static const struct timespec *in_kernel(const struct timespec *date, struct timespec *copy) {
  if (!date || date->tv_sec < DATE) return date;
  *copy = *date;
  copy->tv_sec -= step();
  return copy;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
  int failed = real_clock(clock, now);
  if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += step();
  return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
  struct timespec date;
  (void)zone;
  clock_gettime(CLOCK_REALTIME, &date);
  now->tv_sec = date.tv_sec;
  now->tv_usec = date.tv_nsec / 1000;
  return 0;
}

time_t time(time_t *now) {
  struct timespec date;
  clock_gettime(CLOCK_REALTIME, &date);
  if (now) *now = date.tv_sec;
  return date.tv_sec;
}

int pthread_cond_timedwait(pthread_cond_t *c, pthread_mutex_t *m, const struct timespec *until) {
  struct timespec copy;
  REAL(pthread_cond_timedwait, "GLIBC_2.3.2");
  return real(c, m, in_kernel(until, &copy));
}

int pthread_cond_clockwait(pthread_cond_t *c, pthread_mutex_t *m, clockid_t clock, const struct timespec *until) {
  struct timespec copy;
  REAL(pthread_cond_clockwait, "GLIBC_2.34");
  return real(c, m, clock, in_kernel(until, &copy));
}

int pthread_mutex_timedlock(pthread_mutex_t *m, const struct timespec *until) {
  struct timespec copy;
  REAL(pthread_mutex_timedlock, "GLIBC_2.34");
  return real(m, in_kernel(until, &copy));
}

int sem_timedwait(sem_t *s, const struct timespec *until) {
  struct timespec copy;
  REAL(sem_timedwait, "GLIBC_2.34");
  return real(s, in_kernel(until, &copy));
}

int clock_nanosleep(clockid_t clock, int flags, const struct timespec *time, struct timespec *left) {
  struct timespec copy;
  REAL(clock_nanosleep, "GLIBC_2.17");
  return real(clock, flags, flags & TIMER_ABSTIME ? in_kernel(time, &copy) : time, left);
}

long syscall(long number, ...) {
  struct timespec copy;
  long a[6];
  va_list list;
  va_start(list, number);
  for (int i = 0; i < 6; i++) a[i] = va_arg(list, long);
  va_end(list);
  REAL(syscall, "GLIBC_2.2.5");
  /* Abseil's locks wait by futex. */
  if (number == SYS_futex && a[1] & FUTEX_CLOCK_REALTIME) a[3] = (long)in_kernel((void *)a[3], &copy);
  return real(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}
