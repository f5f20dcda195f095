// The threads that compiled loops take: those that the caller names, so that no pool of our own fights torch's.

#pragma once

namespace stand {

// GOMP_parallel of GNU's OpenMP: calls a function in so many threads, the caller's among them, and waits for all.
using RunInThreads = void (*)(void (*)(void*), void*, unsigned, unsigned);

// work.run() in `num_threads` threads at once.
template <class Work>
void run_in_threads(Work& work, int num_threads, RunInThreads in_threads) {
    in_threads([](void* given) { static_cast<Work*>(given)->run(); }, &work, num_threads, 0);
}

}  // namespace stand
