// Copy engines: one copy at a time for each direction and device, at the link's rate, as copy engines do.
#include <algorithm>
#include <cstring>

#include "system.h"

namespace emulated_gpu {
namespace {

constexpr const char* kNames[] = {"a copy out", "a copy in", "a copy within the device", "a copy between devices"};
enum Way { kOut, kIn, kWithin, kBetween };

struct Paced {
  CopyEngine& engine;
  double latency_seconds;
  double seconds;  // what the bytes take at least
};

// Bytes are read and written at the time when the link would carry them: who does not wait finds others.
double run_copy(char* to, const char* from, size_t nbytes, const Paced& paced, double begin_seconds) {
  constexpr size_t kParts = 16;
  const std::lock_guard lock(paced.engine.mutex);
  const double start = std::max(begin_seconds, paced.engine.seconds) + paced.latency_seconds;
  for (size_t part = 0; part < kParts; ++part) {
    sleep_until(start + paced.seconds * static_cast<double>(part + 1) / kParts);
    const size_t begin = nbytes * part / kParts, end = nbytes * (part + 1) / kParts;
    memcpy(to + begin, from + begin, end - begin);
  }
  const double set = start + paced.seconds;
  return paced.engine.seconds = paced.seconds > 0 ? set : std::max(set, now());
}

}  // namespace

int System::copy(void* to, const void* from, size_t nbytes, void* stream, bool is_async, Pageable pageable) {
  if (nbytes == 0) return kSuccess;
  const int to_device = owner(to), from_device = owner(from);
  if (to_device < 0 && from_device < 0) return copy_on_host(to, from, nbytes, stream, is_async);
  const Way way = from_device < 0 ? kIn : to_device < 0 ? kOut : to_device == from_device ? kWithin : kBetween;
  const void* host = way == kIn ? from : way == kOut ? to : nullptr;
  if (host != nullptr && crosses_registrations(host, nbytes)) {
    return report(std::string(kNames[way]) + " of host memory in several registrations, or partly of pageable memory",
                  kInvalidValue);
  }
  const bool is_staged = host != nullptr && !is_pinned(host, nbytes);
  if (is_staged && pageable == Pageable::kForbidden) {
    return report(std::string(kNames[way]) + " of pageable memory, which the driver copies at once", kInvalidValue);
  }
  std::vector<Use> uses;
  const auto use = [&](const void* begin, bool is_write) {
    if (!is_staged || begin != host) uses.push_back({reinterpret_cast<uintptr_t>(begin), nbytes, is_write});
  };
  use(from, false);
  use(to, true);
  std::shared_ptr<std::vector<char>> staged;
  if (is_staged && way == kIn) {  // its bytes are those of now
    const char* begin = static_cast<const char*>(from);
    staged = std::make_shared<std::vector<char>>(begin, begin + nbytes);
  }
  auto* target = static_cast<char*>(bytes_of(to));
  const auto* source = static_cast<const char*>(bytes_of(from));
  if (staged) source = staged->data();
  int code;
  if (way == kWithin) {
    code = launch(stream, kNames[way], uses, {.nbytes = 2.0 * static_cast<double>(nbytes)},
                  [=] { memmove(target, source, nbytes); });
  } else {
    CopyEngine& engine = devices_[from_device < 0 ? to_device : from_device]->copy_engines[way == kIn ? kIn : kOut];
    const Paced paced{engine, link().latency_seconds, seconds_of(from_device, to_device, nbytes)};
    code = queue(stream, kNames[way], uses,
                 [=, keep = staged](double begin) { return run_copy(target, source, nbytes, paced, begin); });
  }
  const bool returns_at_once = is_async && !(is_staged && way == kOut);
  return code != kSuccess || returns_at_once ? code : wait_stream(stream);
}

// Of a tensor of the device whose bytes lie in mapped memory.
int System::copy_on_host(void* to, const void* from, size_t nbytes, void* stream, bool is_async) {
  if (crosses_registrations(to, nbytes) || crosses_registrations(from, nbytes)) {
    return report("a copy within the host of several registrations, or partly of pageable memory", kInvalidValue);
  }
  if (!is_mapped(to, nbytes) && !is_mapped(from, nbytes)) {
    return report("a copy of which neither side is memory that a device can address", kInvalidValue);
  }
  std::vector<Use> uses;
  if (is_pinned(from, nbytes)) uses.push_back({reinterpret_cast<uintptr_t>(from), nbytes, false});
  if (is_pinned(to, nbytes)) uses.push_back({reinterpret_cast<uintptr_t>(to), nbytes, true});
  const bool is_staged = uses.size() < 2;
  const int code = queue(stream, "a copy within the host", uses, [=](double begin) {
    memmove(to, from, nbytes);
    return std::max(begin, now());
  });
  return code != kSuccess || (is_async && !is_staged) ? code : wait_stream(stream);
}

// From or to a device, or -1 for the host. Between devices that do not reach each other, out and in again.
double System::seconds_of(int from, int to, size_t nbytes) {
  const auto at = [=](double rate) { return rate > 0 ? static_cast<double>(nbytes) / rate : 0; };
  const std::lock_guard lock(mutex_);
  if (reached_.contains({from, to}) || reached_.contains({to, from})) return at(peers_.bytes_per_second);
  return (from >= 0 ? at(link_.out_bytes_per_second) : 0) + (to >= 0 ? at(link_.in_bytes_per_second) : 0);
}

int System::fill(void* to, int value, size_t nbytes, void* stream) {
  if (owner(to) < 0 && !is_mapped(to, nbytes)) {
    return report("a fill of memory that the device cannot address", kInvalidValue);
  }
  const Use use{reinterpret_cast<uintptr_t>(to), nbytes, true};
  void* target = bytes_of(to);
  return launch(stream, "a fill", {&use, 1}, {.nbytes = static_cast<double>(nbytes)},
                [=] { memset(target, value, nbytes); });
}

}  // namespace emulated_gpu
