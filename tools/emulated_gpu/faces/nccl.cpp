// libnccl: collectives of processes, queued on streams as kernels are. Numbers are combined in the order of the ranks.
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "face.h"
#include "meeting.h"

using namespace emulated_gpu;

namespace {

// As in nccl.h.
struct Id {
  char text[128];
};
enum Type { kInt8, kUint8, kInt32, kUint32, kInt64, kUint64, kHalf, kFloat, kDouble, kBfloat16, kNumTypes };
enum Reduction { kSum, kProduct, kMost, kLeast, kMean, kNumReductions };
constexpr int kVersion = 22809, kOk = 0, kCudaFailed = 1, kInvalid = 4;
constexpr size_t kBytesOf[kNumTypes] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};

// What numbers of a type are computed with.
template <typename T>
struct Wide {
  using Type = T;
};
template <>
struct Wide<c10::Half> {
  using Type = float;
};
template <>
struct Wide<c10::BFloat16> {
  using Type = float;
};

struct Communicator {
  Communicator(const std::string& name, int rank, int size) : meeting(name, rank, size) {}
  Meeting meeting;
  Turns turns;
  std::mutex mutex;  // held while something is queued
};

// Those that were made and not given back; what is queued on one keeps it.
class Communicators {
 public:
  void* add(std::shared_ptr<Communicator> communicator) {
    const std::lock_guard lock(mutex_);
    void* handle = reinterpret_cast<void*>(++num_handles_ << 12);  // as an address, and never again
    communicators_.emplace(handle, std::move(communicator));
    return handle;
  }
  std::shared_ptr<Communicator> find(void* handle) {
    const std::lock_guard lock(mutex_);
    const auto found = communicators_.find(handle);
    return found == communicators_.end() ? nullptr : found->second;
  }
  std::shared_ptr<Communicator> remove(void* handle) {
    const std::lock_guard lock(mutex_);
    const auto node = communicators_.extract(handle);
    return node.empty() ? nullptr : node.mapped();
  }

 private:
  std::mutex mutex_;
  std::unordered_map<void*, std::shared_ptr<Communicator>> communicators_;
  uintptr_t num_handles_ = 0;
};

Communicators& communicators() {
  static Communicators& all = *new Communicators;  // torch's threads may still ask while the process ends
  return all;
}

// What a call with a handle that was given back or never made returns.
int refuse(const char* call) {
  System::instance().report(std::string(call) + ": its communicator was given back or never made", kInvalidHandle);
  return kInvalid;
}

template <typename T>
T combine(T a, T b, Reduction reduction) {
  switch (reduction) {
    case kProduct:
      return a * b;
    case kMost:
      return std::max(a, b);
    case kLeast:
      return std::min(a, b);
    default:
      return a + b;
  }
}

// Rounds after each rank, as numbers that travel in their own type.
template <typename T>
void reduce_numbers(const Meeting& meeting, size_t count, Reduction reduction, void* to) {
  using Number = typename Wide<T>::Type;
  T* result = static_cast<T*>(to);
  for (size_t i = 0; i < count; ++i) {
    T value = reinterpret_cast<const T*>(meeting.place(0))[i];
    for (int rank = 1; rank < meeting.size; ++rank) {
      const T other = reinterpret_cast<const T*>(meeting.place(rank))[i];
      value = static_cast<T>(combine<Number>(static_cast<Number>(value), static_cast<Number>(other), reduction));
    }
    const Number whole = static_cast<Number>(value);
    result[i] = reduction == kMean ? static_cast<T>(whole / static_cast<Number>(meeting.size)) : value;
  }
}

constexpr void (*kReduce[kNumTypes])(const Meeting&, size_t, Reduction, void*) = {
    reduce_numbers<int8_t>,  reduce_numbers<uint8_t>,       reduce_numbers<int32_t>,   reduce_numbers<uint32_t>,
    reduce_numbers<int64_t>, reduce_numbers<uint64_t>,      reduce_numbers<c10::Half>, reduce_numbers<float>,
    reduce_numbers<double>,  reduce_numbers<c10::BFloat16>,
};

void reduce_places(const Meeting& meeting, size_t nbytes, int type, int reduction, void* to) {
  kReduce[type](meeting, nbytes / kBytesOf[type], static_cast<Reduction>(reduction), to);
}

// All ranks lay their part of `from`, if they have one, into their places; then `take` is called with its offset.
void exchange(Meeting& meeting, const std::byte* from, size_t nbytes,
              const std::function<void(size_t offset, size_t part)>& take) {
  for (size_t offset = 0; offset < nbytes; offset += Meeting::kPlaceBytes) {
    const size_t part = std::min(Meeting::kPlaceBytes, nbytes - offset);
    if (from != nullptr) memcpy(meeting.place(meeting.rank), from + offset, part);
    if (!meeting.wait()) return;
    take(offset, part);
    if (!meeting.wait()) return;
  }
}

std::byte* bytes_of(const void* address) {
  return address == nullptr ? nullptr : static_cast<std::byte*>(DeviceMemory::bytes_of(address));
}

struct Part {
  const void* address;  // null: this rank has none
  size_t nbytes;
};

// Queues what `work` does with the bytes of both. Whatever the streams, what is queued on one communicator runs one
// after the other.
int queue(const char* name, const std::shared_ptr<Communicator>& communicator, Part from, Part to, void* stream,
          std::function<void(Meeting& ranks, const std::byte* from, std::byte* to)> work) {
  std::vector<Use> uses;
  if (from.address != nullptr) uses.push_back({reinterpret_cast<uintptr_t>(from.address), from.nbytes, false});
  if (to.address != nullptr) uses.push_back({reinterpret_cast<uintptr_t>(to.address), to.nbytes, true});
  const Amount amount{.nbytes = static_cast<double>(from.nbytes + to.nbytes)};
  const int code = enter(name, [&](System& system) {
    const std::lock_guard lock(communicator->mutex);
    const uint64_t turn = communicator->turns.take();
    return system.launch(stream, name, uses, amount, [communicator, turn, from, to, work = std::move(work)] {
      communicator->turns.wait(turn);
      work(communicator->meeting, bytes_of(from.address), bytes_of(to.address));
      communicator->turns.end(now());
    });
  });
  return code == kSuccess ? kOk : kCudaFailed;
}

// A call of `count` numbers of a type: `call` is given the communicator and their bytes.
template <typename Call>
int collect(const char* name, void* handle, size_t count, int type, Call call) {
  const auto communicator = communicators().find(handle);
  if (!communicator) return refuse(name);
  if (type < 0 || type >= kNumTypes) return kInvalid;
  return call(communicator, count * kBytesOf[type]);
}

// The same of numbers that are combined; a rank without `to` gives only its own.
int reduce(const char* name, const void* from, void* to, size_t count, int type, int reduction, void* handle,
           void* stream) {
  if (reduction < 0 || reduction >= kNumReductions) return kInvalid;
  return collect(name, handle, count, type, [=](const auto& communicator, size_t nbytes) {
    return queue(name, communicator, {from, nbytes}, {to, nbytes}, stream,
                 [=](Meeting& ranks, const std::byte* own, std::byte* all) {
                   exchange(ranks, own, nbytes, [&](size_t offset, size_t part) {
                     if (all != nullptr) reduce_places(ranks, part, type, reduction, all + offset);
                   });
                 });
  });
}

int start(void** handle, int size, const Id& id, int rank) {
  return *handle = communicators().add(std::make_shared<Communicator>(id.text, rank, size)), kOk;
}

}  // namespace

#define NCCL EXPORTED int

NCCL ncclGetVersion(int* version) { return *version = kVersion, kOk; }
EXPORTED const char* ncclGetErrorString(int code) { return code == kOk ? "no error" : "an emulated call failed"; }
EXPORTED const char* ncclGetLastError(void*) { return ""; }

NCCL ncclGetUniqueId(Id* id) { return snprintf(id->text, sizeof id->text, "%s", Meeting::new_name().c_str()), kOk; }
NCCL ncclCommInitRank(void** handle, int size, Id id, int rank) { return start(handle, size, id, rank); }
NCCL ncclCommInitRankConfig(void** handle, int size, Id id, int rank, void*) { return start(handle, size, id, rank); }
NCCL ncclCommInitRankScalable(void** handle, int size, int rank, int, const Id* ids, void*) {
  return start(handle, size, *ids, rank);
}
NCCL ncclCommCount(void* handle, int* count) {
  const auto communicator = communicators().find(handle);
  return communicator ? *count = communicator->meeting.size, kOk : refuse(__func__);
}
NCCL ncclCommUserRank(void* handle, int* rank) {
  const auto communicator = communicators().find(handle);
  return communicator ? *rank = communicator->meeting.rank, kOk : refuse(__func__);
}
NCCL ncclCommGetAsyncError(void* handle, int* code) {
  return communicators().find(handle) ? *code = kOk, kOk : refuse(__func__);
}
NCCL ncclCommFinalize(void* handle) { return communicators().find(handle) ? kOk : refuse(__func__); }
NCCL ncclCommDestroy(void* handle) { return communicators().remove(handle) ? kOk : refuse(__func__); }
NCCL ncclCommAbort(void* handle) {
  const auto communicator = communicators().remove(handle);
  return communicator ? communicator->meeting.leave(), kOk : refuse(__func__);
}

// What is queued between them waits for no other process: it may be queued one by one.
NCCL ncclGroupStart() { return kOk; }
NCCL ncclGroupEnd() { return kOk; }

NCCL ncclAllReduce(const void* from, void* to, size_t count, int type, int reduction, void* handle, void* stream) {
  return reduce(__func__, from, to, count, type, reduction, handle, stream);
}

NCCL ncclReduce(const void* from, void* to, size_t count, int type, int reduction, int root, void* handle,
                void* stream) {
  const auto communicator = communicators().find(handle);
  const bool is_root = communicator && communicator->meeting.rank == root;
  return reduce(__func__, from, is_root ? to : nullptr, count, type, reduction, handle, stream);
}

NCCL ncclReduceScatter(const void* from, void* to, size_t count, int type, int reduction, void* handle, void* stream) {
  if (reduction < 0 || reduction >= kNumReductions) return kInvalid;
  return collect(__func__, handle, count, type, [=, name = __func__](const auto& communicator, size_t nbytes) {
    return queue(name, communicator, {from, communicator->meeting.size * nbytes}, {to, nbytes}, stream,
                 [=](Meeting& ranks, const std::byte* own, std::byte* own_sum) {
                   for (int rank = 0; rank < ranks.size; ++rank) {
                     exchange(ranks, own + rank * nbytes, nbytes, [&](size_t offset, size_t part) {
                       if (rank == ranks.rank) reduce_places(ranks, part, type, reduction, own_sum + offset);
                     });
                   }
                 });
  });
}

NCCL ncclAllGather(const void* from, void* to, size_t count, int type, void* handle, void* stream) {
  return collect(__func__, handle, count, type, [=, name = __func__](const auto& communicator, size_t nbytes) {
    return queue(name, communicator, {from, nbytes}, {to, communicator->meeting.size * nbytes}, stream,
                 [=](Meeting& ranks, const std::byte* own, std::byte* all) {
                   exchange(ranks, own, nbytes, [&](size_t offset, size_t part) {
                     for (int rank = 0; rank < ranks.size; ++rank)
                       memcpy(all + rank * nbytes + offset, ranks.place(rank), part);
                   });
                 });
  });
}

NCCL ncclBroadcast(const void* from, void* to, size_t count, int type, int root, void* handle, void* stream) {
  return collect(__func__, handle, count, type, [=, name = __func__](const auto& communicator, size_t nbytes) {
    const void* given = communicator->meeting.rank == root ? from : nullptr;
    return queue(name, communicator, {given, nbytes}, {to, nbytes}, stream,
                 [=](Meeting& ranks, const std::byte* own, std::byte* all) {
                   exchange(ranks, own, nbytes,
                            [&](size_t offset, size_t part) { memcpy(all + offset, ranks.place(root), part); });
                 });
  });
}

NCCL ncclBcast(void* both, size_t count, int type, int root, void* handle, void* stream) {
  return ncclBroadcast(both, both, count, type, root, handle, stream);
}
