/* Collectives of processes of one machine, through memory that they share.

   Each rank has a header and two slots, used in turn. It copies its part into a slot, says so, waits for the others' parts and reads what
   is for it, sums in the order of the ranks, so that every rank gets the same bits. A rank that has posted part n has read all of part
   n - 1, so a slot is free again when its turn comes: one wait a part. A rank that waits spins for a moment, then sleeps until it is woken:
   ranks that outnumber the cores, or share them with other work, do not take each other's turn. */
#define _GNU_SOURCE
#include <errno.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

typedef struct {
    _Atomic int64_t posted;
    int64_t pid;
    _Atomic uint32_t bell; /* rung for those that sleep */
    _Atomic uint32_t sleepers;
    char pad[104];
} Header;

#if defined(__GNUC__) && !defined(__clang__) && defined(__x86_64__) && defined(__GLIBC__)
#define CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define CLONES
#endif

enum { DONE = 0, LATE = -1, STOPPED = -2, DEAD = -16 }; /* DEAD - r: rank r */
enum { ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL, SHIFT };

static const double SPIN = 100e-6; /* seconds; waking a rank takes about half of it */

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* A process that has ended but was not waited for still has a pid. */
static int is_gone(int64_t pid) {
    char path[64], state = 0;
    if (kill((pid_t)pid, 0) != 0 && errno == ESRCH) return 1;
    snprintf(path, sizeof path, "/proc/%lld/stat", (long long)pid);
    FILE *f = fopen(path, "r");
    if (!f) return 0;
    int n = fscanf(f, "%*d %*[^)]) %c", &state);
    fclose(f);
    return n == 1 && (state == 'Z' || state == 'X');
}

static void pause_briefly(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static void sleep_on(Header *head, uint32_t bell) {
    struct timespec most = {0, 50000000};
    syscall(SYS_futex, &head->bell, FUTEX_WAIT, bell, &most, NULL, 0);
}

static void post(Header *head, int64_t part) {
    atomic_store(&head->posted, part);
    if (atomic_load(&head->sleepers)) {
        atomic_fetch_add(&head->bell, 1);
        syscall(SYS_futex, &head->bell, FUTEX_WAKE, INT32_MAX, NULL, NULL, 0);
    }
}

static int await_part(Header *head, int64_t part, _Atomic int64_t *stop, double timeout) {
    if (atomic_load_explicit(&head->posted, memory_order_acquire) >= part) return DONE;
    double start = now(), looked = start, at = start;
    while (at - start < SPIN) {
        for (int i = 0; i < 64; i++) {
            if (atomic_load_explicit(&head->posted, memory_order_acquire) >= part) return DONE;
            pause_briefly();
        }
        at = now();
    }
    for (;;) {
        /* Counted as a sleeper before it looks, so that who posts after the look wakes it. */
        atomic_fetch_add(&head->sleepers, 1);
        uint32_t bell = atomic_load(&head->bell);
        if (atomic_load(&head->posted) < part && !atomic_load(stop)) sleep_on(head, bell);
        atomic_fetch_sub(&head->sleepers, 1);
        if (atomic_load(&head->posted) >= part) return DONE;
        if (atomic_load(stop)) return STOPPED;
        at = now();
        if (at - start > timeout) return LATE;
        if (at - looked > 0.2) {
            looked = at;
            if (is_gone(head->pid) && atomic_load(&head->posted) < part) return DEAD;
        }
    }
}

/* out = x and y: of one and the same memory, out may be x. */
#define REDUCE(T)                                                                                                         \
    CLONES static void reduce_##T(T *out, const T *x, const T *y, size_t n, int op) {                                     \
        if (op == 0) for (size_t i = 0; i < n; i++) out[i] = x[i] + y[i];                                                 \
        else if (op == 1) for (size_t i = 0; i < n; i++) out[i] = (x[i] != x[i] || x[i] > y[i]) ? x[i] : y[i];            \
        else for (size_t i = 0; i < n; i++) out[i] = (x[i] != x[i] || x[i] < y[i]) ? x[i] : y[i];                         \
    }
REDUCE(float)
REDUCE(double)
REDUCE(int64_t)

static void reduce(char *out, const char *x, const char *y, size_t nbytes, int kind, int op) {
    if (kind == 0) reduce_float((float *)out, (const float *)x, (const float *)y, nbytes / 4, op);
    else if (kind == 1) reduce_double((double *)out, (const double *)x, (const double *)y, nbytes / 8, op);
    else reduce_int64_t((int64_t *)out, (const int64_t *)x, (const int64_t *)y, nbytes / 8, op);
}

/* base: the shared memory: one Header (its `posted` stops everyone), n Headers, then n times two slots of `capacity` bytes.
   each: bytes of what is summed (ALL_REDUCE), of a rank's part (ALL_GATHER, REDUCE_SCATTER), of what one rank sends one (ALL_TO_ALL) or
   the next (SHIFT: x goes to the rank `op` places after this one; x or out may be NULL, where nothing is sent or awaited). */
int ftp_collective(char *base, int n, int rank, size_t capacity, const char *x, char *out, size_t each, int what, int kind, int op,
                   double timeout) {
    Header *heads = (Header *)base + 1;
    char *slots = (char *)(heads + n);
    _Atomic int64_t *stop = &((Header *)base)->posted;
    int is_cut = what == REDUCE_SCATTER || what == ALL_TO_ALL; /* each rank reads its own part of a slot */
    int is_joined = what == ALL_GATHER || what == ALL_TO_ALL;
    size_t most = is_cut ? capacity / (size_t)n / 64 * 64 : capacity;
    for (size_t at = 0; at < each;) {
        size_t size = each - at < most ? each - at : most;
        int64_t part = atomic_load(&heads[rank].posted) + 1;
        size_t turn = (size_t)(part & 1) * capacity;
        char *mine = slots + 2 * capacity * (size_t)rank + turn;
        for (int r = 0; r < (is_cut ? n : 1) && x; r++) memcpy(mine + (size_t)r * size, x + (size_t)r * each + at, size);
        post(&heads[rank], part);
        const char *first = mine;
        for (int r = 0; r < n; r++) {
            if (r != rank) {
                int found = await_part(&heads[r], part, stop, timeout);
                if (found == DEAD) return DEAD - r;
                if (found != DONE) return found;
            }
            const char *theirs = slots + 2 * capacity * (size_t)r + turn + (is_cut ? (size_t)rank * size : 0);
            if (what == SHIFT) {
                if (out && (r + op - rank) % n == 0) memcpy(out + at, theirs, size);
            } else if (is_joined) memcpy(out + (size_t)r * each + at, theirs, size);
            else if (n == 1) memcpy(out + at, theirs, size);
            else if (r == 0) first = theirs;
            else reduce(out + at, r == 1 ? first : out + at, theirs, size, kind, op);
        }
        at += size;
    }
    return DONE;
}

/* Messages from one rank to another: the sender posts how many it has written, the reader how many it has read. `base` is the shared memory. */
void ftp_post(char *head, int64_t number) { post((Header *)head, number); }

int ftp_await(char *head, int64_t number, char *base, double timeout) {
    return await_part((Header *)head, number, &((Header *)base)->posted, timeout);
}
