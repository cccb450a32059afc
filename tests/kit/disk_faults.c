/* A disk that fails on demand, as a preloaded library: LD_PRELOAD=disk_faults.so python ...
 *
 * Calls that change or sync a file below a watched folder are counted. The n-th can be made to fail with an errno, once or
 * from then on (a disk that stays full), or to write only half of its bytes first. Every call can be traced to a file, with
 * its data, so that the files can be built again as they were at any instant. The wall clock can be set back and forth.
 *
 * Control is by the exported disk_* functions, called through ctypes in the process itself. All calls are serialised by one
 * lock, so a trace is one order of events. What isn't below the folder passes untouched.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum { OP_WRITE = 'w', OP_SYNC = 's', OP_TRUNCATE = 't', OP_CREATE = 'c', OP_UNLINK = 'u', OP_RENAME = 'r', OP_MARK = 'm' };
enum { ONCE = 0, FROM_THEN_ON = 1, HALF_THEN_ON = 2 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char watched[PATH_MAX];
static size_t watched_length;
static long calls, fail_at;
static int fail_errno, fail_mode;
static char failed_call[64 + PATH_MAX];
static int trace_fd = -1;
static long long clock_shift_ns;

#define REAL(name) ((__typeof__(&name))real(#name))
static void *real(const char *name)
{
    void *found = dlsym(RTLD_NEXT, name);
    if (!found) { fprintf(stderr, "disk_faults: no %s in libc\n", name); _exit(97); }
    return found;
}

/* ---- control ------------------------------------------------------------------------------------------------------- */

void disk_watch(const char *folder)
{
    snprintf(watched, sizeof watched, "%s", folder);
    watched_length = strlen(watched);
    calls = 0; fail_at = 0; failed_call[0] = 0;
}
void disk_fail(long nth, int error, int mode) { fail_at = nth; fail_errno = error; fail_mode = mode; }
void disk_mend(void) { fail_at = 0; }
long disk_calls(void) { return calls; }
const char *disk_failed_call(void) { return failed_call; }
void disk_trace(int fd) { trace_fd = fd; }
void disk_clock(long long shift_ns) { clock_shift_ns = shift_ns; }

/* ---- trace: op, path length, data length, offset, path, data ------------------------------------------------------- */

static void put(const void *bytes, size_t size)
{
    const char *from = bytes;
    while (size) {
        long done = syscall(SYS_write, trace_fd, from, size);
        if (done <= 0) { fprintf(stderr, "disk_faults: the trace can't be written\n"); _exit(97); }
        from += done; size -= (size_t)done;
    }
}
static void trace(char op, const char *path, uint64_t offset, const void *data, uint64_t size)
{
    if (trace_fd < 0) return;
    struct { uint64_t op, path_length, offset, size; } head = {(uint64_t)op, strlen(path), offset, size};
    put(&head, sizeof head);
    put(path, head.path_length);
    if (data) put(data, size);
}
void disk_mark(uint64_t value)
{
    pthread_mutex_lock(&lock);
    trace(OP_MARK, "", value, NULL, 0);
    pthread_mutex_unlock(&lock);
}

/* ---- faults -------------------------------------------------------------------------------------------------------- */

static int is_watched(const char *path) { return watched_length && !strncmp(path, watched, watched_length); }
static int path_of(int fd, char *path)
{
    char link[64];
    if (!watched_length || fd < 0 || fd == trace_fd) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, PATH_MAX - 1);
    if (length <= 0) return 0;
    path[length] = 0;
    return is_watched(path);
}
/* Whether this call must fail; errno is set then. `half` is set if half of the bytes go through instead. */
static int must_fail(const char *call, const char *path, int *half)
{
    calls++;
    if (!fail_at || calls < fail_at || (fail_mode == ONCE && calls > fail_at)) return 0;
    if (calls == fail_at) snprintf(failed_call, sizeof failed_call, "%s %s", call, path + watched_length);
    if (half && fail_mode == HALF_THEN_ON && calls == fail_at) { *half = 1; return 0; }
    errno = fail_errno;
    return 1;
}

static ssize_t write_at(const char *call, int fd, const void *data, size_t size, off64_t offset)
{
    char path[PATH_MAX];
    int half = 0, positioned = offset >= 0;
    int ours = path_of(fd, path);
    if (ours) {
        pthread_mutex_lock(&lock);
        if (must_fail(call, path, &half)) { pthread_mutex_unlock(&lock); return -1; }
        if (half) size = size / 2;
        if (trace_fd >= 0 && !positioned) {
            int flags = fcntl(fd, F_GETFL);
            struct stat64 about;
            offset = flags & O_APPEND && !fstat64(fd, &about) ? about.st_size : lseek64(fd, 0, SEEK_CUR);
        }
    }
    ssize_t done = positioned ? syscall(SYS_pwrite64, fd, data, size, offset) : syscall(SYS_write, fd, data, size);
    if (ours) {
        if (done > 0) trace(OP_WRITE, path, (uint64_t)offset, data, (uint64_t)done);
        int kept = errno;
        pthread_mutex_unlock(&lock);
        errno = kept;
    }
    return done;
}
ssize_t write(int fd, const void *data, size_t size) { return write_at("write", fd, data, size, -1); }
ssize_t pwrite(int fd, const void *data, size_t size, off_t offset) { return write_at("pwrite", fd, data, size, offset); }
ssize_t pwrite64(int fd, const void *data, size_t size, off64_t offset) { return write_at("pwrite", fd, data, size, offset); }

static ssize_t gathered(const char *call, int fd, const struct iovec *parts, int count, off64_t offset)
{
    ssize_t total = 0;
    for (int i = 0; i < count; i++) {
        if (!parts[i].iov_len) continue;
        ssize_t done = write_at(call, fd, parts[i].iov_base, parts[i].iov_len, offset < 0 ? -1 : offset + total);
        if (done < 0) return total ? total : -1;
        total += done;
        if ((size_t)done < parts[i].iov_len) break;
    }
    return total;
}
ssize_t writev(int fd, const struct iovec *parts, int count) { return gathered("writev", fd, parts, count, -1); }
ssize_t pwritev(int fd, const struct iovec *parts, int count, off_t offset) { return gathered("pwritev", fd, parts, count, offset); }
ssize_t pwritev64(int fd, const struct iovec *parts, int count, off64_t offset) { return gathered("pwritev", fd, parts, count, offset); }

static int guarded(const char *call, char op, int fd, long number, uint64_t a, uint64_t b, uint64_t c)
{
    char path[PATH_MAX];
    if (!path_of(fd, path)) return (int)syscall(number, fd, a, b, c);
    pthread_mutex_lock(&lock);
    int result = must_fail(call, path, NULL) ? -1 : (int)syscall(number, fd, a, b, c);
    int kept = errno;
    if (!result) trace(op, path, op == OP_TRUNCATE ? a : 0, NULL, 0);
    pthread_mutex_unlock(&lock);
    errno = kept;
    return result;
}
int fsync(int fd) { return guarded("fsync", OP_SYNC, fd, SYS_fsync, 0, 0, 0); }
int fdatasync(int fd) { return guarded("fdatasync", OP_SYNC, fd, SYS_fdatasync, 0, 0, 0); }
int ftruncate(int fd, off_t size) { return guarded("ftruncate", OP_TRUNCATE, fd, SYS_ftruncate, (uint64_t)size, 0, 0); }
int ftruncate64(int fd, off64_t size) { return guarded("ftruncate", OP_TRUNCATE, fd, SYS_ftruncate, (uint64_t)size, 0, 0); }

/* Reserving space doesn't change what is read; it grows the file, which is traced as a truncation to the new size. */
static int reserved(int fd, off64_t offset, off64_t size)
{
    char path[PATH_MAX];
    struct stat64 about;
    int ours = path_of(fd, path);
    if (ours) {
        pthread_mutex_lock(&lock);
        if (must_fail("fallocate", path, NULL)) { pthread_mutex_unlock(&lock); return -1; }
    }
    int result = (int)syscall(SYS_fallocate, fd, 0, offset, size), kept = errno;
    if (ours) {
        if (!result && !fstat64(fd, &about)) trace(OP_TRUNCATE, path, (uint64_t)about.st_size, NULL, 0);
        pthread_mutex_unlock(&lock);
    }
    errno = kept;
    return result;
}
int posix_fallocate(int fd, off_t offset, off_t size) { return reserved(fd, offset, size) ? errno : 0; }
int posix_fallocate64(int fd, off64_t offset, off64_t size) { return reserved(fd, offset, size) ? errno : 0; }

/* ---- files that come and go ---------------------------------------------------------------------------------------- */

static int opened(int folder, const char *name, int flags, mode_t mode)
{
    char path[PATH_MAX];
    int changes = flags & (O_CREAT | O_TRUNC);
    if (!changes || !watched_length) return (int)syscall(SYS_openat, folder, name, flags, mode);
    struct stat64 about;
    int was_there = !fstatat64(folder, name, &about, 0);
    pthread_mutex_lock(&lock);
    int fd = -1, failed = name[0] == '/' && is_watched(name) && !was_there && must_fail("open", name, NULL);
    if (!failed) fd = (int)syscall(SYS_openat, folder, name, flags, mode);
    int kept = errno;
    if (fd >= 0 && path_of(fd, path)) {
        if (!was_there) trace(OP_CREATE, path, 0, NULL, 0);
        else if (flags & O_TRUNC) trace(OP_TRUNCATE, path, 0, NULL, 0);
    }
    pthread_mutex_unlock(&lock);
    errno = kept;
    return fd;
}
#define OPEN_MODE(flags, mode) \
    mode_t mode = 0; \
    if ((flags) & (O_CREAT | O_TMPFILE)) { va_list rest; va_start(rest, flags); mode = va_arg(rest, mode_t); va_end(rest); }
int open(const char *name, int flags, ...) { OPEN_MODE(flags, mode) return opened(AT_FDCWD, name, flags, mode); }
int open64(const char *name, int flags, ...) { OPEN_MODE(flags, mode) return opened(AT_FDCWD, name, flags, mode); }
int openat(int folder, const char *name, int flags, ...) { OPEN_MODE(flags, mode) return opened(folder, name, flags, mode); }
int openat64(int folder, const char *name, int flags, ...) { OPEN_MODE(flags, mode) return opened(folder, name, flags, mode); }

int unlink(const char *name)
{
    int ours = is_watched(name);
    if (!ours) return (int)syscall(SYS_unlink, name);
    pthread_mutex_lock(&lock);
    int result = must_fail("unlink", name, NULL) ? -1 : (int)syscall(SYS_unlink, name), kept = errno;
    if (!result) trace(OP_UNLINK, name, 0, NULL, 0);
    pthread_mutex_unlock(&lock);
    errno = kept;
    return result;
}
static int moved(const char *from, const char *to)
{
    int ours = is_watched(from) || is_watched(to);
    if (!ours) return (int)syscall(SYS_rename, from, to);
    pthread_mutex_lock(&lock);
    int result = must_fail("rename", from, NULL) ? -1 : (int)syscall(SYS_rename, from, to), kept = errno;
    if (!result) trace(OP_RENAME, from, 0, to, strlen(to));
    pthread_mutex_unlock(&lock);
    errno = kept;
    return result;
}
int rename(const char *from, const char *to) { return moved(from, to); }
int renameat(int a, const char *from, int b, const char *to)
{
    if (a == AT_FDCWD && b == AT_FDCWD) return moved(from, to);
    return (int)syscall(SYS_renameat2, a, from, b, to, 0);
}

/* ---- the wall clock ------------------------------------------------------------------------------------------------ */

int clock_gettime(clockid_t which, struct timespec *now)
{
    static __typeof__(&clock_gettime) original;
    if (!original) original = REAL(clock_gettime);
    int result = original(which, now);
    if (!result && which == CLOCK_REALTIME && clock_shift_ns) {
        long long total = now->tv_sec * 1000000000LL + now->tv_nsec + clock_shift_ns;
        now->tv_sec = total / 1000000000LL;
        now->tv_nsec = total % 1000000000LL;
        if (now->tv_nsec < 0) { now->tv_nsec += 1000000000LL; now->tv_sec--; }
    }
    return result;
}
