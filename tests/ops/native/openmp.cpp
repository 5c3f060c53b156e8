// The part of OpenMP's runtime that the kernels call, on std::thread. GCC's libgomp waits in ways that the thread
// sanitizer does not see, and everything behind a barrier would be reported; this it sees through. The kernels are
// compiled with -fopenmp as always and linked with this file instead of -lgomp.
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

namespace {

constexpr int kThreads = 3;  // of one call

struct Team {
  const int size;
  std::mutex lock;
  std::condition_variable all_here;
  int waiting = 0;
  long round = 0;
  bool dealing = false;  // a loop whose items are dealt out
  long next = 0, end = 0, step = 0;

  explicit Team(int threads) : size(threads) {}

  void wait() {
    std::unique_lock<std::mutex> mine(lock);
    const long now = round;
    if (++waiting == size) {
      waiting = 0, dealing = false;
      ++round;
      all_here.notify_all();
    } else {
      all_here.wait(mine, [&] { return round != now; });
    }
  }

  bool deal(long chunk, long* from, long* to) {
    std::lock_guard<std::mutex> mine(lock);
    if (step > 0 ? next >= end : next <= end) return false;
    *from = next, *to = next += step * chunk;
    if (step > 0 ? *to > end : *to < end) *to = end;
    return true;
  }
};

thread_local Team* team = nullptr;
thread_local int number = 0;

}  // namespace

extern "C" {

int omp_get_max_threads() { return kThreads; }
int omp_get_num_threads() { return team ? team->size : 1; }
int omp_get_thread_num() { return number; }

void GOMP_parallel(void (*work)(void*), void* data, unsigned threads, unsigned) {
  Team own(threads ? static_cast<int>(threads) : kThreads);
  Team* const before = team;
  const int place = number;
  std::vector<std::thread> others;
  for (int each = 1; each < own.size; ++each)
    others.emplace_back([&own, each, work, data] {
      team = &own, number = each;
      work(data);
    });
  team = &own, number = 0;
  work(data);
  for (std::thread& each : others) each.join();
  team = before, number = place;
}

void GOMP_barrier() { team->wait(); }

bool GOMP_loop_nonmonotonic_dynamic_next(long* from, long* to) { return team->deal(1, from, to); }

bool GOMP_loop_nonmonotonic_dynamic_start(long begin, long end, long step, long, long* from, long* to) {
  {
    std::lock_guard<std::mutex> mine(team->lock);
    if (!team->dealing) team->dealing = true, team->next = begin, team->end = end, team->step = step;
  }
  return GOMP_loop_nonmonotonic_dynamic_next(from, to);
}

void GOMP_loop_end() { team->wait(); }
}
