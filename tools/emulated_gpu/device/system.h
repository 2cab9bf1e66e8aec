// The state shared by the entry points of CUDA's runtime and driver: the devices, and all that is queued on them.
//
// Strict: what real CUDA lets pass in silence is a violation, and the call fails if it can.
//   - two uses of the same bytes, one of them a write, without an order between them by events or by the host
//   - handles that were destroyed or never made, waits for events that were never recorded, and their times
//   - memory that is used where it is not allocated; pageable memory where the driver's copies want pinned
//   - copies that begin in one registration of host memory and end in another, or in none
//   - what is given back twice; by the driver's calls, what the host does not know to be out of use
//   - calls of CUDA while it calls back
// The host counts as one thread: what any thread has waited for, all later calls are ordered after.
#pragma once

#include <array>
#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "calls.h"
#include "codes.h"
#include "faults.h"
#include "memory.h"
#include "order.h"
#include "settings.h"
#include "stream.h"
#include "violations.h"

namespace emulated_gpu {

struct CopyEngine {
  std::mutex mutex;    // held while it copies
  double seconds = 0;  // when its last copy ended
};

struct Device {
  Device(int index, uint32_t stream, const Settings& settings)
      : memory(settings.capacity_bytes, settings.context_bytes),
        default_stream(std::make_shared<Stream>(stream, index)) {}
  DeviceMemory memory;
  size_t num_retained = 0;  // its context, by the driver's users
  bool is_used_by_runtime = false;
  std::shared_ptr<Stream> default_stream;
  std::array<CopyEngine, 2> copy_engines;  // one each way: out, in
};

// What streams share of the hardware.
struct Queues {
  bool is_one = false;    // what is queued waits for all that was queued before, on whatever stream
  size_t max_queued = 0;  // in one stream; who queues more is held up, and all who call meanwhile; 0: no limit
};

enum class Pageable { kStaged, kForbidden };
enum class InUse { kWaitedFor, kForbidden };  // memory that is given back

// What was made and not given back.
struct Held {
  size_t contexts = 0, streams = 0, events = 0, pinned_bytes = 0, device_bytes = 0;
  bool operator==(const Held&) const = default;
};

class System {
 public:
  static System& instance();

  // What a call of `symbol` returns before it does anything.
  int enter(const char* symbol);

  int num_devices() const { return static_cast<int>(devices_.size()); }
  Device& device(int index) { return *devices_[index]; }
  int owner(const void* address) const;       // of a device address; -1: host memory
  void* bytes_of(const void* address) const;  // where they lie, for a kernel or a copy while it runs
  bool is_pinned(const void* address, size_t nbytes = 1);
  bool is_mapped(const void* address, size_t nbytes = 1);  // pinned, and the device can address it as the host does
  void* device_address(void* host);                        // of pinned memory; null: it has none
  void* host_address(void* device);                        // of the same
  void configure(const Link& link, double jitter_seconds);
  void configure(const Compute& compute);
  void configure(const Peers& peers);
  Link link();
  void configure(const Queues& queues);
  void mend();  // as in a new process: nothing is broken, planned, or pinned that is no more
  void set_capacity(int device, size_t nbytes);
  std::pair<size_t, size_t> free_and_total_bytes(int device);
  Held held();

  void retain_context(int device);
  int release_context(int device);
  void use_by_runtime(int device);  // makes it current; its context lives to the end
  bool has_context(int device);

  bool can_access_peer(int device, int peer);
  int enable_peer_access(int device, int peer);

  int allocate_device(int device, void** address, size_t nbytes);
  int free_device(void* address, InUse in_use);
  int allocate_pinned(void** address, size_t nbytes);
  int free_pinned(void* address);
  int register_pinned(void* address, size_t nbytes, bool is_mapped);
  int unregister_pinned(void* address, InUse in_use);

  int device_of_stream(void* handle);  // -1: there is none
  int device_of_event(void* handle);
  int create_stream(int device, void** handle);
  int destroy_stream(void* handle);
  int query_stream(void* handle);
  int wait_stream(void* handle);
  int wait_device(int device);

  int create_event(void** handle, bool has_time);
  int destroy_event(void* handle);
  int record(void* event, void* stream);
  int wait(void* stream, void* event);
  int query_event(void* handle);
  int wait_event(void* handle);
  int elapsed(float* milliseconds, void* from, void* to);

  // `name` must live as long as the process; `work` runs when all that the stream holds is done.
  int launch(void* stream, const char* name, std::span<const Use> uses, const Amount& amount,
             std::function<void()> work);
  int copy(void* to, const void* from, size_t nbytes, void* stream, bool is_async, Pageable pageable);
  int fill(void* to, int value, size_t nbytes, void* stream);
  int run_on_host(void* stream, std::function<void()> work);

  // Until the word is at least the value. CUDA does not see the order that this makes, and no clock here does: what
  // counts on it alone is a violation.
  int wait_value(void* stream, void* word, uint64_t value);
  int call_back(void* stream, std::function<void(int code)> call);  // with what has broken the context

  int report(const std::string& violation, int code);

  Violations violations;
  Calls calls;
  Faults faults;
  std::atomic<bool> is_initialized{false};  // by cuInit, or by the runtime's first call
  std::atomic<double> late_seconds{0};  // by which kernels took longer than they were set to: times of the host's cores
  std::atomic<bool> is_capturing{false};  // some thread, a CUDA graph of streams that have no part in what is called
  std::atomic<bool> has_host_addresses{true};  // memory that is registered from now on: on devices, those of the host
  std::atomic<bool> ignores_waits_of_the_driver{false};  // what a user of the driver would do that forgot to wait

 private:
  System();
  int refuse(const char* call, const char* what) { return report(std::string(call) + ": " + what, kInvalidHandle); }
  void* new_handle() { return reinterpret_cast<void*>(++num_handles_ << 12); }  // as an address, and never again
  std::shared_ptr<Stream> find_stream(void* handle);
  std::shared_ptr<Event> find_event(void* handle);
  int queue(void* stream, const char* name, std::span<const Use> uses, Work work);
  void note(const Stream& stream, const Operation& operation, std::span<const Use> uses);
  void know(const VectorClock& clock);
  void tell(const VectorClock& clock);  // the same without the lock, which may be held until this thread has gone on
  void hear();
  bool crosses_registrations(const void* host, size_t nbytes);
  bool is_allocated(const Use& use);
  bool is_addressable(const Use& use);  // by a kernel: memory of a device, or mapped memory
  int copy_on_host(void* to, const void* from, size_t nbytes, void* stream, bool is_async);
  double seconds_over_link(std::span<const Use> uses);  // of the bytes of mapped memory that a kernel uses
  void submit(Stream& stream, Work work);
  double seconds_of(int from, int to, size_t nbytes);  // what a copy takes at least
  VectorClock run_dry(int device);
  int give_back(void* address, InUse in_use, const char* otherwise, int code, std::function<size_t()> remove);

  std::mutex mutex_;
  std::vector<std::unique_ptr<Device>> devices_;
  PinnedMemory pinned_, mapped_, elsewhere_;  // the others are parts of the first; the last has no host addresses
  std::unordered_map<void*, std::shared_ptr<Stream>> streams_;
  std::unordered_map<void*, std::shared_ptr<Event>> events_;
  uint32_t num_streams_ = 0;
  uintptr_t num_handles_ = 0;
  VectorClock host_;
  std::mutex told_mutex_;
  VectorClock told_;
  Queues queues_;
  Turns turns_;
  Order order_;
  Link link_;
  Compute compute_;
  Peers peers_;
  std::set<std::pair<int, int>> reached_;  // by whom, whose memory
  double jitter_seconds_ = 0;
  std::mt19937 random_;
};

// Whether this thread runs what CUDA has called back.
inline thread_local bool is_calling_back = false;

// The device that is current in this thread, as cudaSetDevice and cuCtxPushCurrent say; -1: none yet.
int current_device();
void set_current_device(int device);
void push_current_device(int device);
bool pop_current_device(int* device);

}  // namespace emulated_gpu
