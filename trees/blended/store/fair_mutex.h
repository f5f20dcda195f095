// A mutex that is handed over in turn: who lets go and asks again comes after those who wait already.
//
// A lesson of many tokens lets go of its lookup every now and then. An ordinary mutex would be taken again by the same
// thread before the next one has woken up.

#pragma once

#include <cstdint>
#include <mutex>

namespace stand {

class FairMutex {
   public:
    void lock() {
        const std::lock_guard first(entrance_);  // held while waiting, so that nobody overtakes
        inner_.lock();
    }
    void unlock() { inner_.unlock(); }

    // For forks: a child must not find the entrance held by a thread that it does not have.
    void close() {
        entrance_.lock();
        inner_.lock();
    }
    void open() {
        inner_.unlock();
        entrance_.unlock();
    }

   private:
    std::mutex entrance_, inner_;
};

// Holds a mutex and lets others have it after so much work.
class Turn {
   public:
    Turn(FairMutex& mutex, int64_t size) : mutex_(mutex), size_(size) { mutex_.lock(); }
    ~Turn() { mutex_.unlock(); }
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;

    int64_t room() const { return size_ - done_; }
    void count(int64_t work) {
        done_ += work;
        if (done_ < size_) return;
        mutex_.unlock();
        mutex_.lock();
        done_ = 0;
    }

   private:
    FairMutex& mutex_;
    const int64_t size_;
    int64_t done_ = 0;
};

}  // namespace stand
