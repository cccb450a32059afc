// Threads that compute a step together, in phases. They take pieces of a phase from a counter, and go on when all its pieces are
// done, whoever did them: a thread that the system holds up between two pieces delays nobody, and skips what others did. So it
// matters little that a machine has other work; threads that must all arrive everywhere wait for the unluckiest 300 times a
// step. Between steps they sleep.
#pragma once
#include <pthread.h>
#include <sched.h>

#include <atomic>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

static inline void pause_a_moment() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#else
    std::atomic_signal_fence(std::memory_order_seq_cst);
#endif
}

class Pool {
  public:
    typedef void (*Work)(void* context, int thread);
    static constexpr int MAX_THREADS = 256;
    static constexpr int MAX_PHASES = 1 << 14;

    explicit Pool(int threads) : threads_(threads < 1 ? 1 : threads > MAX_THREADS ? MAX_THREADS : threads) {
        pthread_mutex_init(&mutex_, nullptr);
        pthread_cond_init(&changed_, nullptr);
        int started = 1;
        for (; started < threads_; started++) {
            seats_[started] = {this, started};
            if (pthread_create(&ids_[started], nullptr, enter, &seats_[started])) break;
        }
        threads_ = started;
    }

    ~Pool() {
        pthread_mutex_lock(&mutex_);
        closing_ = true;
        pthread_cond_broadcast(&changed_);
        pthread_mutex_unlock(&mutex_);
        for (int thread = 1; thread < threads_; thread++) pthread_join(ids_[thread], nullptr);
        pthread_cond_destroy(&changed_);
        pthread_mutex_destroy(&mutex_);
    }

    int threads() const { return threads_; }

    // Every thread runs `work` once; returns when all are done. Phases are numbered from 0, below `num_phases`.
    void run(Work work, void* context, int num_phases) {
        for (int phase = 0; phase < num_phases; phase++) {
            taken_[phase].store(0, std::memory_order_relaxed);
            done_[phase].store(0, std::memory_order_relaxed);
        }
        finished_.store(1, std::memory_order_relaxed);
        work_ = work;
        context_ = context;
        if (threads_ > 1) {
            pthread_mutex_lock(&mutex_);
            turn_++;
            pthread_cond_broadcast(&changed_);
            pthread_mutex_unlock(&mutex_);
        }
        work(context, 0);
        wait_for(finished_, threads_);
    }

    // Do all `pieces` of a phase, together with the other threads; returns when they are done.
    template <typename Job>
    void share(int phase, int pieces, Job job) {
        for (int piece; (piece = taken_[phase].fetch_add(1, std::memory_order_relaxed)) < pieces;) {
            job(piece);
            add_one(done_[phase]);
        }
        wait_for(done_[phase], pieces);
    }

  private:
    struct Seat {
        Pool* pool;
        int thread;
    };

    static void* enter(void* seat) {
        Seat* mine = static_cast<Seat*>(seat);
        mine->pool->serve(mine->thread);
        return nullptr;
    }

    void serve(int thread) {
        long seen = 0;
        for (;;) {
            pthread_mutex_lock(&mutex_);
            while (turn_ == seen && !closing_) pthread_cond_wait(&changed_, &mutex_);
            seen = turn_;
            bool closing = closing_;
            pthread_mutex_unlock(&mutex_);
            if (closing) return;
            work_(context_, thread);
            add_one(finished_);
        }
    }

    void add_one(std::atomic<int>& counter) {
        counter.fetch_add(1);
        if (waiting_.load() == 0) return;
#if defined(__linux__)
        syscall(SYS_futex, reinterpret_cast<int*>(&counter), FUTEX_WAKE_PRIVATE, MAX_THREADS, nullptr, nullptr, 0);
#endif
    }

    // Spins for some tens of microseconds, then sleeps: the thread waited for may need this very core.
    void wait_for(std::atomic<int>& counter, int wanted) {
        for (int spins = 0; spins < 1000; spins++) {
            if (counter.load(std::memory_order_acquire) >= wanted) return;
            pause_a_moment();
        }
        waiting_.fetch_add(1);
        for (int found; (found = counter.load()) < wanted;) {
#if defined(__linux__)
            syscall(SYS_futex, reinterpret_cast<int*>(&counter), FUTEX_WAIT_PRIVATE, found, nullptr, nullptr, 0);
#else
            sched_yield();
#endif
        }
        waiting_.fetch_sub(1);
    }

    int threads_;
    Seat seats_[MAX_THREADS];
    pthread_t ids_[MAX_THREADS];
    pthread_mutex_t mutex_;
    pthread_cond_t changed_;
    long turn_ = 0;
    bool closing_ = false;
    Work work_ = nullptr;
    void* context_ = nullptr;
    alignas(64) std::atomic<int> waiting_{0};
    alignas(64) std::atomic<int> finished_{0};
    alignas(64) std::atomic<int> taken_[MAX_PHASES];
    alignas(64) std::atomic<int> done_[MAX_PHASES];
};
