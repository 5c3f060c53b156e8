// A plan that runs: pieces in order, each value dropped after its last use. No Python in between.
#include <torch/csrc/inductor/aoti_runtime/interface.h>

#include <cstdint>
#include <vector>

#include "common.h"

namespace {

using Run = AOTIRuntimeError (*)(AOTInductorModelContainerHandle, AtenTensorHandle*, size_t, AtenTensorHandle*, size_t,
                                 AOTInductorStreamHandle, AOTIProxyExecutorHandle);

struct Step {
  Run run;
  AOTInductorModelContainerHandle container;
  std::vector<int32_t> ins, outs, gone;
};

struct Plan {
  std::vector<Step> steps;
  int32_t given;
  std::vector<AtenTensorHandle> values, ins, outs;
};

}  // namespace

INLAY_EXPORT Plan* inlay_plan_new(int32_t given, int32_t values) { return new Plan{{}, given, std::vector<AtenTensorHandle>(values), {}, {}}; }

INLAY_EXPORT void inlay_plan_add(Plan* plan, void* run, void* container, const int32_t* ins, int32_t in_count, const int32_t* outs,
                    int32_t out_count, const int32_t* gone, int32_t gone_count) {
  plan->steps.push_back({reinterpret_cast<Run>(run), static_cast<AOTInductorModelContainerHandle>(container),
                         {ins, ins + in_count}, {outs, outs + out_count}, {gone, gone + gone_count}});
  if (plan->ins.size() < static_cast<size_t>(in_count)) plan->ins.resize(in_count);
  if (plan->outs.size() < static_cast<size_t>(out_count)) plan->outs.resize(out_count);
}

INLAY_EXPORT void inlay_plan_free(Plan* plan) { delete plan; }

// Takes handles of what is given and gives handles of what is wanted; all belong to the caller. 0, or 1 + the step that failed.
INLAY_EXPORT int32_t inlay_plan_run(Plan* plan, AtenTensorHandle* given, const int32_t* wanted, int32_t wanted_count,
                       AtenTensorHandle* results) {
  std::vector<AtenTensorHandle>& values = plan->values;
  for (int32_t i = 0; i < plan->given; ++i) values[i] = given[i];
  int32_t failed = 0;
  for (size_t number = 0; number < plan->steps.size() && !failed; ++number) {
    Step& step = plan->steps[number];
    for (size_t i = 0; i < step.ins.size(); ++i) aoti_torch_new_tensor_handle(values[step.ins[i]], &plan->ins[i]);
    if (step.run(step.container, plan->ins.data(), step.ins.size(), plan->outs.data(), step.outs.size(), nullptr, nullptr))
      failed = static_cast<int32_t>(number) + 1;
    else
      for (size_t i = 0; i < step.outs.size(); ++i) values[step.outs[i]] = plan->outs[i];
    if (!failed)
      for (int32_t value : step.gone) {
        if (value >= plan->given) aoti_torch_delete_tensor_object(values[value]);
        values[value] = nullptr;
      }
  }
  for (int32_t i = 0; i < wanted_count && !failed; ++i) aoti_torch_new_tensor_handle(values[wanted[i]], &results[i]);
  for (size_t i = 0; i < values.size(); ++i) {
    if (values[i] && static_cast<int32_t>(i) >= plan->given) aoti_torch_delete_tensor_object(values[i]);
    values[i] = nullptr;
  }
  return failed;
}

