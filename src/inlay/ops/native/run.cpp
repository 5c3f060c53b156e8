// Runs a plan: pieces in order, each value freed after its last use, without Python between pieces.
//
// A plan is immutable and every call has its own values, so any number of threads may run one plan concurrently. A
// container of AOTInductor is not thread-safe (its first run folds constants, and RunSingleThreaded is for one
// thread), so only one thread at a time enters a piece. Concurrent calls follow each other through the pieces.
// AOTInductor's Run also waits, but it hangs if the call that it waits for fails.
#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_runtime/interface.h>

#include <memory>
#include <mutex>
#include <vector>

#include "common.h"

#define INLAY_TEXT_(name) #name
#define INLAY_TEXT(name) INLAY_TEXT_(name)

INLAY_EXPORT char* INLAY_SHIM(last_error)() { return inlay::last_error(); }

namespace {

// The error text of the kernels that pieces call. Symbols are resolved by name: if several packages with the same
// kernels are in one process, all pieces call the kernels of the package that was loaded first. RTLD_DEFAULT would not
// find those, because this library is linked with -Bsymbolic and resolves its own names first.
char* kernel_error() {
  static const auto found =
      reinterpret_cast<char* (*)()>(dlsym(dlopen(nullptr, RTLD_LAZY), INLAY_TEXT(INLAY_SHIM(last_error))));
  return found ? found() : inlay::last_error();
}

using Run = AOTIRuntimeError (*)(AOTInductorModelContainerHandle, AtenTensorHandle*, size_t, AtenTensorHandle*, size_t,
                                 AOTInductorStreamHandle, AOTIProxyExecutorHandle);

// A container, and the lock of the thread that runs it.
struct Piece {
  Run run;
  AOTInductorModelContainerHandle container;
  std::mutex entered;
};

struct Step {
  Piece* piece;
  std::vector<int32_t> ins, outs, gone;
};

struct Plan {
  int32_t given, values;
  std::vector<Step> steps;
};

struct Delete {
  using pointer = AtenTensorHandle;
  void operator()(AtenTensorHandle handle) const { aoti_torch_delete_tensor_object(handle); }
};
using Owned = std::unique_ptr<AtenTensorOpaque, Delete>;

Owned copied(AtenTensorHandle handle) {
  AtenTensorHandle made = nullptr;
  if (!handle || aoti_torch_new_tensor_handle(handle, &made))
    throw std::runtime_error("a value of the plan is missing");
  return Owned(made);
}

// The values of one call. The caller owns the given ones, the call owns the others.
class Values {
 public:
  Values(const Plan& plan, void** given) : given_(given), own_(static_cast<size_t>(plan.values)), count_(plan.given) {}
  // A C++ tensor is a pointer to its implementation, so the address of such a pointer is a borrowed tensor.
  AtenTensorHandle at(int32_t index) {
    return index < count_ ? reinterpret_cast<AtenTensorHandle>(given_ + index) : own_[index].get();
  }
  void set(int32_t index, AtenTensorHandle handle) { own_[index].reset(handle); }
  void drop(int32_t index) { own_[index].reset(); }

 private:
  void** given_;
  std::vector<Owned> own_;
  int32_t count_;
};

void run_step(const Step& step, Values& values) {
  std::vector<Owned> taken;
  for (int32_t index : step.ins) taken.push_back(copied(values.at(index)));
  std::vector<AtenTensorHandle> ins, outs(step.outs.size(), nullptr);
  for (Owned& each : taken) ins.push_back(each.get());
  {
    std::lock_guard<std::mutex> alone(step.piece->entered);
    for (Owned& each : taken) each.release();  // the container takes ownership, even if it fails
    const bool failed =
        step.piece->run(step.piece->container, ins.data(), ins.size(), outs.data(), outs.size(), nullptr, nullptr);
    if (failed) {
      for (AtenTensorHandle each : outs)
        if (each) aoti_torch_delete_tensor_object(each);
      throw std::runtime_error(kernel_error());
    }
  }
  for (size_t i = 0; i < outs.size(); ++i) values.set(step.outs[i], outs[i]);
  for (int32_t index : step.gone) values.drop(index);
}

}  // namespace

INLAY_EXPORT Piece* inlay_piece_new(void* run, void* container) {
  return new (std::nothrow)
      Piece{reinterpret_cast<Run>(run), static_cast<AOTInductorModelContainerHandle>(container), {}};
}

INLAY_EXPORT void inlay_piece_free(Piece* piece) { delete piece; }

INLAY_EXPORT Plan* inlay_plan_new(int32_t given, int32_t values) { return new (std::nothrow) Plan{given, values, {}}; }

INLAY_EXPORT int32_t inlay_plan_add(Plan* plan, Piece* piece, const int32_t* ins, int32_t in_count, const int32_t* outs,
                                    int32_t out_count, const int32_t* gone, int32_t gone_count) {
  return inlay::guarded([&] {
    plan->steps.push_back({piece, {ins, ins + in_count}, {outs, outs + out_count}, {gone, gone + gone_count}});
  });
}

INLAY_EXPORT void inlay_plan_free(Plan* plan) { delete plan; }

// The version of the functions in this file. A package brings its own kernels, and a later Inlay calls them.
INLAY_EXPORT int32_t inlay_abi() { return INLAY_ABI; }

INLAY_EXPORT const char* inlay_last_error() { return inlay::last_error(); }

// Takes tensors and returns handles of the wanted values, which the caller owns. Returns 0, the number of the step that
// failed (from 1), or -1 if the call failed outside of the steps.
INLAY_EXPORT int32_t inlay_plan_run(const Plan* plan, void** given, const int32_t* wanted, int32_t wanted_count,
                                    AtenTensorHandle* results) {
  inlay::last_error()[0] = kernel_error()[0] = 0;
  int32_t step = -1;
  const int32_t failed = inlay::guarded([&] {
    Values values(*plan, given);
    for (step = 1; step <= static_cast<int32_t>(plan->steps.size()); ++step) run_step(plan->steps[step - 1], values);
    step = -1;
    std::vector<Owned> made;
    for (int32_t i = 0; i < wanted_count; ++i) made.push_back(copied(values.at(wanted[i])));
    for (int32_t i = 0; i < wanted_count; ++i) results[i] = made[i].release();
  });
  return failed ? step : 0;
}
