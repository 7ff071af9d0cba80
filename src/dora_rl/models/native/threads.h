/* Threads that take the items of a phase together, and sleep between passes.
 *
 * A pass is a sequence of phases, a phase a number of items. All threads go through all phases; each claims
 * items until there are no more, then waits until all of them are done. Nobody waits for a thread that has claimed
 * nothing: one that another process keeps from its core, or that wakes late, holds nothing up.
 */
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>

#define SPINS 4000 /* some ten to a hundred microseconds; then the core is given to whoever wants it */

typedef struct {
    atomic_long claimed, done; /* items */
} Phase;

/* What every thread runs; `thread` counts from 0. */
typedef void (*Job)(const void *context, Phase *phases, int64_t thread);

static struct {
    pthread_mutex_t pass_lock; /* one pass at a time */
    pthread_mutex_t lock;      /* of what follows */
    pthread_cond_t wake;
    atomic_long number; /* of the latest pass */
    Job job;            /* NULL: nobody may enter it any more */
    const void *context;
    Phase *phases;
    int64_t threads;
    atomic_long inside; /* workers in it */
    int64_t workers;
} pool = {
    .pass_lock = PTHREAD_MUTEX_INITIALIZER,
    .lock = PTHREAD_MUTEX_INITIALIZER,
    .wake = PTHREAD_COND_INITIALIZER,
};

static inline void relax(int *spins) {
    if (++*spins > SPINS) {
        sched_yield();
        return;
    }
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* The next items of a phase: from *item, up to the return value; 0 when there are no more. */
static inline int64_t claim(Phase *phase, int64_t items, int64_t grain, int64_t *item) {
    const int64_t at = atomic_fetch_add_explicit(&phase->claimed, grain, memory_order_relaxed);
    if (at >= items) return 0;
    *item = at;
    return at + grain < items ? at + grain : items;
}

static inline void finish(Phase *phase, int64_t items) {
    atomic_fetch_add_explicit(&phase->done, items, memory_order_release);
}

static inline void wait_for(Phase *phase, int64_t items) {
    int spins = 0;
    while (atomic_load_explicit(&phase->done, memory_order_acquire) < items) relax(&spins);
}

/* `for` each item that this thread claims, `grain` of them at a time. */
#define EACH(item, items, grain)                                                       \
    for (int64_t item = 0, begin_, stop_; (stop_ = claim(phase, items, grain, &item)); \
         finish(phase, stop_ - begin_))                                                \
        for (begin_ = item; item < stop_; item++)

static void *work(void *argument) {
    const int64_t thread = (int64_t)(intptr_t)argument;
    long seen = 0;
    for (;;) {
        for (int spins = 0; atomic_load(&pool.number) == seen && spins < SPINS;) relax(&spins);
        pthread_mutex_lock(&pool.lock);
        while (atomic_load(&pool.number) == seen) pthread_cond_wait(&pool.wake, &pool.lock);
        seen = atomic_load(&pool.number);
        const Job job = thread < pool.threads ? pool.job : NULL;
        const void *context = pool.context;
        Phase *phases = pool.phases;
        if (job) atomic_fetch_add(&pool.inside, 1);
        pthread_mutex_unlock(&pool.lock);
        if (job) {
            job(context, phases, thread);
            atomic_fetch_sub(&pool.inside, 1);
        }
    }
    return NULL;
}

/* A child of fork has none of its parent's threads. */
static void reset_after_fork(void) {
    pthread_mutex_init(&pool.pass_lock, NULL);
    pthread_mutex_init(&pool.lock, NULL);
    pthread_cond_init(&pool.wake, NULL);
    pool.job = NULL;
    pool.workers = 0;
    atomic_store(&pool.number, 0);
    atomic_store(&pool.inside, 0);
}

/* Start workers up to what is wanted; where the system has no more threads, fewer do the work. */
static void start_workers(int64_t wanted) {
    static atomic_int registered;
    if (!atomic_exchange(&registered, 1)) pthread_atfork(NULL, NULL, reset_after_fork);
    while (pool.workers + 1 < wanted) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, work, (void *)(intptr_t)(pool.workers + 1))) return;
        pthread_detach(thread);
        pool.workers++;
    }
}

/* Run the job on up to `threads` threads, this one included. False for want of memory. */
static int run_together(Job job, const void *context, int64_t num_phases, int64_t threads) {
    Phase *phases = calloc(num_phases, sizeof *phases);
    if (!phases) return 0;
    pthread_mutex_lock(&pool.pass_lock);
    if (threads > 1) {
        start_workers(threads);
        pthread_mutex_lock(&pool.lock);
        pool.job = job;
        pool.context = context;
        pool.phases = phases;
        pool.threads = threads;
        atomic_fetch_add(&pool.number, 1);
        pthread_cond_broadcast(&pool.wake);
        pthread_mutex_unlock(&pool.lock);
    }
    job(context, phases, 0);
    if (threads > 1) {
        pthread_mutex_lock(&pool.lock);
        pool.job = NULL;
        pthread_mutex_unlock(&pool.lock);
        for (int spins = 0; atomic_load(&pool.inside);) relax(&spins);
    }
    pthread_mutex_unlock(&pool.pass_lock);
    free(phases);
    return 1;
}
