// The plan runner and the kernels, called by many threads at once, under the thread sanitizer: `threads SEED THREADS
// ROUNDS`. Results must be those of one thread, bit by bit, and no tensor may be left over.
//
// torch is not linked. Of it the plan runner calls two functions, which copy and delete the handle of a tensor: they
// are here, over tensors that count their handles. The containers that a plan runs are here as well. Like those of
// AOTInductor they are not for two threads at once: each writes to a plain number, which the sanitizer watches.
#include <torch/csrc/inductor/aoti_runtime/interface.h>

#include <atomic>
#include <memory>
#include <thread>

#include "cases.h"

struct Piece;
struct Plan;
extern "C" {
Piece* inlay_piece_new(void*, void*);
void inlay_piece_free(Piece*);
Plan* inlay_plan_new(int32_t, int32_t);
int32_t inlay_plan_add(Plan*, Piece*, const int32_t*, int32_t, const int32_t*, int32_t, const int32_t*, int32_t);
void inlay_plan_free(Plan*);
int32_t inlay_plan_run(const Plan*, void**, const int32_t*, int32_t, AtenTensorHandle*);
}

namespace {

using namespace cases;

// What a tensor points to. A tensor is a pointer to it, and a handle is a pointer to a tensor.
struct Storage {
  double value;
  std::atomic<int64_t> handles{1};
};

std::atomic<int64_t> live{0};

Storage*& tensor(AtenTensorHandle handle) { return *reinterpret_cast<Storage**>(handle); }

Storage* new_storage(double value) {
  ++live;
  return new Storage{value};
}

void release(Storage* storage) {
  if (storage->handles.fetch_sub(1) > 1) return;
  --live;
  delete storage;
}

AtenTensorHandle new_handle(Storage* storage) { return reinterpret_cast<AtenTensorHandle>(new Storage*(storage)); }

}  // namespace

extern "C" {

AOTITorchError aoti_torch_new_tensor_handle(AtenTensorHandle from, AtenTensorHandle* made) {
  tensor(from)->handles.fetch_add(1);
  *made = new_handle(tensor(from));
  return 0;
}

AOTITorchError aoti_torch_delete_tensor_object(AtenTensorHandle handle) {
  release(tensor(handle));
  delete &tensor(handle);
  return 0;
}
}

namespace {

constexpr double kFails = 1e6;

// Adds its inputs. Its first run does something else than the others, as in AOTInductor, and it fails now and then.
struct Container {
  int64_t runs = 0;
  double constant = 0;

  static AOTIRuntimeError run(AOTInductorModelContainerHandle self_, AtenTensorHandle* ins, size_t in_count,
                              AtenTensorHandle* outs, size_t out_count, AOTInductorStreamHandle,
                              AOTIProxyExecutorHandle) {
    Container& self = *reinterpret_cast<Container*>(self_);
    if (self.runs++ == 0) self.constant = 1;
    double sum = self.constant;
    for (size_t i = 0; i < in_count; ++i) {
      sum += tensor(ins[i])->value;
      aoti_torch_delete_tensor_object(ins[i]);
    }
    if (sum >= kFails) {
      inlay::note_error(("the sum is " + std::to_string(sum)).c_str());
      return 1;
    }
    for (size_t i = 0; i < out_count; ++i) outs[i] = new_handle(new_storage(sum + static_cast<double>(i)));
    return 0;
  }
};

struct Owner {
  Container container;
  Piece* piece = inlay_piece_new(reinterpret_cast<void*>(&Container::run), &container);
  ~Owner() { inlay_piece_free(piece); }
};

void add(Plan* plan, const Owner& owner, std::vector<int32_t> ins, std::vector<int32_t> outs,
         std::vector<int32_t> gone) {
  const auto size = [](const std::vector<int32_t>& each) { return static_cast<int32_t>(each.size()); };
  inlay_plan_add(plan, owner.piece, ins.data(), size(ins), outs.data(), size(outs), gone.data(), size(gone));
}

// Two values are given (0, 1). Both plans go through one container, as those of two buckets may.
struct Plans {
  Owner first, second, third;
  Plan *whole = inlay_plan_new(2, 6), *part = inlay_plan_new(2, 3);
  Plans() {
    add(whole, first, {0, 1}, {2, 3}, {});
    add(whole, second, {2, 1}, {4}, {2});
    add(whole, third, {3, 4}, {5}, {4});
    add(part, second, {0, 1}, {2}, {});
  }
  ~Plans() { inlay_plan_free(whole), inlay_plan_free(part); }
};

void run_plan(const Plan* plan, double a, double b, std::vector<int32_t> wanted, const std::vector<double>& values) {
  Storage *first = new_storage(a), *second = new_storage(b);
  void* given[2] = {first, second};
  std::vector<AtenTensorHandle> results(wanted.size(), nullptr);
  const int32_t failed =
      inlay_plan_run(plan, given, wanted.data(), static_cast<int32_t>(wanted.size()), results.data());
  release(first), release(second);
  if (values.empty()) {
    if (failed != 1 || std::string(inlay::last_error()).find("the sum is") != 0)
      fail("a step that fails is step " + std::to_string(failed) + ": " + inlay::last_error());
    return;
  }
  if (failed) fail("step " + std::to_string(failed) + " failed: " + inlay::last_error());
  for (size_t i = 0; i < values.size(); ++i) {
    if (tensor(results[i])->value != values[i]) fail("a plan gave what another call wanted");
    aoti_torch_delete_tensor_object(results[i]);
  }
}

void run_plans(const Plans& plans, int64_t number) {
  const double a = static_cast<double>(number % 17), b = static_cast<double>(number % 5);
  const double two = a + b + 1, four = two + b + 1;
  run_plan(plans.whole, a, b, {5, 3, 3}, {two + 1 + four + 1, two + 1, two + 1});
  run_plan(plans.part, a, b, {2}, {a + b + 1});
  if (number % 7 == 0) run_plan(plans.whole, kFails, b, {5}, {});
}

// Cases that are read by all threads at once, and what they give when one thread works on them.
template <typename Case>
struct Known {
  std::unique_ptr<Case> one;
  std::unique_ptr<Numbers> result;
  Known(Case* made, int64_t count, int32_t type) : one(made), result(new Numbers(count, type)) { one->run(*result); }
  void run() const {
    Numbers found(result->count, result->type);
    one->run(found);
    if (!found.equal(*result)) fail(one->text() + ": another result than that of one thread");
  }
};

}  // namespace

int main(int count, char** given) {
  const auto number = [&](int at, int usual) { return count > at ? std::atoi(given[at]) : usual; };
  Random random(number(1, 0));
  const int threads = number(2, 8), rounds = number(3, 2);
  std::vector<Known<LinearCase>> linear;
  for (const Format& format : kFormats)
    for (int32_t way : kWays)
      for (int64_t rows : {5, 18}) {
        auto* one = new LinearCase(random, format, rows, way);
        linear.emplace_back(one, rows * one->features, one->x.type);
      }
  std::vector<Known<AttentionCase>> attention;
  for (int64_t length : {1, 1, 3, 16, 17, 40})
    for (int again = 0; again < 2; ++again) {
      auto* one = new AttentionCase(random, 2, length, again == 0);
      attention.emplace_back(one, 2 * length * one->heads * one->width, one->query.type);
    }
  Plans plans;
  std::vector<std::thread> callers;
  for (int caller = 0; caller < threads; ++caller)
    callers.emplace_back([&, caller] {
      for (int round = 0; round < rounds; ++round) {
        for (int64_t at = 0; at < 60; ++at) run_plans(plans, at + caller);
        for (size_t at = 0; at < linear.size(); at += 2) linear[(at + caller) % linear.size()].run();
        for (size_t at = 0; at < attention.size(); at += 2) attention[(at + caller) % attention.size()].run();
      }
    });
  for (std::thread& each : callers) each.join();
  if (live != 0) fail(std::to_string(live) + " tensors are left over");
  std::printf("%lld cases\n",
              static_cast<long long>(threads * rounds * (60 + linear.size() / 2 + attention.size() / 2)));
}
