#include "operators.h"

#include <algorithm>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>

namespace emulated_gpu {
namespace {

constexpr size_t kNamespace = sizeof("aten::") - 1;
// Index tensors, lengths, and the step counts and scales of optimizers may lie on the host.
constexpr const char* kMixing[] = {"index", "_index", "_unsafe_index", "_foreach", "_fused",
                                   "_amp",  "copy",   "_pad",          "_pack"};

// By the beginnings of their names.
constexpr const char* kOfCublas[] = {"mm", "addmm", "bmm", "baddbmm", "addmv", "mv", "dot", "_addmm"};
constexpr const char* kOfCudnn[] = {"convolution"};
constexpr const char* kWide[] = {"convolution",       "mm", "addmm", "bmm", "baddbmm", "native_batch_norm",
                                 "_native_batch_norm"};
constexpr const char* kAddingUp[] = {"index_add", "scatter_add", "scatter_reduce", "embedding_dense_backward",
                                     "cumsum",    "histc",       "upsample"};

template <size_t kCount>
bool begins_with(const std::string& name, const char* const (&beginnings)[kCount]) {
  return std::ranges::any_of(beginnings, [&](const char* begin) { return name.starts_with(begin); });
}

int argument_of(const c10::Argument& result, const c10::FunctionSchema& schema) {
  if (result.alias_info() == nullptr) return -1;
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    const c10::AliasInfo* alias = schema.arguments()[i].alias_info();
    if (alias != nullptr && *alias == *result.alias_info()) return static_cast<int>(i);
  }
  return -1;
}

bool is_tensors(const c10::Argument& result) {
  const std::string type = result.type()->str();
  return type == "Tensor" || type == "Tensor[]";
}

std::unique_ptr<Operator> read(const c10::OperatorHandle& handle) {
  const c10::FunctionSchema& schema = handle.schema();
  auto op = std::unique_ptr<Operator>(new Operator{.handle = handle, .name = toString(handle.operator_name())});
  for (const c10::Argument& argument : schema.arguments()) {
    if (argument.type()->str().find("Generator") != std::string::npos)
      op->generator = static_cast<int>(op->writes.size());
    op->writes.push_back(argument.alias_info() != nullptr && argument.alias_info()->isWrite());
  }
  for (const c10::Argument& result : schema.returns()) {
    op->argument_of.push_back(argument_of(result, schema));
    if (!is_tensors(result)) op->waits = true;
  }
  for (const at::Tag tag : handle.getTags()) {
    if (tag == at::Tag::nondeterministic_seeded && op->generator < 0) op->draws_unasked = true;
    if (tag == at::Tag::dynamic_output_shape || tag == at::Tag::data_dependent_output) op->waits = true;
  }
  if (op->draws_unasked) op->waits = true;
  op->has_kernel = handle.hasComputedKernelForDispatchKey(c10::DispatchKey::CPU);
  const std::string name = schema.name().substr(kNamespace);
  op->mixes_devices = begins_with(name, kMixing);
  if (begins_with(name, kOfCublas)) op->library = Library::kCublas;
  if (begins_with(name, kOfCudnn)) op->library = Library::kCudnn;
  const bool makes_all = std::ranges::all_of(op->argument_of, [](int argument) { return argument < 0; });
  op->is_wide = begins_with(name, kWide) && makes_all;
  op->adds_up = begins_with(name, kAddingUp);
  return op;
}

}  // namespace

Operator& operator_of(const c10::OperatorHandle& handle) {
  static std::shared_mutex mutex;
  static auto* const known = new std::unordered_map<const void*, std::unique_ptr<Operator>>();
  {
    const std::shared_lock lock(mutex);
    if (const auto found = known->find(&handle.schema()); found != known->end()) return *found->second;
  }
  auto made = read(handle);
  const std::unique_lock lock(mutex);
  return *known->emplace(&handle.schema(), std::move(made)).first->second;
}

}  // namespace emulated_gpu
